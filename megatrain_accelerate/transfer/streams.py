"""The engine's streams, the slots that hold weights and gradients on the device, and a stand-in without a GPU.

=============== ==================================================== =============================================
stream          carries                                              overlaps
=============== ==================================================== =============================================
compute_stream  the model's own kernels; always the current stream   both copy streams
h2d_stream      weights, host to device, one copy a layer;           compute of the layer before, of the part before
                for a part of its experts one copy a parameter
d2h_stream      gradients, device to host, as many copies            compute of the layer that follows in backward
both of these   offloaded activations; exchanges between ranks       compute of other layers
step_stream     steps of states on the device of units on the host   the next forward
arriving_stream their gradients, host to device, one copy a step     the step before
=============== ==================================================== =============================================

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
        self.device = device
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
        """Blocks until all work that was issued to the device is over. For use between steps only."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


class _Slot:
    """A flat uint8 buffer on the device, as long as the largest layer that it is to hold, with cached views of it."""

    trainable_only = False

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._views: dict[int, list[torch.Tensor]] = {}
        self._ranges: dict[tuple[int, int], torch.Tensor] = {}

    def bytes_of(self, begin: int, end: int) -> torch.Tensor:
        """A range of the buffer. The view is cached."""
        if (begin, end) not in self._ranges:
            with torch.inference_mode(False):
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
    Reader: the compute stream. It may be written again once ``compute_finished_event`` is over."""

    def __init__(self, buffer: torch.Tensor, streams: Streams) -> None:
        super().__init__(buffer)
        self.address = buffer.untyped_storage().data_ptr()
        """Address of the buffer, by which the slot of a tensor is found."""
        self.holder: tuple[int, int] | None = None
        """(layer index, version of the unit's weights) that the buffer holds, or will once ``params_copied_event`` is over."""
        self.gathered: tuple[int, int] | None = None
        """As :attr:`holder`, for what all ranks last gathered. If they differ this rank has copied over it since."""
        self.last_used = self.last_gathered = 0
        """The prefetcher's clock when a call last used it, and when a call that all ranks make did."""
        self.users = 0
        """Number of calls of its layer that issue kernels that read it. Nothing else may be copied into it meanwhile."""
        self.late_ms = 0.0
        """How much earlier the copy would have been issued without a wait for the layer's step. For the counters."""
        self.reader: Any = None
        """The call of its layer that is computing with it, see :meth:`read_by`."""
        self.leaves: list[torch.Tensor] = []
        """The weights that are bound to the layer while it has a lease of the slot (:attr:`.prefetch.Prefetcher.leases`)."""
        self.until_lease_ends: list[contextlib.AbstractContextManager[object]] = []
        """Context managers that are exited when the lease ends, the last one first."""
        self.params_copied_event = streams.event()
        self.compute_finished_event = streams.event()
        self._at: dict[Place, torch.Tensor] = {}
        self.places: dict[Place, Place] = {}
        """Maps each :data:`Place` to which a graph refers to one object that stands for all equal ones."""

    def read_by(self, call: Any) -> contextlib.AbstractContextManager[None]:
        """Makes ``call``, of the slot's layer, its :attr:`reader` while the body runs."""
        return replaced(self, "reader", call)

    def require_reader(self) -> Any:
        """The slot's :attr:`reader`. Raises a ``StateError`` without one: another layer's weights may soon be there."""
        if self.reader is None:
            raise StateError(
                "a weight of a streamed layer is used outside the layer's forward, where another layer's may lie in its "
                "place; use the parameter itself, or set megatrain_config.layer_classes to larger blocks"
            )
        return self.reader

    def uses_with(self, layout: FlatLayout) -> int:
        """How many tensors refer to the buffer. The layout's own views count, those of :meth:`view` don't."""
        self.views(layout)
        return int(torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata)) - len(self._at)

    def view(self, place: Place) -> torch.Tensor:
        """A tensor in the buffer, by its :data:`Place`. It is cached."""
        if (view := self._at.get(place)) is None:
            dtype, shape, stride, offset = place
            with torch.inference_mode(False), torch.no_grad():
                # Not a view of the buffer: it would hold another tensor, and each counts as one use of the memory.
                view = torch.empty(0, dtype=dtype, device=self.buffer.device)
                self._at[place] = view.set_(self.buffer.untyped_storage(), offset, shape, stride)
        return view


class GradientSlot(_Slot):
    """One layer's gradients on the device until they are on the host: the trainable prefix of its flat layout, of at most
    ``size_bytes`` and ``parameter_count`` parameters. Owner: the gradient offloader. Writer: the compute stream, and for means
    of several ranks the d2h stream. Reader: the d2h stream. It may be written again once ``grads_copied_event`` is over."""

    trainable_only = True

    def __init__(self, size_bytes: int, parameter_count: int, streams: Streams) -> None:
        # Zeros, so that the padding between parameters carries no non-finite values to the host.
        super().__init__(torch.zeros(size_bytes, dtype=torch.uint8, device=streams.device))
        self.norms = torch.zeros(parameter_count, dtype=torch.float32, device=streams.device)
        """2-norms of the gradients in the buffer, in entry order. They are copied to the host with the gradients."""
        self.grads_ready_event = streams.event()
        self.grads_copied_event = streams.event()
