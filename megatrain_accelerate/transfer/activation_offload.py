"""Offloads activations to the host in forward and prefetches them in backward, if the link has time and memory is short.

A *recording* has the storages on the device that one run of a layer saves for its backward, each once. When the layer's
forward has been issued the d2h stream copies them to the host, and in backward the h2d stream copies them to new memory ahead
of their use: the idea of vDNN (Rhu et al., arXiv 1602.08124), and of ``torch.autograd.graph.save_on_cpu``, which waits for
each copy.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.store.host_pool import HostBlock, HostPool
from megatrain_accelerate.transfer.call_order import Tape
from megatrain_accelerate.transfer.meter import Cause, Meter, named_range
from megatrain_accelerate.transfer.streams import Place
from megatrain_accelerate.units import MIB

MIN_OFFLOADED_BYTES = 1 * MIB
"""Smaller storages stay on the device: to issue their copies would cost more than their memory is worth."""

EVERY_RUN = -1
"""Stands for a run's number where all runs of a call need a recording."""


@dataclasses.dataclass
class _Arrival:
    """The end of one batch of copies to the device. Compute waits for it once, before it first uses what they bring."""

    event: Any
    is_waited_for: bool = False


class _OffloadedStorage:
    """One storage, of which ``source`` is a tensor. The d2h stream copies it to the host, the h2d stream copies it back.
    Owner: the :class:`OffloadedTensor` objects that autograd holds instead of tensors. The last of them gives back the host
    memory."""

    def __init__(self, source: torch.Tensor, label: str, offloader: ActivationOffloader) -> None:
        self.label = label
        self.offloader = offloader
        self.on_device: torch.UntypedStorage | None = source.untyped_storage()
        """The original storage until its copy to the host is over, in backward the one that was copied back, else None."""
        self.size_bytes = self.on_device.nbytes()
        self.block: HostBlock = []
        self.last_copy_event: Any = None
        """Once it is over no copy uses the host memory."""
        self.arrival: _Arrival | None = None
        self.was_written = False
        self._witness: torch.Tensor | None = source
        self._version = source._version

    def look_for_writes(self) -> None:
        """Notes whether somebody wrote to the storage since it was saved: its copy may have either value."""
        if self._witness is not None:
            self.was_written |= self._witness._version != self._version

    def leave_device(self) -> None:
        """Drops the original storage. Its copy is ordered before all later work of compute, which may use the memory again."""
        self.look_for_writes()
        self.on_device = self._witness = None

    def __del__(self) -> None:
        if self.arrival is not None and not self.arrival.is_waited_for:
            # The backward ended early: the copy to the device may still write to the memory.
            self.offloader.strays.append((self.arrival, self.on_device))
        if self.block:
            self.offloader.pool.give_back(self.block, self.last_copy_event)


@dataclasses.dataclass(frozen=True)
class OffloadedTensor:
    """What autograd holds instead of an offloaded tensor: the storage, and the tensor's view of it."""

    saved: _OffloadedStorage
    place: Place

    def tensor(self) -> torch.Tensor:
        """The tensor, on the device again. Raises as :meth:`ActivationOffloader.on_device` does."""
        storage, (dtype, shape, stride, offset) = self.saved.offloader.on_device(self.saved), self.place
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


class Recording:
    """What one run of a layer, which ``label`` names, saves for backward and may be offloaded. Storages of the tensors that
    ``stay`` aren't, since others hold them anyway."""

    def __init__(self, offloader: ActivationOffloader, label: str, stay: Iterable[torch.Tensor] = ()) -> None:
        self.label = label
        self._offloader = offloader
        self._stay = {tensor.untyped_storage().data_ptr() for tensor in stay}
        # Keeps storages until the run is issued: an address identifies a storage only while it lives.
        self._open: dict[tuple[int, int], _OffloadedStorage] | None = {}
        self.storages: weakref.WeakValueDictionary[tuple[int, int], _OffloadedStorage] = weakref.WeakValueDictionary()
        """Once the recording is sealed, the storages that backward still needs."""

    def place(self, tensor: torch.Tensor) -> OffloadedTensor | None:
        """What autograd is to hold instead of a tensor that will be offloaded. None for a tensor that stays on the device."""
        if (
            self._open is None
            or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.device != self._offloader.device
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_OFFLOADED_BYTES or storage.data_ptr() in self._stay:
            return None
        if (key := (storage.data_ptr(), tensor._version)) not in self._open:
            self._open[key] = _OffloadedStorage(tensor.detach(), self.label, self._offloader)
        place = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return OffloadedTensor(self._open[key], place)

    def seal(self) -> list[_OffloadedStorage]:
        """Ends the recording. Returns its storages, which only autograd holds from then on."""
        assert self._open is not None
        self.storages.update(self._open)
        storages, self._open = list(self._open.values()), None
        return storages


@dataclasses.dataclass
class _CopyOut:
    """Issued copies of one run to the host, with the storages that must stay on the device until they are over."""

    run: int
    """Its number among all runs of layers."""
    recording: Recording
    copied_event: Any
    storages: list[_OffloadedStorage]


class ActivationOffloader:
    """Moves recordings between device and host. One object per engine.

    The launching thread gives up a run's device memory :attr:`spacing` runs later, or when another run was offloaded after it:
    it makes compute wait for the copies and drops its references. So the peak, two runs' storages, doesn't depend on timing.
    In backward storages are prefetched ``spacing`` calls ahead. Those that are still on the device aren't copied.
    """

    def __init__(self, pool: HostPool, meter: Meter) -> None:
        self.pool = pool
        self.device = meter.streams.device
        self.strays: collections.deque[tuple[_Arrival, torch.UntypedStorage | None]] = collections.deque()
        """Device memory that was dropped before compute waited for the copy into it."""
        self.spacing = 1
        """Runs of layers from one that is offloaded to the next (``Placement.offload_spacing``)."""
        self._streams, self._meter = meter.streams, meter
        self._run = 0
        self.leaving: list[_CopyOut] = []
        self._recordings: weakref.WeakKeyDictionary[Tape, dict[int, list[tuple[int, Recording]]]] = weakref.WeakKeyDictionary()

    def run_begins(self) -> None:
        """Called when a layer is about to run. Of earlier runs at most the last offloaded one keeps its device memory."""
        self._run += 1
        self.give_up([left for left in self.leaving if left.run < max(self._run - self.spacing, self.leaving[-1].run)])

    def settle(self) -> None:
        """Called when a backward ended. Gives up all device memory whose copies were issued."""
        self.give_up(list(self.leaving))

    def give_up(self, copies_out: Iterable[_CopyOut]) -> None:
        """Gives up the device memory of these copies, and of strays."""
        while self.strays:
            self.wait_for(self.strays[0][0])
            self.strays.popleft()
        for copy_out in copies_out:
            self.leaving.remove(copy_out)
            # WAR: the copy out must be over before the allocator hands the memory to other kernels.
            self._meter.compute_waits_for(copy_out.copied_event, Cause.D2H)
            for saved in copy_out.storages:
                saved.leave_device()

    def wait_for(self, arrival: _Arrival) -> None:
        """Makes the compute stream wait until copies from the host are over."""
        if not arrival.is_waited_for:
            # RAW: kernels must see the whole copy.
            self._meter.compute_waits_for(arrival.event, Cause.H2D)
            arrival.is_waited_for = True

    def send(self, recording: Recording, tape: Tape, position: int, run: int = EVERY_RUN) -> None:
        """Issues the copies of a recording whose run's kernels were all issued, or raises a ``HostMemoryError`` without room.
        Backward finds it by the call's position on the tape of its pass, and by the run's number in forward order."""
        storages = recording.seal()
        self._recordings.setdefault(tape, {}).setdefault(position, []).append((run, recording))
        if not storages:
            return
        made_event, copied_event = self._streams.event(), self._streams.event()
        for saved in storages:
            saved.block, saved.last_copy_event = self.pool.take(saved.size_bytes), copied_event
        made_event.record(self._streams.compute_stream)
        d2h_stream = self._streams.d2h_stream
        with self._streams.on(d2h_stream), named_range(f"megatrain::offload_activations ({recording.label})"):
            # RAW: the copies must see the finished activations.
            d2h_stream.wait_event(made_event)
            for saved in storages:
                assert saved.on_device is not None
                self.copy(saved.block, saved.on_device, to_host=True)
            copied_event.record(d2h_stream)
        self.leaving.append(_CopyOut(self._run, recording, copied_event, storages))
        self._meter.counters.d2h_bytes += sum(saved.size_bytes for saved in storages)

    def bring_back(self, tape: Tape, position: int, run: int) -> None:
        """Issues the copies to the device for a run of a call (see :meth:`send`), and for the next runs of backward."""
        if not self._recordings and not self.leaving:
            return
        calls = self._recordings.get(tape, {})
        runs = [(position, run), (position, run - 1)]  # backward takes a call's runs in reverse
        if not run:
            near = range(position - 1, position - self.spacing - 1, -1)
            runs[1:] = [(before, max((number for number, _ in calls.get(before, [])), default=0)) for before in near]
        wanted = [at for place, number in runs for run_of, at in calls.get(place, []) if run_of in (number, EVERY_RUN)]
        # Backward has used the other runs' storages, or will only do so later.
        self.give_up([left for left in self.leaving if left.recording not in wanted])
        for recording in wanted:
            if away := [saved for saved in recording.storages.values() if saved.on_device is None]:
                with named_range(f"megatrain::bring_back_activations ({recording.label})"):
                    self._bring_back(away)

    def on_device(self, saved: _OffloadedStorage) -> torch.UntypedStorage:
        """The storage, for kernels issued after this. Raises an ``UnsupportedError`` if it was written to since saved."""
        saved.look_for_writes()
        if saved.was_written:
            raise UnsupportedError(
                f"a tensor that layer {saved.label} saved for backward was modified in place; don't modify the inputs and "
                "outputs of layers, or set megatrain_config.placement.offloaded_layers to 0 and placement.offloaded_inputs to "
                "false"
            )
        if saved.on_device is None:
            self._bring_back([saved])
        if saved.arrival is not None:
            self.wait_for(saved.arrival)
        assert saved.on_device is not None
        return saved.on_device

    def _bring_back(self, storages: list[_OffloadedStorage]) -> None:
        memories = [torch.empty(p.size_bytes, dtype=torch.uint8, device=self.device).untyped_storage() for p in storages]
        allocated_event, arrived_event = self._streams.event(), self._streams.event()
        allocated_event.record(self._streams.compute_stream)
        h2d_stream = self._streams.h2d_stream
        arrival = _Arrival(arrived_event)
        with self._streams.on(h2d_stream):
            # WAR: kernels issued earlier may still use the memory that the allocator hands out again.
            h2d_stream.wait_event(allocated_event)
            # RAW: the copies out may still write the host memory.
            for copied_event in {id(p.last_copy_event): p.last_copy_event for p in storages}.values():
                h2d_stream.wait_event(copied_event)
            for saved, memory in zip(storages, memories, strict=True):
                saved.on_device, saved.arrival, saved.last_copy_event = memory, arrival, arrived_event
                self.copy(saved.block, memory, to_host=False)
            arrived_event.record(h2d_stream)
        self._meter.counters.h2d_bytes += sum(saved.size_bytes for saved in storages)

    def copy(self, block: HostBlock, storage: torch.UntypedStorage, to_host: bool) -> None:
        """Issues the copies between a block on the host and a storage on the device."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        for part, on_device in zip(block, flat.split([part.numel() for part in block]), strict=True):
            target, source = (part, on_device) if to_host else (on_device, part)
            target.copy_(source, non_blocking=True)

    def close(self) -> None:
        """Gives up device memory and unregisters host memory."""
        self.settle()
        self.pool.close()
