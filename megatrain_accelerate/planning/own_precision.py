"""In which dtype each weight computes, and which keep theirs where the run's mixed precision is bf16."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.planning.meta_weights import is_without_weights

_loaded_in_bf16 = WeakTensorKeyDictionary()
"""Parameters that were adopted as bf16 to be trained: what a closed engine hands back is their fp32 masters."""


def compute_dtypes(model: nn.Module, bf16: bool) -> dict[int, torch.dtype]:
    """The dtype in which each parameter computes, by ``id``.

    Args:
        model: as loaded, or as the engine of an earlier preparation left it: then the dtype of loading counts.
        bf16: whether the run's mixed precision is bf16.

    Raises:
        UnsupportedError: fp16, fp64, quantised or integer weights, or some without data.
    """
    for parameter in model.parameters():
        # A meta tensor mustn't be referred to: it is swapped for its values. One that is frozen comes back as it is.
        if parameter.dtype == torch.bfloat16 and not parameter.is_meta:
            _loaded_in_bf16.pop(parameter, None)
            if parameter.requires_grad:
                _loaded_in_bf16[parameter] = True
    own, empty = own_precision(model), is_without_weights(model)
    return {id(p): _compute_dtype(name, p, bf16 and id(p) not in own, empty) for name, p in model.named_parameters()}


def _compute_dtype(name: str, parameter: nn.Parameter, bf16: bool, without_weights: bool = False) -> torch.dtype:
    """The dtype in which a parameter computes.

    Args:
        name: qualified name in the model.
        parameter: as loaded.
        bf16: whether it computes in bf16 whatever it is; fp32 weights are then rounded for compute and keep fp32 masters.
        without_weights: whether it is to be initialised here.

    Raises:
        UnsupportedError: fp16, fp64, quantised or integer weights, or weights without data.
    """
    if parameter.is_meta and not without_weights:
        raise UnsupportedError(
            f"parameter {name} is on the meta device and has no values, while others have; load the whole model on the CPU "
            "(from_pretrained without device_map), or fill what is missing (load_state_dict(..., assign=True) of all weights, "
            "tie_weights()). A model of which every parameter is on the meta device is initialised at random"
        )
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"parameter {name} has dtype {parameter.dtype}; only float32 and bfloat16 weights can be trained with fp32 "
            "masters. Load the model with dtype=torch.bfloat16 or torch.float32 (fp16 and quantised weights are refused)"
        )
    return torch.bfloat16 if bf16 else _loaded_dtype(parameter)


def _loaded_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.bfloat16 if parameter in _loaded_in_bf16 else parameter.dtype


def own_precision(model: nn.Module) -> set[int]:
    """Ids of the parameters that keep their dtype, and so their values, their file format and their merges.

    - What the model itself wants in fp32 (transformers' ``_keep_in_fp32_modules_strict``).
    - What PEFT trains: adapters, ``modules_to_save``, prompts. PEFT makes them fp32 on purpose, whatever the base is, and
      autocast rounds them where it does so without this package. 16 bytes a parameter instead of 14, of few parameters.
    - An output head whose ``forward`` somebody replaced (TRL's ``cast_lm_head_to_fp32``).
    - In a model that was loaded in bf16, the parameters that aren't: somebody cast a head or a router to fp32 on purpose.

    In a model that was loaded in fp32 all others compute in bf16, from fp32 masters.
    """
    found = _wanted_by_the_model(model) | _trained_by_peft(model)
    return found | _of_a_replaced_head(model) | _exceptions_of_a_bf16_model(model)


def _wanted_by_the_model(model: nn.Module) -> set[int]:
    parts: set[str] = set()
    for module in model.modules():
        parts.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    return {id(parameter) for name, parameter in model.named_parameters() if parts.intersection(name.split("."))}


def _trained_by_peft(model: nn.Module) -> set[int]:
    if not any(hasattr(module, "peft_config") for module in model.modules()):
        return set()
    # Adapters may be disabled, and so frozen, when the model is prepared; and PEFT trains biases that aren't in adapters.
    found = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            holder = _attribute(module, name)
            if isinstance(holder, nn.Module):
                found.update(id(parameter) for parameter in holder.parameters())
            elif isinstance(holder, nn.Parameter):
                found.add(id(holder))
    return found


def _of_a_replaced_head(model: nn.Module) -> set[int]:
    try:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return set()
    return {id(parameter) for parameter in head.parameters()} if "forward" in getattr(head, "__dict__", {}) else set()


def _exceptions_of_a_bf16_model(model: nn.Module) -> set[int]:
    parameters = list(model.parameters())
    in_bf16 = sum(parameter.numel() for parameter in parameters if _loaded_dtype(parameter) == torch.bfloat16)
    if 2 * in_bf16 <= sum(parameter.numel() for parameter in parameters):
        return set()
    return {id(parameter) for parameter in parameters if _loaded_dtype(parameter) == torch.float32}


def _attribute(module: nn.Module, name: str) -> object:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None
