"""States on the device: this process's share of a unit's states, which are stepped there while the unit stays on the host.

Each of several ranks has its share alone, so that states that are too large for one GPU fit all of them together, as with ZeRO
(arXiv 1910.02054). A step copies gradients to the device and stepped weights back to the host, from where any rank can fetch
them. When ranks gather weights, each contributes the share on its own device. Meanwhile residuals and moments on the host are
stale, until :meth:`DeviceStates.leave`.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.kernels.device import StepKernels
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.kernels.moments import FloatMoments
from megatrain_accelerate.store.host_memory import copy_bytes
from megatrain_accelerate.store.layout import FlatLayout, Share
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.segments import FlatStates, Segment, step_segments


class StepDevice:
    """Where shares are stepped: a device, its kernels and streams, and buffers for gradients. Steps run one at a time, since
    the step worker waits for each. Meanwhile the next step's gradients are copied on a stream of their own. ``streams``: see
    :class:`~megatrain_accelerate.transfer.streams.Streams`."""

    def __init__(self, kernels: StepKernels, host_kernels: HostKernels, streams: Any, shares: Iterable[Share]) -> None:
        self.device, self.kernels, self.host_kernels, self.streams = streams.device, kernels, host_kernels, streams
        sizes = [(share.end_byte - share.begin_byte, 2 * share.split_elements) for share in shares]
        gradient_bytes, sums_bytes = map(max, zip(*sizes, strict=True))
        self.size_bytes = 2 * gradient_bytes + sums_bytes
        made = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        self._buffer, self._next_buffer, self.sums = made.split([gradient_bytes, gradient_bytes, sums_bytes])
        self.expected: collections.deque[torch.Tensor] = collections.deque()
        """Gradients on the host, in the order of steps. Nobody writes to them before their step is over."""
        self._coming: torch.Tensor | None = None
        """The gradients on the host whose copy to ``_next_buffer`` was issued. None if there are none."""
        self._arrived_event = streams.event()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Runs the body on the step stream, for one thread at a time, and waits for the stream at the end."""
        with self._lock:
            try:
                with self.streams.on(self.streams.step_stream):
                    yield
            finally:
                self.streams.step_stream.synchronize()

    def arrived(self, gradients: torch.Tensor) -> torch.Tensor:
        """These gradients on the device, for work that is issued to the step stream after this call."""
        if any(other is gradients for other in self.expected):
            while self.expected.popleft() is not gradients:
                continue  # of a step that was announced but not applied
        if self._coming is not gradients:
            self._bring(gradients)
        self.streams.step_stream.wait_event(self._arrived_event)
        self._buffer, self._next_buffer = self._next_buffer, self._buffer
        self._coming = None
        return self._buffer[: gradients.numel()]

    def bring_next(self) -> None:
        """Issues the copy of the gradients that are expected next. Called after the launch of a step's kernels, which copies a
        small table to the device: that copy would otherwise wait behind these gradients."""
        if self.expected:
            self._bring(self.expected[0])  # WAR: the last step that read the other buffer is over

    def _bring(self, gradients: torch.Tensor) -> None:
        with self.streams.on(self.streams.arriving_stream):
            self._next_buffer[: gradients.numel()].copy_(gradients, non_blocking=True)
            self._arrived_event.record(self.streams.arriving_stream)
        self._coming = gradients


class DeviceStates:
    """A share's weights, residuals and moments on the device, which the step worker steps. Any thread may call :meth:`leave`
    while no step of the unit is queued."""

    def __init__(self, layout: FlatLayout, share: Share, moments_dtype: torch.dtype, where: StepDevice) -> None:
        self._layout, self._share, self._where = layout, share, where
        self._is_current = False
        """True from a step to the next :meth:`leave`. While it is False the host's states are valid, and the next step first
        copies them to the device."""
        self.read_event = where.streams.event()
        """Recorded by whoever issued copies of what :meth:`weights_of` returned. The next step waits for it (WAR)."""
        self._shown_versions: dict[int, int] = {}
        """``_version``, by ``id``, of each tensor that shows the user the host's states, as first seen since :meth:`leave`."""
        count, device = share.end - share.begin, where.device
        self._weights = torch.empty(share.end_byte - share.begin_byte, dtype=torch.uint8, device=device)
        self._residuals = torch.empty(share.split_elements, dtype=torch.int16, device=device)
        self._moments = FloatMoments(*(torch.empty(count, dtype=moments_dtype, device=device) for _ in range(2)))
        self.size_bytes = sum(state.nbytes for state in (self._weights, self._residuals, *self._moments))

    def refuse_written(self, name: str, states: Iterable[ParameterState]) -> None:
        """Raises a ``StateError`` if somebody wrote to these parameters' residuals or moments in the optimizer's state while
        those on the device are valid. Called when a step is taken."""
        shown = (tensor for state in states for tensor in (state.residual, *(state.moments or ())) if tensor is not None)
        versions = {id(tensor): tensor._version for tensor in shown}
        before = self._shown_versions
        if any(before.get(key, version) != version for key, version in versions.items()):
            raise StateError(
                f"moments or residuals of {name} in the optimizer's state were written to while they are on the GPU; call "
                "megatrain_accelerate.drain() before such writes, or set megatrain_config.placement.device_states: 0"
            )
        before.update(versions)

    def expect(self, host: FlatStates) -> torch.Tensor:
        """Announces a step whose gradients are on the host, so that their copy to the device can begin. Returns them."""
        assert host.gradients is not None
        expected = host.gradients[self._share.bytes]
        self._where.expected.append(expected)
        return expected

    def weights_of(self, part: slice) -> tuple[slice, torch.Tensor] | None:
        """Which bytes of this range of the unit's weights are on the device, and the bytes. None if the share has none of
        them, or while the host's states are valid, since somebody may have written to the weights there. Call it while no step
        of the unit is queued, and record :attr:`read_event` after the copies."""
        begin, end = max(part.start, self._share.begin_byte), min(part.stop, self._share.end_byte)
        if not self._is_current or begin >= end:
            return None
        return slice(begin, end), self._weights[begin - self._share.begin_byte : end - self._share.begin_byte]

    def step(self, host: FlatStates, segments: Sequence[Segment], expected: torch.Tensor | None) -> None:
        """Steps the segments, which are in the share. ``host`` has the unit's states on the host. The gradients are those that
        :meth:`expect` returned, or with None the host's. When this returns the stepped weights are on the host, too."""
        share, where = self._share, self._where
        assert host.gradients is not None
        on_host = host.gradients[share.bytes] if expected is None else expected
        with where.at_work():
            where.streams.step_stream.wait_event(self.read_event)
            if not self._is_current:
                for here, there in self._pairs(host):
                    copy_bytes(here, there, where.host_kernels)
                self._is_current = True
            gradients, sums = where.arrived(on_host), None
            if any(segment.is_sum for segment in segments):
                assert host.gradient_residuals is not None
                sums = where.sums[: 2 * share.split_elements].view(torch.int16)
                of_host = host.gradient_residuals[share.begin : share.begin + share.split_elements]
                copy_bytes(sums, of_host, where.host_kernels)  # synchronous, since they aren't page-locked
            own = FlatStates(share.begin, self._weights, self._residuals, self._moments, gradients, sums)
            step_segments(self._layout, own, segments, where.kernels)
            where.bring_next()
            host.weights[share.bytes].copy_(self._weights, non_blocking=True)

    def leave(self, host: FlatStates) -> bool:
        """Copies the share's residuals and moments to the host, where they may be read and written until the next step.
        Returns whether there was anything to copy."""
        copies = self._is_current
        with self._where.at_work():
            if copies:
                for here, there in self._pairs(host)[1:]:  # each step has copied the weights
                    copy_bytes(there, here, self._where.host_kernels)
                self._is_current = False
            self._shown_versions = {}
        return copies

    def _pairs(self, host: FlatStates) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of each state on the device and its range on the host. The weights come first."""
        begin, count = self._share.begin, self._share.end - self._share.begin
        residuals = host.residuals[begin : begin + self._residuals.numel()]
        moments = zip(self._moments, host.moments.run(begin, count), strict=True)
        return [(self._weights, host.weights[self._share.bytes]), (self._residuals, residuals), *moments]
