"""Predicts the duration of a step under a placement, by arithmetic on its profile.

A small simulation of the pipeline runs three steps, of which the last counts. Its resources do one thing at a time each: the
device's compute, the two directions of the link, the host's optimizer, and the network. Optimizer and copies share the host's
memory, so copies have a share of their speed while the optimizer steps (``Machine.h2d_share_in_step``). The optimizer's speed
has those of weights deducted already (``SHARE_IN_A_STEP``). While activations are offloaded it is
``Machine.step_share_beside_copies`` of that.

One of several ranks is simulated. Gradients are exchanged before they are copied to the host, in the same order, and a rank
copies and steps its share. Each of several machines sends the others their shares of its ranks' sums, and receives as much.
Stepped weights return in the same way. A machine's ranks divide its traffic and its network's speed alike, so that one rank's
transfer takes as long as the whole traffic at full speed.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Hashable, Sequence

from megatrain_accelerate.gradients.offload import GRADIENT_SLOTS
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.placement import Model, UnitSizes, sent_bytes
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_profile import Event, LayerProfile, StepProfile

_NORM_BYTES = 2
"""Bytes per parameter that the device reads for the gradients' norm, which it computes apart from the step."""

_LOST_TO_EXCHANGE = 0.15
"""Share of the device's compute that is lost while gradients are exchanged: collectives occupy some multiprocessors."""


class Resource:
    """Does one thing at a time, in the order in which work is queued."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy = 0.0
        """Seconds of work so far."""
        self.spans: list[tuple[float, float]] = []
        """Begin and end of each stretch of work without a gap."""

    def work(self, seconds: float, not_before: float = 0.0) -> float:
        """Queues work. Returns when it ends."""
        start = max(self.free_at, not_before)
        self.free_at = start + seconds
        self.busy += seconds
        if self.spans and self.spans[-1][1] == start:
            start = self.spans.pop()[0]
        self.spans.append((start, self.free_at))
        return self.free_at

    def wait_until(self, moment: float) -> float:
        """Lets later work begin at this moment at the earliest. Returns when it can begin."""
        self.free_at = max(self.free_at, moment)
        return self.free_at


def end_beside(spans: list[tuple[float, float]], start: float, seconds: float, share: float) -> float:
    """When work ends that takes ``seconds`` at full speed, and has a ``share`` of that speed within the ``spans``."""
    now, left = start, seconds
    for begin, end in spans[max(0, bisect.bisect(spans, (start,)) - 1) :]:
        if end <= now:
            continue
        if now + left <= begin:
            break
        left -= max(0.0, begin - now)
        now = max(now, begin)
        done = (end - now) * share
        if share and left <= done:
            return now + left / share
        left -= done
        now = end
    return now + left


class Link(Resource):
    """One direction of the link, which has a ``share`` of its speed while the optimizer works."""

    def __init__(self, bytes_per_second: float, share: float, optimizer: Resource) -> None:
        super().__init__()
        self._bytes_per_second, self._share, self._optimizer = bytes_per_second, share, optimizer
        self._of_steps = Resource()
        """Copies for the steps of units whose states are on the device."""

    def copy_between(self, size_bytes: int, start: float) -> float:
        """Fits a copy between queued ones: it counts as busy time, but waits for none of them. Returns when it ends."""
        end = end_beside(self._optimizer.spans, start, size_bytes / self._bytes_per_second, self._share)
        self.busy += end - start
        return end

    def copy_of_step(self, size_bytes: int, not_before: float) -> float:
        """Queues a copy for a unit's step on the device, behind those of earlier steps, at the speed that copies in the other
        direction leave to it. Returns when it ends."""
        seconds = size_bytes / (self._bytes_per_second * self._share)
        self.busy += seconds
        return self._of_steps.work(seconds, not_before)

    def copy(self, size_bytes: int, not_before: float = 0.0, steps_first: bool = False) -> float:
        """Queues a copy. Returns when it ends. With ``steps_first`` it pauses during copies for steps on the device."""
        start = max(self.free_at, not_before)
        end = self.copy_between(size_bytes, start)
        self.free_at = end_beside(self._of_steps.spans, start, end - start, 0.0) if steps_first else end
        return self.free_at


class Slots:
    """Slots for weights. The slot that was used longest ago is filled next, once its last user has computed."""

    def __init__(self, count: int, link: Link) -> None:
        self._link = link
        self._users: dict[Hashable, float] = {object(): 0.0 for _ in range(count)}
        """Until when each holder computes with its slot, in the order of use. Unused slots have dummy holders."""

    def filled_at(self, holder: Hashable, size_bytes: int, not_before: float) -> float:
        """When the holder's weights are in a slot: 0 if they are already, else the end of a copy, which this queues."""
        if holder in self._users:
            return 0.0
        return self._link.copy(size_bytes, max(not_before, next(iter(self._users.values()))))

    def use(self, holder: Hashable, until: float) -> None:
        """Notes that the holder computes with its slot ``until`` then."""
        del self._users[holder if holder in self._users else next(iter(self._users))]
        self._users[holder] = until


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A predicted step in seconds: its duration, and how long each resource works in it."""

    seconds: float
    compute: float
    h2d: float
    d2h: float
    host_step: float
    network: float = 0.0

    @property
    def bound_by(self) -> str:
        """The resource that works longest."""
        names = ("compute", "H2D", "D2H", "host step", "network")
        return max(zip(names, dataclasses.astuple(self)[1:], strict=True), key=lambda busy: busy[1])[0]


class _CallSeconds:
    """Seconds of a layer's call, measured or else estimated from its costs."""

    def __init__(self, profile: LayerProfile, machine: Machine) -> None:
        def known(measured: float | None, costs: OpCosts) -> float:
            return costs.seconds(machine) if measured is None else measured

        self.forward = known(profile.forward_seconds, profile.forward)
        self.kept_forward = known(profile.kept_forward_seconds, profile.forward)
        self.recompute = self.kept_forward if profile.recompute_seconds is None else profile.recompute_seconds
        self.backward = known(profile.backward_seconds, profile.backward)
        """Time of a backward that doesn't recompute."""
        self.attention = known(profile.attention_seconds, profile.attention)
        """Time of a forward that recompute saves if attention's results are kept."""
        forward = profile.forward.seconds(machine)
        self.experts = self.kept_forward * profile.experts.seconds(machine) / forward if forward else 0.0
        """Time of a forward that recompute saves if results of experts in parts are kept: their share of the costs."""


class _Pipeline:
    """The resources of one rank, and when each has done its work of the steps simulated so far."""

    def __init__(self, step_profile: StepProfile, model: Model, placement: Placement, machine: Machine) -> None:
        self.step_profile = step_profile.at(*placement.budgets)
        self.model, self.placement, self.machine = model, placement, machine
        self.seconds = {kind: _CallSeconds(profile, machine) for kind, profile in self.step_profile.profiles.items()}
        events, measured = self.step_profile.events, self.step_profile.outside_seconds
        self.last_forward = max((i for i, event in enumerate(events) if not event.is_backward), default=-1)
        self.outside_seconds = [event.costs.seconds(machine) for event in events]
        """Time outside the layers before each event."""
        if measured is not None:  # one time for all before the first backward, where it is counted
            self.outside_seconds[: self.last_forward + 2] = [*[0.0] * (self.last_forward + 1), measured]
        self.sent = sent_bytes(step_profile, placement)
        self.compute, self.host, self.network = Resource(), Resource(), Resource()
        self.h2d = Link(machine.h2d_bytes, machine.h2d_share_in_step, self.host)
        self.d2h = Link(machine.d2h_bytes, machine.d2h_share_in_step, self.host)
        self.applied: dict[Hashable, float] = collections.defaultdict(float)
        """When a layer was stepped, or a part of its experts: (layer, index of the part)."""
        self.before_at = self.after_at = 0.0
        """When the weights of resident groups before the layers, and of those after them, are on the device since the step."""
        self.may_arrive_at = 0.0
        """When the gradients of the next unit that is stepped on the device may begin to arrive there."""
        self.slots, self.part_slots = Slots(model.slots, self.h2d), Slots(model.slots, self.h2d)
        self.gradients_out = collections.deque([0.0] * GRADIENT_SLOTS, GRADIENT_SLOTS)
        """When each gradient slot's last copy to the host ended, the earliest first."""
        self.step_bytes_per_second = machine.host_step_traffic * self._step_share()

    def _step_share(self) -> float:
        """Share of the host step's speed that remains, by the part of the step's time in which activations are offloaded."""
        model, placement, machine = self.model, self.placement, self.machine
        leaving_seconds = sum(self.sent) / (machine.d2h_bytes * machine.d2h_share_in_step)
        traffic = sum(unit.step_traffic for units in (model.layers, *model.parts.values(), model.groups) for unit in units)
        not_on_host = [*model.on_device(placement), *model.stepped_on_device(placement)]
        seconds = (traffic - sum(unit.step_traffic for unit in not_on_host)) / model.ranks / machine.host_step_traffic
        return 1 - min(1.0, leaving_seconds / seconds if seconds else 0.0) * (1 - machine.step_share_beside_copies)

    def _weights_at(self, layer: int) -> float:
        if layer in self.placement.on_device:
            return 0.0
        return self.slots.filled_at(layer, self.model.fetch_bytes(layer, self.placement), self.applied[layer])

    def forward_and_backward(self, is_last: bool) -> None:
        placement = self.placement
        copies = _ActivationCopies(self)
        self.compute.wait_until(self.before_at)
        events, last_forward = self.step_profile.events, self.last_forward
        ready = self._weights_at(events[0].layer) if events else 0.0
        for position, event in enumerate(events):
            self.compute.work(self.outside_seconds[position])
            unit = self.model.layers[event.layer]
            seconds = self.seconds[event.kind]
            is_recomputed = placement.is_recomputed(event.layer)
            sends_gradients = event.layer not in placement.on_device and unit.gradient_bytes > 0
            issued_at = self.compute.free_at
            if event.is_backward:
                ready = max(ready, copies.back_at(event.layer, issued_at))
                if sends_gradients:
                    ready = max(ready, self.gradients_out[0])
                recompute = seconds.recompute
                if event.layer in placement.attention_kept:  # such a layer isn't compiled
                    recompute = seconds.kept_forward - seconds.attention
                if not is_recomputed:
                    recompute = 0.0
                elif event.layer not in placement.inputs_offloaded:  # experts' results are kept
                    recompute -= seconds.experts
                elif event.layer in self.model.parts:
                    # They aren't kept if inputs are offloaded: all parts are fetched once more to recompute them.
                    self._compute_call(event, recompute, ready)
                    recompute = 0.0
                end = self._compute_call(event, recompute + seconds.backward, ready, is_last)
                if not sends_gradients:
                    # All ranks step what lives on devices: they exchange shares, which are added, and then the means.
                    self._exchange(2 * unit.gradient_bytes, end)
                else:
                    out = self._send_gradients(unit, end)
                    if is_last and self.model.steps_in_backward:
                        self.applied[event.layer] = self._step_unit(unit, out, event.layer in placement.states_on_device)
            else:
                copies.make_room()
                end = self._compute_call(event, seconds.forward if is_recomputed else seconds.kept_forward, ready)
                copies.leave(end)
                if position == last_forward:
                    self.compute.wait_until(self.after_at)
            if event.layer not in placement.on_device:
                self.slots.use(event.layer, end)
            # The next layer's weights are fetched before activations are prefetched.
            ready = self._weights_at(events[position + 1].layer) if position + 1 < len(events) else 0.0
            if event.is_backward:
                copies.bring_ahead(event.layer, issued_at)
        self.compute.work(self.step_profile.tail_costs.seconds(self.machine))
        for unit in [*self.model.groups_after, *self.model.groups_before]:
            self.compute.wait_until(self._exchange(2 * unit.gradient_bytes, self.compute.free_at))
            if is_last and not placement.groups_on_device:
                sum_bytes = unit.sum_bytes if self.model.micro_batches > 1 else 0
                self.d2h.copy((unit.gradient_bytes + sum_bytes) // self.model.ranks, self.compute.free_at)

    def _compute_call(self, event: Event, seconds: float, ready: float, is_last: bool | None = None) -> float:
        """Computes a layer for ``seconds`` in all once its own weights are ``ready``. Returns when that ends. Experts in parts
        take equal shares of the time, in each piece of a batch. ``is_last`` says whether a backward is the last before a step.
        It is None for a forward, and for a recompute by itself, which make no gradients."""
        parts = self.model.parts.get(event.layer, ())
        if not parts:
            return self.compute.work(seconds, ready)
        pieces, is_backward = self.step_profile.profiles[event.kind].pieces, is_last is not None
        keyed = [((event.layer, place), part) for place, part in enumerate(parts)]
        end, out = self.compute.wait_until(ready), 0.0
        for piece in range(pieces):
            for key, part in reversed(keyed) if is_backward else keyed:
                filled_at = self.part_slots.filled_at(key, part.weight_bytes, self.applied[key])
                ready = max(filled_at, self.gradients_out[0] if is_backward else 0.0)
                end = self.compute.work(seconds / (pieces * len(parts)), ready)
                self.part_slots.use(key, end)
                if is_backward and part.gradient_bytes:
                    out = self._send_gradients(part, end, is_added=piece > 0, is_part=True)
        if is_last and self.model.steps_in_backward and any(part.gradient_bytes for part in parts):
            # All parts are stepped when the last gradients have arrived.
            for part in parts:
                out = self._step_unit(part, out)
            self.applied.update((key, out) for key, _ in keyed)
        return end

    def _exchange(self, size_bytes: int, computed_at: float) -> float:
        """All ranks send ``size_bytes`` to the others, on the d2h stream, then over the network. Returns when that is over."""
        if self.model.ranks == 1:
            return computed_at
        seconds = size_bytes / self.model.exchange_bytes
        self.compute.work(_LOST_TO_EXCHANGE * seconds)
        return self.d2h.wait_until(self._over_network(size_bytes, self.d2h.work(seconds, computed_at)))

    def _over_network(self, size_bytes: int, not_before: float) -> float:
        """A machine sends the others their shares of ``size_bytes``, and receives as many. Returns when they have arrived."""
        model = self.model
        if model.machines == 1:
            return not_before
        return self.network.work(size_bytes * (1 - 1 / model.machines) / model.network_bytes, not_before)

    def _send_gradients(self, unit: UnitSizes, computed_at: float, is_added: bool = False, is_part: bool = False) -> float:
        """Copies a unit's gradients to the host, to be added to others of the backward if ``is_added``. Returns when the copy
        ends. A part of experts (``is_part``) is nearly all in one rank's share: that rank receives it whole from every rank
        and copies all of it. At best, parts in other ranks' shares are exchanged meanwhile."""
        ranks, size_bytes = self.model.ranks, unit.gradient_bytes
        exchanged_at = self._exchange(size_bytes * (ranks if is_part else 1), computed_at)
        # A share is 1 / ranks of a unit. A part counts as the mean of a whole copy and a share's: (1 + 1 / ranks) / 2.
        out = self.d2h.copy(size_bytes * ((ranks + 1) if is_part else 2) // (2 * ranks), exchanged_at)
        self.gradients_out.append(out)
        if is_added or self.model.micro_batches > 1:
            # The addition moves 6 bytes per parameter, 10 with the sums' residuals.
            self.host.work(unit.parameters * (10 if unit.sum_bytes else 6) / ranks / self.machine.host_step_traffic, out)
        return out

    def _step_unit(self, unit: UnitSizes, not_before: float, on_device: bool = False) -> float:
        """Steps this rank's share of a unit, on the host or ``on_device``. Returns when other machines' shares are there."""
        traffic, size_bytes = unit.step_traffic / self.model.ranks, unit.gradient_bytes // self.model.ranks
        if on_device:
            # Gradients are copied to the device, which steps, and as many bytes of weights are copied back. The host's worker
            # waits without being busy. The next unit's gradients follow when this step begins or, in a backward, when it ends.
            seconds = traffic / self.machine.device_bytes
            self.compute.work(seconds)
            arrived = self.h2d.copy_of_step(size_bytes, max(self.may_arrive_at, not_before))
            begun = max(arrived, self.host.free_at)
            stepped = self.host.free_at = self.d2h.copy_of_step(size_bytes, begun + seconds)
            self.may_arrive_at = stepped if self.model.steps_in_backward else begun
        else:
            stepped = self.host.work(traffic / self.step_bytes_per_second, not_before)
        return self._over_network(unit.gradient_bytes, stepped)  # weights have as many bytes

    def step(self) -> None:
        """What ``optimizer.step()`` does. Called when every gradient is on the host."""
        model, placement = self.model, self.placement
        now = self.compute.wait_until(self.d2h.free_at)
        self.before_at = self._step_and_push(model.groups_before, now)
        for layer, unit in enumerate(model.layers if not model.steps_in_backward else ()):
            if layer not in placement.on_device:
                self.applied[layer] = self._step_unit(unit, now, layer in placement.states_on_device)
            for place, part in enumerate(model.parts.get(layer, ())):
                self.applied[layer, place] = self._step_unit(part, now)
        self.after_at = self._step_and_push(model.groups_after, now)
        # Slots hold weights from before the step, so that every layer is fetched again.
        self.slots, self.part_slots = Slots(model.slots, self.h2d), Slots(model.slots, self.h2d)
        self.compute.wait_until(self.compute.free_at + self.machine.step_overhead)
        stepped_bytes = sum(unit.step_traffic + _NORM_BYTES * unit.parameters for unit in model.on_device(placement))
        self.compute.work(stepped_bytes / self.machine.device_bytes)

    def _step_and_push(self, units: Sequence[UnitSizes], now: float) -> float:
        """Steps resident groups that live on the host. Returns when their new weights are on the device. If any layers are
        stepped on the device, so are these groups, and their weights are sent while layers are stepped."""
        if self.placement.groups_on_device:
            return now
        steps_on_device, model = bool(self.placement.states_on_device), self.model
        stepped = [(unit, self._step_unit(unit, now, steps_on_device)) for unit in units]
        if steps_on_device and model.gathers_states:  # ranks gather the weights from the devices, not from the host
            for unit in units:
                if unit.gradient_bytes:
                    self.compute.work(model.gathered_bytes(unit) / self.machine.h2d_bytes)
            return max((at for _, at in stepped), default=now)
        push = self.h2d.copy_of_step if steps_on_device else self.h2d.copy_between
        return max((push(unit.weight_bytes, at) for unit, at in stepped), default=now)


class _ActivationCopies:
    """Simulates copies of a forward's activations to the host and back, as ``ActivationOffloader`` issues them."""

    def __init__(self, pipeline: _Pipeline) -> None:
        self._pipeline = pipeline
        self._last_call = {event.layer: call for call, event in enumerate(pipeline.step_profile.forward_calls)}
        self._spacing = pipeline.placement.offload_spacing
        self._call = -1
        self._leaving: collections.deque[int] = collections.deque()
        """Calls whose copies to the host compute hasn't waited for."""
        self._out_at: dict[int, float] = {}  # when a call's activations are on the host
        self._in_at: dict[int, float] = {}  # when they are on the device again

    def make_room(self) -> None:
        """Begins the next call. Compute waits for earlier calls' copies, except the last one's if it is within the spacing."""
        self._call += 1
        while len(self._leaving) > 1 or (self._leaving and self._leaving[0] < self._call - self._spacing):
            self._pipeline.compute.wait_until(self._out_at[self._leaving.popleft()])

    def leave(self, computed_at: float) -> None:
        """Queues the copy of the call's activations to the host."""
        if sent := self._pipeline.sent[self._call]:
            self._out_at[self._call] = self._pipeline.d2h.copy(sent, computed_at, steps_first=True)
            self._leaving.append(self._call)

    def back_at(self, layer: int, issued_at: float) -> float:
        """When a layer's activations are on the device again, if its backward is issued at ``issued_at``."""
        call = self._last_call[layer]
        self._bring_back(call, issued_at)
        return self._in_at.get(call, 0.0)

    def bring_ahead(self, layer: int, issued_at: float) -> None:
        """Queues the copies back of activations of the next layers in backward."""
        call = self._last_call[layer]
        for ahead in range(call - 1, max(-1, call - self._spacing - 1), -1):
            self._bring_back(ahead, issued_at)

    def _bring_back(self, call: int, issued_at: float) -> None:
        if call in self._out_at and call not in self._in_at and call not in self._leaving:
            self._in_at[call] = self._pipeline.h2d.copy(self._pipeline.sent[call], max(self._out_at[call], issued_at))


def simulate_step(step_profile: StepProfile, model: Model, placement: Placement, machine: Machine) -> StepTime:
    """Predicts the duration of a step in the steady state, and how long each resource works in it."""
    pipeline = _Pipeline(step_profile, model, placement, machine)
    resources = (pipeline.compute, pipeline.h2d, pipeline.d2h, pipeline.host, pipeline.network)
    for _ in range(3):
        start, busy = pipeline.compute.free_at, [resource.busy for resource in resources]
        for micro_batch in range(model.micro_batches):
            pipeline.forward_and_backward(is_last=micro_batch == model.micro_batches - 1)
        pipeline.step()
    times = (after.busy - before for after, before in zip(resources, busy, strict=True))
    return StepTime(pipeline.compute.free_at - start, *times)
