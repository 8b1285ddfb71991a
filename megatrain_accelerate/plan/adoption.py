"""Adoption: a model's parameters move to the store one unit at a time, and their own memory is freed meanwhile. Also says in
which dtype each parameter computes, and initialises models that were built without weights."""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers.proxy import is_proxy
from megatrain_accelerate.plan.layer_discovery import Discovery
from megatrain_accelerate.store.expandable_segments import expand_segments
from megatrain_accelerate.store.file_mappings import FileMappings, page_out, read_ahead, trim_heap
from megatrain_accelerate.store.host_limits import unused_host_bytes

logger = logging.getLogger(__name__)

_loaded_in_bf16 = WeakTensorKeyDictionary()
"""Parameters that were bf16 when they were adopted for training. A closed engine hands them back as fp32 masters."""


class Adoption:
    """Manages memory while the store's units are made from a model's parameters, so that the host never holds the model twice.

    Weights in mapped files are read ahead by one unit. If the store needs memory that their page cache takes, the cache is
    given back unit by unit: the system would do that by itself, but not in huge pages. A model that was built without weights
    gets them here, unless ``device`` is meta, too. Units are made in the order of the discovery.
    """

    def __init__(self, model: nn.Module, discovery: Discovery, *, device: torch.device, store_bytes: int) -> None:
        expand_segments(device)  # before the engine's first tensor on the device
        wants_weights = is_without_weights(model) and device.type != "meta"
        self._meta_weights = _MetaWeights(model, discovery, device) if wants_weights else None
        files = FileMappings()
        self._pages = [files.pages(parameter for _, parameter in group) for _, group in discovery.units()]
        mapped = sum(end - start for ranges in self._pages for start, end in ranges)
        self._gives_cache_back = unused_host_bytes() < store_bytes + mapped
        self._made = 0

    @contextlib.contextmanager
    def of_unit(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """The body makes the next unit, which copies the values of these parameters. Then their own memory may be freed."""
        trim_heap()  # else the process keeps small tensors that earlier units have freed
        for pages in self._pages[self._made + 1 if self._made else 0 : self._made + 2]:
            read_ahead(pages)
        if self._meta_weights is not None:
            self._meta_weights.fill_unit(self._made, (parameter for _, parameter in parameters))
        yield
        if self._gives_cache_back:
            page_out(self._pages[self._made])
        self._made += 1

    def finish(self) -> None:
        """Called when all units are made."""
        trim_heap()
        if self._meta_weights is not None:
            self._meta_weights.finish()


def compute_dtypes(model: nn.Module, bf16: bool) -> dict[int, torch.dtype]:
    """The dtype in which each parameter computes, by ``id``. With ``bf16``, the run's mixed precision, fp32 weights are
    rounded for compute and keep fp32 masters. If an earlier engine held the model, the dtype in which it was loaded counts.
    Raises an UnsupportedError for fp16, fp64, quantised or integer weights, or if only some have no data."""
    for parameter in model.parameters():
        # Meta tensors are left out: swapping them for their values forbids weak references. Frozen ones come back unchanged.
        if parameter.dtype == torch.bfloat16 and not parameter.is_meta:
            _loaded_in_bf16.pop(parameter, None)
            if parameter.requires_grad:
                _loaded_in_bf16[parameter] = True
    own, may_be_empty = _own_precision(model), is_without_weights(model)
    dtypes: dict[int, torch.dtype] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not may_be_empty:
            raise UnsupportedError(
                f"parameter {name} is on the meta device and has no values, while others have; load the whole model on the "
                "CPU (from_pretrained without device_map), or fill what is missing (load_state_dict(..., assign=True) of all "
                "weights, tie_weights()). A model of which every parameter is on the meta device is initialised at random"
            )
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedError(
                f"parameter {name} has dtype {parameter.dtype}; only float32 and bfloat16 weights can be trained with fp32 "
                "masters. Load the model with dtype=torch.bfloat16 or torch.float32 (fp16 and quantised weights are refused)"
            )
        dtypes[id(parameter)] = torch.bfloat16 if bf16 and id(parameter) not in own else _loaded_dtype(parameter)
    return dtypes


def _loaded_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.bfloat16 if parameter in _loaded_in_bf16 else parameter.dtype


def _own_precision(model: nn.Module) -> set[int]:
    """Ids of the parameters that keep their dtype, and thus their values, their file format and the results of merges."""
    parameters = dict(model.named_parameters())
    # Parameters that the model itself wants in fp32.
    wishes = (getattr(module, "_keep_in_fp32_modules_strict", None) or () for module in model.modules())
    parts = set(itertools.chain.from_iterable(wishes))
    found = {id(parameter) for name, parameter in parameters.items() if parts.intersection(name.split("."))}
    # PEFT makes what it trains (adapters, modules_to_save, prompts) fp32 on purpose. Autocast rounds as without this package.
    if any(hasattr(module, "peft_config") for module in model.modules()):
        # Adapters may be disabled, and so frozen, when the model is prepared. PEFT also trains biases outside adapters.
        found |= {id(parameter) for parameter in parameters.values() if parameter.requires_grad}
        for module in model.modules():
            for name in getattr(module, "adapter_layer_names", ()):
                with contextlib.suppress(AttributeError):
                    holder = operator.attrgetter(name)(module)
                    held = holder.parameters() if isinstance(holder, nn.Module) else [holder]
                    found |= {id(parameter) for parameter in held}
    # An output head whose forward somebody replaced (TRL's cast_lm_head_to_fp32).
    head: Any = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        head = model.get_output_embeddings()  # type: ignore[operator]
    if "forward" in getattr(head, "__dict__", {}) and not is_proxy(head):
        found |= {id(parameter) for parameter in head.parameters()}
    # fp32 parameters of a model that was loaded in bf16: somebody cast a head or a router to fp32 on purpose.
    in_bf16 = sum(p.numel() for p in parameters.values() if _loaded_dtype(p) == torch.bfloat16)
    if 2 * in_bf16 > sum(p.numel() for p in parameters.values()):
        found |= {id(p) for p in parameters.values() if _loaded_dtype(p) == torch.float32}
    return found


def is_without_weights(model: nn.Module) -> bool:
    """Whether all parameters are on the meta device. If only some are, that is a mistake, for example a ``device_map``."""
    return all(parameter.is_meta for parameter in model.parameters())


class _MetaWeights:
    """Initialises the parameters and buffers of a model that was built on the meta device, one unit at a time. A module's rule
    is ``_init_weights`` of the innermost transformers model around it, else its own ``reset_parameters``. Values come from
    torch's generator of the device: equal for equal seeds and devices, but not those of a model that is built on the CPU."""

    def __init__(self, model: nn.Module, discovery: Discovery, device: torch.device) -> None:
        self._device = device
        self._rules: dict[nn.Module, Callable[[nn.Module], object] | None] = {}
        """The rules of all modules, inner modules first."""
        self._names = {module: name for name, module in model.named_modules()}
        self._note(model, None)
        self._unit_of = {part: unit for unit, (parts, _) in enumerate(discovery.units()) for part in parts}
        logger.warning(
            "megatrain: the model was built without weights (on the meta device); they are initialised at random, by seed %d. "
            "For a pretrained model call from_pretrained outside torch.device('meta') and init_empty_weights()",
            torch.initial_seed(),
        )

    def _note(self, module: nn.Module, rule: Callable[[nn.Module], object] | None) -> None:
        if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
            rule = module._init_weights  # type: ignore[assignment]
        if module not in self._rules:
            for child in module.children():
                self._note(child, rule)
            self._rules[module] = rule

    def fill_unit(self, index: int, parameters: Iterable[nn.Parameter]) -> None:
        """Makes and initialises a unit's parameters on the device, and its modules' buffers. Raises an ``UnsupportedError`` if
        the model has no rule for one of them, or if there is a weak reference to a parameter."""
        for parameter in parameters:
            if not parameter.is_meta:
                continue  # tied to one of an earlier unit
            made = nn.Parameter(_unset(parameter, self._device), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            try:
                torch.utils.swap_tensors(parameter, made)  # the same object has memory from now on
            except RuntimeError as error:
                raise UnsupportedError(
                    f"a parameter on the meta device can't be given values ({error}); prepare the model before anything holds "
                    "a weak reference to its parameters or a graph of them, or build it with weights"
                ) from error
        self._initialise([module for module in self._rules if self._unit_of.get(module) == index])

    def finish(self) -> None:
        """Initialises buffers of modules in no unit. Raises as :meth:`fill_unit` does."""
        others = [module for module in self._rules if module not in self._unit_of]
        # The rest have shared parameters, which were initialised with their owner.
        self._initialise([module for module in others if next(module.parameters(recurse=False), None) is None])
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _initialise(self, modules: list[nn.Module]) -> None:
        made: list[tuple[str, torch.Tensor]] = []
        for module in modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = new = _unset(buffer, torch.device("cpu"))
                    made.append((f"buffer {self._names[module]}.{key}", new))
            made += [(f"parameter {self._names[module]}.{key}", p) for key, p in module.named_parameters(recurse=False)]
        with torch.no_grad():
            for module in modules:
                if (rule := self._rules[module]) is not None:
                    rule(module)
                elif callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        for name, tensor in made:
            # A rule may write the lowest integer, so a written integer tensor passes. No rule writes NaN, which marks any gap.
            is_float = tensor.dtype.is_floating_point
            unset = tensor.isnan() if is_float else tensor == _unset_value(tensor.dtype)
            if (tensor._version == 0 or is_float) and bool(unset.any()):
                reason = "the model has no rule that initialises it"
                if not bool(unset.all()):
                    reason = "the model's rule initialises only part of it"
                remedy = "build the model with weights, on the CPU"
                if name.startswith("buffer"):
                    remedy += ", or under accelerate.init_empty_weights(), which leaves buffers as they are"
                raise UnsupportedError(f"{name} is on the meta device and {reason}; {remedy}")


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor whose values say that it isn't initialised. Versions don't: a rule that writes to ``.data`` changes none."""
    return torch.full(like.shape, _unset_value(like.dtype), dtype=like.dtype, device=device)


def _unset_value(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return torch.nan
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min
