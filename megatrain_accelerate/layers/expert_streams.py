"""Parts of experts on their way to the device: slots of their own, in the order of the calls; and trials without copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.layers.layer import ExpertPart, StreamedExperts
from megatrain_accelerate.transfer.call_order import CallOrder, Tape
from megatrain_accelerate.transfer.prefetch import Prefetcher

Places = list[tuple[Tape, int]]
"""Where on the tape of a forward each part of a layer's experts was called, in order."""


class ExpertStreams:
    """All experts of a model that stream in parts.

    Args:
        experts: in the order of the forward; maybe none.
        slots: weight slots for their parts.
        offloader: the way of their gradients.
        anchor: a number that requires grad, for calls none of whose inputs does.
        runs_dry: whether layers run on trial, for a plan or a probe.
        layers: in which order the layers are called.
    """

    def __init__(
        self,
        experts: Sequence[StreamedExperts],
        slots: int,
        offloader: GradientOffloader,
        anchor: torch.Tensor,
        runs_dry: Callable[[], bool],
        layers: CallOrder,
    ) -> None:
        self.anchor = anchor
        self.runs_dry = runs_dry
        self._slots = slots
        self.offloader = offloader
        parts = [part for whole in experts for part in whole.parts]
        self._prefetcher = Prefetcher(parts, slots, offloader.streams, offloader.meter) if parts else None
        self._order = CallOrder(len(parts), leader=layers)

    def close(self) -> None:
        """Gives up all slots. Nothing may be fetched afterwards."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    @property
    def slot_bytes(self) -> int:
        return 0 if self._prefetcher is None else self._prefetcher.device_bytes

    def record(self, experts: StreamedExperts) -> Places:
        """Notes a forward call of a layer's experts."""
        return [self._order.record(part.index) for part in experts.parts]

    @contextlib.contextmanager
    def fetched(self, part: ExpertPart, upcoming: Sequence[int], layout_of: ExpertPart) -> Iterator[list[torch.Tensor]]:
        """A part's weights are on the device while the body issues its kernels; yields them as those of ``layout_of``."""
        assert self._prefetcher is not None
        slot = self._prefetcher.acquire(part, upcoming)
        try:
            yield slot.views(layout_of.unit.layout)
        finally:
            self._prefetcher.release(slot)

    def upcoming(self, place: tuple[Tape, int], in_backward: bool, backward_follows: bool) -> Sequence[int]:
        """The parts that are expected after that of the call at ``place``."""
        if in_backward:
            return self._order.after_backward(*place, self._slots, not self.offloader.gradients_complete())
        return self._order.after_forward(*place, self._slots, backward_follows)


def shown_instead(experts: StreamedExperts) -> list[torch.Tensor] | None:
    """What somebody has put in the place of the parameters: tensors without data, made-up numbers.

    None where they are their own. A StateError where one isn't the one that was adopted.
    """
    shown: list[Any] = [experts.module._parameters.get(state.name) for state in experts.unit.states]
    if all(tensor is state.parameter for tensor, state in zip(shown, experts.unit.states, strict=True)):
        return None
    if any(tensor is None or isinstance(tensor, nn.Parameter) for tensor in shown):
        raise StateError(
            f"a parameter of the experts {experts.name} was replaced or removed after the model was prepared; change "
            "the model (adapters, heads, tokens) before accelerator.prepare()"
        )
    return shown
