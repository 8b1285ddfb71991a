"""Finds on the CPU what streams and threads don't order: a read and a write, or two writes, of one memory.

Every stream and every thread has a vector clock: for every stream and thread, the number of its last access that surely came
before. An event carries the clock of the stream that it was recorded on to whoever waits for it, and work that is issued to a
stream comes after what its thread knew then. Two accesses are ordered if the later one's clock contains the earlier one's
number (L. Lamport, Time, Clocks, and the Ordering of Events, 1978; C. Flanagan and S. N. Freund, FastTrack, PLDI 2009).

On the CPU work is over as soon as it is issued, so that a missing wait changes no number there: hence this checker. With it
``query()`` is False unless the thread has waited, so that nothing can rely on work that only happened to be over. All threads
but the step worker count as one. Memory is known by its address.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatrain_accelerate.gradients import buffers, clipping, offload
from megatrain_accelerate.layers import runtime, saved_tensors
from megatrain_accelerate.optim import fused_step
from megatrain_accelerate.store import device_states, parameter, step_worker, unit
from megatrain_accelerate.transfer import activation_offload, meter, prefetch, streams

COMPUTE, H2D, D2H, STEP, ARRIVING = "compute", "h2d", "d2h", "step", "arriving"
WORKER, LAUNCHING = "step worker", "launching thread"
STREAMS = COMPUTE, H2D, D2H, STEP, ARRIVING
Clock = dict[str, int]


def this_thread() -> str:
    return WORKER if "worker" in threading.current_thread().name else LAUNCHING


@dataclasses.dataclass(frozen=True)
class Access:
    begin: int
    end: int
    is_write: bool
    actor: str
    time: int
    what: str


class Recorded:
    """An event, or with a ``name`` a stream, in place of the CPU stand-in's."""

    def __init__(self, checker: Checker, name: str | None = None) -> None:
        self._checker, self.name = checker, name
        self.clock: Clock = {}

    def record(self, stream: Recorded | None = None) -> None:
        name = COMPUTE if stream is None else stream.name
        assert name is not None
        with self._checker.lock:
            self._checker.join(name, self._checker.clocks[this_thread()])
            self.clock = dict(self._checker.clocks[name])

    def synchronize(self) -> None:
        with self._checker.lock:
            self._checker.join(this_thread(), self.clock if self.name is None else self._checker.clocks[self.name])

    def wait_event(self, event: Recorded) -> None:
        assert self.name is not None
        with self._checker.lock:
            self._checker.join(self.name, event.clock)

    def query(self) -> bool:
        with self._checker.lock:
            known = self._checker.clocks[this_thread()]
            # An event tells of its stream's work, not of what the thread did that recorded it.
            return all(known.get(actor, 0) >= time for actor, time in self.clock.items() if actor in STREAMS)

    def elapsed_time(self, end: Recorded) -> float:
        return 0.0


class Checker:
    """Replaces streams and events, and notes accesses, until ``patch`` is undone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lock = threading.RLock()
        self.clocks: dict[str, Clock] = collections.defaultdict(dict)
        self.unordered: collections.Counter[str] = collections.Counter()
        """How often each kind of pair of accesses came in no order."""
        self.noted: collections.Counter[str] = collections.Counter()
        """How many accesses of each kind there were."""
        self._last: list[Access] = []
        self._patch, self._current = patch, threading.local()
        self._replace_streams()
        self._follow_the_worker()
        self._watch_weights()
        self._watch_steps()
        self._watch_gradients()
        self._watch_activations()

    def join(self, actor: str, clock: Clock) -> None:
        """What ``clock`` knows comes before what the actor does next."""
        own = self.clocks[actor]
        for other, time in list(clock.items()):
            own[other] = max(own.get(other, 0), time)

    def note(self, memory: torch.Tensor | torch.UntypedStorage | None, writes: bool, actor: str, what: str) -> None:
        """An access to memory by a stream or a thread."""
        size = 0 if memory is None else memory.nbytes if isinstance(memory, torch.Tensor) else memory.nbytes()
        if memory is None or not size or (isinstance(memory, torch.Tensor) and memory.is_meta):
            return
        begin = memory.data_ptr()
        with self.lock:
            self.noted[what] += 1
            if actor in STREAMS:
                self.join(actor, self.clocks[this_thread()])
            known = self.clocks[actor]
            known[actor] = known.get(actor, 0) + 1
            access, left = Access(begin, begin + size, writes, actor, known[actor], what), []
            for before in self._last:
                if before.begin < access.end and begin < before.end:
                    if (writes or before.is_write) and known.get(before.actor, 0) < before.time:
                        self.unordered[f"{before.actor} {before.what}, {actor} {what}"] += 1
                    # One that a write covers can go: who comes after the write comes after it, or is reported with the write.
                    is_covered = begin <= before.begin and before.end <= access.end
                    if is_covered and (writes or (not before.is_write and before.actor == actor)):
                        continue
                left.append(before)
            self._last = [*left, access]

    def on_thread(self, memory: torch.Tensor | None, writes: bool, what: str) -> None:
        self.note(memory, writes, this_thread(), what)

    def _around(
        self, owner: Any, name: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        """``before(*arguments)`` and ``after(result, *arguments)`` are called around each call of a method or function."""
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        self._patch.setattr(owner, name, noting)

    def _replace_streams(self) -> None:
        named = {name: Recorded(self, name) for name in STREAMS}
        current = self._current

        def made(self: streams.Streams, device: torch.device) -> None:
            self.device, self.is_cuda = torch.empty(0, device=device).device, False
            self.h2d_stream, self.d2h_stream, self.step_stream, self.arriving_stream = (named[name] for name in STREAMS[1:])

        @contextlib.contextmanager
        def on(self: streams.Streams, stream: Recorded) -> Iterator[None]:
            before, current.stream = getattr(current, "stream", None), stream
            try:
                yield
            finally:
                current.stream = before

        def synchronize(_: streams.Streams) -> None:
            with self.lock:
                for name in STREAMS:
                    self.join(this_thread(), self.clocks[name])

        replaced = {
            "__init__": made,
            "compute_stream": property(lambda _: getattr(current, "stream", None) or named[COMPUTE]),
            "event": lambda _, timing=False: Recorded(self),
            "on": on,
            "synchronize": synchronize,
        }
        for name, value in replaced.items():
            self._patch.setattr(streams.Streams, name, value)

    def _follow_the_worker(self) -> None:
        """Work comes after what its submitter knew. Who sees that it is over knows all that the worker knew when it ended."""

        def is_done(future: Any) -> bool:
            if future.__dict__["is_done"]:
                with self.lock:
                    self.join(this_thread(), future.__dict__["clock"])
            return bool(future.__dict__["is_done"])

        def set_done(future: Any, value: bool) -> None:
            with self.lock:
                future.__dict__["clock"] = dict(self.clocks[this_thread()])
            future.__dict__["is_done"] = value

        self._patch.setattr(step_worker.Future, "is_done", property(is_done, set_done), raising=False)
        self._around(step_worker.Future, "wait_until_over", after=lambda _, future: future.is_done)
        submit = step_worker.StepWorker.submit

        def following(worker: Any, name: str, work: Callable[[], None]) -> Any:
            with self.lock:
                known = dict(self.clocks[this_thread()])

            def after_that() -> None:
                with self.lock:
                    self.join(WORKER, known)
                work()

            return submit(worker, name, after_that)

        self._patch.setattr(step_worker.StepWorker, "submit", following)

    def _watch_weights(self) -> None:
        """Writes by ``write_master`` aren't noted: they may race with a fetch under way, but the unit's version differs then,
        and the layer is fetched again. The memory of a new slot may have been the compute stream's before."""

        def copied(copies: list[tuple[torch.Tensor, torch.Tensor]], *_: Any) -> None:
            for source, target in copies:
                self.note(source, False, H2D, "fetches host weights")
                self.note(target, True, H2D, "fills a slot")

        for owner in (unit.HostUnit, unit.UnitRange):
            self._around(owner, "copies", after=copied)
        reads = "computes with a slot"
        self._around(
            streams.WeightSlot,
            "__init__",
            before=lambda slot, buffer, _: self.note(buffer, True, COMPUTE, "used memory of a slot before"),
        )
        self._around(
            prefetch.Prefetcher, "acquire", after=lambda slot, *_, **__: self.note(slot.buffer, False, COMPUTE, reads)
        )
        self._around(prefetch.Prefetcher, "release", before=lambda _, slot: self.note(slot.buffer, False, COMPUTE, reads))
        self._around(saved_tensors.SlotPlace, "tensor", after=lambda weight, _: self.note(weight, False, COMPUTE, reads))

        def plain(slots: dict[int, Any]) -> None:
            for slot in slots.values():
                self.note(slot.buffer, False, COMPUTE, "computes with a slot that is held")

        self._around(prefetch.Prefetcher, "own_slots_of_all", after=lambda slots, _: plain(slots))
        self._around(runtime.StreamingRuntime, "end_forward", before=lambda at: plain(at._plain_slots))

        def used(_: Any, at: Any, group: Any) -> None:
            for state in group.unit.states if at.fake_run is None else ():
                self.note(state.parameter.data, False, COMPUTE, "computes with a resident")

        self._around(runtime.StreamingRuntime, "before_group_use", after=used)

        def filled(handle: Any, weights: torch.Tensor) -> None:
            self.note(weights, False, H2D, "fetches a resident's host weights")
            self.note(handle.parameter.data, True, H2D, "fills a resident")

        self._around(parameter.ParamHandle, "fill", before=filled)

        def loaded(_: Any, at: Any, *__: Any) -> None:
            for layer in at.layers:
                self.on_thread(layer.unit.weights, True, "loads host weights")

        self._around(runtime.StreamingRuntime, "begin_loading", after=loaded)

    def _watch_steps(self) -> None:
        def on_host(_: Any, states: Any, *__: Any) -> None:
            self.on_thread(states.gradients, False, "steps with host gradients")
            self.on_thread(states.weights, True, "steps host weights")

        def on_device(_: Any, states: Any, *__: Any) -> None:
            self.note(states.gradients, False, STEP, "steps with gradients on the device")
            self.note(states.weights, True, STEP, "steps weights on the device")

        self._around(fused_step, "step_segments", before=on_host)
        self._around(device_states, "step_segments", before=on_device)

        def brings(device: Any, gradients: torch.Tensor) -> None:
            self.note(gradients, False, ARRIVING, "brings host gradients")
            self.note(device._next_buffer[: gradients.numel()], True, ARRIVING, "brings gradients to a buffer")

        self._around(device_states.StepDevice, "_bring", before=brings)

    def _watch_gradients(self) -> None:
        def written(_: Any, slot: Any, *__: Any) -> None:
            for memory in (slot.buffer, slot.norms):
                self.note(memory, True, COMPUTE, "fills a gradient slot")

        sending = threading.local()

        def send_begins(offloader: Any, name: str, ready_event: Any, copies: Any, norms: Any) -> None:
            sending.copies = (*copies, *norms)

        def copies_begin(*_: Any, **__: Any) -> None:  # after `send` has had its stream wait
            copies, sending.copies = getattr(sending, "copies", ()), ()
            for target, source in copies:
                self.note(source, False, D2H, "sends gradients")
                self.note(target, True, D2H, "writes host gradients")

        self._around(offload.UnitGradients, "_take_norms", before=written)
        self._around(offload.GradientOffloader, "send", before=send_begins)
        self._around(meter.Meter, "copying", before=copies_begin)

        def added(addition: Any, new: torch.Tensor | None, sums: Any, of: Callable[..., torch.Tensor]) -> None:
            self.on_thread(new, False, "adds arrived gradients")
            self.on_thread(of(addition.state.entry, addition.state.gradient), True, "adds to host gradients")

        self._around(buffers.Addition, "add", before=added)
        self._around(
            clipping.Clipping, "total_norm", before=lambda at, *_: self.on_thread(at._norms.norms, False, "reads norms")
        )

    def _watch_activations(self) -> None:
        offloader = activation_offload.ActivationOffloader

        def copied(_: Any, block: Any, storage: Any, to_host: bool) -> None:
            stream = D2H if to_host else H2D
            self.note(storage, not to_host, stream, "copies activations on the device")
            for memory in block:
                self.note(memory, to_host, stream, "copies activations on the host")

        def made(_: Any, recording: Any, *__: Any, **___: Any) -> None:
            for storage in (recording._open or {}).values():
                self.note(storage.on_device, True, COMPUTE, "makes activations")

        self._around(offloader, "copy", before=copied)
        self._around(offloader, "send", before=made)
        self._around(
            offloader, "on_device", after=lambda found, *_: self.note(found, False, COMPUTE, "computes with activations")
        )
        self._around(
            activation_offload._OffloadedStorage,
            "leave_device",
            before=lambda storage: self.note(storage.on_device, True, COMPUTE, "uses memory of activations again"),
        )
