"""Adam and AdamW by the fused kernel: when each unit is stepped, and with which constants. A ``state`` is a parameter's in the
store. An ``entry`` is what ``optimizer.state`` has for the parameter, and a group is one of ``optimizer.param_groups``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import AdamW, Optimizer

from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.gradients.buffers import refuse_unstepped
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.kernels.host import AdamArguments, ParameterStep
from megatrain_accelerate.layers.layer import ExpertPart, StreamedExperts
from megatrain_accelerate.layers.resident import ResidentGroup, UnitOwner
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.optim.host_step import Found, HostStep, narrowed_to, parameters_of
from megatrain_accelerate.optim.moment_states import (
    RESIDUAL_KEY,
    own_copies,
    show,
    shown_in_fp32,
    shows,
    take_over,
    without_residual,
)
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.segments import plan_segments, segments_between, segments_of_experts, step_segments
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.meter import Cause
from megatrain_accelerate.transfer.parts import Stepped, Streamed

UNFUSED_OPTIONS = ("amsgrad", "differentiable")
"""Options of a group of Adam or AdamW that the fused kernel doesn't support."""

Step = tuple[ParameterState, AdamArguments]
"""A parameter and the constants with which it is stepped."""


def refuse_unfused(groups: Iterable[dict[str, Any]]) -> None:
    """Raises an ``UnsupportedError`` if a group, edited or loaded, has an option that the fused kernel doesn't support."""
    for group in groups:
        for option in UNFUSED_OPTIONS:
            if group.get(option):
                raise UnsupportedError(
                    f"a group of the optimizer has {option}={group[option]} since it was prepared, which the fused AdamW "
                    f"doesn't do; make the optimizer with {option}={group[option]} before accelerator.prepare() (its own "
                    f"step() runs then, on the host), or leave {option} as it was"
                )


def _next_steps(entries: Sequence[dict[str, Any]]) -> list[int]:
    """The number of each parameter's next step."""
    # In one operation for all: in each operation the worker may take the interpreter lock, and release it late.
    return [int(step) + 1 for step in torch.stack([entry["step"] for entry in entries]).tolist()] if entries else []


def _versions(states: Iterable[ParameterState]) -> list[tuple[int, int]]:
    """The versions of each parameter's weight and of its gradient on the host. In ``step()`` each has a gradient there, since
    ``step()`` refuses those that pass (``host_gradients: passing``)."""
    return [(state.parameter._version, state.gradient._version) for state in states if state.gradient is not None]


def _refuse_written(unit: HostUnit, states: Sequence[ParameterState], versions_then: list[tuple[int, int]]) -> None:
    """Raises a ``StateError`` if a weight or gradient was written to between ``step()`` and the end of its arithmetic."""
    if (versions := _versions(states)) != versions_then:
        now, then, state = next(found for found in zip(versions, versions_then, states, strict=True) if found[0] != found[1])
        what = "weight" if now[0] != then[0] else "gradient"
        raise StateError(
            f"the {what} of {unit.name}.{state.name} was written to after optimizer.step(), before the step was applied; "
            "call megatrain_accelerate.drain() before such writes, or set megatrain_config.step_schedule to 'serial'"
        )


def _refuse_rewritten(done: Iterable[Step]) -> None:
    """Raises a ``StateError`` if gradients with which layers were stepped in backward have changed since."""
    if rewritten := sum(not state.has_norm or state.is_rewritten for state, _ in done):
        raise StateError(
            f"{rewritten} gradients were changed, replaced or dropped between backward and step() (by a callback, a hook or "
            "clipping in the script), but their layers were stepped in backward already, since step_schedule is "
            "'backward' ('auto' chooses it where max_grad_norm is 0); set megatrain_config.step_schedule to 'deferred' (and "
            "host_gradients to 'kept')"
        )


def _step_on_device(units: Iterable[tuple[HostUnit, Sequence[Step]]]) -> None:
    """Steps parameters of units that live on the device in place, each from its own ``parameter.grad``."""
    stepped, found = [(unit, steps) for unit, steps in units if steps], []
    for state, arguments in (step for _, steps in stepped for step in steps):
        gradient = state.parameter.grad
        assert gradient is not None
        assert state.moments is not None
        grad_residual = state.gradient_residual if state.handle.has_fp32_sum else None
        tensors = (state.weight, state.residual, state.moments, gradient.contiguous())
        found.append(ParameterStep(*tensors, arguments, grad_residual, state.entry.state_offset or 0))
    if stepped:
        stepped[0][0].kernels.adamw_of_many(found)
    for unit, steps in stepped:
        unit.version += 1
        increment_version([state.parameter for state, _ in steps])  # autograd doesn't see the kernel's writes
        for state, _ in steps:
            state.handle.note_version()


class FusedStep(HostStep):
    """Adam and AdamW by the fused kernel, stepped deferred, serially or in backward (``config.step_schedule``)."""

    needs_states_on_host = False  # each unit is stepped where its states are

    def __init__(self, optimizer: Optimizer, runtime: StreamingRuntime, schedule: str) -> None:
        self._is_adamw = isinstance(optimizer, AdamW)
        self._shown: set[int] = set()
        """``id`` of each parameter whose moments were put into the optimizer's state, where a script may replace them."""
        super().__init__(optimizer, runtime)
        self._group_of: dict[int, dict[str, Any]] = {}
        self._stepped_in_backward: dict[int, Step] = {}
        # For parameters that aren't trained any more the optimizer may have views of an earlier engine's store, which would
        # keep all of that store's memory alive.
        idle = [p for p in parameters_of(optimizer) if not runtime.trains(p) and id(p) in self._trained_before]
        own_copies([optimizer.state.get(parameter) for parameter in idle], runtime.config.host_memory_gib)
        self.schedule = schedule
        self.next_schedule: str | None = None
        """The schedule from the next :meth:`step` on, if it changes then."""

    @property
    def _optimizer(self) -> Optimizer:
        assert self.optimizer is not None, "the user's optimizer was garbage-collected"
        return self.optimizer

    def hold(self, parameters: Sequence[torch.Tensor]) -> None:
        """See :meth:`HostStep.hold`. New parameters take over the optimizer's moments, or get some with their first step."""
        new = {id(parameter) for parameter in parameters} - self.parameter_ids
        super().hold(parameters)
        self.runtime.worker.drain()  # another optimizer may have queued steps of them
        for parameter in parameters:
            state = self.runtime.state_of(parameter)
            if id(parameter) in new and state is not None and state.row is not None:
                unit = self.runtime.owner_of(state).unit
                unit.promise("moments")
                if unit.is_on_device:
                    unit.allocate("moments")  # before activations take the memory that the plan meant for them
                self.import_state(state, self._optimizer.state.pop(parameter, None) or {})

    def import_state(self, state: ParameterState, values: dict[str, Any]) -> None:
        """Sets a parameter's moments, step and residual from an optimizer's state for it. An empty one means zero moments."""
        unit = self.runtime.owner_of(state).unit
        if values:
            unit.allocate("moments")
        if state.moments is None:
            return
        unit.bring_states()
        take_over(state, values)
        unit.note_written("moments")
        unit.write_residual(state, values.get(RESIDUAL_KEY))
        if not values:
            self._shown.discard(id(state.parameter))
            return
        entry = self._optimizer.state[state.parameter]
        entry["step"] = torch.tensor(float(values["step"]), dtype=torch.float32)
        show(entry, state)
        self._shown.add(id(state.parameter))

    @property
    def steps_in_backward(self) -> bool:
        """Whether layers are stepped in backward, either already or from the next :meth:`step` on."""
        return "backward" in (self.schedule, self.next_schedule)

    def retire(self, why: str, copies: bool = False) -> None:
        super().retire(why, copies)
        states = {} if self.optimizer is None else self.optimizer.state
        # The entries are changed in place: a script may hold these very dicts, above all in a state_dict().
        entries = [entry for parameter, entry in states.items() if id(parameter) in self.parameter_ids]
        for entry in entries:
            entry.pop(RESIDUAL_KEY, None)  # residuals belong to the weights
        if copies:
            own_copies(entries, self.runtime.config.host_memory_gib)

    def forget_backward(self) -> int:
        """Forgets the steps of a backward that no ``step()`` followed, without undoing what they did to the weights. Returns
        how many parameters were stepped so. The worker must be idle."""
        count = len(self._stepped_in_backward)
        self._stepped_in_backward = {}
        return count

    def saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's ``state_dict()`` with moments that any optimizer can load, see :func:`.shown_in_fp32`."""
        shown = shown_in_fp32(state_dict["state"], self.runtime.config.host_memory_gib)
        return super().saved(optimizer, {**state_dict, "state": shown})

    def load(self, optimizer: Optimizer, state_dict: dict[str, Any], own_load: Callable[[dict[str, Any]], None]) -> None:
        """Loads moments, steps and residuals into the store, and all else by the optimizer's own ``load_state_dict()``."""
        refuse_unfused(state_dict["param_groups"])
        self.forget_backward()
        # torch's own would cast the moments to the weights' dtype and device, and hold a second copy.
        loaded = [(key, p, state_dict["state"].get(key) or {}) for key, p in self.by_key(optimizer, state_dict)]
        outside = {} if self.is_retired else {key: without_residual(e) for key, p, e in loaded if not self.runtime.state_of(p)}
        own_load({"state": outside, "param_groups": state_dict["param_groups"]})
        for _, parameter, entry in loaded:
            state = self.runtime.state_of(parameter)
            if not self.is_retired and state is not None and state.entry.spec.trainable:
                self.import_state(state, entry)
            elif self.is_retired or (state is not None and entry):
                # Kept until the frozen parameter is trained again, or the optimizer of a retired driver is prepared again.
                optimizer.state[parameter] = without_residual(entry) if self.is_retired else dict(entry)
        self.load_residuals(optimizer, {**state_dict, "state": {}})  # those with an entry are there already

    def _entry(self, states: dict[Any, dict[str, Any]], state: ParameterState) -> dict[str, Any]:
        """Returns the entry of a parameter in the optimizer's ``states``, with moments, which are allocated if missing. If a
        script emptied or changed the entry, the store takes that over after the queued steps, which still write moments."""
        if state.moments is None:
            self.runtime.owner_of(state).unit.allocate("moments", touch=False)  # the step touches them while nobody waits
        if id(state.parameter) not in self.parameter_ids:  # a script put it into a group
            self.hold([state.parameter])
        entry = states[state.parameter]
        if entry and shows(entry, state):
            return entry
        if entry or id(state.parameter) in self._shown:
            self.runtime.worker.drain()
            self.import_state(state, entry)
        if not entry:
            entry["step"] = torch.zeros((), dtype=torch.float32)
            show(entry, state)
            self._shown.add(id(state.parameter))
        return entry

    def _steps(self, found: Iterable[Found], numbers: Iterable[int], factors: dict[int, float]) -> list[Step]:
        """Makes each parameter's step, with its number and clip factor. Parameters with equal constants share one object."""
        shared: dict[tuple[int, int, float], AdamArguments] = {}
        equal: dict[AdamArguments, AdamArguments] = {}  # groups with the same settings share, too
        steps = []
        for (state, group), number in zip(found, numbers, strict=True):
            factor = factors.get(id(state.parameter), 1.0)
            if (key := (id(group), number, factor)) not in shared:
                values = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
                lr, beta1, beta2, eps, decay = map(float, values)
                decoupled, maximize = self._is_adamw or bool(group.get("decoupled_weight_decay")), bool(group["maximize"])
                arguments = AdamArguments(lr, beta1, beta2, eps, decay, number, factor, decoupled, maximize)
                shared[key] = equal.setdefault(arguments, arguments)
            steps.append((state, shared[key]))
        return steps

    def _submit(
        self, owner: Stepped, steps: list[Step], may_step: Callable[[], bool] | None = None, part: ExpertPart | None = None
    ) -> None:
        """Queues the step of an owner's unit, or of a ``part`` of its experts, for the worker. The gate of the owner or part
        is closed until all ranks have applied the step. In backward the worker skips it if ``may_step`` returns False."""
        unit, group = owner.unit, owner if isinstance(owner, ResidentGroup) else None
        segments = plan_segments(steps)
        if part is not None:
            segments = segments_of_experts(segments, unit.states, part.experts)
        if (shared_unit := unit.shared) is not None:
            segments = segments_between(segments, unit.share.begin, unit.share.end)
        elements = sum(segment.elements for segment in segments)
        meter, states_on_device, device_states = self.runtime.meter, self.runtime.states_on_device, unit.device_states
        if device_states is not None:
            device_states.refuse_written(unit.name, [state for state, _ in steps])
        is_gathered = group is not None and self.runtime.gathers_groups
        readers_finished_event = group.announce_push() if group is not None and not is_gathered else None
        # In backward nothing is checked here: the worker may still add up the gradients, which step() checks.
        checked = [] if may_step is not None else [state for state, _ in steps]
        versions = _versions(checked)

        def work() -> None:
            if may_step is not None and not may_step():
                return
            _refuse_written(unit, checked, versions)
            with meter.stepping(elements):
                if device_states is not None:
                    states_on_device.step(unit, device_states, segments, announced)
                else:
                    step_segments(unit.layout, unit.flat_states, segments, unit.kernels)
                    unit.note_written("residuals", "moments")
            _refuse_written(unit, checked, versions)
            if shared_unit is not None:
                shared_unit.note_applied()
            if group is not None and not is_gathered:
                if step_of_all is not None:
                    step_of_all.wait()
                group.push_weights(readers_finished_event)

        # In backward gradients may still be in flight to the host. Those announced here may be copied to the device at once.
        may_announce = segments and may_step is None
        announced = device_states.expect(unit.flat_states) if device_states is not None and may_announce else None
        # Device copies are stale from here on, even before the worker has applied the step.
        unit.version += 1
        step_of_all = None if shared_unit is None else shared_unit.next_step(unit.name)
        future = self.runtime.worker.submit(f"step ({unit.name})", work)
        (part or owner).gate.close_until(future, *([] if step_of_all is None else [step_of_all]))
        if group is not None and is_gathered:
            group.note_ungathered()

    @torch.no_grad()
    def step(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> None:
        """Fixes the step's settings and gradients, and hands the arithmetic to the worker. ``own_step``, the optimizer's
        original one, steps the parameters of other modules. Raises what :meth:`begin_step`, :meth:`with_gradients`,
        :meth:`allows` and :func:`refuse_unfused` do. Raises a StateError if layers were stepped in backward with other
        settings, or if a layer whose gradients pass has a gradient with which no backward has stepped it."""
        runtime = self.runtime
        self.begin_step()
        if runtime.ranks is not None:
            runtime.ranks.meet("optimizer.step()")  # WAR: no rank reads the old weights any more
        refuse_unfused(optimizer.param_groups)
        self.schedule, self.next_schedule = self.next_schedule or self.schedule, None
        done, self._stepped_in_backward = self._stepped_in_backward, {}
        _refuse_rewritten(done.values())
        found, outside = self.with_gradients(optimizer)
        if runtime.config.passes_gradients:
            refuse_unstepped([*runtime.layers, *runtime.experts], {id(state.parameter) for state, _ in found} - done.keys())
        norm, factors = self.norm_and_factors(optimizer, found, outside)
        if done:
            self._check_stepped_in_backward(found, factors, done)
            found = [(state, group) for state, group in found if id(state.parameter) not in done]
        if not self.allows(norm):
            runtime.watch.begin()  # another optimizer's step may be under way
            return
        entries_by_parameter = optimizer.state  # looked up once, since that is a call
        entries = [self._entry(entries_by_parameter, state) for state, _ in found]
        all_steps = {id(step[0]): step for step in self._steps(found, _next_steps(entries), factors)}

        def steps_of(unit: HostUnit) -> list[Step]:
            return [step for state in unit.states if (step := all_steps.get(id(state))) is not None]

        def submit(owners: Sequence[tuple[UnitOwner, list[Step]]]) -> None:
            for owner, steps in owners:
                for part in owner.parts if isinstance(owner, StreamedExperts) else (None,):
                    self._submit(owner, steps, part=part)

        owners_on_host = [owner for owner in runtime.in_forward_order() if not owner.unit.is_on_device]
        stepped_on_host = [(owner, steps) for owner in owners_on_host if (steps := steps_of(owner.unit))]
        # The first one keeps the worker busy while the launches for the device are prepared, which wait for nothing else.
        submit(stepped_on_host[:1])
        try:
            _step_on_device((unit, steps_of(unit)) for unit in runtime.units if unit.is_on_device)
        except BaseException as error:
            runtime.worker.fail(error)
            raise
        submit(stepped_on_host[1:])
        if entries:
            torch._foreach_add_([entry["step"] for entry in entries], 1)
        if outside:
            with narrowed_to(optimizer, outside):
                own_step()
        if self.schedule == "serial":
            with runtime.meter.blocked_by(Cause.HOST_STEP):
                runtime.worker.drain()
            runtime.drain()
        runtime.watch.begin()

    def _check_stepped_in_backward(self, found: list[Found], factors: dict[int, float], done: dict[int, Step]) -> None:
        """Raises a StateError unless the steps taken in backward are those that ``step()`` would take."""
        with self.runtime.meter.blocked_by(Cause.HOST_STEP):
            self.runtime.worker.drain()
        stepped = [(state, group) for state, group in found if id(state.parameter) in done]
        used = [done[id(state.parameter)][1] for state, _ in stepped]
        wanted = self._steps(stepped, (arguments.step for arguments in used), factors)
        for (state, arguments), arguments_then in zip(wanted, used, strict=True):
            entry = self._optimizer.state.get(state.parameter)
            if not entry or not shows(entry, state):
                raise StateError(
                    "the optimizer's state was emptied or replaced between backward and step(), but layers were stepped in "
                    "backward already, since step_schedule is 'backward' ('auto' chooses it where max_grad_norm is 0); do it "
                    "after step(), or set megatrain_config.step_schedule to 'deferred' (and host_gradients to 'kept')"
                )
            if arguments_then != arguments:
                factor = arguments.clip_factor
                what = "the optimizer's settings had changed" if factor == 1.0 else f"gradients were clipped (by {factor:.3g})"
                raise StateError(
                    f"layers were stepped in backward, but at step() {what}; set max_grad_norm to 0 and change settings after "
                    "step(), or set megatrain_config.step_schedule to 'deferred' (and host_gradients to 'kept')"
                )

    def layer_done(self, layer: Streamed, wait: Callable[[], None]) -> bool:
        """Submits the layer's step and returns True, if the schedule is ``backward`` and no other gradient of the layer can
        follow. Otherwise returns False, and :meth:`step` steps it. The worker skips a step with non-finite gradients."""
        if self.schedule != "backward" or self.optimizer is None or layer.unit.is_on_device:
            return False
        # A gradient in a script's own tensor waits for step(), which copies it into the store.
        if not self.runtime.may_step_in_backward(layer) or any(state.has_foreign_gradient for state in layer.unit.states):
            return False
        if not self._stepped_in_backward:  # once a backward: a model with experts has thousands of parameters
            refuse_unfused(self._optimizer.param_groups)
            self._group_of = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        if any(id(state.parameter) in self._stepped_in_backward for state in layer.unit.states):
            raise StateError(
                f"layer {layer.name} was stepped in an earlier backward, and another one came before optimizer.step() (an "
                "accumulation that Accelerate doesn't know of, or a failed backward that was tried again); set "
                "megatrain_config.step_schedule to 'deferred' (and host_gradients to 'kept'), or use accelerator.accumulate()"
            )
        found = [
            (state, group)
            for state in layer.unit.states
            if state.parameter.grad is not None and (group := self._group_of.get(id(state.parameter))) is not None
        ]
        if not found:
            return False
        with replaced(self, "is_at_work", True):
            entries_by_parameter = self._optimizer.state
            entries = [self._entry(entries_by_parameter, state) for state, _ in found]
        steps = self._steps(found, _next_steps(entries), {})
        torch._foreach_add_([entry["step"] for entry in entries], 1)
        rows = [state.row for state, _ in steps]

        def gradients_are_finite() -> bool:
            wait()
            are_finite = bool(self.runtime.norms.norms[torch.tensor(rows)].isfinite().all())
            if not are_finite:  # step() will find the global norm non-finite, too
                for entry in entries:
                    entry["step"] -= 1
            return are_finite

        self._submit(layer, steps, may_step=gradients_are_finite)
        self._stepped_in_backward |= {id(step[0].parameter): step for step in steps}
        return True
