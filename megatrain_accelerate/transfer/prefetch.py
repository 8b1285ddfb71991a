"""Weights to the device, ahead of their use: which slot holds which layer, and when a copy is issued."""

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

    The ``layers``, all that are streamed, by index, take turns in the shared ``slots`` (a number, at least 2). One that
    evaluations *hold* has a slot of its own until training goes on, so that it is copied once; one whose unit lives on the
    device is its own slot. Copies are issued on the h2d stream when a layer is asked for or a backward of one is over, for
    layers whose steps are applied. The launching thread never waits for a copy, and for a step only when the layer is next.
    What several ranks ``gather`` they ask for ``together``; :mod:`.gather` says by which rules they do so alike.
    """

    def __init__(self, layers: Sequence[Fetched], slots: int, meter: Meter, gather: Gather | None = None) -> None:
        self._layers, self.gather = layers, gather
        self.gathers = False
        """Whether training passes fetch together; set by the plan, on all ranks."""
        self._streams, self._meter = meter.streams, meter
        self._largest = max((layer.unit.layout.weight_bytes for layer in layers), default=0)
        if gather is not None:
            self._largest = gather.slot_bytes(self._largest)
        self.slot_count = slots
        self.shared_bytes = slots * self._largest
        """Of the shared slots, made or not."""
        self.slots: list[WeightSlot] = []
        self.own_slots: dict[int, WeightSlot] = {}
        """Slots of single layers, that are held or whose units live on the device, by the layer's index."""
        self._held: list[int] = []
        """Layers that have a slot of :meth:`hold`, in the order in which they got it."""
        self._last_copied_event = self._streams.event()
        self._clock = itertools.count(1)
        self._refused_at: dict[int, float] = {}
        """When a layer's copy could have been issued but for its step, by index."""
        self.leases: dict[int, WeightSlot] = {}
        """Slots of the layers whose backward has begun, by index, from the first saved tensor that it reads to the last. A
        cache: where every slot is in use the one that was read least recently is given up, and taken anew."""
        self._upcoming: tuple[Sequence[int], bool] = (), False
        """The layers that the last call expected, and whether they are fetched together."""
        self._chosen: collections.deque[tuple[WeightSlot, Fetched]] = collections.deque()
        """Slots that were chosen together and what is to be gathered into them, which isn't issued yet."""
        self.at_address: dict[int, WeightSlot] = {}
        """The slots that there are, by where their memory begins."""
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
        """Gives up the slots of single layers, and what of their memory nobody else holds. No copy may be in flight."""
        self.own_slots, self._held = {}, []
        self._note_slots()

    def close(self) -> None:
        """Gives up all slots. Nothing may be fetched afterwards."""
        for held in (self.slots, self.own_slots, self._held, self.at_address):
            held.clear()

    def hold(self, index: int) -> None:
        """Gives a layer that has none a slot of its own until :meth:`let_go`; a torch.OutOfMemoryError without room."""
        with torch.inference_mode(False):
            slot = self._new_slot(self._layers[index].unit.layout.weight_bytes)
        # WAR: kernels that were issued before may still use the memory under its former owner's name.
        slot.compute_finished_event.record(self._streams.compute_stream)
        self.own_slots[index] = slot
        self._held.append(index)
        self._note_slots()

    def let_go(self, size_bytes: int | None = None) -> int:
        """Takes slots of :meth:`hold` back, the latest first, until ``size_bytes`` (or all) are free; returns the bytes."""
        freed_bytes = 0
        while self._held and (size_bytes is None or freed_bytes < size_bytes):
            slot = self.own_slots.pop(self._held.pop())
            # WAW: kernels use the memory under another name from here on, and a copy into it may still run.
            self._streams.compute_stream.wait_event(slot.params_copied_event)
            freed_bytes += slot.buffer.numel()
        if freed_bytes:
            self._note_slots()
        return freed_bytes

    def note_moves(self) -> None:
        """Layers whose units live on the device by now are slots of their own. No kernel and no copy may be in flight."""
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
        """Where the weights of all layers are in slots of their own (held, or on the device), those slots, by the layer's
        index; else none. Kernels of forwards without a graph may read them from now on, and release nothing: the next copy
        into a slot is ordered behind what the stream has that is current then, so a script that changes streams joins them."""
        if len(self.own_slots) < len(self._layers) or None in map(self._slot_of, self._layers):
            return {}
        if not self._last_copied_event.query():
            # RAW: copies are made in the order in which they were issued.
            self._meter.compute_waits_for(self._last_copied_event, Cause.H2D, 0.0)
        return self.own_slots

    def acquire(
        self, layer: Fetched, upcoming: Sequence[int], together: bool = False, address: int | None = None
    ) -> WeightSlot:
        """Makes a layer's weights usable by kernels issued from now on, in the slot at this ``address`` or in any; starts the
        copies of the ``upcoming`` ones, by index, nearest first. A StepWorkerError if the layer's step failed."""
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
        """The caller, who acquired the slot, issues no kernel from now on that reads it."""
        slot.compute_finished_event.record(self._streams.compute_stream)
        slot.users -= 1

    def leased(self, layer: Fetched, address: int | None = None) -> WeightSlot | None:
        """The slot that the layer has a lease of, and reads now, if it holds the weights of now at this ``address`` or at any;
        else the lease ends."""
        slot, unit = self.leases.get(layer.index), layer.unit
        if slot is None:
            return None
        if address in (None, slot.address) and (slot.holder == (layer.index, unit.version) or unit.is_on_device):
            slot.last_used = next(self._clock)
            return slot
        self.end_lease(layer.index, prefetches=False)
        return None

    def end_lease(self, index: int, prefetches: bool = True) -> None:
        """A layer's backward is over: its slot is free for the layer that is expected next. Does nothing without one."""
        if (slot := self.leases.pop(index, None)) is not None:
            while slot.until_lease_ends:
                slot.until_lease_ends.pop().__exit__(None, None, None)
            slot.leaves = []
            self.release(slot)
            if prefetches:
                self.prefetch(*self._upcoming)

    def _note_slots(self) -> None:
        """Called when slots were made or given up."""
        self.at_address = {slot.address: slot for slot in (*self.slots, *self.own_slots.values())}
        self.look_ahead = self.slot_count + len(self.own_slots)
        """How many calls to name as upcoming: one for each slot, since layers with slots of their own may lie between."""

    def _slot_of(self, layer: Fetched, together: bool = False, address: int | None = None) -> WeightSlot | None:
        """The slot that has the layer's weights of now, or will once its copy is over: the one at this ``address``, else its
        own if it has one, else a shared one. ``together`` the one into which they were gathered."""
        own = self.own_slots.get(layer.index) if address is None else self.at_address[address]
        holder = (layer.index, layer.unit.version)
        for slot in self.slots if own is None else (own,):
            if (slot.gathered if together else slot.holder) == holder:
                return slot
        return own if own is not None and layer.unit.is_on_device else None

    def _victim(self, layer: Fetched, wanted: set[int], together: bool = False, address: int | None = None) -> WeightSlot:
        """The slot to overwrite: that at this ``address``, the layer's own, a stale one, or the least recently used, a
        ``wanted`` layer's last; else the one whose lease was read least recently. A StateError if layers that run use all."""
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
        """The slot with a layer for which all ranks ask, who choose alike."""
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
        """Gathers what was chosen, in the order of the choices, as far as steps are applied; waits for them while the slot
        ``until`` isn't filled."""
        while self._chosen:
            slot, layer = self._chosen[0]
            if not layer.gate.is_open and all(chosen is not until for chosen, _ in self._chosen):
                self._refused_at.setdefault(layer.index, time.perf_counter())
                return
            self._wait_for_step(layer)
            self._chosen.popleft()
            self.fill(slot, layer, True)

    def issue_all(self) -> None:
        """Gathers all that was chosen, before this rank does something else: others may wait for it."""
        if self._chosen:
            self._issue(until=self._chosen[-1][0])

    def forget_gathered(self) -> None:
        """What was gathered doesn't count any more; called by all ranks, since it may differ where layers moved."""
        for slot in self.slots:
            slot.gathered, slot.last_gathered = None, 0

    def prefetch(self, upcoming: Sequence[int], together: bool = False) -> None:
        """Issues the copies of layers that will run, for as many of them as have room."""
        room = sum([not slot.users for slot in self.slots])
        wanted: set[int] = set()
        """Layers for which there is a shared slot."""
        missing: dict[int, Fetched] = {}
        for index in upcoming:
            # A held layer takes no room: its copy may begin as soon as its step is applied.
            if index not in self.own_slots and index not in wanted:
                if len(wanted) == room:
                    continue
                wanted.add(index)
            # A write to weights since a layer's last use is noticed by `acquire`.
            if self._slot_of(layer := self._layers[index], together) is None:
                missing[index] = layer
        for index, layer in missing.items():
            if together:
                self._choose(layer, wanted)
                continue
            if not layer.gate.is_open:
                self._refused_at.setdefault(index, time.perf_counter())
                break  # it is tried again with the next layer, and at the latest when it is needed
            layer.gate.wait()
            self.fill(self._victim(layer, wanted), layer)
        if self._chosen:
            self._issue()

    def trial(self, together: bool) -> None:
        """Fetches the largest layer of the host, to be timed; called by all ranks at once."""
        of_host = [layer for layer in self._layers if not layer.unit.is_on_device]
        self.fill(self.slots[0], max(of_host, key=lambda layer: layer.unit.layout.weight_bytes), together)
        self.slots[0].holder = None

    def fill(self, slot: WeightSlot, layer: Fetched, together: bool = False) -> None:
        """Issues the copy of a layer's weights into a slot, or that of a part of them which all ranks gather."""
        assert not slot.users, f"layer {layer.name} would overwrite a slot in use"
        slot.holder = None  # until the copy is issued: an interrupt must not leave a slot that claims to hold it
        unit, index = layer.unit, layer.index
        unit.register_weights()  # the first time: what moves to the device before is never registered
        refused_at = self._refused_at.pop(index, None)
        slot.late_ms = 0.0 if refused_at is None else 1e3 * (time.perf_counter() - refused_at)
        if index in self.own_slots:  # all_held() may have given it out, and its readers don't tell when they are done
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
