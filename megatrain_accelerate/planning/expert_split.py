"""Whether a model's experts stream in parts, and in how many."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError, UnsupportedError
from megatrain_accelerate.memory.flat_layout import FlatLayout, ParameterSpec, expert_ranges
from megatrain_accelerate.planning.device_memory import USABLE_SHARE_OF_DEVICE
from megatrain_accelerate.planning.layer_discovery import Discovery, ExpertsSpec
from megatrain_accelerate.units import MIB

logger = logging.getLogger(__name__)

SLOTS_SHARE = 0.25
"""Of the GPU memory that a plan may fill: more than that for slots of whole layers, and their experts stream in parts."""

SMALLEST_PART_BYTES = 64 * MIB
"""Smaller parts don't fill the link, and their products don't fill a GPU."""

_LITTLE_MORE = 1.05
"""Where no number of parts reaches the share, fewer of them do whose slots are this much larger than those of the most."""

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "config")
"""What ``use_experts_implementation`` of transformers (integrations/moe.py) leaves on a module of experts."""


def _reason_against(module: nn.Module) -> str | None:
    """Why a module that looks like experts can't be cut into parts; None if it can."""
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    count = module.num_experts
    if not isinstance(count, int) or count < 2:
        return f"it has {count!r} experts"
    if sum(1 for _ in module.parameters()) != len(own):
        return "modules inside it have parameters of their own"
    if any(parameter.dim() < 2 or parameter.shape[0] != count for parameter in own.values()):
        return f"not all of its parameters have {count} as their first dimension"
    if any(True for _ in module.buffers()):
        return "it has buffers"
    if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p for part in module.modules()):
        return "it draws random numbers (dropout)"
    return None


def _find(layers: Sequence[tuple[str, nn.Module]]) -> tuple[list[tuple[int, str, nn.Module]], list[str]]:
    """The experts of each layer, as (index of the layer, name, module), and why others can't be cut."""
    found: list[tuple[int, str, nn.Module]] = []
    reasons: list[str] = []
    for index, (name, layer) in enumerate(layers):
        inside_adapters = [part for part in layer.modules() if hasattr(part, "base_layer")]
        for key, module in layer.named_modules():
            if not key or not all(hasattr(module, mark) for mark in _MARKS):
                continue
            reason = _reason_against(module)
            if any(adapter.base_layer is module for adapter in inside_adapters):
                reason = "an adapter changes its parameters (PEFT's target_parameters)"
            if reason is None:
                found.append((index, f"{name}.{key}", module))
            else:
                reasons.append(f"{name}.{key}: {reason}")
    return found, reasons


class _Sizes:
    """Bytes of the slots that layers need, with their experts in parts or without.

    Args:
        layers: the model's.
        found: their experts.
        dtypes: in which parameters compute, by ``id``.
        config: the settings.
        training: whether there are slots for gradients.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        found: Sequence[tuple[int, str, nn.Module]],
        dtypes: Mapping[int, torch.dtype],
        config: MegatrainConfig,
        training: bool,
    ) -> None:
        self._slots, self._gradient_slots = config.slots, config.gradient_slots * training
        of_experts = {id(parameter) for _, _, module in found for parameter in module.parameters()}

        def layout(parameters: Sequence[tuple[str, nn.Parameter]]) -> FlatLayout:
            return FlatLayout(ParameterSpec(k, tuple(p.shape), dtypes[id(p)], p.requires_grad) for k, p in parameters)

        named = [list(layer.named_parameters()) for _, layer in layers]
        self._whole = [layout(parameters) for parameters in named]
        self._rest = [layout([(k, p) for k, p in parameters if id(p) not in of_experts]) for parameters in named]
        self._experts = [(int(m.num_experts), layout(list(m.named_parameters()))) for _, _, m in found]  # type: ignore[arg-type]

    @property
    def most_parts(self) -> int:
        """In how many parts each is still worth a copy, on average: their sizes differ by one expert."""
        return max(1, min(min(count, layout.weight_bytes // SMALLEST_PART_BYTES) for count, layout in self._experts))

    def slot_bytes(self, parts: int) -> int:
        """Of all slots, for weights and for gradients."""
        if parts == 1:
            return self._of(self._whole, self._whole)
        largest = [expert_ranges(count, parts)[0].layout(layout) for count, layout in self._experts]
        of_parts = self._slots * max(layout.weight_bytes for layout in largest)
        return of_parts + self._of(self._rest, [*self._rest, *largest])

    def _of(self, weights: Sequence[FlatLayout], gradients: Sequence[FlatLayout]) -> int:
        of_gradients = self._gradient_slots * max(layout.gradient_bytes for layout in gradients)
        return self._slots * max(layout.weight_bytes for layout in weights) + of_gradients


def _chosen_parts(sizes: _Sizes, budget_bytes: int) -> int:
    """The fewest parts whose slots don't take more than their share of the budget, or hardly more than those of the most."""
    most = sizes.most_parts
    enough_bytes = max(SLOTS_SHARE * budget_bytes, _LITTLE_MORE * sizes.slot_bytes(most))
    return next(parts for parts in range(1, most + 1) if sizes.slot_bytes(parts) <= enough_bytes)


def wants_whole_layers(config: MegatrainConfig) -> bool:
    """Whether other settings say of whole layers where they are to be, so that ``auto`` cuts nothing."""
    placed = config.device_layers not in ("auto", 0) or config.resident_layers not in ("auto", 0)
    return placed or config.evaluation_weights == "resident"


def split_experts(
    discovery: Discovery, config: MegatrainConfig, dtypes: Mapping[int, torch.dtype], device: torch.device, training: bool
) -> Discovery:
    """The discovery with the experts that are to stream in parts.

    Args:
        discovery: of the model.
        config: the settings; ``expert_parts`` above all. Where GPU memory isn't planned with, ``auto`` cuts nothing.
        dtypes: in which the parameters compute, by ``id``.
        device: where the model computes.
        training: whether the engine trains.

    Raises:
        UnsupportedError: parts are asked for, and the model has no experts that can be cut, or others that can't.
        ConfigError: more parts are asked for than there are experts.
    """
    asked, budget_bytes = config.expert_parts, planned_device_bytes(config, device)
    if asked == 1 or (asked == "auto" and not budget_bytes):
        return discovery
    found, reasons = _find(discovery.layers)
    if asked == "auto":
        in_pieces = config.passes_gradients and config.micro_batch_size is not None
        if not found or wants_whole_layers(config) or in_pieces:
            return discovery
        parts = _chosen_parts(_Sizes(discovery.layers, found, dtypes, config, training), budget_bytes)
        return discovery if parts == 1 else _with(discovery, found, parts, config)
    if not found:
        raise UnsupportedError(
            f"megatrain_config.expert_parts is {asked}, and the model has no experts that can stream in parts"
            + (f" ({reasons[0]})" if reasons else " (modules under transformers' use_experts_implementation)")
            + "; leave it out"
        )
    if reasons:  # the slots would be as large as those
        raise UnsupportedError(
            f"megatrain_config.expert_parts is {asked}, and the experts of {len(found)} layers could stream in parts, but not "
            f"all of the model's ({reasons[0]}); leave it out"
        )
    fewest = min(int(module.num_experts) for _, _, module in found)  # type: ignore[arg-type]
    if int(asked) > fewest:
        raise ConfigError(f"megatrain_config.expert_parts is {asked}, but a layer has {fewest} experts; lower it")
    return _with(discovery, found, int(asked), config)


def _with(discovery: Discovery, found: Sequence[tuple[int, str, nn.Module]], parts: int, config: MegatrainConfig) -> Discovery:
    if config.compile_layers is True:
        logger.warning("megatrain: layers whose experts stream in parts aren't compiled, and run as they are")
    return dataclasses.replace(discovery, experts=tuple(ExpertsSpec(*of_layer, parts) for of_layer in found))


def planned_device_bytes(config: MegatrainConfig, device: torch.device) -> int:
    """GPU memory that a plan will fill, before anything is on the GPU; 0 without one."""
    if config.gpu_memory_bytes is not None:
        return config.gpu_memory_bytes
    return int(USABLE_SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
