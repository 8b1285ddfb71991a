"""Makes the plan: where weights, states and activations live, by the model, batch, machine's speeds and memory budgets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.kernels.device import can_step_on
from megatrain_accelerate.layers.micro_batches import rows_of
from megatrain_accelerate.layers.nested_tensors import Inputs
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.layers.runtime import StreamingRuntime, forwards_are_open
from megatrain_accelerate.layers.saved_tensors import innermost_hooks
from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.plan.device_budget import DeviceBudget
from megatrain_accelerate.plan.evaluation_weights import EvaluationWeights
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
from megatrain_accelerate.plan.placement import Counts, Model, UnitSizes, fixed_counts, peak_bytes, sent_bytes, step_bytes
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
"""Device memory for cuBLAS workspaces (32 MiB for each thread that computes) and small tensors outside the step's graph."""

LONGEST_WITHOUT_CUDNN = 4096
"""Up to this many tokens of a sequence, attention runs without cuDNN if lengths vary. cuDNN builds kernels for each new length
(60 ms for forward and 60 for backward on an H100), torch's others don't. On longer sequences cuDNN's speed is worth that."""

# Compiling changes numbers, so equal trainings must decide alike: by these fixed estimates, and by no measured times.
COMPILE_SECONDS = 30.0
"""Time to compile one kind of layer. Measured: 10 s for a fixed length, up to 36 s with dynamic shapes, less if cached."""
_SAVED_SHARE = 0.25
"""Share of uncompiled layers' time that compiling saves. On an H200 (3B, 8 x 4,096 tokens): 24,000 tokens/s, not 17,500."""
_EAGER_FLOPS = 3.5e14
"""FLOP/s of uncompiled layers on an H200. A slower GPU saves more seconds than this estimate says."""


class DevicePlan:
    """Plans the steps of one engine. A batch that is larger than the last plan covers, and doesn't fit it, gets a new plan.
    Layers are measured on the first batch that doesn't surely fit. Steps on other batches are extrapolated from it while they
    run in the same way. Once sizes vary, plans leave room for larger batches, so that data of many lengths needs few plans.
    Such a plan may have two placements: for the largest batch that it covers, and for the *usual* one, a batch with the mean
    number of tokens of all so far (:attr:`.PlanRecord.usual_share`)."""

    def __init__(self, runtime: StreamingRuntime, config: MegatrainConfig, device: torch.device, show: bool = False) -> None:
        self._runtime, self._config, self._device = runtime, config, device
        self.show = show
        """Whether this process prints the plan as a table."""
        self.budget = DeviceBudget(runtime, config, device)
        self.current = PlanRecord()
        """The last plan and what the next one depends on, replaced whenever one of these changes."""
        self._measured_steps: dict[Hashable, tuple[StepProfile, StepProfile]] = {}
        """The estimated and the measured profile of one step, by :meth:`_scaling_key`."""
        self._profiles: dict[Hashable, StepProfile] = {}
        """What :meth:`foresee` has returned since the last plan, by the batch's shapes and extent."""
        self._table: str | None = None
        """The table of a new plan until it is printed."""
        self._rank_count = runtime.fp32_sums.ranks
        self.may_gather = all(layer.has_trainable for layer in runtime.layers)
        """Whether all ranks surely run the same layers. Some may skip a frozen one (an image encoder's, say)."""
        self._exchange_bytes = math.inf
        """Bytes of gradients that several ranks exchange in a second."""
        self._fetch_share = 1.0
        """Seconds in which ranks gather a layer, over those in which each copies it whole."""
        self._cudnn_again: weakref.finalize[[bool], DevicePlan] | None = None
        """Enables cuDNN's attention again, at the latest when this plan is collected. None unless the plan disabled it."""
        self._is_displaced = False
        """Whether units moved to the host to make room for an evaluation, or for a measurement."""
        self.evaluation_weights = EvaluationWeights(runtime, config.evaluation_weights, self.budget)
        self._announced: tuple[int | None, bool | None] = (None, None)
        """``steps`` and ``compiles`` of the last call of :meth:`expect_steps`."""
        self._calls_in_forward = 1
        """The most calls of a layer in one forward so far."""
        self._compiles_after: int | None = None
        """``steps_taken`` before a training's first step if that one runs uncompiled, and later ones compiled; else None."""
        self._resumed: dict[str, Any] | None = None
        """The record of an interrupted training until it is resumed or rejected."""
        self.micro_batches = 1
        """Backwards before each optimizer step."""
        self.predicted_peak_bytes = 0
        """The most device memory that any batch so far was predicted to take."""
        runtime.token_tile = 0 if config.token_tile == "auto" else int(config.token_tile)
        # Some optimizers step on the host only.
        runtime.keep_states_on_host = self._keep_states_on_host
        self._place(self._minimal_placement())

    @property
    def record(self) -> dict[str, Any] | None:
        """The last plan as data. None before the first one, without a budget, or while it is an uncompiled first step's."""
        is_planned = self.current.plans and self.budget.exists and self._compiles_after is None
        return self.current.as_data() if is_planned else None

    @property
    def measures(self) -> bool:
        """Whether layers are measured. Without CUDA their costs are estimated."""
        return self._device.type == "cuda"

    @functools.cached_property
    def _machine(self) -> Machine:
        return measured_machine(self._device, self._runtime.kernels, self._rank_count)

    def make_room(self, model: nn.Module, inputs: Inputs) -> None:
        """Called before a forward without gradients. If it doesn't fit beside units and states on the device, they move to the
        host until the next training forward. If memory is left, streamed layers are held (:mod:`.evaluation_weights`), unless
        a backward of any model is to come, which needs the memory: the forward before it has given up what was held."""
        if self._runtime.open_forwards:
            return
        if not forwards_are_open():
            self.evaluation_weights.before_forward(model, inputs)
        placement = self.current.placement
        if (placement.on_device or placement.states_on_device) and not self._is_displaced and self._device.type == "cuda":
            needed_bytes = self.evaluation_weights.needed_bytes(model, inputs)
            if needed_bytes > USABLE_SHARE_OF_DEVICE * free_bytes(self._device):
                logger.info("megatrain: layers leave the GPU for an evaluation of %.1f GiB", needed_bytes / GIB)
                self._is_displaced = True
                self._runtime.place((), groups_on_device=False)

    def follow(self, model: nn.Module, inputs: Inputs) -> None:
        """Plans for a training forward on ``inputs``, the model's arguments, if no plan covers them. A forward that begins
        before another one's backward (as in preference losses) recomputes all layers, and the next plan leaves room for it."""
        if open_forwards := self._runtime.open_forwards:
            if torch._C._current_graph_task_id() != -1:
                return  # within backward a user's checkpoint runs the forward again, and has to save the same tensors
            self._note_rows(row_size(inputs))
            if open_forwards >= self.current.forwards_at_once:
                # An empty extent covers no batch, so that the next one is planned for.
                self._note(forwards_at_once=open_forwards + 1, planned=BatchExtent())
            nothing = frozenset[int]()
            recomputed = dataclasses.replace(self.current.placement, kept=nothing, offloaded=nothing, attention_kept=nothing)
            self._runtime.calls.policy = recomputed
            return
        if self._compiles_after is not None and self._runtime.steps_taken > self._compiles_after:
            self._run_layers(compiled=True)
        self._runtime.calls.policy = self.current.placement
        if self._is_displaced:
            self._place(self.current.placement)
        ranks, omits_padding = self._runtime.ranks, self._runtime.calls.real_tokens is not None
        own = (self._extent(inputs), row_size(inputs), omits_padding, self.current.planned, self._resumed is not None)
        of_ranks: list[Any] = [own] if ranks is None else ranks.gather(own)
        extents, sizes, padding_omitted, planned, resumes = zip(*of_ranks, strict=True)
        extent = functools.reduce(BatchExtent.union, extents)
        self._note_rows(*sizes)  # before compiling: it decides whether graphs are for one size
        tokens = self.current.tokens + sum(of_rank.real for of_rank in extents)
        self._note(batches=self.current.batches + len(extents), tokens=tokens)
        # All ranks decide by what all have gathered, so that they take the same branch.
        if any(resumes) or not all(of_rank.covers(extent) for of_rank in planned):
            # A checkpoint around the whole model would count what the trial runs save.
            has_hooks = innermost_hooks() is not None
            with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach) if has_hooks else contextlib.nullcontext():
                if ranks is None:
                    self._plan(model, inputs, extent, sizes)
                else:
                    self._plan_together(ranks, model, inputs, extents, sizes)
        of_largest = self.current.usual_share == 1.0 or not self.current.planned.covers(extent)
        share = 1.0 if of_largest else extent.share_of(self.current.planned, all(padding_omitted))
        self._runtime.calls.policy, predicted_bytes = self.current.at(share)
        self._runtime.activations.spacing = self._runtime.calls.policy.offload_spacing
        self.predicted_peak_bytes = max(self.predicted_peak_bytes, predicted_bytes)
        if self.show and self._table is not None:
            say(self._table, file=sys.stderr)
        self._table = None

    def _plan_together(
        self, ranks: Ranks, model: nn.Module, inputs: Inputs, extents: Sequence[BatchExtent], sizes: Sequence[int]
    ) -> None:
        """Makes one plan for all ranks: the rank with the largest batch plans, within the smallest rank's budget."""
        extent = functools.reduce(BatchExtent.union, extents)
        planner = max(range(ranks.size), key=lambda rank: (extents[rank].elements, extents[rank].length))
        # These trials come before free memory is read, since collectives allocate buffers when they first run.
        exchange = self._runtime.offloader.exchange
        if self._exchange_bytes == math.inf and self.budget.exists and exchange is not None:
            _ = self._machine  # measured on first access: by all ranks at the same time
            self._exchange_bytes = exchange.trial() / seconds_of(self._device, exchange.trial)
            if self._runtime.prefetcher.slots and self.may_gather:
                self._choose_fetches(ranks)
        failure: Exception | None = None
        with replaced(self.budget, "given_bytes", min(ranks.gather(self.budget.whole_bytes()))):
            if ranks.rank == planner:
                # If another rank's batch has more real tokens, the plan assumes that padding is computed (None), as a bound.
                real = self._runtime.calls.real_tokens if self._extent(inputs).covers(extent) else None
                try:
                    with replaced(self._runtime.calls, "real_tokens", real):
                        self._plan(model, inputs, extent, sizes)
                except Exception as error:  # raised on all ranks below: they wait, and a script may catch it and go on
                    failure = error
            elif self.measures and self._resumed is None and not self.current.plans:
                # Compiles this rank's layers while the planner compiles its own. The forward raises an error again.
                with contextlib.suppress(Exception):
                    self.foresee(model, inputs)
        compiled = self._runtime.compiled
        result = self.current, compiled.pays, self._compiles_after, self._table, failure
        made, compiled.pays, self._compiles_after, self._table, failure = ranks.broadcast(result, planner)
        if failure is not None:
            raise failure
        if ranks.rank != planner:
            self._adopt(made)
            self._note_rows(*sizes)
        self._runtime.prefetcher.forget_agreed()

    def _choose_fetches(self, ranks: Ranks) -> None:
        """Lets ranks gather weights if that is faster than copying them whole to all ranks at the same time."""
        prefetcher = self._runtime.prefetcher
        own = [seconds_of(self._device, functools.partial(prefetcher.fetch_largest, together)) for together in (False, True)]
        whole, gathered = map(max, zip(*ranks.gather(own), strict=True))
        prefetcher.gathers = gathered < whole
        self._fetch_share = min(1.0, gathered / whole)

    def _adopt(self, plan: PlanRecord) -> None:
        """Applies a plan: moves units, and sets how layers run."""
        self._place(plan.placement)
        self._runtime.batch_cut.chosen, self._runtime.token_tile = plan.samples, plan.token_tile
        self.current, self._resumed = plan, None
        self._profiles.clear()

    def _holds(self, model: nn.Module, inputs: Inputs, extent: BatchExtent) -> bool:
        """Whether a text batch that the last plan doesn't cover fits it nevertheless: with longer rows and fewer tokens, say.
        The first plan isn't asked: the second one knows the mean size, and may keep more of batches of that size. Nor are
        plans of several ranks, which would have to agree, and those of forwards that wait beside others of any size."""
        plan = self.current
        is_asked = plan.plans > 1 and plan.forwards_at_once == 1 and self._runtime.ranks is None and self.budget.exists
        if not (is_asked and extent.length and plan.planned.elements and plan.predicted_bytes):
            return False
        if any(held.covers(extent) for held in plan.held):
            return True
        try:
            step_profile = self._without_measuring(inputs, self._ways(model, inputs).step_profile())
        except Exception:  # planning for it meets the error, too, and deals with it
            return False
        if step_profile is None or sum(sent_bytes(step_profile, plan.placement)) > plan.offloaded_bytes:
            return False
        taken_bytes = self.fixed_bytes(step_profile) + peak_bytes(step_profile, self.model_sizes(), plan.placement)
        if taken_bytes > self.budget.whole_bytes():
            return False
        held = (*(held for held in plan.held if not extent.covers(held)), extent)
        self._note(held=held, seen=plan.seen.union(extent), predicted_bytes=max(plan.predicted_bytes, taken_bytes))
        return True

    def _plan(self, model: nn.Module, inputs: Inputs, extent: BatchExtent, sizes: Sequence[int]) -> None:
        """Plans for batches of this extent and these row sizes, unless an interrupted training's plan or the last one fits."""
        if self._resumed is not None:
            self._take_over(model, self._resumed, sizes)
        if self.current.planned.covers(extent):
            return
        self._runtime.refresh_if_written()
        if self._holds(model, inputs, extent):
            return
        budget_bytes = self.budget.whole_bytes()
        seen = self.current.seen.union(extent)
        try:
            plan, step_profile = self._best_plan(model, inputs, seen)
        except torch.OutOfMemoryError:
            raise  # without noting the batch as seen: the script may retry with a smaller one
        except Exception as error:  # a model whose code reads values can't run on fake tensors
            logger.log(
                logging.WARNING if budget_bytes else logging.INFO,
                "megatrain: a step can't be predicted for this model (%s: %s), so its layers are streamed and recomputed; "
                "set megatrain_config.placement.kept_layers or device_layers to give them GPU memory",
                type(error).__name__,
                error,
            )
            self._place(self._minimal_placement())
            # How layers run (in pieces, by tiles) stays as it was. The old predictions were for another placement.
            unknown = {"offloaded_bytes": 0, "predicted_bytes": 0, "predicted_time": None}
            self._note(planned=seen, usual_share=1.0, is_linear=False, **unknown)
            return
        self._adopt(plan)
        if budget_bytes and (self.show or self._runtime.ranks is not None) and self._compiles_after is None:
            self._table = plan_table(plan, self._runtime, budget_bytes, step_profile)
        if budget_bytes and plan.predicted_bytes > budget_bytes:
            of_step = plan.predicted_bytes - self.fixed_bytes(step_profile)
            held = {**self.budget.fixed_bytes_by_kind(step_profile), "step": of_step}
            logger.warning(
                "megatrain: this batch is predicted to take %.1f GiB of GPU memory (%s), and the budget is %.1f GiB; if it "
                "runs out of memory, set megatrain_config.micro_batch_size, or lower per_device_train_batch_size or lengths",
                plan.predicted_bytes / GIB,
                ", ".join(f"{kind} {count / GIB:.1f}" for kind, count in held.items()),
                budget_bytes / GIB,
            )

    def _note(self, **changes: Any) -> None:
        self.current = dataclasses.replace(self.current, **changes)

    def _note_rows(self, *sizes: int) -> None:
        """Notes the row sizes (:func:`.row_size`) of all ranks' batches. If they vary, compiled layers get one graph for all
        sizes, and attention kernels that serve all. Kernels aren't switched between a forward and its backward."""
        so_far = functools.reduce(sizes_after, sizes, self.current.row_sizes)
        self._note(row_sizes=so_far)
        varies = self._runtime.compiled.sizes_vary = sizes_vary(so_far) or any(size != so_far[0] for size in sizes)
        if self._device.type == "cuda" and not forwards_are_open():
            self.use_cudnn(not varies or max(sizes) > LONGEST_WITHOUT_CUDNN)

    def use_cudnn(self, is_used: bool) -> None:
        """Lets attention run in cuDNN, as before the first step, or prevents it. If a user disabled it, it stays disabled."""
        if is_used and self._cudnn_again is not None:
            self._cudnn_again()
            self._cudnn_again = None
        elif not is_used and self._cudnn_again is None and torch.backends.cuda.cudnn_sdp_enabled():
            torch.backends.cuda.enable_cudnn_sdp(False)
            self._cudnn_again = weakref.finalize(self, torch.backends.cuda.enable_cudnn_sdp, True)

    def _best_plan(self, model: nn.Module, inputs: Inputs, seen: BatchExtent) -> tuple[PlanRecord, StepProfile]:
        """The plan, and the profile of the step that it is made for. While all batches have one size, that step is on this
        batch; later it is on one that covers all batches so far (``seen``) and, as far as such a step fits, larger ones."""
        made_with = made_for(model, self._runtime, self._config, self.micro_batches)
        for growth, planned, step_profile in self._steps_to_plan_for(model, inputs, seen):
            plan = dataclasses.replace(
                self.current,
                made_for=made_with,
                seen=seen,
                planned=planned,
                held=(),
                plans=self.current.plans + 1,
                samples=step_profile.samples,
                token_tile=step_profile.token_tile,
                usual_share=1.0,
                usual_bytes=0,
                is_linear=False,
            )
            plan, room_is_free = self._placed(model, inputs, plan, step_profile) if self.budget.exists else (plan, False)
            # The first step is taken, but that of FREE_GROWTH only if its room costs the usual batch nothing.
            if room_is_free or growth < FREE_GROWTH:
                break
        fixed_bytes = self.fixed_bytes(step_profile)
        # The usual placement keeps more, so that its peak may be the higher one.
        most_bytes = max(peak_bytes(step_profile, self.model_sizes(), plan.placement), plan.usual_bytes)
        usual_bytes = fixed_bytes + plan.usual_bytes
        return dataclasses.replace(plan, predicted_bytes=fixed_bytes + most_bytes, usual_bytes=usual_bytes), step_profile

    def _steps_to_plan_for(
        self, model: nn.Module, inputs: Inputs, seen: BatchExtent
    ) -> Iterator[tuple[float, BatchExtent, StepProfile]]:
        """Yields growth, extent and profile of steps, the largest first: if sizes vary, of those on ``seen`` and on larger
        batches that fit, and at last of the step on ``inputs``, whether it fits or not."""
        varies = self.budget.exists and (self.current.plans or sizes_vary(self.current.row_sizes))
        if varies and (self.measures or not self.current.plans) and self._scaling_key(inputs) not in self._measured_steps:
            self.foresee(model, inputs)  # measures this step unless it surely fits; larger ones are scaled from it
        # Without an extent that was planned for, the new plan may make room for more open forwards alone.
        growth = GROWTH_FACTORS[min(max(1, self.current.plans), len(GROWTH_FACTORS)) - 1]
        growths = [FREE_GROWTH, growth, growth**0.5]
        is_larger = seen != self.current.seen or self.current.planned.elements > 0
        for growth in [*(growths if is_larger else ()), 1.0] if varies else ():
            # Batches that haven't come are no reason for smaller pieces or for tiles.
            planned, step_profile = self._resized_step(model, inputs, seen, growth, may_change_way=growth == 1.0)
            if step_profile is not None and self.search_for(step_profile).something_fits:
                yield growth, planned, step_profile
        yield 1.0, self._extent(inputs), self.foresee(model, inputs)

    def _resized_step(
        self, model: nn.Module, inputs: Inputs, extent: BatchExtent, growth: float, may_change_way: bool = False
    ) -> tuple[BatchExtent, StepProfile | None]:
        """The extent of a batch ``growth`` times as large, and its step scaled from the measured one, or None if unknown."""
        calls = self._runtime.calls
        if (resized := resized_batch(model, inputs, extent, growth)) is None:
            return extent, None
        # While this batch is computed with its padding, the larger one is, too.
        batch, real = resized[0], None if calls.real_tokens is None else resized[1]
        try:
            with replaced(calls, "real_tokens", real):
                ways = self._ways(model, batch)
                step_profile = ways.best() if may_change_way else ways.step_profile()
                return self._extent(batch), self._without_measuring(batch, step_profile)
        except Exception as error:  # the model may limit sequences in its own way
            logger.info("megatrain: can't predict a step on a larger or smaller batch (%s)", error)
            return extent, None

    def _placed(
        self, model: nn.Module, inputs: Inputs, plan: PlanRecord, step_profile: StepProfile
    ) -> tuple[PlanRecord, bool]:
        """The plan with the fastest placement that fits, else the leanest one, and with one for the usual batch if that batch
        is clearly smaller. Also returns whether room for the largest batch is known to cost the usual one nothing."""
        # All searches share one budget: the driver needs milliseconds to report it, and reports another each time.
        search_for = functools.partial(self.search_for, budget_bytes=self.budget.whole_bytes())
        share = plan.tokens / (plan.batches * plan.planned.real) if plan.planned.real else 1.0

        def step_at(share: float) -> StepProfile | None:
            extent, growth = plan.planned, share
            if self._runtime.calls.real_tokens is not None:  # padding is left out: only real tokens shrink, not the length
                extent, growth = dataclasses.replace(extent, real=round(share * extent.real)), 1.0
            with layers_run(self._runtime, step_profile.samples, step_profile.token_tile):
                return self._resized_step(model, inputs, extent, growth)[1]

        if share <= MOST_USUAL_SHARE and "kept" not in self._fixed_counts():
            both = place_both(plan, share, step_at, step_profile, search_for)
            if both is not None:
                return both
        search = search_for(step_profile)
        found = search.best() or search.leanest()
        time, sent = None if step_profile.surely_fits else found.time, sum(sent_bytes(step_profile, found.placement))
        return dataclasses.replace(plan, placement=found.placement, predicted_time=time, offloaded_bytes=sent), False

    def _extent(self, inputs: Inputs) -> BatchExtent:
        return BatchExtent.of(inputs, self._runtime.calls.real_tokens)

    def fixed_bytes(self, step_profile: StepProfile) -> int:
        """Device bytes that such a step takes whatever its placement, with those of forwards that are open beside it."""
        # An open forward holds at most what a step takes that recomputes all layers. All forwards share the slots.
        waiting = step_bytes(step_profile, self.model_sizes(), Placement())
        held = sum(self.budget.fixed_bytes_by_kind(step_profile).values()) + LIBRARY_WORKSPACE_BYTES
        return held + (self.current.forwards_at_once - 1) * waiting

    def _take_over(self, model: nn.Module, data: dict[str, Any], sizes: Sequence[int]) -> None:
        """Adopts a recorded plan if it was made for this model, GPU and settings, and fits. Otherwise adopts none."""
        record, self._resumed = PlanRecord.of_data(data), None
        if record is None or record.made_for != made_for(model, self._runtime, self._config, self.micro_batches):
            logger.info(
                "megatrain: the checkpoint's plan isn't used: the GPU, the settings, the model, or the version of torch or "
                "megatrain differ"
            )
            return
        budget_bytes = self.budget.whole_bytes()
        if self._config.gpu_memory_bytes is None:
            # Free memory varies by a few MiB from run to run, and the recorded plan filled what was free.
            budget_bytes = int(budget_bytes * RESUMED_SHARE_OF_DEVICE / USABLE_SHARE_OF_DEVICE)
        room_bytes = self._host_budget_bytes() + self.model_sizes().moved_bytes(record.placement)
        if record.predicted_bytes > budget_bytes or record.offloaded_bytes > max(0, room_bytes):
            logger.info(
                "megatrain: the checkpoint's plan isn't used: it needs %.1f GiB of GPU memory and %.1f GiB of host memory, "
                "and %.1f and %.1f GiB are free for it",
                *(count / GIB for count in (record.predicted_bytes, record.offloaded_bytes, budget_bytes, max(0, room_bytes))),
            )
        else:
            counts = {name: getattr(record, name) + getattr(self.current, name) for name in ("batches", "tokens")}
            self._adopt(dataclasses.replace(record, **counts))
            self._note_rows(*sizes)

    def expect_steps(self, steps: int | None, compiles: bool | None = None, record: dict[str, Any] | None = None) -> None:
        """Called when a training begins. The number of optimizer ``steps``, if known, decides whether compiling layers pays.
        ``compiles`` is what a training chose before it was interrupted, and ``record`` is its :attr:`record`."""
        if record is not None or (steps, compiles) != self._announced:
            self._announced = (steps, compiles)
            self._note(row_sizes=(), batches=0, tokens=0)
            self._run_layers(compiles if self._runtime.compiled.is_optional else None)
        self._resumed = record

    def _run_layers(self, compiled: bool | None) -> None:
        """Runs layers compiled (True) or not (False), or as the next profile decides (None). Drops measurements and plans."""
        self._runtime.compiled.pays, self._compiles_after = compiled, None
        self._measured_steps.clear()
        self._profiles.clear()
        self.forget()

    @property
    def expected(self) -> tuple[int | None, bool | None]:
        """Steps of the current training, and whether it compiles layers. None for what isn't known."""
        return self._announced[0], self._compiles_after is not None or self._runtime.compiled.pays

    def forget(self) -> None:
        """Makes the next batch get a plan as if it were the first. Called when steps are to run in another way."""
        self._note(seen=BatchExtent(), planned=BatchExtent(), plans=0)
        self._resumed = None

    def foresee(self, model: nn.Module, inputs: Inputs) -> StepProfile:
        """The profile of a step on ``inputs``, without a plan for it. :meth:`follow` uses it, too. The first profile is
        measured unless the step surely fits. Later ones are scaled from it, and measured if that step doesn't fit. Raises an
        ``UnsupportedError`` for a batch that can't run in pieces, and what the model raises on fake tensors."""
        shapes = tuple((name, tuple(value.shape)) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        key = (self._runtime.batch_cut.asked, shapes, self._extent(inputs))
        if key not in self._profiles:
            self._runtime.refresh_if_written()
            ways = self._ways(model, inputs)
            estimate = ways.best() if self.budget.exists else ways.step_profile()
            self._decide_on_compiling(estimate)
            profile = self._without_measuring(inputs, estimate)
            # Nothing is measured without CUDA (the profile is the estimate), or if the profile surely fits, or, scaled, fits.
            if profile is None or not (profile is estimate or profile.surely_fits or self.search_for(profile).something_fits):
                measured = None
                try:
                    measured = ways.measured(estimate, lambda leaner: self._measured(model, inputs, leaner))
                except torch.OutOfMemoryError:
                    if self._compiles_after is None:
                        raise
                if measured is None or (self._compiles_after is not None and not self.search_for(measured[1]).something_fits):
                    # The first step was to run uncompiled, and doesn't fit so. Compiled layers need less memory.
                    self._run_layers(compiled=True)
                    return self.foresee(model, inputs)
                self._measured_steps[self._scaling_key(inputs)] = measured
                profile = measured[1]
            self._profiles[key] = profile
        return self._profiles[key]

    @contextlib.contextmanager
    def joining(self, samples: int) -> Iterator[None]:
        """In the body, a training forward runs the joined batch of a whole step in pieces of at most ``samples`` samples."""
        cut = self._runtime.batch_cut
        asked = samples if cut.asked is None else min(cut.asked, samples)
        with replaced(cut, "asked", asked), replaced(self, "micro_batches", 1):
            yield

    def _decide_on_compiling(self, step_profile: StepProfile) -> None:
        """Decides on a training's first profile whether the training is long enough to compile layers. Even then its first
        step runs uncompiled, so that the user soon sees the script work."""
        compiled, steps = self._runtime.compiled, self._announced[0]
        if compiled.is_optional and compiled.pays is None and steps is not None:
            # Backward takes twice the FLOPs of forward, so both take three times.
            pass_flops = 3 * sum(step_profile.profiles[call.kind].forward.flops for call in step_profile.forward_calls)
            saved_seconds = steps * self.micro_batches * _SAVED_SHARE * pass_flops / _EAGER_FLOPS
            compiled.pays = saved_seconds >= COMPILE_SECONDS * len(step_profile.profiles)
            # If micro-batches may be joined, the first step is compiled, too: its times decide on joining once and for all.
            nothing_to_join = self.micro_batches == 1 and self._runtime.batch_cut.asked is None
            if compiled.pays and nothing_to_join and not compiled.compilations:
                self._compiles_after, compiled.pays = self._runtime.steps_taken, False
            elif not compiled.pays:
                logger.info(
                    "megatrain: layers aren't compiled: %d steps are too few to regain the compile time (compile_layers: true "
                    "compiles them)",
                    steps,
                )

    def _scaling_key(self, inputs: Inputs) -> Hashable:
        """What two steps must have in common for the costs of one to be scaled to the other."""
        return self._runtime.batch_cut.asked, self._runtime.compiled.pays, frozenset(inputs)

    def _without_measuring(self, inputs: Inputs, step_profile: StepProfile) -> StepProfile | None:
        """The estimated profile if that will do, or one scaled from the measured step. None if this step is to be measured."""
        if not self.measures:
            return step_profile
        if (steps := self._measured_steps.get(self._scaling_key(inputs))) is not None:
            return extrapolated_profile(step_profile, *steps, self._machine)
        # If everything fits with much room to spare, it is placed on the device whatever a step's time, and memory is
        # estimated well enough. But what compiled layers save can't be estimated, and joining micro-batches depends on times.
        in_pieces = step_profile.token_tile or step_profile.samples or self._runtime.batch_cut.asked
        if in_pieces or self.micro_batches > 1 or self._runtime.compiled.may_compile:
            return None
        everything = self.search_for(step_profile, budget_bytes=int(CERTAIN_SHARE * self.budget.whole_bytes())).everything()
        return None if everything is None else dataclasses.replace(step_profile, surely_fits=True)

    def _ways(self, model: nn.Module, inputs: Inputs) -> WayChoice:
        def step_profile() -> StepProfile:
            profile = profile_step(model, self._runtime, inputs, self._device)
            calls = Counter(call.layer for call in profile.forward_calls)
            self._calls_in_forward = max([self._calls_in_forward, *calls.values()])
            return profile

        ids = inputs.get("input_ids")  # they have a row for each sample, while images may have one for each patch
        samples = max(rows_of(dict(inputs) if ids is None else ids), default=1)
        return WayChoice(self._runtime, self._config, samples, step_profile, self.search_for)

    def search_for(self, step_profile: StepProfile, budget_bytes: int | None = None, **counts: int) -> PlacementSearch:
        """The search for such a step's placement. It fixes the ``counts`` (:class:`.Counts`) that the settings leave open."""
        whole_bytes = self.budget.whole_bytes() if budget_bytes is None else budget_bytes
        left_bytes, fixed = whole_bytes - self.fixed_bytes(step_profile), {**counts, **self._fixed_counts()}
        sizes, host_bytes = self.model_sizes(), self._host_budget_bytes()
        return PlacementSearch(step_profile, sizes, self._machine, left_bytes, fixed, host_bytes)

    def _measured(self, model: nn.Module, inputs: Inputs, step_profile: StepProfile) -> StepProfile:
        is_plain = self._runtime.runs_whole and self.search_for(step_profile).everything() is not None
        try:
            return measure_layers(model, self._runtime, inputs, step_profile, self.budget.whole_bytes(), is_plain)
        except torch.OutOfMemoryError:
            if self._is_displaced or self.current.placement == self._minimal_placement():
                raise
        except Exception as error:  # the training's forward raises it again, unless the measurement alone has it
            logger.info("megatrain: layers can't be measured, their costs are estimated (%s)", error)
            return step_profile
        # Out of memory: units that an earlier plan put on the device move to the host, and the layers are measured once more.
        # If that fails too, the error is raised, and :meth:`follow` moves the units back at the next training forward.
        self._is_displaced = True
        self._runtime.place((), groups_on_device=False)
        torch.cuda.empty_cache()
        return measure_layers(model, self._runtime, inputs, step_profile, self.budget.whole_bytes(), is_plain)

    def _host_budget_bytes(self) -> int:
        """Host memory that is left for offloaded activations if all units live on the host."""
        host_bytes = available_host_bytes(self._config.host_memory_gib) - CONSTANT_OVERHEAD_BYTES
        on_device = (self._unit_sizes(unit).host_bytes for unit in self._runtime.units if unit.is_on_device)
        return host_bytes - sum(on_device) // self._rank_count

    def _place(self, placement: Placement) -> None:
        self._note(placement=placement)
        self._runtime.calls.policy = placement
        self._runtime.activations.spacing = placement.offload_spacing
        self._runtime.place(placement.on_device, placement.groups_on_device, placement.states_on_device)
        self._is_displaced = False

    def _keep_states_on_host(self) -> None:
        nothing = frozenset[int]()
        placement = self.current.placement
        self._place(dataclasses.replace(placement, on_device=nothing, states_on_device=nothing, groups_on_device=False))

    def _fixed_counts(self) -> dict[str, Any]:
        """The :class:`.Counts` that settings fix, by name. Some are fixed to 0 if an optimizer can't step on the device."""
        fixed = fixed_counts(self._config.placement, len(self._runtime.layers))
        may_move = self._runtime.states_may_move and can_step_on(self._device)
        return fixed if may_move else {**fixed, "on_device": 0, "groups_on_device": False, "states_on_device": 0}

    def _minimal_placement(self) -> Placement:
        """The placement that has what the settings ask for, and nothing more."""
        return Counts(**self._fixed_counts()).placement(len(self._runtime.layers))

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
            calls=self._calls,
            ranks=self._rank_count,
            exchange_bytes=self._exchange_bytes,
            fetch_share=self._fetch_share,
            parts={
                layer.index: [sizes(part.owner.unit).of_part(part) for at in layer.experts for part in at.parts]
                for layer in runtime.layers
                if layer.experts
            },
        )

    @property
    def _calls(self) -> int:
        """The most calls of a layer in one backward."""
        return max(self.current.forwards_at_once, self._calls_in_forward)

    @property
    def adds_on_host(self) -> bool:
        """Whether gradients are summed on the host: over several backwards, or, of experts in parts, over a batch's pieces."""
        in_pieces = self._runtime.batch_cut.asked is not None
        return self.micro_batches > 1 or (in_pieces and any(at.has_trainable for at in self._runtime.experts))

    def _unit_sizes(self, unit: HostUnit) -> UnitSizes:
        # The first sum allocates residuals for all units.
        is_summed = self._runtime.fp32_sums.is_wanted and (self.adds_on_host or self._calls > 1)
        return UnitSizes.of_unit(unit, is_summed, is_shared=self._rank_count > 1)
