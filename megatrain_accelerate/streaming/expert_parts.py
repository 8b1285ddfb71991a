"""The experts of a layer in parts: ranges of experts that are fetched, computed and given back one after the other.

The store keeps the experts' parameters as they are, contiguous tensors of dimensions (experts, ...): a part is a range of
each. In a slot the ranges lie one behind the other, as the parameters of a small layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain_accelerate.memory.expert_range import ExpertRange, expert_ranges
from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.update_gate import UpdateGate

if TYPE_CHECKING:
    from megatrain_accelerate.streaming.expert_function import ExpertResults


class PartOfUnit:
    """What the prefetcher sees of a part: where it lies in a slot, and where its pieces are in the unit of all experts."""

    is_on_device = False
    """Parts always stream."""

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
        """Changes whenever a copy of the part on the device becomes stale."""
        return self._whole.version

    @property
    def weights(self) -> torch.Tensor:
        """Flat weights of all experts, uint8; :meth:`pieces` says which bytes are the part's."""
        return self._whole.weights

    def pieces(self, of_unit: torch.Tensor, of_slot: torch.Tensor, trainable_only: bool) -> list[tuple[torch.Tensor, ...]]:
        """For each parameter, or each that is trained, the part's bytes of both: views.

        Args:
            of_unit: flat weights or gradients of all experts, uint8.
            of_slot: a slot's buffer, uint8.
            trainable_only: of the parameters that have gradients only.
        """
        return [
            (of_unit[there : there + size], of_slot[here : here + size])
            for trainable, there, here, size in self._places
            if trainable or not trainable_only
        ]


class ExpertPart:
    """Some experts of one layer: a streaming unit of its own.

    Args:
        index: position among all parts of the model, in the order of the forward.
        owner: all experts of the layer.
        experts: which of them.
    """

    def __init__(self, index: int, owner: StreamedExperts, experts: ExpertRange) -> None:
        self.index = index
        self.owner = owner
        self.experts = experts
        self.name = f"{owner.name}[{experts.first}:{experts.last}]"
        self.unit = PartOfUnit(owner.unit, experts)
        self.gate = UpdateGate()

    def refresh_if_written(self) -> None:
        """See :meth:`StreamedLayer.refresh_if_written`; that of all experts."""
        self.owner.refresh_if_written()


class StreamedExperts(StreamedLayer):
    """All experts of a layer: their module, their host unit, and their parts.

    Args:
        index, name, module, forward, unit: as of :class:`StreamedLayer`, the index that of the layer whose experts they are;
            the module's parameters have the dimensions (experts, ...).
        parts: into how many they are cut.
        first_part: index of the first of them.
    """

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
        self.parts = [ExpertPart(first_part + place, self, experts) for place, experts in enumerate(ranges)]
        self.gate = UpdateGate([part.gate for part in self.parts])
        self.results: ExpertResults | None = None
        """Of the run of the layer that is under way, if it has a graph."""

    @property
    def shown(self) -> list[torch.Tensor]:
        """What the module's parameters are now, in entry order: others than the store's where a run without data, or one on
        made-up numbers, has put its own in their place."""
        return [self.module._parameters.get(state.name) for state in self.unit.states]  # type: ignore[misc]
