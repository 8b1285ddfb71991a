"""The plan: what lives where, from the model, the batch, the machine's speeds and the budgets. It follows the batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.kernels.device import can_step_on
from megatrain_accelerate.layers.micro_batches import rows_of
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.layers.runtime import StreamingRuntime, forwards_are_open
from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.plan.device_budget import DeviceBudget
from megatrain_accelerate.plan.evaluation_weights import EvaluationWeights
from megatrain_accelerate.plan.fake_runs import replaced
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.layer_measurement import CERTAIN_SHARE, measure_layers
from megatrain_accelerate.plan.machine import USABLE_SHARE_OF_DEVICE, Machine, free_bytes, measured_machine, seconds_of
from megatrain_accelerate.plan.other_batches import (
    FREE_GROWTH,
    GROWTH_FACTORS,
    BatchExtent,
    extrapolated_profile,
    resized_batch,
    row_size,
    sizes_after,
    sizes_vary,
)
from megatrain_accelerate.plan.placement import Counts, Model, UnitSizes, fixed_counts, peak_bytes, sent_bytes
from megatrain_accelerate.plan.placement_search import MOST_USUAL_SHARE, PlacementSearch, place_both
from megatrain_accelerate.plan.plan_record import RESUMED_SHARE_OF_DEVICE, PlanRecord, made_for, plan_table
from megatrain_accelerate.plan.step_profile import StepProfile
from megatrain_accelerate.plan.step_ways import WayChoice, layers_run
from megatrain_accelerate.progress import say
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES, available_host_bytes
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.units import GIB, MIB

logger = logging.getLogger(__name__)

LIBRARY_WORKSPACE_BYTES = 128 * MIB
"""Device memory for workspaces of cuBLAS (32 MiB a thread that computes) and small tensors outside the step's graph."""

LONGEST_WITHOUT_CUDNN = 4096
"""Tokens of a sequence. For each new length cuDNN builds attention's kernels, 60 ms forward and 60 backward on an H100, which
other kernels of torch don't; of longer sequences cuDNN's own speed is worth more."""

# Compiling changes numbers. So the decision uses fixed estimates and no measured times: equal trainings decide alike.
COMPILE_SECONDS = 30.0
"""To compile one kind of layer. Measured: 10 s for a fixed length, up to 36 s with dynamic shapes, less with a warm cache."""
_SAVED_SHARE = 0.25
"""Of the uncompiled layers' time. Measured on an H200 (3B, 8 x 4,096 tokens): 24,000 tokens a second instead of 17,500."""
_EAGER_FLOPS = 3.5e14
"""A second, of uncompiled layers on an H200. A slower GPU would save more seconds than this estimate says."""


class DevicePlan:
    """Follows the batches: when one is larger than what is planned for, its step is predicted and planned anew.

    Layers are measured once, on the first batch that doesn't surely fit; other steps are extrapolated from it. From the second
    on plans leave room for batches that are larger still, so that data of many lengths has few.
    """

    def __init__(self, runtime: StreamingRuntime, config: MegatrainConfig, device: torch.device, show: bool = False) -> None:
        self._runtime, self._config, self._device = runtime, config, device
        self.show = show
        """Whether this process shows the table."""
        self.budget = DeviceBudget(runtime, config, device)
        self.made = PlanRecord()
        self._measured_steps: dict[Hashable, tuple[StepProfile, StepProfile]] = {}
        """For each way of running a step, one that was measured: its estimate, and its measured profile."""
        self._foreseen: dict[Hashable, StepProfile] = {}
        self._table: str | None = None
        """That of a plan that was just made, until it is shown."""
        self._ranks = runtime.sums.ranks
        self.may_gather = all(layer.has_trainable for layer in runtime.layers)
        """Whether all ranks are sure to run the same layers; a frozen one (of pictures, say) may be left out by some."""
        self._exchange_bytes = math.inf
        """Of gradients that several ranks exchange a second."""
        self._fetch_share = 1.0
        """Seconds of a fetch with the other ranks, by those of a whole one."""
        self._cudnn_again: weakref.finalize[[bool], DevicePlan] | None = None
        """While attention runs without cuDNN, what gives it back: at the latest when the plan goes with its model."""
        self._is_displaced = False
        """Whether an evaluation needed the room of what lives on the device."""
        self.evaluation_weights = EvaluationWeights(runtime, config.evaluation_weights, self.budget)
        self._expected: tuple[int | None, bool | None] = (None, None)
        self._compiles_after: int | None = None
        """While the first step of a training is under way and layers are compiled from the second on, the steps before it."""
        self._resumed: dict[str, Any] | None = None
        """The record of an interrupted training, until its plan is taken over."""
        self.micro_batches = 1
        """Backwards before each optimizer step."""
        self.predicted_peak_bytes = 0
        """The most that any batch so far was predicted to take."""
        runtime.token_tile = 0 if config.token_tile == "auto" else int(config.token_tile)
        # An optimizer may work there alone.
        runtime.keep_states_on_host = self._keep_states_on_host
        self._place(self._settled())

    @property
    def record(self) -> dict[str, Any] | None:
        """The last plan, as :meth:`PlanRecord.as_data` gives it; None before the first, and without a predicted time."""
        is_planned = self.made.plans and self.made.predicted_time is not None and self._compiles_after is None
        return self.made.as_data() if is_planned else None

    @property
    def measures(self) -> bool:
        """Whether layers are measured: elsewhere their costs are estimated."""
        return self._device.type == "cuda"

    @functools.cached_property
    def _machine(self) -> Machine:
        return measured_machine(self._device, self._runtime.kernels, self._ranks)

    def make_room(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Before a forward without gradients: what lives on the device leaves until the next training forward if this one
        wouldn't fit beside it. Where there is room to spare, layers that stream are held (:mod:`.evaluation_weights`)."""
        if self._runtime.open_forwards:
            return
        self.evaluation_weights.before_forward(model, inputs)
        placement = self.made.placement
        if (placement.on_device or placement.states_on_device) and not self._is_displaced and self._device.type == "cuda":
            needed_bytes = self.evaluation_weights.needed_bytes(model, inputs)
            if needed_bytes > USABLE_SHARE_OF_DEVICE * free_bytes(self._device):
                logger.info("megatrain: layers leave the GPU for an evaluation of %.1f GiB", needed_bytes / GIB)
                self._is_displaced = True
                self._runtime.place((), groups_on_device=False)

    def follow(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Plans for a training forward on ``inputs``, the model's arguments, if no plan covers it. One that begins before
        another one's backward (a preference loss) is recomputed whole, and the next plan leaves room for as many at once."""
        if open_forwards := self._runtime.open_forwards:
            self._note_rows(row_size(inputs))
            if open_forwards >= self.made.forwards_at_once:
                self._note(forwards_at_once=open_forwards + 1, planned=BatchExtent())
            nothing = frozenset[int]()
            recomputed = dataclasses.replace(self.made.placement, kept=nothing, offloaded=nothing, attention_kept=nothing)
            self._runtime.calls.policy = recomputed
            return
        if self._compiles_after is not None and self._runtime.steps_taken > self._compiles_after:
            self._run_layers(compiled=True)
        self._runtime.calls.policy = self.made.placement
        if self._is_displaced:
            self._place(self.made.placement)
            self._is_displaced = False
        ranks, is_in_a_row = self._runtime.ranks, self._runtime.calls.real is not None
        own = (self._extent(inputs), row_size(inputs), is_in_a_row, self.made.planned, self._resumed is not None)
        told: list[Any] = [own] if ranks is None else ranks.gather(own)
        extents, sizes, in_rows = ([each[at] for each in told] for at in range(3))
        extent = functools.reduce(BatchExtent.union, extents)
        self._note_rows(*sizes)  # before anything is compiled
        tokens = self.made.tokens + sum(each.real for each in extents)
        self._note(batches=self.made.batches + len(extents), tokens=tokens)
        # All ranks decide alike, from what all told.
        if any(resumes or not planned.covers(extent) for *_, planned, resumes in told):
            if ranks is None:
                self._plan(model, inputs, extent, sizes)
            else:
                self._plan_together(ranks, model, inputs, extents, sizes)
        share = 1.0 if self.made.usual_share == 1.0 else extent.share_of(self.made.planned, all(in_rows))
        self._runtime.calls.policy, predicted_bytes = self.made.at(share)
        self._runtime.activations.spacing = self._runtime.calls.policy.offload_spacing
        self.predicted_peak_bytes = max(self.predicted_peak_bytes, predicted_bytes)
        if self.show and self._table is not None:
            say(self._table, file=sys.stderr)
        self._table = None

    def _plan_together(
        self, ranks: Ranks, model: nn.Module, inputs: Mapping[str, Any], extents: Sequence[BatchExtent], sizes: Sequence[int]
    ) -> None:
        """One plan for all ranks, by the one with the largest batch, within the smallest budget."""
        extent = functools.reduce(BatchExtent.union, extents)
        planner = max(range(ranks.size), key=lambda rank: (extents[rank].elements, extents[rank].length))
        # Before free memory is asked for: collectives make their buffers when they first run.
        exchange = self._runtime.offloader.exchange
        if self._exchange_bytes == math.inf and self.budget.exists and exchange is not None:
            _ = self._machine  # which is measured when it is first asked for
            self._exchange_bytes = exchange.trial() / seconds_of(self._device, exchange.trial)
            if self._runtime.prefetcher.slots and self.may_gather:
                self._choose_fetches(ranks)
        failure: Exception | None = None
        with replaced(self.budget, "given_bytes", min(ranks.gather(self.budget.whole_bytes()))):
            if ranks.rank == planner:
                # Another rank's batch may have less padding.
                real = self._runtime.calls.real if self._extent(inputs).covers(extent) else None
                try:
                    with replaced(self._runtime.calls, "real", real):
                        self._plan(model, inputs, extent, sizes)
                except Exception as error:  # the others wait, and a script may catch it (too little memory) and go on
                    failure = error
            elif self.measures and self._resumed is None and not self.made.plans:
                # It compiles its layers while the planner does. A failure recurs in the forward.
                with contextlib.suppress(Exception):
                    self.foresee(model, inputs)
        compiled = self._runtime.compiled
        result = self.made, compiled.pays, self._compiles_after, self._table, failure
        made, compiled.pays, self._compiles_after, self._table, failure = ranks.broadcast(result, planner)
        if failure is not None:
            raise failure
        if ranks.rank != planner:
            self._adopt(made)
            self._note_rows(*sizes)
        self._runtime.prefetcher.forget_gathered()

    def _choose_fetches(self, ranks: Ranks) -> None:
        """Weights are gathered from all ranks if that takes less time than when each fetches them whole, all at once."""
        prefetcher = self._runtime.prefetcher
        own = [seconds_of(self._device, functools.partial(prefetcher.trial, together)) for together in (False, True)]
        whole, gathered = map(max, zip(*ranks.gather(own), strict=True))
        prefetcher.gathers = gathered < whole
        self._fetch_share = min(1.0, gathered / whole)

    def _adopt(self, plan: PlanRecord) -> None:
        """Layers run by this plan from now on."""
        self._place(plan.placement)
        self._runtime.batch_cut.chosen, self._runtime.token_tile = plan.samples, plan.token_tile
        self.made, self._resumed = plan, None
        self._foreseen.clear()

    def _plan(self, model: nn.Module, inputs: Mapping[str, Any], extent: BatchExtent, sizes: Sequence[int]) -> None:
        """Plans for batches of this extent and these row sizes, if the plan of an interrupted training doesn't cover them."""
        if self._resumed is not None:
            self._take_over(model, self._resumed, sizes)
        if self.made.planned.covers(extent):
            return
        budget_bytes = self.budget.whole_bytes()
        self._runtime.refresh_if_written()
        seen = self.made.seen.union(extent)
        try:
            plan, step_profile = self._best_plan(model, inputs, seen)
        except torch.OutOfMemoryError:
            raise  # and the batch doesn't count: it is tried again smaller
        except Exception as error:  # a model that looks at its data can't be run without any
            logger.log(
                logging.WARNING if budget_bytes else logging.INFO,
                "megatrain: a step can't be predicted for this model (%s: %s), so that its layers stream and are recomputed; "
                "set megatrain_config.placement.kept_layers or device_layers to give them GPU memory",
                type(error).__name__,
                error,
            )
            self._place(self._settled())
            self._note(planned=seen, usual_share=1.0)
            return
        self._adopt(plan)
        if budget_bytes and (self.show or self._runtime.ranks is not None) and self._compiles_after is None:
            self._table = plan_table(plan, self._runtime, budget_bytes, step_profile)
        if budget_bytes and plan.predicted_bytes > budget_bytes:
            held = {
                **self.budget.fixed_bytes_by_kind(step_profile),
                "step": plan.predicted_bytes - self.fixed_bytes(step_profile),
            }
            logger.warning(
                "megatrain: this batch is predicted to take %.1f GiB of GPU memory (%s) and %.1f GiB are planned with; if it "
                "runs out of memory, set megatrain_config.micro_batch_size, or lower per_device_train_batch_size or lengths",
                plan.predicted_bytes / GIB,
                ", ".join(f"{kind} {count / GIB:.1f}" for kind, count in held.items()),
                budget_bytes / GIB,
            )

    def _note(self, **changes: Any) -> None:
        self.made = dataclasses.replace(self.made, **changes)

    def _note_rows(self, *sizes: int) -> None:
        """Where lengths vary, by batch or by rank, each graph of a compiled layer is made for any of them, and attention has
        kernels that are. A backward that is to come computes with those that its forward had."""
        so_far = functools.reduce(sizes_after, sizes, self.made.row_sizes)
        self._note(row_sizes=so_far)
        varies = self._runtime.compiled.sizes_vary = sizes_vary(so_far) or any(size != so_far[0] for size in sizes)
        if self._device.type == "cuda" and not forwards_are_open():
            self.use_cudnn(not varies or max(sizes) > LONGEST_WITHOUT_CUDNN)

    def use_cudnn(self, is_used: bool) -> None:
        """Whether attention may run in cuDNN, as before the first step; where somebody else switched that off it stays off."""
        if is_used and self._cudnn_again is not None:
            self._cudnn_again()
            self._cudnn_again = None
        elif not is_used and self._cudnn_again is None and torch.backends.cuda.cudnn_sdp_enabled():
            torch.backends.cuda.enable_cudnn_sdp(False)
            self._cudnn_again = weakref.finalize(self, torch.backends.cuda.enable_cudnn_sdp, True)

    def _best_plan(self, model: nn.Module, inputs: Mapping[str, Any], seen: BatchExtent) -> tuple[PlanRecord, StepProfile]:
        """The plan, and the step that it is made for: on the batch itself as long as all have one size, else on one that
        covers all batches so far (``seen``) and, as far as such a step fits, larger ones."""
        made_with = made_for(model, self._runtime, self._config, self.micro_batches)
        for growth, planned, step_profile in self._steps_to_plan_for(model, inputs, seen):
            plan = dataclasses.replace(
                self.made,
                made_for=made_with,
                seen=seen,
                planned=planned,
                plans=self.made.plans + 1,
                samples=step_profile.samples,
                token_tile=step_profile.token_tile,
                usual_share=1.0,
                usual_bytes=0,
                is_linear=False,
            )
            plan, room_is_free = self._placed(model, inputs, plan, step_profile) if self.budget.exists else (plan, False)
            if room_is_free or growth < FREE_GROWTH:
                break
        fixed_bytes = self.fixed_bytes(step_profile)
        step_bytes = max(peak_bytes(step_profile, self.model_sizes(), plan.placement), plan.usual_bytes)
        usual_bytes = fixed_bytes + plan.usual_bytes
        return dataclasses.replace(plan, predicted_bytes=fixed_bytes + step_bytes, usual_bytes=usual_bytes), step_profile

    def _steps_to_plan_for(
        self, model: nn.Module, inputs: Mapping[str, Any], seen: BatchExtent
    ) -> Iterator[tuple[float, BatchExtent, StepProfile]]:
        """Steps that fit, on batches that grow by less and less: the growth, the extent and the step of each."""
        varies = self.budget.exists and (self.made.plans or sizes_vary(self.made.row_sizes))
        if varies and not self.made.plans:
            self.foresee(model, inputs)  # from which others are scaled
        # Steps may be planned anew for another reason than their batches: more forwards at once.
        growths = [FREE_GROWTH, GROWTH_FACTORS[min(max(1, self.made.plans), len(GROWTH_FACTORS)) - 1]]
        for growth in [*(growths if seen != self.made.seen else ()), 1.0] if varies else ():
            # Room for batches that never came isn't worth smaller pieces, or tiles.
            planned, step_profile = self._resized_step(model, inputs, seen, growth, may_change_way=growth == 1.0)
            if step_profile is not None and self.search_for(step_profile).something_fits:
                yield growth, planned, step_profile
        yield 1.0, self._extent(inputs), self.foresee(model, inputs)

    def _resized_step(
        self, model: nn.Module, inputs: Mapping[str, Any], extent: BatchExtent, growth: float, may_change_way: bool = False
    ) -> tuple[BatchExtent, StepProfile | None]:
        """A batch of ``growth`` times that extent, and its step, scaled from the measured one; None if it can't be told."""
        calls = self._runtime.calls
        if (resized := resized_batch(model, inputs, extent, growth)) is None:
            return extent, None
        # A batch that is computed whole takes more than its tokens in a row.
        batch, real = resized[0], None if calls.real is None else resized[1]
        try:
            with replaced(calls, "real", real):
                ways = self._ways(model, batch)
                step_profile = ways.best()[0] if may_change_way else ways.step_profile()
                return self._extent(batch), self._in_proportion(batch, step_profile)
        except Exception as error:  # the model bounds sequences in a way of its own
            logger.info("megatrain: no batches of another size can be planned for (%s)", error)
            return extent, None

    def _placed(
        self, model: nn.Module, inputs: Mapping[str, Any], plan: PlanRecord, step_profile: StepProfile
    ) -> tuple[PlanRecord, bool]:
        """The plan with the fastest placement, for the usual batch too where that is smaller; and whether room for the largest
        costs the usual one nothing."""
        # One budget for all: the driver tells another number each time, after milliseconds.
        search_for = functools.partial(self.search_for, budget_bytes=self.budget.whole_bytes())
        share = plan.tokens / (plan.batches * plan.planned.real) if plan.planned.real else 1.0

        def step_at(share: float) -> StepProfile | None:
            extent, growth = plan.planned, share
            if self._runtime.calls.real is not None:  # without padding the tokens alone count, else the length does, too
                extent, growth = dataclasses.replace(extent, real=round(share * extent.real)), 1.0
            with layers_run(self._runtime, step_profile.samples, step_profile.token_tile):
                return self._resized_step(model, inputs, extent, growth)[1]

        if share <= MOST_USUAL_SHARE and "kept" not in self._fixed():
            both = place_both(plan, share, step_at, step_profile, search_for)
            if both is not None:
                return both
        search = search_for(step_profile)
        found = search.best() or search.leanest()
        time, sent = None if step_profile.surely_fits else found.time, sum(sent_bytes(step_profile, found.placement))
        return dataclasses.replace(plan, placement=found.placement, predicted_time=time, offloaded_bytes=sent), False

    def _extent(self, inputs: Mapping[str, Any]) -> BatchExtent:
        return BatchExtent.of(inputs, self._runtime.calls.real)

    def fixed_bytes(self, step_profile: StepProfile) -> int:
        """What such a step takes under any placement."""
        # What others that wait for their backward hold isn't more than what one takes that is recomputed; they share slots.
        sizes = dataclasses.replace(self.model_sizes(), slot_bytes=0, gradient_slot_bytes=0)
        waiting = peak_bytes(step_profile, sizes, Placement())
        held = sum(self.budget.fixed_bytes_by_kind(step_profile).values()) + LIBRARY_WORKSPACE_BYTES
        return held + (self.made.forwards_at_once - 1) * waiting

    def _take_over(self, model: nn.Module, data: dict[str, Any], sizes: Sequence[int]) -> None:
        """Goes on by a recorded plan, if it was made for what is here and fits; else the next batch is planned for."""
        record, self._resumed = PlanRecord.of_data(data), None
        if record is None or record.made_for != made_for(model, self._runtime, self._config, self.micro_batches):
            logger.info("megatrain: the checkpoint's plan was made for something else")
            return
        budget_bytes = self.budget.whole_bytes()
        if self._config.gpu_memory_bytes is None:
            # A few MiB more or less are free each time, and a plan fills what it finds.
            budget_bytes = int(budget_bytes * RESUMED_SHARE_OF_DEVICE / USABLE_SHARE_OF_DEVICE)
        room_bytes = self._host_budget_bytes() + self.model_sizes().moved_bytes(record.placement)
        if record.predicted_bytes > budget_bytes or record.offloaded_bytes > room_bytes:
            logger.info("megatrain: there is less memory than the checkpoint's plan was made for")
        else:
            counts = {name: getattr(record, name) + getattr(self.made, name) for name in ("batches", "tokens")}
            self._adopt(dataclasses.replace(record, **counts))
            self._note_rows(*sizes)

    def expect_steps(self, steps: int | None, compiles: bool | None = None, record: dict[str, Any] | None = None) -> None:
        """A training begins, of so many optimizer steps if that is known: layers are compiled only if that pays for itself.
        ``compiles`` is what the training chose before it was interrupted, ``record`` its :attr:`record`."""
        if record is not None or (steps, compiles) != self._expected:
            self._expected = (steps, compiles)
            self._note(row_sizes=(), batches=0, tokens=0)
            self._run_layers(compiles if self._runtime.compiled.is_optional else None)
        self._resumed = record

    def _run_layers(self, compiled: bool | None) -> None:
        """From now on layers run compiled (True) or not (False); None: the next profile decides. What was measured and planned
        before counts no more."""
        self._runtime.compiled.pays, self._compiles_after = compiled, None
        self._measured_steps.clear()
        self._foreseen.clear()
        self.forget()

    @property
    def expected(self) -> tuple[int | None, bool | None]:
        """Steps of the training in progress, and whether it compiles layers; None for what isn't known."""
        return self._expected[0], self._compiles_after is not None or self._runtime.compiled.pays

    def forget(self) -> None:
        """The next batch is planned for as if it were the first: steps are to run in another way from now on."""
        self._note(seen=BatchExtent(), planned=BatchExtent(), plans=0)
        self._resumed = None

    def foresee(self, model: nn.Module, inputs: Mapping[str, Any]) -> StepProfile:
        """The profile of a step on ``inputs``, without planning for it; :meth:`follow` takes it over. The first is measured,
        and later ones are scaled from it where they can be. Raises an ``UnsupportedError`` for a batch that can't run in
        pieces, and whatever the model raises when it looks at its data."""
        shapes = tuple((name, tuple(value.shape)) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        key = (self._runtime.batch_cut.asked, shapes, self._extent(inputs))
        if key not in self._foreseen:
            self._runtime.refresh_if_written()
            ways = self._ways(model, inputs)
            step_profile = ways.best()[0] if self.budget.exists else ways.step_profile()
            self._decide_on_compiling(step_profile)
            found = self._in_proportion(inputs, step_profile)
            if found is None or not (found is step_profile or found.surely_fits or self.search_for(found).something_fits):
                measured = None
                try:
                    measured = ways.measured(step_profile, lambda made: self._measured(model, inputs, made))
                except torch.OutOfMemoryError:
                    if self._compiles_after is None:
                        raise
                if measured is None or (self._compiles_after is not None and not self.search_for(measured[1]).something_fits):
                    self._run_layers(compiled=True)  # which takes less memory, so that the first step is compiled too
                    return self.foresee(model, inputs)
                self._measured_steps[self._way_of(inputs)] = measured
                found = measured[1]
            self._foreseen[key] = found
        return self._foreseen[key]

    @contextlib.contextmanager
    def joining(self, samples: int) -> Iterator[None]:
        """Training forwards in the body run a whole step's batch, in pieces of at most ``samples``."""
        cut = self._runtime.batch_cut
        asked = samples if cut.asked is None else min(cut.asked, samples)
        with replaced(cut, "asked", asked), replaced(self, "micro_batches", 1):
            yield

    def _decide_on_compiling(self, step_profile: StepProfile) -> None:
        """The first profile of a training decides whether it is long enough to pay for compiling layers. The first step runs
        uncompiled even then, so that the user soon sees the script work."""
        compiled, steps = self._runtime.compiled, self._expected[0]
        if compiled.is_optional and compiled.pays is None and steps is not None:
            # Backward takes twice the FLOPs of forward.
            pass_flops = 3 * sum(step_profile.profiles[call.kind].forward.flops for call in step_profile.forward_calls)
            saved_seconds = steps * self.micro_batches * _SAVED_SHARE * pass_flops / _EAGER_FLOPS
            compiled.pays = saved_seconds >= COMPILE_SECONDS * len(step_profile.profiles)
            # Whether micro-batches are joined is decided once, by the times of layers as they will run.
            is_plain = self.micro_batches == 1 and self._runtime.batch_cut.asked is None
            if compiled.pays and is_plain and not compiled.compilations:
                self._compiles_after, compiled.pays = self._runtime.steps_taken, False
            elif not compiled.pays:
                text = "megatrain: %d steps don't pay for compiling the layers (compile_layers: true compiles them)"
                logger.info(text, steps)

    def _way_of(self, inputs: Mapping[str, Any]) -> Hashable:
        """What two steps must share for the costs of one to be scaled from the other's."""
        return self._runtime.batch_cut.asked, self._runtime.compiled.pays, frozenset(inputs)

    def _in_proportion(self, inputs: Mapping[str, Any], step_profile: StepProfile) -> StepProfile | None:
        """The profile scaled from the measured step, None if there is none to scale it from; itself where none is measured."""
        if not self.measures:
            return step_profile
        if (steps := self._measured_steps.get(self._way_of(inputs))) is not None:
            return extrapolated_profile(step_profile, *steps, self._machine)
        # Nothing needs to be measured where states and activations leave so much room: what they take is estimated well
        # enough, and all lie there however long a step takes. What a compiler saves can't be estimated. Where micro-batches
        # may be joined, the times of both ways are compared.
        is_plain = self.micro_batches == 1 and not (
            step_profile.token_tile or step_profile.samples or self._runtime.batch_cut.asked
        )
        if not is_plain or self._runtime.compiled.may_compile:
            return None
        everything = self.search_for(step_profile, budget_bytes=int(CERTAIN_SHARE * self.budget.whole_bytes())).everything()
        return None if everything is None else dataclasses.replace(step_profile, surely_fits=True)

    def _ways(self, model: nn.Module, inputs: Mapping[str, Any]) -> WayChoice:
        step_profile = functools.partial(profile_step, model, self._runtime, inputs, self._device)
        ids = inputs.get("input_ids")  # beside which a picture may have a row for each of its patches
        samples = max(rows_of(dict(inputs) if ids is None else ids), default=1)
        return WayChoice(self._runtime, self._config, samples, step_profile, self.search_for)

    def search_for(self, step_profile: StepProfile, budget_bytes: int | None = None, **counts: int) -> PlacementSearch:
        """For the placement of such a step, with these ``counts`` where the settings fix no others, in the whole budget unless
        another is named."""
        whole_bytes = self.budget.whole_bytes() if budget_bytes is None else budget_bytes
        step_bytes, host_bytes = whole_bytes - self.fixed_bytes(step_profile), self._host_budget_bytes()
        return PlacementSearch(
            step_profile, self.model_sizes(), self._machine, step_bytes, {**counts, **self._fixed()}, host_bytes
        )

    def _measured(self, model: nn.Module, inputs: Mapping[str, Any], step_profile: StepProfile) -> StepProfile:
        is_plain = self._runtime.runs_whole and self.search_for(step_profile).everything() is not None
        try:
            return measure_layers(model, self._runtime, inputs, step_profile, self.budget.whole_bytes(), is_plain)
        except torch.OutOfMemoryError:
            if self.made.placement == self._settled():
                raise
        except Exception as error:  # if it is more than the trial's, the training's own forward raises it
            logger.info("megatrain: layers can't be measured, their costs are estimated (%s)", error)
            return step_profile
        # What an earlier plan put on the device for smaller batches makes room.
        self._place(Placement())
        torch.cuda.empty_cache()
        return measure_layers(model, self._runtime, inputs, step_profile, self.budget.whole_bytes(), is_plain)

    def _host_budget_bytes(self) -> int:
        """Host memory that offloaded activations could take if all units lived on the host."""
        host_bytes = available_host_bytes(self._config.host_memory_gib) - CONSTANT_OVERHEAD_BYTES
        on_device = (self._unit_sizes(unit).host_bytes for unit in self._runtime.units if unit.is_on_device)
        return host_bytes - sum(on_device) // self._ranks

    def _place(self, placement: Placement) -> None:
        self._note(placement=placement)
        self._runtime.calls.policy = placement
        self._runtime.activations.spacing = placement.offload_spacing
        self._runtime.place(placement.on_device, placement.groups_on_device, placement.states_on_device)

    def _keep_states_on_host(self) -> None:
        nothing = frozenset[int]()
        at_home = dataclasses.replace(self.made.placement, on_device=nothing, states_on_device=nothing, groups_on_device=False)
        self._place(at_home)

    def _fixed(self) -> dict[str, Any]:
        """The counts that the settings leave no choice of, as far as the optimizers allow it."""
        fixed = fixed_counts(self._config.placement, len(self._runtime.layers))
        may_move = self._runtime.states_may_move and can_step_on(self._device)
        return fixed if may_move else {**fixed, "on_device": 0, "groups_on_device": False, "states_on_device": 0}

    def _settled(self) -> Placement:
        """What the settings ask for and nothing more."""
        return Counts(**self._fixed()).placement(len(self._runtime.layers))

    def model_sizes(self) -> Model:
        runtime, config, sizes = self._runtime, self._config, self._unit_sizes
        return Model(
            layers=[sizes(layer.unit) for layer in runtime.layers],
            groups_before=[sizes(group.unit) for group in runtime.groups if not group.layers_before],
            groups_after=[sizes(group.unit) for group in runtime.groups if group.layers_before],
            slots=config.placement.slots,
            slot_bytes=runtime.prefetcher.shared_bytes,
            gradient_slot_bytes=runtime.offloader.slot_bytes,
            steps_in_backward=any(stepper.schedule == "backward" for stepper in runtime.steppers),
            micro_batches=self.micro_batches,
            ranks=self._ranks,
            exchange_bytes=self._exchange_bytes,
            fetch_share=self._fetch_share,
            parts={
                layer.index: [sizes(part.owner.unit).of_part(part) for at in layer.experts for part in at.parts]
                for layer in runtime.layers
                if layer.experts
            },
        )

    @property
    def adds_on_host(self) -> bool:
        """Whether gradients are added up on the host: those of several backwards, or of pieces of a batch, which experts in
        parts bring one by one."""
        in_pieces = self._runtime.batch_cut.asked is not None
        return self.micro_batches > 1 or (in_pieces and any(at.has_trainable for at in self._runtime.experts))

    def _unit_sizes(self, unit: HostUnit) -> UnitSizes:
        # The first addition makes room for all units' sums.
        is_summed = self._runtime.sums.is_wanted and self.adds_on_host
        return UnitSizes.of_unit(unit, is_summed, is_shared=self._ranks > 1)
