"""The order in which the next forward needs the units of a model: that in which they are stepped."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain_accelerate.memory.flat_layout import ExpertRange
from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.meter import UpdateGate
from megatrain_accelerate.streaming.resident import ResidentGroup

UnitInOrder = tuple[HostUnit, ResidentGroup | None, list[tuple[UpdateGate, ExpertRange | None]]]
"""A unit, its resident group if it is one's, and each of the parts in which it is stepped: the gate, and the experts that it
is, or None for the whole unit."""


def in_forward_order(layers: Sequence[StreamedLayer], groups: Sequence[ResidentGroup]) -> list[UnitInOrder]:
    """Layers, the experts of each behind it, and groups between the layers that they stand between."""
    units: list[tuple[int, int, UnitInOrder]] = []
    units += [(group.layers_before, 0, (group.unit, group, [(group.gate, None)])) for group in groups]
    for layer in layers:
        units.append((layer.index, 1, (layer.unit, None, [(layer.gate, None)])))
        for whole in layer.experts:
            units.append((layer.index, 2, (whole.unit, None, [(part.gate, part.experts) for part in whole.parts])))
    return [unit for _, _, unit in sorted(units, key=lambda item: item[:2])]
