"""The experts of a layer in parts: ranges of experts that are fetched, computed and given back one after the other.

The store keeps the experts' parameters as they are, contiguous tensors of dimensions (experts, ...): a part is a range of
each. In a slot the ranges lie one behind the other, as the parameters of a small layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain_accelerate.memory.flat_layout import ExpertRange, expert_ranges
from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.meter import UpdateGate

if TYPE_CHECKING:
    from megatrain_accelerate.streaming.expert_function import ExpertResults


class PartOfUnit:
    """What the prefetcher sees of a part: its layout in a slot, its pieces of the whole unit."""

    is_on_device = False

    def __init__(self, whole: HostUnit, experts: ExpertRange) -> None:
        self._whole = whole
        self.layout = experts.layout(whole.layout)
        self._places: list[tuple[bool, int, int, int]] = []
        for entry, of_part in zip(whole.layout.entries, self.layout.entries, strict=True):
            begin, end = (entry.spec.dtype.itemsize * place for place in experts.elements(entry))
            place = (entry.spec.trainable, entry.weight_offset + begin, of_part.weight_offset, end - begin)
            self._places.append(place)

    @property
    def version(self) -> int:
        return self._whole.version

    @property
    def weights(self) -> torch.Tensor:
        """Of all experts; :meth:`pieces` says which bytes are the part's."""
        return self._whole.weights

    def register_weights(self) -> None:
        """See :meth:`HostUnit.register_weights`."""
        self._whole.register_weights()

    def pieces(self, of_unit: torch.Tensor, of_slot: torch.Tensor, trainable_only: bool) -> list[tuple[torch.Tensor, ...]]:
        """For each parameter, or each that is trained, views of the part's bytes in ``of_unit``, flat weights or gradients of
        all experts, and ``of_slot``, a slot's buffer; both uint8."""
        return [
            (of_unit[there : there + size], of_slot[here : here + size])
            for trainable, there, here, size in self._places
            if trainable or not trainable_only
        ]


class ExpertPart:
    """Some of a layer's experts, which stream alone: number ``place`` of the layer's, ``index`` of the model's in forward."""

    def __init__(self, place: int, index: int, owner: StreamedExperts, experts: ExpertRange) -> None:
        self.place = place
        self.index = index
        self.owner = owner
        self.experts = experts
        self.name = f"{owner.name}[{experts.first}:{experts.last}]"
        self.unit = PartOfUnit(owner.unit, experts)
        self.gate = UpdateGate()

    def refresh_if_written(self) -> None:
        self.owner.refresh_if_written()


class StreamedExperts(StreamedLayer):
    """All experts of a layer, whose index they have, in parts of which the first has the index ``first_part``."""

    kind = "experts"

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        unit: HostUnit,
        *,
        parts: int,
        first_part: int,
    ) -> None:
        super().__init__(index, name, module, forward, unit)
        self.count = int(module.num_experts)  # type: ignore[arg-type]
        ranges = expert_ranges(self.count, parts)
        self.parts = [ExpertPart(place, first_part + place, self, experts) for place, experts in enumerate(ranges)]
        self.gate = UpdateGate([part.gate for part in self.parts])
        self.results: ExpertResults | None = None
        """Of the run of the layer that is under way, if it has a graph."""
        self._begins: dict[torch.device, torch.Tensor] = {}

    def begins(self, device: torch.device) -> torch.Tensor:
        """int64 numbers on the device: the first expert of each part, and ``count``."""
        if device not in self._begins:
            numbers = [part.experts.first for part in self.parts] + [self.count]
            self._begins[device] = torch.tensor(numbers, device=device)
        return self._begins[device]
