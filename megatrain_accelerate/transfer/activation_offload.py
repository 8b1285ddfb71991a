"""Activations to host memory in forward and back in backward, when the link has time for them and the device no room.

A *recording* has the storages of the device that one run of a layer saves for its backward, each once. When the layer's
forward has been issued the d2h stream copies them out, and in backward, one run ahead, the h2d stream back into new memory:
the idea of vDNN (Rhu et al., arXiv 1602.08124) and ``torch.autograd.graph.save_on_cpu``, which waits for each copy.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.store.host_pool import HostBlock, HostPool
from megatrain_accelerate.transfer.call_order import Tape
from megatrain_accelerate.transfer.meter import Cause, Meter, named_range
from megatrain_accelerate.transfer.streams import Place
from megatrain_accelerate.units import MIB

MIN_OFFLOADED_BYTES = 1 * MIB
"""Smaller storages stay on the device: their copies would cost more to issue than their memory is worth."""

EVERY_RUN = -1
"""In the place of a run's number: what all runs of a call need."""


@dataclasses.dataclass
class _Arrival:
    """The end of one batch of copies back: compute waits for it once, before it first uses what they bring."""

    event: Any
    is_waited_for: bool = False


class _Parcel:
    """One storage, over which ``source`` is a tensor, on its way to the host (written by the d2h stream) and back (by the h2d
    stream). Owner: the :class:`ParcelPlace` objects that autograd holds in the place of tensors; with the last of them it
    gives its host memory back."""

    def __init__(self, source: torch.Tensor, label: str, offloader: ActivationOffloader) -> None:
        self.label = label
        self.offloader = offloader
        self.on_device: torch.UntypedStorage | None = source.untyped_storage()
        """The storage itself until its copy out is over; in backward what came back; else None."""
        self.size_bytes = self.on_device.nbytes()
        self.block: HostBlock = []
        self.last_copy_event: Any = None
        """Over when no copy uses the host memory any more."""
        self.arrival: _Arrival | None = None
        self.was_written = False
        self._witness: torch.Tensor | None = source
        self._version = source._version

    def look_for_writes(self) -> None:
        """Notes whether somebody wrote to the storage since it was saved: its copy may have either value."""
        if self._witness is not None:
            self.was_written |= self._witness._version != self._version

    def leave_device(self) -> None:
        """The copy out is ordered before all that compute does from now on: the device's memory may be used again."""
        self.look_for_writes()
        self.on_device = self._witness = None

    def __del__(self) -> None:
        if self.arrival is not None and not self.arrival.is_waited_for:
            # A backward that ended early: the copy back may still write the memory.
            self.offloader.strays.append((self.arrival, self.on_device))
        if self.block:
            self.offloader.pool.give_back(self.block, self.last_copy_event)


@dataclasses.dataclass(frozen=True)
class ParcelPlace:
    """What autograd holds instead of a tensor that went to the host: the parcel, and the tensor's view of its storage."""

    parcel: _Parcel
    place: Place

    def tensor(self) -> torch.Tensor:
        """The tensor, on the device again. Raises what :meth:`ActivationOffloader.on_device` does."""
        storage, (dtype, shape, stride, offset) = self.parcel.offloader.on_device(self.parcel), self.place
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


class Recording:
    """What one run of a layer, which the ``label`` names, saves for backward and may leave the device: not the storages of the
    tensors that ``stay``, since others hold them anyway."""

    def __init__(self, offloader: ActivationOffloader, label: str, stay: Iterable[torch.Tensor] = ()) -> None:
        self.label = label
        self._offloader = offloader
        self._stay = {tensor.untyped_storage().data_ptr() for tensor in stay}
        # Held until the run is issued: the address of a storage names it only as long as it lives.
        self._open: dict[tuple[int, int], _Parcel] | None = {}
        self.parcels: weakref.WeakValueDictionary[tuple[int, int], _Parcel] = weakref.WeakValueDictionary()
        """Once sealed, those that backward still needs."""

    def place(self, tensor: torch.Tensor) -> ParcelPlace | None:
        """A place for a tensor that is to leave the device, or None for one that stays."""
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
            self._open[key] = _Parcel(tensor.detach(), self.label, self._offloader)
        place = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return ParcelPlace(self._open[key], place)

    def seal(self) -> list[_Parcel]:
        """Ends the recording; returns its parcels, which only their places hold from now on."""
        assert self._open is not None
        self.parcels.update(self._open)
        parcels, self._open = list(self._open.values()), None
        return parcels


@dataclasses.dataclass
class _Departure:
    """Copies out of a run that were issued, with what must stay on the device until they are over."""

    run: int
    tape: Tape
    position: int
    copied_event: Any
    parcels: list[_Parcel]


class ActivationOffloader:
    """Moves recordings between device and host. One object per engine.

    The launching thread gives up a run's storages on the device :attr:`spacing` runs later, or when another run's have come
    after them: compute is made to wait for their copy and the references go. So the peak, two runs' storages, doesn't depend
    on timing. In backward storages come back ``spacing`` calls ahead; what is still there isn't copied.
    """

    def __init__(self, pool: HostPool, meter: Meter) -> None:
        self.pool = pool
        self.device = torch.empty(0, device=meter.streams.device).device  # with an index
        self.strays: collections.deque[tuple[_Arrival, torch.UntypedStorage | None]] = collections.deque()
        """Device memory that was given up before compute waited for the copy into it."""
        self.spacing = 1
        """Runs of layers from one that is recorded to the next (``Placement.offload_spacing``)."""
        self._streams, self._meter = meter.streams, meter
        self._run = 0
        self.leaving: list[_Departure] = []
        self._recordings: weakref.WeakKeyDictionary[Tape, dict[int, list[tuple[int, Recording]]]] = weakref.WeakKeyDictionary()

    def run_begins(self) -> None:
        """A layer is about to run forward: of the runs before it the last one that left may still hold device memory."""
        self._run += 1
        self.give_up([left for left in self.leaving if left.run < max(self._run - self.spacing, self.leaving[-1].run)])

    def settle(self) -> None:
        """A backward ended: all device memory whose copy was issued is given up."""
        self.give_up(list(self.leaving))

    def give_up(self, departures: Iterable[_Departure]) -> None:
        """Gives up the device's memory of what has left, and of strays."""
        while self.strays:
            self.wait_for(self.strays[0][0])
            self.strays.popleft()
        for departure in departures:
            self.leaving.remove(departure)
            # WAR: the copy out must be over before the allocator hands the memory to other kernels.
            self._meter.compute_waits_for(departure.copied_event, Cause.D2H)
            for parcel in departure.parcels:
                parcel.leave_device()

    def wait_for(self, arrival: _Arrival) -> None:
        """The compute stream waits until a copy from the host is over."""
        if not arrival.is_waited_for:
            # RAW: kernels must see the whole copy.
            self._meter.compute_waits_for(arrival.event, Cause.H2D)
            arrival.is_waited_for = True

    def send(self, recording: Recording, tape: Tape, position: int, run: int = EVERY_RUN) -> None:
        """Issues the copies of what was recorded in a run whose kernels were all issued; a HostMemoryError without room.
        Backward asks for it by the call's place on its forward pass and the number of the run, in forward order."""
        parcels = recording.seal()
        self._recordings.setdefault(tape, {}).setdefault(position, []).append((run, recording))
        if not parcels:
            return
        made_event, copied_event = self._streams.event(), self._streams.event()
        for parcel in parcels:
            parcel.block, parcel.last_copy_event = self.pool.take(parcel.size_bytes), copied_event
        made_event.record(self._streams.compute_stream)
        d2h_stream = self._streams.d2h_stream
        with self._streams.on(d2h_stream), named_range(f"megatrain::offload_activations ({recording.label})"):
            # RAW: the copies must see the finished activations.
            d2h_stream.wait_event(made_event)
            for parcel in parcels:
                assert parcel.on_device is not None
                self.copy(parcel.block, parcel.on_device, to_host=True)
            copied_event.record(d2h_stream)
        self.leaving.append(_Departure(self._run, tape, position, copied_event, parcels))
        self._meter.counters.d2h_bytes += sum(parcel.size_bytes for parcel in parcels)

    def bring_back(self, tape: Tape, position: int, run: int) -> None:
        """Starts the copies back for one run of a call (see :meth:`send`), and for what backward comes to next."""
        if not self._recordings:
            return
        near = range(position - self.spacing, position + 1)
        self.give_up([left for left in self.leaving if left.tape is not tape or left.position not in near])
        calls = self._recordings.get(tape, {})
        runs = [(position, run), (position, run - 1)]  # backward takes a call's runs from the last
        if not run:
            runs[1:] = [(before, max((number for number, _ in calls.get(before, [])), default=0)) for before in near[-2::-1]]
        wanted = [at for place, number in runs for run_of, at in calls.get(place, []) if run_of in (number, EVERY_RUN)]
        for recording in wanted:
            if away := [parcel for parcel in recording.parcels.values() if parcel.on_device is None]:
                with named_range(f"megatrain::bring_back_activations ({recording.label})"):
                    self._bring_back(away)

    def on_device(self, parcel: _Parcel) -> torch.UntypedStorage:
        """The parcel's storage, usable by kernels issued from now on. An UnsupportedError if it was written to since."""
        parcel.look_for_writes()
        if parcel.was_written:
            raise UnsupportedError(
                f"something that layer {parcel.label} needs in backward was written to in place after it was computed; leave "
                "the layers' inputs and outputs as they are, or set megatrain_config.placement.offloaded_layers to 0 and "
                "placement.offloaded_inputs to false"
            )
        if parcel.on_device is None:
            self._bring_back([parcel])
        if parcel.arrival is not None:
            self.wait_for(parcel.arrival)
        assert parcel.on_device is not None
        return parcel.on_device

    def _bring_back(self, parcels: list[_Parcel]) -> None:
        storages = [torch.empty(p.size_bytes, dtype=torch.uint8, device=self.device).untyped_storage() for p in parcels]
        allocated_event, arrived_event = self._streams.event(), self._streams.event()
        allocated_event.record(self._streams.compute_stream)
        h2d_stream = self._streams.h2d_stream
        arrival = _Arrival(arrived_event)
        with self._streams.on(h2d_stream):
            # WAR: kernels issued earlier may still use the memory that the allocator hands out again.
            h2d_stream.wait_event(allocated_event)
            # RAW: the copies out may still write the host memory.
            for copied_event in {id(p.last_copy_event): p.last_copy_event for p in parcels}.values():
                h2d_stream.wait_event(copied_event)
            for parcel, storage in zip(parcels, storages, strict=True):
                parcel.on_device, parcel.arrival, parcel.last_copy_event = storage, arrival, arrived_event
                self.copy(parcel.block, storage, to_host=False)
            arrived_event.record(h2d_stream)
        self._meter.counters.h2d_bytes += sum(parcel.size_bytes for parcel in parcels)

    def copy(self, block: HostBlock, storage: torch.UntypedStorage, to_host: bool) -> None:
        """Issues the copies between a block on the host and memory on the device."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        for part, on_device in zip(block, flat.split([part.numel() for part in block]), strict=True):
            target, source = (part, on_device) if to_host else (on_device, part)
            target.copy_(source, non_blocking=True)

    def close(self) -> None:
        """Gives up what is on the device, and unregisters the host memory."""
        self.settle()
        self.pool.close()


@contextlib.contextmanager
def inputs_offloaded(
    offloader: ActivationOffloader, label: str, tensors: Sequence[torch.Tensor], tape: Tape, position: int
) -> Iterator[None]:
    """What autograd saves of a call's inputs while the body runs goes to the host, if gradients flow to it. Other inputs
    (masks, position embeddings) are the same tensors for all layers, and stay."""
    recording = Recording(offloader, label, [tensor for tensor in tensors if not tensor.requires_grad])
    with saved_tensors_hooks(
        lambda tensor: recording.place(tensor) or tensor,
        lambda packed: packed.tensor() if isinstance(packed, ParcelPlace) else packed,
    ):
        yield
    offloader.send(recording, tape, position)
