"""Prefetches weights to the device: which slot holds which layer, and when a copy is issued."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Sequence

import torch

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.gather import Gather
from megatrain_accelerate.transfer.meter import Cause, Meter, named_range
from megatrain_accelerate.transfer.parts import Fetched
from megatrain_accelerate.transfer.streams import WeightSlot


class Prefetcher:
    """Owner of the weight slots.

    All streamed ``layers``, by index, take turns in the shared ``slots`` (a number, at least 2). A layer that evaluations
    *hold* has a slot of its own until training goes on, so that it is copied once. A layer whose unit lives on the device is
    its own slot. Copies are issued on the h2d stream when a layer is asked for or the backward of one is over, for layers
    whose steps are applied. The launching thread never waits for a copy, and for a step only when its layer is next. Several
    ranks ``gather`` the weights that they ask for ``together``, by the rules of :mod:`.gather`.
    """

    def __init__(self, layers: Sequence[Fetched], slots: int, meter: Meter, gather: Gather | None = None) -> None:
        self._layers, self.gather = layers, gather
        self.gathers = False
        """Whether ranks gather weights in training passes. Set by the plan, on all ranks."""
        self._streams, self._meter = meter.streams, meter
        self._largest = max((layer.unit.layout.weight_bytes for layer in layers), default=0)
        if gather is not None:
            self._largest = gather.slot_bytes(self._largest)
        self.slot_count = slots
        self.shared_bytes = slots * self._largest
        """Size of all shared slots, allocated or not."""
        self.slots: list[WeightSlot] = []
        self.own_slots: dict[int, WeightSlot] = {}
        """Slots of single layers that are held or whose units live on the device, by the layer's index."""
        self._held: list[int] = []
        """Indices of the layers with a slot of :meth:`hold`, in the order in which they got it."""
        self._last_copied_event = self._streams.event()
        self._clock = itertools.count(1)
        self._refused_at: dict[int, float] = {}
        """When a layer's copy could have been issued if its step had been applied, by the layer's index."""
        self.leases: dict[int, WeightSlot] = {}
        """Slots of the layers whose backward has begun, by index, from the first saved tensor that it reads to the last. If
        every slot is in use, the lease that was read least recently ends, and is taken anew when it is needed."""
        self._upcoming: tuple[Sequence[int], bool] = (), False
        """The layers that the last call expected, and whether ranks gather them."""
        self._chosen: collections.deque[tuple[WeightSlot, Fetched]] = collections.deque()
        """Slots that ranks chose for gathers that aren't issued yet, with the layers."""
        self.at_address: dict[int, WeightSlot] = {}
        """All slots, by their address."""
        self.note_moves()

    def _new_slot(self, size_bytes: int) -> WeightSlot:
        return WeightSlot(torch.empty(size_bytes, dtype=torch.uint8, device=self._streams.device), self._streams)

    @property
    def device_bytes(self) -> int:
        return sum(slot.buffer.numel() for slot in self.slots)

    @property
    def held_bytes(self) -> int:
        return sum(self.own_slots[index].buffer.numel() for index in self._held)

    @property
    def all_on_device(self) -> bool:
        return len(self.own_slots) - len(self._held) == len(self._layers)

    def drop_own_slots(self) -> None:
        """Drops the slots of single layers, and their memory unless somebody else holds it. No copy may be in flight."""
        self.own_slots, self._held = {}, []
        self._note_slots()

    def close(self) -> None:
        """Drops all slots. Nothing may be fetched afterwards."""
        for held in (self.slots, self.own_slots, self._held, self.at_address):
            held.clear()

    def hold(self, index: int) -> None:
        """Gives a layer without one a slot of its own until :meth:`let_go`, or raises a ``torch.OutOfMemoryError``."""
        with torch.inference_mode(False):
            slot = self._new_slot(self._layers[index].unit.layout.weight_bytes)
        # WAR: kernels of the memory's former owner may still use it.
        slot.compute_finished_event.record(self._streams.compute_stream)
        self.own_slots[index] = slot
        self._held.append(index)
        self._note_slots()

    def let_go(self, size_bytes: int | None = None) -> int:
        """Drops slots of :meth:`hold`, the latest first, until ``size_bytes`` (or all) are free. Returns the freed bytes."""
        freed_bytes = 0
        while self._held and (size_bytes is None or freed_bytes < size_bytes):
            slot = self.own_slots.pop(self._held.pop())
            # WAW: a copy into the memory may still run when the allocator hands it out again.
            self._streams.compute_stream.wait_event(slot.params_copied_event)
            freed_bytes += slot.buffer.numel()
        if freed_bytes:
            self._note_slots()
        return freed_bytes

    def note_moves(self) -> None:
        """Called when units have moved. Layers on the device become slots of their own. No kernel or copy may be in flight."""
        self.drop_own_slots()
        self._refused_at.clear()
        for layer in self._layers:
            if isinstance(layer.unit, HostUnit) and layer.unit.is_on_device:
                self.own_slots[layer.index] = WeightSlot(layer.unit.weights, self._streams)
        if len(self.own_slots) == len(self._layers):
            self.slots = []
        elif not self.slots:
            self.slots = [self._new_slot(self._largest) for _ in range(self.slot_count)]
        self._note_slots()

    def all_held(self) -> dict[int, WeightSlot]:
        """If all layers' weights are in slots of their own (held, or on the device): those slots, by the layer's index.
        Otherwise an empty dict. Kernels of forwards without a graph may read them without releasing them. The next copy into a
        slot is ordered behind the stream that is current then, so a script that changes streams must join them."""
        if len(self.own_slots) < len(self._layers) or None in map(self._slot_of, self._layers):
            return {}
        if not self._last_copied_event.query():
            # RAW: copies run in order, so that the last one's event covers all.
            self._meter.compute_waits_for(self._last_copied_event, Cause.H2D, 0.0)
        return self.own_slots

    def acquire(
        self, layer: Fetched, upcoming: Sequence[int], together: bool = False, address: int | None = None
    ) -> WeightSlot:
        """Makes a layer's weights usable by kernels issued after this, in the slot at this ``address`` or in any. Prefetches
        the ``upcoming`` layers (indices, nearest first). Raises a ``StepWorkerError`` if the layer's step failed."""
        layer.refresh_if_written()
        slot = self._gathered(layer) if together else self._slot_of(layer, address=address)
        if slot is None:
            self._wait_for_step(layer)
            slot = self._victim(layer, set(), address=address)
            self.fill(slot, layer)
        slot.users += 1
        slot.last_used = next(self._clock)
        self._upcoming = upcoming, together
        try:
            if not slot.params_copied_event.query():
                # RAW: the kernels must see the whole copy.
                self._meter.compute_waits_for(slot.params_copied_event, Cause.H2D, slot.late_ms)
            self.prefetch(upcoming, together)
        except BaseException:
            self.release(slot)
            raise
        return slot

    def _wait_for_step(self, layer: Fetched) -> None:
        if not layer.gate.is_open:
            self._refused_at.setdefault(layer.index, time.perf_counter())
        self._meter.wait_for_step(layer.name, layer.gate)

    def release(self, slot: WeightSlot) -> None:
        """Called by whoever acquired the slot, after the last kernel that reads it was issued."""
        slot.compute_finished_event.record(self._streams.compute_stream)
        slot.users -= 1

    def leased(self, layer: Fetched, address: int | None = None) -> WeightSlot | None:
        """The slot of the layer's lease, if it holds the current weights, at this ``address`` or any. Else the lease ends."""
        slot, unit = self.leases.get(layer.index), layer.unit
        if slot is None:
            return None
        if address in (None, slot.address) and (slot.holder == (layer.index, unit.version) or unit.is_on_device):
            slot.last_used = next(self._clock)
            return slot
        self.end_lease(layer.index, prefetches=False)
        return None

    def end_lease(self, index: int, prefetches: bool = True) -> None:
        """Called when a layer's backward is over: its slot is free for the next layer. Does nothing without a lease."""
        if (slot := self.leases.pop(index, None)) is not None:
            while slot.until_lease_ends:
                slot.until_lease_ends.pop().__exit__(None, None, None)
            slot.leaves = []
            self.release(slot)
            if prefetches:
                self.prefetch(*self._upcoming)

    def _note_slots(self) -> None:
        self.at_address = {slot.address: slot for slot in (*self.slots, *self.own_slots.values())}
        self.look_ahead = self.slot_count + len(self.own_slots)
        """How many calls to name as upcoming: one for each slot, since layers with slots of their own may be between them."""

    def _slot_of(self, layer: Fetched, together: bool = False, address: int | None = None) -> WeightSlot | None:
        """The slot that has the layer's current weights, or will once its copy is over: the one at this ``address``, else its
        own if it has one, else a shared one. With ``together``, the one into which ranks gathered them."""
        own = self.own_slots.get(layer.index) if address is None else self.at_address[address]
        holder = (layer.index, layer.unit.version)
        for slot in self.slots if own is None else (own,):
            if (slot.gathered if together else slot.holder) == holder:
                return slot
        return own if own is not None and layer.unit.is_on_device else None

    def _victim(self, layer: Fetched, wanted: set[int], together: bool = False, address: int | None = None) -> WeightSlot:
        """The slot to overwrite: at this ``address``, the layer's own, a stale one, or the least recently used, ``wanted``
        layers' last. If none is free the least recently read lease ends. Raises a ``StateError`` if running layers use all."""
        own = self.own_slots.get(layer.index) if address is None else self.at_address[address]
        slots = self.slots if own is None else [own]

        def rank(slot: WeightSlot) -> tuple[bool, int]:
            holder, last_used = (slot.gathered, slot.last_gathered) if together else (slot.holder, slot.last_used)
            if holder is None or holder[1] != self._layers[holder[0]].unit.version:
                return False, -1
            return holder[0] in wanted, last_used

        if free := [slot for slot in slots if not slot.users]:
            return min(free, key=rank) if len(free) > 1 else free[0]
        leased = [index for index, slot in self.leases.items() if slot in slots and slot.users == 1]
        if not leased:
            raise StateError(f"layer {layer.name} finds all {len(slots)} slots in use; raise megatrain_config.placement.slots")
        index = min(leased, key=lambda index: self.leases[index].last_used)
        found = self.leases[index]
        self.end_lease(index, prefetches=False)
        return found

    def _gathered(self, layer: Fetched) -> WeightSlot:
        """The slot with a layer that all ranks ask for. They choose the same one."""
        slot = self._slot_of(layer, together=True) or self._choose(layer, set())
        slot.last_gathered = next(self._clock)
        self._issue(until=slot)
        if slot.holder != slot.gathered:
            self.fill(slot, layer)
        return slot

    def _choose(self, layer: Fetched, wanted: set[int]) -> WeightSlot:
        """Chooses the slot into which all ranks gather a layer next."""
        slot = self._victim(layer, wanted, together=True)
        slot.gathered = (layer.index, layer.unit.version)
        self._chosen.append((slot, layer))
        return slot

    def _issue(self, until: WeightSlot | None = None) -> None:
        """Issues the chosen gathers in order, as far as steps are applied. Waits for steps until slot ``until`` is filled."""
        while self._chosen:
            slot, layer = self._chosen[0]
            if not layer.gate.is_open and all(chosen is not until for chosen, _ in self._chosen):
                self._refused_at.setdefault(layer.index, time.perf_counter())
                return
            self._wait_for_step(layer)
            self._chosen.popleft()
            self.fill(slot, layer, True)

    def issue_all(self) -> None:
        """Issues all chosen gathers before this rank does something else, since other ranks may wait for them."""
        if self._chosen:
            self._issue(until=self._chosen[-1][0])

    def forget_gathered(self) -> None:
        """Nothing counts as gathered any more. Called by all ranks, whose notes may differ where layers moved."""
        for slot in self.slots:
            slot.gathered, slot.last_gathered = None, 0

    def prefetch(self, upcoming: Sequence[int], together: bool = False) -> None:
        """Issues the copies of the upcoming layers, for as many as there are free slots."""
        room = sum([not slot.users for slot in self.slots])
        wanted: set[int] = set()
        """Layers that get a shared slot."""
        missing: dict[int, Fetched] = {}
        for index in upcoming:
            # A held layer needs no shared slot: its copy may begin as soon as its step is applied.
            if index not in self.own_slots and index not in wanted:
                if len(wanted) == room:
                    continue
                wanted.add(index)
            # `acquire` notices writes to weights since a layer's last use.
            if self._slot_of(layer := self._layers[index], together) is None:
                missing[index] = layer
        for index, layer in missing.items():
            if together:
                self._choose(layer, wanted)
                continue
            if not layer.gate.is_open:
                self._refused_at.setdefault(index, time.perf_counter())
                break  # tried again with the next layer, at the latest when it is needed
            layer.gate.wait()
            self.fill(self._victim(layer, wanted), layer)
        if self._chosen:
            self._issue()

    def trial(self, together: bool) -> None:
        """Fetches the largest layer on the host, to be timed. Called by all ranks at once."""
        of_host = [layer for layer in self._layers if not layer.unit.is_on_device]
        self.fill(self.slots[0], max(of_host, key=lambda layer: layer.unit.layout.weight_bytes), together)
        self.slots[0].holder = None

    def fill(self, slot: WeightSlot, layer: Fetched, together: bool = False) -> None:
        """Issues the copy of a layer's weights into a slot, or that of this rank's range of them, which all ranks gather."""
        assert not slot.users, f"layer {layer.name} would overwrite a slot in use"
        slot.holder = None  # an interrupt before the copy is issued must not leave a slot that claims to hold the layer
        unit, index = layer.unit, layer.index
        unit.register_weights()  # only here, so that a unit that moves to the device first is never registered
        refused_at = self._refused_at.pop(index, None)
        slot.late_ms = 0.0 if refused_at is None else 1e3 * (time.perf_counter() - refused_at)
        if index in self.own_slots:  # readers that got it from all_held() don't release it
            slot.compute_finished_event.record(self._streams.compute_stream)
        h2d_stream = self._streams.h2d_stream
        with self._streams.on(h2d_stream), named_range(f"megatrain::prefetch ({layer.name})"):
            # WAR: kernels of the layer that the slot held may still read it.
            h2d_stream.wait_event(slot.compute_finished_event)
            if together and self.gather is not None:
                assert isinstance(unit, HostUnit)
                self.gather.fetch(unit, slot.buffer, layer.name, self._meter, h2d_stream)
            else:
                with self._meter.copying(Cause.H2D, unit.layout.weight_bytes):
                    for source, target in unit.copies(slot.bytes_of):
                        target.copy_(source, non_blocking=True)
            slot.params_copied_event.record(h2d_stream)
        self._last_copied_event = slot.params_copied_event
        slot.holder = (index, unit.version)
        self._meter.counters.weight_fetches += 1
