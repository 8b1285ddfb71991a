"""Parts of experts on their way to the device: slots of their own, in the order of the calls; and trials without copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.streaming.call_order import CallOrder, Tape
from megatrain_accelerate.streaming.device_slots import WeightSlot
from megatrain_accelerate.streaming.expert_gradients import ExpertGradients
from megatrain_accelerate.streaming.expert_parts import ExpertPart, StreamedExperts
from megatrain_accelerate.streaming.prefetch import Fetched, Prefetcher

if TYPE_CHECKING:
    from megatrain_accelerate.streaming.runtime import StreamingRuntime

Places = list[tuple[Tape, int]]
"""Where on the tape of a forward each part of a layer's experts was called, in order."""


class _PartPrefetcher(Prefetcher):
    """Owner of the slots of parts: each takes a range of every parameter."""

    def __init__(self, parts: Sequence[ExpertPart], runtime: StreamingRuntime) -> None:
        self._parts = parts
        super().__init__(parts, runtime.config.slots, runtime.streams, runtime.meter)

    def _copy(self, layer: Fetched, slot: WeightSlot) -> None:
        unit = self._parts[layer.index].unit
        for there, here in unit.pieces(unit.weights, slot.buffer, trainable_only=False):
            here.copy_(there, non_blocking=True)


class ExpertStreams:
    """All experts of a model that stream in parts.

    Args:
        runtime: the engine at work; its experts are in the order of the forward, maybe none.
        runs_dry: whether layers run on trial, for a plan or a probe.
        layers: in which order the layers are called.
    """

    def __init__(self, runtime: StreamingRuntime, runs_dry: Callable[[], bool], layers: CallOrder) -> None:
        self.experts = runtime.experts
        self.anchor = runtime.anchor
        self._runtime = runtime
        self._slots = runtime.config.slots
        self._runs_dry = runs_dry
        parts = [part for whole in self.experts for part in whole.parts]
        self._prefetcher = _PartPrefetcher(parts, runtime) if parts else None
        self._order = CallOrder(len(parts), leader=layers)
        self._begins: dict[tuple[int, torch.device], torch.Tensor] = {}

    def close(self) -> None:
        """Gives up all slots. Nothing may be fetched afterwards."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def begins(self, experts: StreamedExperts, device: torch.device) -> torch.Tensor:
        """For :meth:`Routing.of <megatrain_accelerate.streaming.expert_routing.Routing.of>`."""
        key = (id(experts), device)
        if key not in self._begins:
            numbers = [part.experts.first for part in experts.parts] + [experts.count]
            self._begins[key] = torch.tensor(numbers, device=device)
        return self._begins[key]

    def record(self, experts: StreamedExperts) -> Places:
        """Notes a forward call of a layer's experts."""
        return [self._order.record(part.index) for part in experts.parts]

    def source(self, experts: StreamedExperts) -> Source:
        """Where the weights of a call come from.

        Raises:
            StateError: a parameter of the module isn't the one that was adopted.
        """
        if not experts.shows_its_own:
            if any(shown is None or isinstance(shown, nn.Parameter) for shown in experts.shown):
                raise StateError(
                    f"a parameter of the experts {experts.name} was replaced or removed after the model was prepared; change "
                    "the model (adapters, heads, tokens) before accelerator.prepare()"
                )
            return Shown(experts)
        return OnTrial(self, experts) if self._runs_dry() else Streaming(self, experts)

    @contextlib.contextmanager
    def fetched(self, part: ExpertPart, upcoming: Sequence[int], layout_of: ExpertPart) -> Iterator[list[torch.Tensor]]:
        """A part's weights are on the device while the body issues its kernels; yields them as those of ``layout_of``."""
        assert self._prefetcher is not None
        slot = self._prefetcher.acquire(part, upcoming)
        try:
            yield slot.views(layout_of.unit.layout)
        finally:
            self._prefetcher.release(slot)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the parts' weight slots on the device."""
        return 0 if self._prefetcher is None else self._prefetcher.device_bytes

    def after_forward(self, place: tuple[Tape, int], backward_follows: bool) -> Sequence[int]:
        """Parts that are expected after the one called there."""
        return self._order.after_forward(*place, self._slots, backward_follows)

    def after_backward(self, place: tuple[Tape, int]) -> Sequence[int]:
        """Parts that are expected in backward after that of the one called there."""
        return self._order.after_backward(*place, self._slots, not self._runtime.gradients_complete())

    def gradients(self, experts: StreamedExperts, is_last: bool) -> ExpertGradients | None:
        """What takes the gradients of one backward; None if nothing is trained.

        Raises:
            StateError: they can't be taken; see :class:`ExpertGradients`.
        """
        trained = [state.parameter for state in experts.trainable if state.parameter.requires_grad]
        if not trained:
            return None
        return ExpertGradients(self._runtime, experts, is_last)


class Source:
    """Where the weights of one call of experts come from, and where their gradients go."""

    streams_parts = False
    """Whether the call is one of a step or an evaluation, and not a trial."""

    def weights(
        self, part: ExpertPart, place: tuple[Tape, int] | None, in_backward: bool, backward_follows: bool
    ) -> contextlib.AbstractContextManager[list[torch.Tensor]]:
        """A part's weights, in entry order, while the body issues its kernels.

        Args:
            part: the part.
            place: of its call in forward; None if it isn't known.
            in_backward: whether this is its backward.
            backward_follows: whether a backward will.
        """
        raise NotImplementedError

    def gradients(self, is_last: bool) -> ExpertGradients | None:
        """What takes the gradients; None where they are dropped."""
        return None


class Streaming(Source):
    """The parts' slots, and the way to the host."""

    streams_parts = True

    def __init__(self, streams: ExpertStreams, experts: StreamedExperts) -> None:
        self._streams, self._experts = streams, experts

    def weights(
        self, part: ExpertPart, place: tuple[Tape, int] | None, in_backward: bool, backward_follows: bool
    ) -> contextlib.AbstractContextManager[list[torch.Tensor]]:
        """See :meth:`Source.weights`; starts the copies of the parts that come next."""
        upcoming: Sequence[int] = ()
        if place is not None:
            streams = self._streams
            upcoming = streams.after_backward(place) if in_backward else streams.after_forward(place, backward_follows)
        return self._streams.fetched(part, upcoming, part)

    def gradients(self, is_last: bool) -> ExpertGradients | None:
        """See :meth:`ExpertStreams.gradients`."""
        return self._streams.gradients(self._experts, is_last)


class OnTrial(Source):
    """A trial on data: all parts compute with the weights of the first, so that no copy is waited for."""

    def __init__(self, streams: ExpertStreams, experts: StreamedExperts) -> None:
        self._streams, self._experts = streams, experts

    def weights(self, part: ExpertPart, *_: Any) -> contextlib.AbstractContextManager[list[torch.Tensor]]:
        """Those of the first part, which is as large as any."""
        return self._streams.fetched(self._experts.parts[0], (), part)


class Shown(Source):
    """What somebody has put in the place of the parameters: tensors without data, or made-up numbers."""

    def __init__(self, experts: StreamedExperts) -> None:
        self._shown = experts.shown

    def weights(self, part: ExpertPart, *_: Any) -> contextlib.AbstractContextManager[list[torch.Tensor]]:
        """The part's range of each."""
        return contextlib.nullcontext([part.experts.of(shown) for shown in self._shown])
