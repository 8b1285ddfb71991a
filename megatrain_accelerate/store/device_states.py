"""States on the device: what one process steps of a unit, while the unit's weights and gradients stay on the host.

Of several ranks each has its share there, so that the states of a model that is too large for one GPU fit all of them
together, as with ZeRO (arXiv 1910.02054). The step comes to them: gradients are copied to the device, and the weights that it
makes back to the host, from where every rank fetches them as ever. Residuals and moments on the host are old meanwhile, until
:meth:`DeviceStates.leave`.
"""

from __future__ import annotations

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
from megatrain_accelerate.store.segments import FlatStates, Segment, step_segments


class StepDevice:
    """Where units' shares are stepped: the device, its kernels, the stream of all such steps, and a buffer on the device for
    the gradients of one, of ``arriving_bytes``. Steps run one at a time: the step worker waits for each."""

    def __init__(
        self, device: torch.device, kernels: StepKernels, host_kernels: HostKernels, stream: Any, arriving_bytes: int
    ) -> None:
        self.device, self.kernels, self.host_kernels, self.stream = device, kernels, host_kernels, stream
        self.arriving = torch.empty(arriving_bytes, dtype=torch.uint8, device=device)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """The body's work runs on the stream, that of one thread at a time, and is over when this returns."""
        with self._lock:
            try:
                with torch.cuda.stream(self.stream) if self.device.type == "cuda" else contextlib.nullcontext():
                    yield
            finally:
                self.stream.synchronize()


def states_bytes(shares: Iterable[tuple[FlatLayout, Share, torch.dtype]]) -> int:
    """Bytes on the device of these shares' weights, residuals and moments (of that dtype), and of the largest's gradients."""
    states, arriving = 0, 0
    for layout, share, dtype in shares:
        of_masters = arriving_bytes(layout, share)
        states += of_masters + 2 * dtype.itemsize * (share.end - share.begin)
        arriving = max(arriving, of_masters)
    return states + arriving


def arriving_bytes(layout: FlatLayout, share: Share) -> int:
    """Bytes of a share's gradients, fp32 sums with their residuals."""
    return share.end_byte - share.begin_byte + 2 * share.split(layout)


class DeviceStates:
    """A share's weights, residuals and moments on the device. The step worker steps them. :meth:`leave` may be called by any
    thread, while no step of the unit is queued."""

    def __init__(self, layout: FlatLayout, share: Share, moments_dtype: torch.dtype, where: StepDevice) -> None:
        self._layout, self._share, self._where = layout, share, where
        self._is_current = False
        """True from a step to the next :meth:`leave`. While False the host's states are valid, and the next step copies them
        here first."""
        self._shown_versions: dict[int, int] = {}
        """Of tensors that show the host's states, by ``id``, since the last :meth:`leave`."""
        count, device = share.end - share.begin, where.device
        self._weights = torch.empty(share.end_byte - share.begin_byte, dtype=torch.uint8, device=device)
        self._residuals = torch.empty(share.split(layout), dtype=torch.int16, device=device)
        self._moments = FloatMoments(*(torch.empty(count, dtype=moments_dtype, device=device) for _ in range(2)))

    def refuse_written(self, name: str, shown: Sequence[torch.Tensor]) -> None:
        """Raises a ``StateError`` where somebody wrote to these residuals and moments, which an optimizer's state shows, while
        those on the device are valid. Called when a step is taken."""
        versions = {id(tensor): tensor._version for tensor in shown}
        before = self._shown_versions
        if any(before.get(key, version) != version for key, version in versions.items()):
            raise StateError(
                f"moments or residuals of {name} in the optimizer's state were written to while they are on the GPU; call "
                "megatrain_accelerate.drain() before such writes, or set megatrain_config.placement.device_states: 0"
            )
        before.update(versions)

    def step(self, host: FlatStates, segments: Sequence[Segment]) -> None:
        """Steps the segments, which lie in the share, from gradients on the host (``host``, the unit's whole states there),
        where the stepped weights are when this returns."""
        share, where = self._share, self._where
        split = share.split(self._layout)
        assert host.gradients is not None
        with where.at_work():
            if not self._is_current:
                for here, there in self._pairs(host):
                    copy_bytes(here, there, where.host_kernels)
                self._is_current = True
            gradients = where.arriving[: share.end_byte - share.begin_byte]
            gradients.copy_(host.gradients[share.bytes], non_blocking=True)
            sums = None
            if any(segment.is_sum for segment in segments):
                assert host.gradient_residuals is not None
                sums = where.arriving[gradients.numel() :][: 2 * split].view(torch.int16)
                # They aren't page-locked.
                copy_bytes(sums, host.gradient_residuals[share.begin : share.begin + split], where.host_kernels)
            own = FlatStates(share.begin, self._weights, self._residuals, self._moments, gradients, sums)
            step_segments(self._layout, own, segments, where.kernels)
            host.weights[share.bytes].copy_(self._weights, non_blocking=True)

    def leave(self, host: FlatStates) -> None:
        """Makes the share's residuals and moments on the host valid: they may be read and written until the next step."""
        with self._where.at_work():
            if self._is_current:
                for here, there in self._pairs(host)[1:]:  # the weights are there
                    copy_bytes(there, here, self._where.host_kernels)
                self._is_current = False
            self._shown_versions = {}

    def _pairs(self, host: FlatStates) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each of these states, and its place on the host; the weights first."""
        begin, count = self._share.begin, self._share.end - self._share.begin
        residuals = host.residuals[begin : begin + self._residuals.numel()]
        moments = zip(self._moments, host.moments.run(begin, count), strict=True)
        return [(self._weights, host.weights[self._share.bytes]), (self._residuals, residuals), *moments]
