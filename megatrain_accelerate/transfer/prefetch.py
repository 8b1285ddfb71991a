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

    All streamed ``layers``, by index, take turns in ``slot_count`` shared slots (at least 2). A layer that evaluations *hold*
    has a slot of its own until training goes on, so that it is copied once. If a layer's unit lives on the device, the unit's
    memory is the slot. :meth:`acquire` and :meth:`end_lease` issue copies on the h2d stream, of layers whose last optimizer
    step has been applied. The launching thread never waits for a copy. It waits for a step only to acquire that very layer,
    or, where ranks gather, layers that were queued before it.
    Weights that all ranks ask for ``together`` are gathered, by the rules of :mod:`.gather`.
    """

    def __init__(self, layers: Sequence[Fetched], slot_count: int, meter: Meter, gather: Gather | None = None) -> None:
        self._layers, self.gather = layers, gather
        self.gathers = False
        """Whether ranks gather weights in training passes. Set by the plan, on all ranks."""
        self._streams, self._meter = meter.streams, meter
        self._slot_bytes = max((layer.unit.layout.weight_bytes for layer in layers), default=0)
        if gather is not None:
            self._slot_bytes = gather.slot_bytes(self._slot_bytes)
        self.slot_count = slot_count
        self.shared_bytes = slot_count * self._slot_bytes
        """Size of all shared slots, allocated or not."""
        self.slots: list[WeightSlot] = []
        self.own_slots: dict[int, WeightSlot] = {}
        """Slots that belong to one layer, which is held or whose unit lives on the device, by the layer's index."""
        self._held: list[int] = []
        """Indices of the held layers, in the order in which :meth:`hold` gave them slots."""
        self._last_copied_event = self._streams.event()
        self._clock = itertools.count(1)
        self._late_since: dict[int, float] = {}
        """By layer index, the time at which a copy was first put off because the layer's step wasn't applied. It gives
        ``slot.late_ms``: so much of a later wait for the copy counts as a wait for the step."""
        self.leases: dict[int, WeightSlot] = {}
        """Slots that are kept for layers whose backward has begun, by index. The layer's call acquires one when backward first
        reads a saved weight, and enters it here. If every slot is in use, the lease that was read least recently ends."""
        self._upcoming: tuple[Sequence[int], bool] = (), False
        """The layers that the last :meth:`acquire` expected, and whether ranks gather them."""
        self._chosen: collections.deque[tuple[WeightSlot, Fetched]] = collections.deque()
        """Slots that all ranks chose for gathers that this rank hasn't issued yet, with the layers."""
        self.at_address: dict[int, WeightSlot] = {}
        """All slots, by their address."""
        self.note_moves()

    def _new_slot(self, size_bytes: int) -> WeightSlot:
        slot = WeightSlot(torch.empty(size_bytes, dtype=torch.uint8, device=self._streams.device), self._streams)
        # WAR: kernels of the memory's former owner may still use it.
        slot.compute_finished_event.record(self._streams.compute_stream)
        return slot

    def wait_for_copies(self) -> None:
        """Blocks until all copies that were issued have read the host's weights."""
        self._last_copied_event.synchronize()

    @property
    def device_bytes(self) -> int:
        return sum(slot.buffer.numel() for slot in self.slots)

    @property
    def held_bytes(self) -> int:
        """Size of the slots of :meth:`hold`."""
        return sum(self.own_slots[index].buffer.numel() for index in self._held)

    @property
    def all_on_device(self) -> bool:
        """Whether all layers' units live on the device."""
        return len(self.own_slots) - len(self._held) == len(self._layers)

    def drop_own_slots(self) -> None:
        """Drops the slots of single layers. Memory of units on the device stays theirs. No copy may be in flight."""
        self.own_slots, self._held = {}, []
        self._note_slots()

    def close(self) -> None:
        """Drops all slots. Nothing may be fetched afterwards."""
        for collection in (self.slots, self.own_slots, self._held, self.at_address):
            collection.clear()

    def hold(self, index: int) -> None:
        """Gives a layer without one a slot of its own until :meth:`let_go`, or raises a ``torch.OutOfMemoryError``."""
        with torch.inference_mode(False):
            slot = self._new_slot(self._layers[index].unit.layout.weight_bytes)
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
        """Called when units have moved: those on the device become slots of their own. No kernel or copy may be in flight."""
        self.drop_own_slots()
        self._late_since.clear()
        for layer in self._layers:
            if isinstance(layer.unit, HostUnit) and layer.unit.is_on_device:
                self.own_slots[layer.index] = WeightSlot(layer.unit.weights, self._streams)
        if len(self.own_slots) == len(self._layers):
            self.slots = []
        elif not self.slots:
            self.slots = [self._new_slot(self._slot_bytes) for _ in range(self.slot_count)]
        self._note_slots()

    def own_slots_of_all(self) -> dict[int, WeightSlot]:
        """If all layers' weights are in slots of their own (held, or on the device): those slots, by the layer's index.
        Otherwise an empty dict. Forwards without gradients may read them without :meth:`release`, since :meth:`fill` orders
        the next copy behind all work of the stream that is current at that time. A script that uses others must join them."""
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
        slot = self._slot_of_all_ranks(layer) if together else self._slot_of(layer, address=address)
        if slot is None:
            self._wait_for_step(layer)
            slot = self._victim(layer, set(), address=address)
            self.fill(slot, layer)
        slot.user_count += 1
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
            self._late_since.setdefault(layer.index, time.perf_counter())
        self._meter.wait_for_step(layer.name, layer.gate)

    def release(self, slot: WeightSlot) -> None:
        """Called by whoever acquired the slot, after the last kernel that reads it was issued."""
        slot.compute_finished_event.record(self._streams.compute_stream)
        slot.user_count -= 1

    def leased(self, layer: Fetched, address: int | None = None) -> WeightSlot | None:
        """The slot of the layer's lease, if it has the current weights, at this ``address`` or any. Else the lease ends."""
        slot, unit = self.leases.get(layer.index), layer.unit
        if slot is None:
            return None
        if address in (None, slot.address) and (slot.contents == (layer.index, unit.version) or unit.is_on_device):
            slot.last_used = next(self._clock)
            return slot
        self.end_lease(layer.index, prefetches=False)
        return None

    def end_lease(self, index: int, prefetches: bool = True) -> None:
        """Ends a layer's lease, if it has one, so that its slot is free. If it ``prefetches``, the backward is over, and
        copies of the layers that follow are issued."""
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
        """How many upcoming calls to name, so that all shared slots are filled even if layers with own slots come first."""

    def _slot_of(self, layer: Fetched, together: bool = False, address: int | None = None) -> WeightSlot | None:
        """The slot with the layer's current weights, whose copy may still be under way; None if there is none. Looked for at
        ``address`` alone if given, else in the layer's own slot alone if it has one, else in the shared ones. With
        ``together``, the slot that all ranks have agreed on, even if its gather hasn't been issued."""
        only = self.own_slots.get(layer.index) if address is None else self.at_address[address]
        contents = (layer.index, layer.unit.version)
        for slot in self.slots if only is None else (only,):
            if (slot.agreed_contents if together else slot.contents) == contents:
                return slot
        # A layer on the device is always in its slot, which is the unit's memory.
        return only if only is not None and layer.unit.is_on_device else None

    def _victim(self, layer: Fetched, wanted: set[int], together: bool = False, address: int | None = None) -> WeightSlot:
        """The slot to overwrite: at this ``address``, or the layer's own, or of all shared ones a stale one, or the least
        recently used, of ``wanted`` layers only if all others are in use. If none is free the lease that was read least
        recently ends. Raises a ``StateError`` if running layers use all."""
        only = self.own_slots.get(layer.index) if address is None else self.at_address[address]
        slots = self.slots if only is None else [only]

        def worth(slot: WeightSlot) -> tuple[bool, int]:
            contents, used = (slot.agreed_contents, slot.last_used_together) if together else (slot.contents, slot.last_used)
            if contents is None or contents[1] != self._layers[contents[0]].unit.version:
                return False, -1
            return contents[0] in wanted, used

        if free := [slot for slot in slots if not slot.user_count]:
            return min(free, key=worth) if len(free) > 1 else free[0]
        # A lease counts as one user, so these slots have no other.
        leased = [index for index, slot in self.leases.items() if slot in slots and slot.user_count == 1]
        if not leased:
            raise StateError(
                f"layer {layer.name} needs a weight slot, but running layers use all {len(slots)}; raise "
                "megatrain_config.placement.slots"
            )
        index = min(leased, key=lambda index: self.leases[index].last_used)
        found = self.leases[index]
        self.end_lease(index, prefetches=False)
        return found

    def _slot_of_all_ranks(self, layer: Fetched) -> WeightSlot:
        """The slot with a layer that all ranks ask for. They choose the same one."""
        slot = self._slot_of(layer, together=True) or self._choose(layer, set())
        slot.last_used_together = next(self._clock)
        self._issue(last=slot)
        if slot.contents != slot.agreed_contents:
            # This rank alone has copied something else over the gathered weights since.
            self.fill(slot, layer)
        return slot

    def _choose(self, layer: Fetched, wanted: set[int]) -> WeightSlot:
        """Chooses the slot into which all ranks gather a layer next."""
        slot = self._victim(layer, wanted, together=True)
        slot.agreed_contents = (layer.index, layer.unit.version)
        self._chosen.append((slot, layer))
        return slot

    def _issue(self, last: WeightSlot | None = None) -> None:
        """Issues the chosen gathers in order, as far as steps are applied. Up to slot ``last`` it waits for the steps."""
        while self._chosen:
            slot, layer = self._chosen[0]
            if not layer.gate.is_open and not any(chosen is last for chosen, _ in self._chosen):
                self._late_since.setdefault(layer.index, time.perf_counter())
                return
            self._wait_for_step(layer)
            self._chosen.popleft()
            self.fill(slot, layer, True)

    def issue_all(self) -> None:
        """Issues all chosen gathers before this rank does something else, since other ranks may wait for them."""
        if self._chosen:
            self._issue(last=self._chosen[-1][0])

    def forget_agreed(self) -> None:
        """Clears what slots note of gathers. Called by all ranks, whose notes may differ where layers moved."""
        for slot in self.slots:
            slot.agreed_contents = None
            slot.last_used_together = 0

    def prefetch(self, upcoming: Sequence[int], together: bool = False) -> None:
        """Issues the copies of the upcoming layers, for as many as there are free slots."""
        free_count = sum([not slot.user_count for slot in self.slots])
        wanted: set[int] = set()
        """Layers that get a shared slot."""
        missing: dict[int, Fetched] = {}
        for index in upcoming:
            # A layer with a slot of its own needs no shared one: its copy may begin as soon as its step is applied.
            if index not in self.own_slots and index not in wanted:
                if len(wanted) == free_count:
                    continue
                wanted.add(index)
            # Scripts' writes to weights since a layer's last use are noticed later, by `acquire`.
            if self._slot_of(layer := self._layers[index], together) is None:
                missing[index] = layer
        for index, layer in missing.items():
            if together:
                self._choose(layer, wanted)
                continue
            if not layer.gate.is_open:
                self._late_since.setdefault(index, time.perf_counter())
                break  # the next call of a layer tries again, and the layer's own call waits
            layer.gate.wait()  # doesn't block now, but raises if the step failed
            self.fill(self._victim(layer, wanted), layer)
        if self._chosen:
            self._issue()

    def fetch_largest(self, together: bool) -> None:
        """Fetches the largest layer on the host, to be timed. Called by all ranks at once."""
        on_host = [layer for layer in self._layers if not layer.unit.is_on_device]
        self.fill(self.slots[0], max(on_host, key=lambda layer: layer.unit.layout.weight_bytes), together)
        self.slots[0].contents = None

    def fill(self, slot: WeightSlot, layer: Fetched, together: bool = False) -> None:
        """Issues the copy of a layer's weights into a slot. With ``together`` this rank copies its range of the weights only,
        and all ranks gather the ranges."""
        assert not slot.user_count, f"layer {layer.name} would overwrite a slot in use"
        slot.contents = None  # an interrupt before the copy is issued must not leave a slot that claims to have the layer
        unit, index = layer.unit, layer.index
        unit.page_lock_weights()  # only here, so that a unit that moves to the device first is never page-locked
        late_since = self._late_since.pop(index, None)
        slot.late_ms = 0.0 if late_since is None else 1e3 * (time.perf_counter() - late_since)
        if index in self.own_slots:  # readers that got it from own_slots_of_all() don't release it
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
        slot.contents = (index, unit.version)
        self._meter.counters.weight_fetches += 1
