"""The engine's streams, the slots that hold weights and gradients on the device, and a stand-in without a GPU.

=============== ==================================================== ===============================================
stream          carries                                              overlaps
=============== ==================================================== ===============================================
compute_stream  the model's own kernels; always the current stream   h2d_stream and d2h_stream
h2d_stream      weights, host to device, one copy a layer;           compute of the layer before, or of the part before
                for a part of its experts one copy a parameter
d2h_stream      gradients, device to host, as many copies            compute of the layer that follows in backward
h2d and d2h     offloaded activations; exchanges between ranks       compute of other layers
step_stream     optimizer steps of units that have device_states     the next forward
arriving_stream gradients of these, host to device, one copy a step  the step before
=============== ==================================================== ===============================================

Events are attributes of the objects that they protect. They order the reuse of slots, so that ``record_stream`` isn't needed.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.store.layout import FlatLayout


class Immediate:
    """Stream and event of the CPU stand-in, whose work is over when it is issued: nothing waits. It uses the host's clock."""

    _recorded_at = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_at = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Immediate) -> float:
        return 1e3 * (end._recorded_at - self._recorded_at)


_NO_STREAM = contextlib.nullcontext()
Place = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""Dtype, shape, strides and offset of a tensor in a slot or a storage. The last two are in elements."""


class Streams:
    """The engine's streams on one device: CUDA, or the CPU for the stand-in."""

    def __init__(self, device: torch.device) -> None:
        # With an index, as tensors have it; Accelerate's device for one process has none.
        self.device = torch.empty(0, device=device).device
        self.is_cuda = device.type == "cuda"
        made: list[Any] = [torch.cuda.Stream(device) if self.is_cuda else Immediate() for _ in range(4)]
        self.h2d_stream, self.d2h_stream, self.step_stream, self.arriving_stream = made

    @property
    def compute_stream(self) -> Any:
        """The current stream, on which the caller's kernels run."""
        return torch.cuda.current_stream(self.device) if self.is_cuda else Immediate()

    def event(self, timing: bool = False) -> Any:
        """A new event, which counts as complete until it is first recorded."""
        return torch.cuda.Event(enable_timing=timing) if self.is_cuda else Immediate()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Runs the body's device work on ``stream``."""
        return torch.cuda.stream(stream) if self.is_cuda else _NO_STREAM

    def synchronize(self) -> None:
        """Blocks until all work that was issued to the device is over. It is for use between steps only."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


class _Slot:
    """A flat uint8 buffer on the device, as long as the largest layer that it is to hold, with cached views of it."""

    trainable_only = False
    """Whether the buffer is for the trainable parameters alone, which come first in a layout."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._views: dict[int, list[torch.Tensor]] = {}
        self._ranges: dict[tuple[int, int], torch.Tensor] = {}

    def bytes_of(self, begin: int, end: int) -> torch.Tensor:
        """A range of the buffer. The view is cached."""
        if (begin, end) not in self._ranges:
            with torch.inference_mode(False):  # autograd doesn't take ``data`` for a view of the buffer
                self._ranges[begin, end] = self.buffer[begin:end].data
        return self._ranges[begin, end]

    def views(self, layout: FlatLayout) -> list[torch.Tensor]:
        """The buffer as the layout's tensors, in entry order. They are cached for each layout."""
        if layout.key not in self._views:
            # Views made in inference mode could never require a gradient.
            with torch.inference_mode(False):
                self._views[layout.key] = [view.data for view in layout.views(self.buffer, self.trainable_only)]
        return self._views[layout.key]


class WeightSlot(_Slot):
    """One layer's weights on the device, in its flat layout from byte 0. Owner: the prefetcher. Writer: the h2d stream.
    Reader: the compute stream. It may be written again once ``compute_finished_event`` is complete."""

    def __init__(self, buffer: torch.Tensor, streams: Streams) -> None:
        super().__init__(buffer)
        self.address = buffer.untyped_storage().data_ptr()
        """Address of the buffer, by which the slot of a tensor is found."""
        self.contents: tuple[int, int] | None = None
        """(layer index, version of its unit's weights) in the buffer now, or once ``params_copied_event`` is complete."""
        self.agreed_contents: tuple[int, int] | None = None
        """As :attr:`contents`: what all ranks last chose to gather into it. They differ until this rank has issued the gather,
        and once it has copied something else over it."""
        self.last_used = self.last_used_together = 0
        """The prefetcher's clock at the last call that used it, and at the last one of those that all ranks make together."""
        self.user_count = 0
        """Number of calls, and leases, that read it. Nothing may be copied into it meanwhile."""
        self.late_ms = 0.0
        """How much earlier the copy would have been issued without its layer's step, for ``Meter.compute_waits_for``."""
        self.current_call: Any = None
        """The call of its layer that is computing with it, see :meth:`read_by`. What it saves for backward refers to it."""
        self.leaves: list[torch.Tensor] = []
        """The weights that are bound to the layer while it has a lease of the slot (:attr:`.prefetch.Prefetcher.leases`)."""
        self.until_lease_ends: list[contextlib.AbstractContextManager[object]] = []
        """Context managers that are exited when the lease ends, the last one first."""
        self.params_copied_event = streams.event()
        self.compute_finished_event = streams.event()
        self._view_at: dict[Place, torch.Tensor] = {}
        self.interned_places: dict[Place, Place] = {}
        """One object for all equal places, to which graphs then refer. The key and the value are the same."""

    def read_by(self, call: Any) -> contextlib.AbstractContextManager[None]:
        """Makes ``call``, of the slot's layer, its :attr:`current_call` while the body runs."""
        return replaced(self, "current_call", call)

    def require_current_call(self) -> Any:
        """The :attr:`current_call`. Raises a ``StateError`` without one: another layer's weights may soon be in the slot."""
        if self.current_call is None:
            raise StateError(
                "a weight of a streamed layer was used outside the layer's forward, when its slot may hold another layer's "
                "weights; use the parameter itself, or set megatrain_config.layer_classes to larger blocks"
            )
        return self.current_call

    def tensor_count(self, layout: FlatLayout) -> int:
        """How many tensors refer to the buffer, without those of :meth:`view`. If a forward leaves more than it found, and
        they aren't leaves of the graph, something that autograd doesn't see keeps weights (a function's context)."""
        self.views(layout)
        return int(torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata)) - len(self._view_at)

    def view(self, place: Place) -> torch.Tensor:
        """A tensor in the buffer, by its :data:`Place`. It is cached."""
        if (view := self._view_at.get(place)) is None:
            dtype, shape, stride, offset = place
            with torch.inference_mode(False), torch.no_grad():
                # A slice in another dtype would hold one more tensor over the buffer, and :meth:`tensor_count` count it.
                view = torch.empty(0, dtype=dtype, device=self.buffer.device)
                self._view_at[place] = view.set_(self.buffer.untyped_storage(), offset, shape, stride)
        return view


class GradientSlot(_Slot):
    """One layer's gradients on the device until they are on the host: the trainable prefix of its flat layout, of at most
    ``size_bytes`` and ``parameter_count`` parameters. Owner: the gradient offloader. Writer: the compute stream, and for means
    over ranks the d2h stream. Reader: the d2h stream. It may be written again once ``grads_copied_event`` is complete."""

    trainable_only = True

    def __init__(self, size_bytes: int, parameter_count: int, streams: Streams) -> None:
        # Zeros, so that the padding between parameters carries no non-finite values to the host.
        super().__init__(torch.zeros(size_bytes, dtype=torch.uint8, device=streams.device))
        self.norms = torch.zeros(parameter_count, dtype=torch.float32, device=streams.device)
        """2-norms of the gradients in the buffer, in entry order. They are copied to the host with the gradients."""
        self.grads_ready_event = streams.event()
        self.grads_copied_event = streams.event()
