"""Models that were built without weights, on the meta device: they are initialised at random where they are adopted.

A model of any size is so built within seconds and without a second copy, for benchmarks and for training from scratch. The
values are those that the model's own rules draw from torch's generator of the device, unit by unit: the same for the same
seed and device, but not those that the model would draw when it is built with weights on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.planning.layer_discovery import Discovery

logger = logging.getLogger(__name__)


def is_without_weights(model: nn.Module) -> bool:
    """Whether all parameters are on the meta device: some alone are a mistake, as of a ``device_map``."""
    return all(parameter.is_meta for parameter in model.parameters())


class MetaWeights:
    """Gives values to the parameters and buffers of a model without weights, one unit at a time.

    transformers' models are initialised by ``_init_weights`` of the innermost model around each module, others by each
    module's ``reset_parameters``.

    Args:
        model: all of its parameters are on the meta device; buffers may be.
        discovery: its layers and resident parameters.
        device: where values are drawn.
    """

    def __init__(self, model: nn.Module, discovery: Discovery, device: torch.device) -> None:
        self._device = device
        self._rules: dict[int, Callable[[nn.Module], object] | None] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inner_first: list[nn.Module] = []
        self._note(model, None)
        of_layer: dict[int, int] = {}
        units = 0
        for index, (_, layer) in enumerate(discovery.layers):
            for module in (layer, *(spec.module for spec in discovery.experts_of(index))):
                of_layer |= {id(part): units for part in module.modules()}
                units += 1
        self._units: list[list[nn.Module]] = [[] for _ in (*discovery.layers, *discovery.experts)]
        self._units += [[spec.modules[0]] for spec in discovery.residents]
        owners = {id(spec.modules[0]) for spec in discovery.residents}
        self._others: list[nn.Module] = []
        for part in self._inner_first:
            if id(part) in of_layer:
                self._units[of_layer[id(part)]].append(part)
            elif id(part) not in owners and next(part.parameters(recurse=False), None) is None:
                self._others.append(part)  # what only shares parameters was initialised with their owner
        logger.warning(
            "megatrain: the model was built without weights (on the meta device); they are initialised at random, by seed %d. "
            "For a pretrained model call from_pretrained outside torch.device('meta') and init_empty_weights()",
            torch.initial_seed(),
        )

    def _note(self, module: nn.Module, rule: Callable[[nn.Module], object] | None) -> None:
        if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
            rule = module._init_weights  # type: ignore[assignment]
        if id(module) not in self._rules:
            self._rules[id(module)] = rule
            for child in module.children():
                self._note(child, rule)
            self._inner_first.append(module)

    def fill_unit(self, index: int, parameters: Iterable[nn.Parameter]) -> None:
        """Makes and initialises the parameters of a unit, on the device, and the buffers of its modules.

        Args:
            index: of the unit, in the order of :meth:`Discovery.parameter_groups`.
            parameters: the unit's.

        Raises:
            UnsupportedError: the model has no rule for one of them.
        """
        for parameter in parameters:
            _materialise(parameter, self._device)
        self._initialise(self._units[index])

    def finish(self) -> None:
        """Initialises what is in no unit: buffers outside the layers.

        Raises:
            UnsupportedError: the model has no rule for one of them.
        """
        self._initialise(self._others)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _initialise(self, modules: list[nn.Module]) -> None:
        made: list[tuple[str, torch.Tensor]] = []
        for module in modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = new = _unset(buffer, torch.device("cpu"))
                    made.append((f"buffer {self._names[id(module)]}.{key}", new))
            of_module = [(key, parameter) for key, parameter in module._parameters.items() if parameter is not None]
            made += [(f"parameter {self._names[id(module)]}.{key}", parameter) for key, parameter in of_module]
        with torch.no_grad():
            for module in modules:
                rule = self._rules[id(module)]
                if rule is not None:
                    rule(module)
                elif callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        for name, tensor in made:
            # A rule may write the lowest integer; no rule writes NaN, and one that writes a part leaves it in the rest.
            unset = _unset_places(tensor)
            if (tensor._version == 0 or tensor.dtype.is_floating_point) and bool(unset.any()):
                reason = "the model has no rule that initialises it"
                if not bool(unset.all()):
                    reason = "the model's rule leaves a part of it without a number"
                remedy = "build the model with weights, on the CPU"
                if name.startswith("buffer"):
                    remedy += ", or under accelerate.init_empty_weights(), which leaves buffers as they are"
                raise UnsupportedError(f"{name} is on the meta device and {reason}; {remedy}")


def _materialise(parameter: nn.Parameter, device: torch.device) -> None:
    """The same object has memory from now on.

    Raises:
        UnsupportedError: somebody holds a weak reference to it.
    """
    if not parameter.is_meta:
        return  # tied to one of an earlier unit
    made = nn.Parameter(_unset(parameter, device), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, made)
    except RuntimeError as error:
        raise UnsupportedError(
            f"a parameter on the meta device can't be given values ({error}); prepare the model before anything else refers "
            "to its parameters, or build it with weights"
        ) from error


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that can be told from an initialised one. Rules may write through ``.data``, which moves no version."""
    if like.dtype.is_floating_point:
        return torch.full(like.shape, torch.nan, dtype=like.dtype, device=device)
    return torch.full(like.shape, _lowest(like.dtype), dtype=like.dtype, device=device)


def _lowest(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _unset_places(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.isnan() if tensor.dtype.is_floating_point else tensor == _lowest(tensor.dtype)
