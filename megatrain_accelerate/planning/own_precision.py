"""Which weights keep the dtype in which they were loaded where the run's mixed precision is bf16."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn


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
    in_bf16 = sum(parameter.numel() for parameter in parameters if parameter.dtype == torch.bfloat16)
    if 2 * in_bf16 <= sum(parameter.numel() for parameter in parameters):
        return set()
    return {id(parameter) for parameter in parameters if parameter.dtype == torch.float32}


def _attribute(module: nn.Module, name: str) -> object:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None
