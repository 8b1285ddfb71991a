"""The order in which the next forward needs the units of a model: that in which they are stepped."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.streaming.layer import StreamedLayer, UpdateGate
from megatrain_accelerate.streaming.resident import ResidentGroup

UnitInOrder = tuple[HostUnit, UpdateGate, ResidentGroup | None]
"""A unit, what guards it, and its resident group if it is one's."""


def in_forward_order(layers: Sequence[StreamedLayer], groups: Sequence[ResidentGroup]) -> list[UnitInOrder]:
    """Layers, the experts of each behind it, and groups between the layers that they stand between."""
    units: list[tuple[int, int, UnitInOrder]] = [(group.layers_before, 0, (group.unit, group.gate, group)) for group in groups]
    units += [(layer.index, 1, (layer.unit, layer.gate, None)) for layer in layers]
    units += [(layer.index, 2, (part.unit, part.gate, None)) for layer in layers for part in layer.experts]
    return [unit for _, _, unit in sorted(units, key=lambda item: item[:2])]
