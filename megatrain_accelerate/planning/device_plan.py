"""The plan: what lives where, from the model, the batch, the machine's speeds and the budgets. It follows the batches."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.memory.host_limits import CONSTANT_OVERHEAD_BYTES, available_host_bytes
from megatrain_accelerate.optim.device_kernel import can_step_on
from megatrain_accelerate.planning.batch_extent import GROWTH_FACTORS, BatchExtent, enlarged_batch
from megatrain_accelerate.planning.compile_choice import compilation_pays
from megatrain_accelerate.planning.device_memory import SEGMENT_BYTES, USABLE_SHARE_OF_DEVICE, free_bytes, whole_free_bytes
from megatrain_accelerate.planning.engine_sizes import engine_model, state_bytes, unit_sizes
from megatrain_accelerate.planning.evaluation_weights import EvaluationWeights, has_cache, is_next_token
from megatrain_accelerate.planning.layer_measurement import measure_layers
from megatrain_accelerate.planning.machine import Machine, measured_machine
from megatrain_accelerate.planning.placement import Model, Placement, peak_bytes
from megatrain_accelerate.planning.placement_search import Candidate, Choices, PlacementSearch
from megatrain_accelerate.planning.plan_table import plan_table
from megatrain_accelerate.planning.step_outline import evaluation_bytes, outline_step
from megatrain_accelerate.planning.step_profile import StepOutline, extrapolated_outline
from megatrain_accelerate.planning.step_simulation import StepTime
from megatrain_accelerate.planning.tile_choice import measured_to_fit, outline_with_tiles
from megatrain_accelerate.progress import say
from megatrain_accelerate.streaming.runtime import StreamingRuntime
from megatrain_accelerate.units import GIB, MIB

logger = logging.getLogger(__name__)

LIBRARY_WORKSPACE_BYTES = 128 * MIB
"""Device memory for workspaces of cuBLAS (32 MiB a thread that computes) and small tensors outside the step's graph."""

_NOT_PREDICTED = (
    "megatrain: a step can't be predicted for this model (%s: %s), so that its layers stream and are recomputed; set "
    "megatrain_config.keep_layers, resident_layers or device_layers to give them GPU memory"
)

_CLEARLY_LARGER = 1.25


class DevicePlan:
    """Follows the batches: when one is larger than what is planned for, its step is predicted and planned anew.

    Layers are measured once, on the first batch; other steps are extrapolated from it. The second plan and later ones leave
    room for batches that are larger still, so that data of many lengths has few plans.

    Args:
        runtime: the engine at work; the plan places its layers.
        config: the settings.
        device: where the model computes.
        show: whether this process shows the table.
    """

    def __init__(self, runtime: StreamingRuntime, config: MegatrainConfig, device: torch.device, show: bool = False) -> None:
        self._runtime = runtime
        self._config = config
        self._device = device
        self.show = show
        """Whether this process shows the table."""
        self._seen, self._planned = BatchExtent(), BatchExtent()
        self._plans = 0
        self._measured_steps: dict[Hashable, tuple[StepOutline, StepOutline]] = {}
        """For each way of running a step, one that was measured: its estimate, and its measured outline."""
        self._evaluated, self._evaluation_bytes = BatchExtent(), 0
        self._displaced: Placement | None = None
        self._is_interrupted = False
        self.evaluation_weights = EvaluationWeights(runtime, config.evaluation_weights)
        """Which layers stay on the device from one forward without gradients to the next."""
        self._forwards_at_once = 1
        self._foreseen: dict[Hashable, StepOutline] = {}
        self._expected: tuple[int | None, bool | None] = (None, None)
        self.micro_batches = 1
        """Backwards before each optimizer step."""
        self.predicted_bytes = 0
        """Predicted peak of the device's memory for the batch that is planned for; 0 before the first plan, or if unknown."""
        self.predicted_time: StepTime | None = None
        """Predicted step on the batch that is planned for; None before the first, without a GPU or budget, or if unknown."""
        self.placement = Placement()
        count = len(runtime.layers)
        self._choices = Choices.of_settings(config, count)
        runtime.token_tile = 0 if config.token_tile == "auto" else int(config.token_tile)
        self._asked = Placement.of_counts(
            count,
            kept=self._choices.kept or 0,
            offloaded=self._choices.offloaded or 0,
            resident=self._choices.resident or 0,
            on_device=count if self._choices.on_device == -1 else self._choices.on_device or 0,
            groups_on_device=self._choices.on_device == -1,
            inputs_offloaded=self._choices.inputs_offloaded or 0,
            attention_kept=self._choices.attention_kept or 0,
        )
        runtime.keep_states_on_host = self._keep_states_on_host
        self._place(self._asked)

    def held_bytes_by_kind(self) -> dict[str, int]:
        """Bytes that the engine holds on the device now, by what they hold."""
        units = self._runtime.units
        return {
            "slots": self._runtime.prefetcher.device_bytes,
            "gradient_slots": self._runtime.offloader.device_bytes,
            **self._fixed_bytes_by_kind(with_sums=self._runtime.gradient_sums.is_made),
            "resident_layers": self._runtime.prefetcher.resident_bytes,
            "states": sum(state_bytes(unit) - unit.layout.weight_bytes for unit in units if unit.is_on_device),
            "layers": sum(layer.unit.layout.weight_bytes for layer in self._runtime.layers if layer.unit.is_on_device),
            **self._sums_bytes_by_kind(),
        }

    def _sums_bytes_by_kind(self) -> dict[str, int]:
        """The residuals of gradients that are summed on the device: all resident ones, and those of units that live there."""
        runtime = self._runtime
        units = [group.unit for group in runtime.groups] + [layer.unit for layer in runtime.layers if layer.unit.is_on_device]
        held = sum(2 * unit.layout.split_elements for unit in units if unit.gradient_residuals is not None)
        return {"gradient_residuals": held} if held else {}

    def _fixed_bytes_by_kind(self, with_sums: bool) -> dict[str, int]:
        """Those under any placement; ``with_sums`` the sums of a batch's pieces too."""
        part_slots = self._runtime.expert_streams.slot_bytes
        return {
            **({"expert_slots": part_slots} if part_slots else {}),
            "resident": sum(group.device_bytes for group in self._runtime.groups),
            **({"gradient_sums": self._runtime.gradient_sums.planned_bytes} if with_sums else {}),
        }

    def _planned_fixed_bytes_by_kind(self) -> dict[str, int]:
        """Those under any placement, when the next step is under way."""
        runtime = self._runtime
        return self._fixed_bytes_by_kind(runtime.gradient_sums.is_made or runtime.micro_batch_size is not None)

    @property
    def _measures(self) -> bool:
        """Whether layers are measured: elsewhere their costs are reckoned."""
        return self._device.type == "cuda"

    @functools.cached_property
    def _machine(self) -> Machine:
        return measured_machine(self._device, self._runtime.kernels, self._runtime.register)

    def make_room(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Before a forward without gradients: what lives on the device leaves it if the forward wouldn't fit beside it.

        It comes back with the next training forward. Logits of an evaluation are made whole. Where there is room to spare,
        layers that stream are held until then (:mod:`.evaluation_weights`).
        """
        moves = (self.placement.on_device or self.placement.resident) and self._device.type == "cuda"
        holds = self.evaluation_weights.may_be_held
        if self._runtime.open_forwards or not (moves or holds):
            return
        if holds:
            self.evaluation_weights.before_forward(inputs, functools.partial(self._spare_bytes, model, inputs))
        # Of a generation the first forward is the one to predict; of the others those that matter.
        if moves or (holds and has_cache(inputs) and self.has_budget):
            self._predict_evaluation(model, inputs)
        if moves and self._evaluation_bytes > USABLE_SHARE_OF_DEVICE * free_bytes(self._device):
            logger.info("megatrain: layers leave the GPU for an evaluation of %.1f GiB", self._evaluation_bytes / GIB)
            self._displaced = self.placement
            self._place(
                dataclasses.replace(self.placement, resident=frozenset(), on_device=frozenset(), groups_on_device=False)
            )
            torch.cuda.empty_cache()

    def _predict_evaluation(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        extent = BatchExtent.of(inputs)
        # A token's inputs grow by its mask; it needs less than the text before it, and can't run without its cache.
        if self._evaluated.covers(extent) or is_next_token(inputs):
            return
        self._evaluated = self._evaluated.union(extent)
        try:
            self._evaluation_bytes = evaluation_bytes(model, self._runtime, inputs, self._device)
        except Exception as error:  # a model that looks at its data can't be run without any
            logger.info("megatrain: an evaluation's memory can't be predicted for this model (%s)", error)

    def follow(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Plans for a training forward on ``inputs`` (keyword arguments of the model) if no plan covers it.

        A forward that begins before the backward of another (a preference loss on two batches) is recomputed whole, and the
        next plan leaves room for as many at once.
        """
        open_forwards = self._runtime.open_forwards
        if open_forwards:
            if open_forwards >= self._forwards_at_once:
                self._forwards_at_once, self._planned = open_forwards + 1, BatchExtent()
            self._runtime.kept_layers = self._runtime.offloaded_layers = self._runtime.attention_layers = frozenset()
            return
        self._treat_activations()
        if self._displaced is not None:
            placement, self._displaced = self._displaced, None
            torch.cuda.empty_cache()
            self._place(placement)
        extent = BatchExtent.of(inputs)
        if self._planned.covers(extent):
            return
        budget_bytes = self._budget_bytes()
        # A plan that fills the memory has no room for a batch that is only a little larger; a mere prediction may wait.
        if not budget_bytes and self._planned.scaled(_CLEARLY_LARGER).covers(extent):
            return
        self._runtime.refresh_if_written()
        seen = self._seen.union(extent)
        try:
            batch, outline = self._batch_to_plan_for(model, inputs, seen)
        except torch.OutOfMemoryError:
            raise  # and the batch doesn't count: it is tried again smaller
        except Exception as error:  # a model that looks at its data can't be run without any
            logger.log(logging.WARNING if budget_bytes else logging.INFO, _NOT_PREDICTED, type(error).__name__, error)
            self._place(self._settled())
            self._planned = seen
            return
        self._foreseen.clear()
        self._runtime.token_tile = outline.token_tile
        if budget_bytes:
            self._plan(outline, budget_bytes)
        else:
            placed_bytes = peak_bytes(outline, self.model_sizes(), self.placement)
            self.predicted_bytes = self._fixed_bytes(outline) + placed_bytes
        self._seen, self._planned = seen, BatchExtent.of(batch)
        self._plans += 1

    def _batch_to_plan_for(
        self, model: nn.Module, inputs: Mapping[str, Any], seen: BatchExtent
    ) -> tuple[Mapping[str, Any], StepOutline]:
        """Returns the batch to plan for and its step: in the first plan the batch itself, in later ones a batch that covers
        all batches so far and, if such a step fits, larger ones."""
        if self._plans and self.has_budget:
            # Steps may be planned anew for another reason than their batches: more forwards at once.
            growths = () if seen == self._seen else (GROWTH_FACTORS[min(self._plans, len(GROWTH_FACTORS)) - 1],)
            for growth in (*growths, 1.0):
                batch = enlarged_batch(model, inputs, seen, growth)
                if batch is None:
                    break
                try:
                    outline = self._in_proportion(batch, self._outlined(model, batch))
                except Exception as error:  # the model bounds sequences in a way of its own
                    logger.info("megatrain: no larger batches can be planned for (%s)", error)
                    continue
                if outline is not None and self._search_for(outline).something_fits:
                    return batch, outline
        foreseen = self._foreseen.get(self._key(inputs))
        return inputs, foreseen or self._predicted(model, inputs)

    def _fixed_bytes(self, outline: StepOutline) -> int:
        """What such a step takes under any placement."""
        # What others that wait for their backward hold isn't more than what one takes that is recomputed; they share slots.
        every = Placement.of_counts(len(self._runtime.layers), resident=len(self._runtime.layers))
        sizes = dataclasses.replace(self.model_sizes(), gradient_slot_bytes=0)
        waiting = peak_bytes(outline, sizes, every) - sum(layer.weight_bytes for layer in sizes.layers)
        held = sum(self._planned_fixed_bytes_by_kind().values()) + LIBRARY_WORKSPACE_BYTES
        return held + (self._forwards_at_once - 1) * waiting

    def expect_steps(self, steps: int | None, compiles: bool | None = None) -> None:
        """A training begins.

        Args:
            steps: of its optimizer, where their number is known: layers are compiled only if that pays for itself.
            compiles: what the training chose before it was interrupted.
        """
        if (steps, compiles) != self._expected:
            compiled = self._runtime.compiled
            self._expected, compiled.pays = (steps, compiles), compiles if compiled.is_optional else None
            self._measured_steps.clear()
            self._foreseen.clear()
            self.forget()

    @property
    def expected(self) -> tuple[int | None, bool | None]:
        """Steps of the training in progress, and whether it compiles layers; None for what isn't known."""
        return self._expected[0], self._runtime.compiled.pays

    def _choose_compilation(self, outline: StepOutline) -> None:
        compiled, steps = self._runtime.compiled, self._expected[0]
        if compiled.is_optional and compiled.pays is None and steps is not None:
            compiled.pays = compilation_pays(outline, steps * self.micro_batches)
            if not compiled.pays:
                logger.info(
                    "megatrain: %d steps don't pay for compiling the layers (compile_layers: true compiles them)", steps
                )

    def forget(self) -> None:
        """The next batch is planned for as if it were the first: steps are to run in another way from now on."""
        self._seen, self._planned, self._plans = BatchExtent(), BatchExtent(), 0

    @property
    def has_budget(self) -> bool:
        """Whether device memory is planned with; else nothing is placed and no time predicted."""
        return self._budget_bytes() > 0

    def foresee(self, model: nn.Module, inputs: Mapping[str, Any]) -> StepOutline:
        """The outline of a step on ``inputs``, without planning for it. :meth:`follow` on the like takes it over.

        Raises:
            UnsupportedError: the batch can't run in pieces.
            Exception: whatever the model raises when it looks at its data.
        """
        key = self._key(inputs)
        if key not in self._foreseen:
            self._runtime.refresh_if_written()
            token_tile = self._runtime.token_tile
            try:
                self._foreseen[key] = self._predicted(model, inputs)
            finally:
                self._runtime.token_tile = token_tile
        return self._foreseen[key]

    def weigh(self, model: nn.Module, inputs: Mapping[str, Any]) -> Candidate | None:
        """The fastest placement for steps on ``inputs``, which isn't applied; None if none fits the budget.

        Raises:
            Exception: see :meth:`foresee`.
        """
        return self._search_for(self.foresee(model, inputs)).best()

    def _predicted(self, model: nn.Module, inputs: Mapping[str, Any]) -> StepOutline:
        """Returns the outline of a step. The first is measured, later ones are scaled from it where they can be."""
        outline = self._outlined(model, inputs)
        self._choose_compilation(outline)
        found = self._in_proportion(inputs, outline)
        if found is not None and (found is outline or self._search_for(found).something_fits):
            return found
        measured = self._measured_to_fit(model, inputs, outline)
        if measured.token_tile == outline.token_tile:
            self._measured_steps[_way_of(self._runtime, inputs)] = (outline, measured)
        return measured

    def _in_proportion(self, inputs: Mapping[str, Any], outline: StepOutline) -> StepOutline | None:
        """Returns the outline scaled from the measured step, or None if none was measured that it can be scaled from.

        Where nothing is measured, the outline stays as it is.
        """
        if not (self._measures and self.has_budget):
            return outline
        steps = self._measured_steps.get(_way_of(self._runtime, inputs))
        return None if steps is None else extrapolated_outline(outline, *steps, self._machine)

    def _outlined(self, model: nn.Module, inputs: Mapping[str, Any]) -> StepOutline:
        """The outline of a step with the tiles that suit it, which the runtime has from then on."""
        return outline_with_tiles(
            self._runtime,
            self._config.token_tile,
            lambda: outline_step(model, self._runtime, inputs, self._device),
            self._search_for if self.has_budget else None,
        )

    def _search_for(self, outline: StepOutline) -> PlacementSearch:
        return self._search(outline, self._budget_bytes() - self._fixed_bytes(outline))

    def _key(self, inputs: Mapping[str, Any]) -> Hashable:
        shapes = tuple((name, tuple(value.shape)) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        return (self._runtime.micro_batch_size, shapes)

    def _measured_to_fit(self, model: nn.Module, inputs: Mapping[str, Any], outline: StepOutline) -> StepOutline:
        return measured_to_fit(
            self._runtime,
            outline,
            self._config.token_tile,
            lambda: outline_step(model, self._runtime, inputs, self._device),
            lambda made: self._measured(model, inputs, made),
            self._search_for,
        )

    def _measured(self, model: nn.Module, inputs: Mapping[str, Any], outline: StepOutline) -> StepOutline:
        try:
            return measure_layers(model, self._runtime, inputs, outline, self._budget_bytes())
        except torch.OutOfMemoryError:
            if self.placement == self._settled():
                raise
        except Exception as error:  # if it is more than the trial's, the training's own forward raises it
            logger.info("megatrain: layers can't be measured, their costs are reckoned (%s)", error)
            return outline
        # What an earlier plan put on the device for smaller batches makes room.
        self._place(Placement())
        torch.cuda.empty_cache()
        return measure_layers(model, self._runtime, inputs, outline, self._budget_bytes())

    def _plan(self, outline: StepOutline, budget_bytes: int) -> None:
        fixed_bytes = self._fixed_bytes(outline)
        search = self._search(outline, budget_bytes - fixed_bytes)
        found = search.best() or search.leanest(self._settled())
        self.predicted_bytes = fixed_bytes + found.peak_bytes
        self.predicted_time = found.time
        self._place(found.placement)
        if self.show:
            table = plan_table(found, self._runtime, self.predicted_bytes, budget_bytes, outline)
            say(table, file=sys.stderr)
        if self.predicted_bytes > budget_bytes:
            held = {**self._planned_fixed_bytes_by_kind(), "step": found.peak_bytes}
            logger.warning(
                "megatrain: this batch is predicted to take %.1f GiB of GPU memory (%s) and %.1f GiB are planned with; if it "
                "runs out of memory, set megatrain_config.micro_batch_size, or lower per_device_train_batch_size or the "
                "sequence length",
                self.predicted_bytes / GIB,
                ", ".join(f"{kind} {count / GIB:.1f}" for kind, count in held.items()),
                budget_bytes / GIB,
            )

    def _search(self, outline: StepOutline, step_bytes: int) -> PlacementSearch:
        choices = self._choices
        if not self._runtime.states_may_move or not can_step_on(self._device):
            choices = dataclasses.replace(choices, on_device=0)
        return PlacementSearch(outline, self.model_sizes(), self._machine, step_bytes, choices, self._host_budget_bytes())

    def _host_budget_bytes(self) -> int:
        """Host memory that offloaded activations could take if all units lived on the host."""
        host_bytes = available_host_bytes(self._config.host_memory_gib) - CONSTANT_OVERHEAD_BYTES
        return host_bytes - sum(
            unit_sizes(unit, self._runtime, self.micro_batches).host_bytes for unit in self._runtime.units if unit.is_on_device
        )

    def _place(self, placement: Placement) -> None:
        before, self.placement = self.placement, placement
        self._treat_activations()
        where = (placement.resident, placement.on_device, placement.groups_on_device)
        if self._is_interrupted or where != (before.resident, before.on_device, before.groups_on_device):
            self._is_interrupted = True  # until all have moved
            self._runtime.place(*where)
            self._is_interrupted = False

    def _treat_activations(self) -> None:
        runtime, placement = self._runtime, self.placement
        runtime.kept_layers, runtime.offloaded_layers = placement.kept, placement.offloaded
        runtime.input_offloaded_layers = placement.inputs_offloaded
        runtime.attention_layers = placement.attention_kept
        runtime.activations.spacing = placement.offload_spacing
        runtime.memory_budgets = placement.budgets

    def _settled(self) -> Placement:
        """What the settings ask for and nothing more, as far as the optimizers allow it."""
        return self._asked if self._runtime.states_may_move else _on_host(self._asked)

    def _keep_states_on_host(self) -> None:
        """An optimizer works there from now on."""
        self._displaced = None if self._displaced is None else _on_host(self._displaced)
        self._place(_on_host(self.placement))

    def model_sizes(self) -> Model:
        """What the simulation has to know of the engine."""
        return engine_model(self._runtime, self._config, self.micro_batches)

    def _budget_bytes(self) -> int:
        """Bytes of the device that a step may take, what the engine holds included; 0 without a GPU."""
        if self._config.gpu_memory_bytes is not None:
            return self._config.gpu_memory_bytes
        if self._device.type != "cuda":
            return 0
        return int(USABLE_SHARE_OF_DEVICE * (free_bytes(self._device) + sum(self.held_bytes_by_kind().values())))

    def _spare_bytes(self, model: nn.Module, inputs: Mapping[str, Any]) -> int | None:
        """Bytes of the budget beside what the engine holds and an evaluation needs; None without a budget.

        Half of what would be there if the need is unknown.
        """
        budget_bytes = self._budget_bytes()
        if not budget_bytes:
            return None
        self._predict_evaluation(model, inputs)
        left = budget_bytes - sum(self.held_bytes_by_kind().values())
        if self._device.type == "cuda":
            left = min(left, int(USABLE_SHARE_OF_DEVICE * whole_free_bytes(self._device)) - SEGMENT_BYTES)
        return left - self._evaluation_bytes if self._evaluation_bytes else left // 2


def _way_of(runtime: StreamingRuntime, inputs: Mapping[str, Any]) -> Hashable:
    """Returns what two steps must share for the costs of one to be scaled from the other's."""
    return runtime.micro_batch_size, frozenset(inputs)


def _on_host(placement: Placement) -> Placement:
    return dataclasses.replace(placement, on_device=frozenset(), groups_on_device=False)
