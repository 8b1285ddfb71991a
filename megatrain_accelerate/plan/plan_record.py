"""A plan as plain data in checkpoints, and as a table that is printed after planning. A resumed training takes over its plan:
one made anew, from the first batch after the checkpoint, could differ, and compiled layers would give other bits.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.plan.other_batches import BatchExtent
from megatrain_accelerate.plan.step_profile import StepProfile
from megatrain_accelerate.plan.step_simulation import StepTime
from megatrain_accelerate.units import GIB

RESUMED_SHARE_OF_DEVICE = 0.95
"""Share of free memory that a resumed plan may take. A new plan takes less, since free memory varies by a few MiB."""

_TABLE_COLUMNS = 80


def made_for(model: nn.Module, runtime: StreamingRuntime, config: MegatrainConfig, micro_batches: int) -> str:
    """A text of what must be equal for a recorded plan to be taken over: GPU, torch, settings, model, ranks and way of
    stepping."""
    device = runtime.streams.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    layouts = [(at.weight_bytes, at.gradient_bytes, at.parameter_count) for at in (unit.layout for unit in runtime.units)]
    configs = (getattr(module, "config", None) for module in model.modules())
    attention = sorted({str(getattr(config, "_attn_implementation", None)) for config in configs})
    way = (runtime.batch_cut.asked, micro_batches, runtime.states_may_move, runtime.fp32_sums.ranks)
    return repr((gpu, torch.__version__, config, layouts, attention, way))


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """The last plan of a :class:`~megatrain_accelerate.plan.device_plan.DevicePlan`, and what the next plan depends on."""

    made_for: str = ""
    """What :func:`made_for` returned. The plan is only taken over where it returns the same."""
    offloaded_bytes: int = 0
    """Host memory of offloaded activations and inputs."""
    seen: BatchExtent = dataclasses.field(default_factory=BatchExtent)
    """An extent that covers all batches so far."""
    planned: BatchExtent = dataclasses.field(default_factory=BatchExtent)
    """The extent of the largest batch that the plan covers."""
    held: tuple[BatchExtent, ...] = ()
    """Extents that the plan doesn't cover and that turned out to fit it."""
    row_sizes: tuple[int, ...] = ()
    """Row sizes that show whether sizes vary (:func:`.sizes_vary`), so that compiled layers need one graph for all sizes."""
    plans: int = 0
    forwards_at_once: int = 1
    """The most forwards that may wait for their backward at a time."""
    samples: int | None = None
    """Samples of a piece, as the plan has chosen (:mod:`.step_ways`). None where it left that to the settings."""
    token_tile: int = 0
    """Tokens of a tile in the layers; 0 for none."""
    placement: Placement = dataclasses.field(default_factory=Placement)
    """The placement for the largest batch."""
    predicted_bytes: int = 0
    """The most device memory that a step is predicted to take. 0 before the first plan, and if it isn't predicted."""
    predicted_time: StepTime | None = None
    """Predicted time of a step on the usual batch if there is one, else on the largest. None if it isn't predicted."""
    batches: int = 0
    tokens: int = 0
    """Tokens of all batches so far, as :attr:`BatchExtent.real` counts them."""
    usual_share: float = 1.0
    """Tokens of a batch of the mean size, the *usual* one, over those of the largest that the plan covers."""
    usual_placement: Placement = dataclasses.field(default_factory=Placement)
    """The placement for batches up to the usual one. Units live where :attr:`placement` has them."""
    usual_bytes: int = 0
    """Device memory that a step on the usual batch is predicted to take."""
    is_linear: bool = False
    """Whether the placements differ in kept layers alone, whose number :meth:`at` may interpolate between the two batches."""

    def at(self, share: float) -> tuple[Placement, int]:
        """The placement for a batch with this share of the largest one's tokens, and the most bytes that it is predicted to
        take. A batch of ``t`` tokens with ``k`` kept layers takes ``a + (b + c k) t`` bytes: ``c`` for each token in each kept
        layer, ``b`` more for each token, and ``a`` in any case. So the most kept layers that fit are linear in ``1 / t``, and
        the bytes with them are linear in ``t``."""
        if share <= self.usual_share < 1.0:
            return self.usual_placement, self.usual_bytes
        if share >= 1.0 or not self.is_linear:
            return self.placement, self.predicted_bytes
        count, last_kept = len(self.placement.kept), max(self.usual_placement.kept, default=0)
        more = (len(self.usual_placement.kept) - count) * (1 / share - 1) / (1 / self.usual_share - 1)
        kept = frozenset(range(last_kept + 1 - count - int(more), last_kept + 1))
        above = (share - self.usual_share) / (1.0 - self.usual_share)
        predicted = round(self.usual_bytes + above * (self.predicted_bytes - self.usual_bytes))
        return dataclasses.replace(self.placement, kept=kept), predicted

    def as_data(self) -> dict[str, Any]:
        """The record as JSON data: numbers, texts, lists and dicts."""
        data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=sorted))  # of sets
        return data

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> PlanRecord | None:
        """The reverse of :meth:`as_data`. None for data with other field names, from another version of this package."""
        placements = dict.fromkeys(("placement", "usual_placement"), Placement)
        kinds = {"seen": BatchExtent, "planned": BatchExtent, "predicted_time": StepTime, **placements}
        if data.get("predicted_time") is None:
            del kinds["predicted_time"]
        pairs = [(cls, data), *((kind, data.get(name, {})) for name, kind in kinds.items())]
        pairs += [(BatchExtent, extent) for extent in data.get("held", ())]
        if any({field.name for field in dataclasses.fields(kind)} != found.keys() for kind, found in pairs):
            return None
        held = tuple(BatchExtent(**extent) for extent in data["held"])
        data = {**data, "row_sizes": tuple(data["row_sizes"]), "held": held}
        for name in placements:
            at = data[name]
            sets = {key: frozenset(value) for key, value in at.items() if isinstance(value, list)}
            data[name] = {**at, **sets, "budgets": tuple(at["budgets"])}
        return cls(**{**data, **{name: kind(**data[name]) for name, kind in kinds.items()}})


def plan_table(plan: PlanRecord, runtime: StreamingRuntime, budget_bytes: int, step_profile: StepProfile) -> str:
    """The plan as a table: where everything is once it is applied, and a step's predicted memory, time and bottleneck."""
    placement, time = plan.placement, plan.predicted_time
    step_profile = step_profile.at(*placement.budgets)
    count, on_gpu = len(runtime.layers), len(placement.on_device)
    recomputed = count - len(placement.kept) - len(placement.offloaded)
    there = [unit for unit in runtime.units if not unit.is_on_device]
    host = plan.offloaded_bytes + sum(unit.touched_bytes + unit.promised_bytes for unit in there)
    calls = [(step_profile.profiles[event.kind], event.layer) for event in step_profile.forward_calls]
    kept_bytes = sum(profile.kept_bytes for profile, layer in calls if layer in placement.kept)
    lean_bytes = sum(profile.lean_bytes for profile, layer in calls if placement.is_recomputed(layer))
    low, high = placement.budgets
    budgets = f"; memory budgets {high:g} and {low:g} ({lean_bytes / GIB:.1f} GiB)" if (low, high) != (0.0, 1.0) else ""
    away = sum(map(placement.offloads_inputs, range(count)))
    attending, both = len(placement.attention_kept), len(placement.attention_kept & placement.inputs_offloaded)
    states = f", {len(placement.states_on_device)} more stepped there" if placement.states_on_device else ""
    outside = "GPU" if placement.groups_on_device else "host, stepped on the GPU" if states else "host"
    rows = [
        ("weights", f"{count - on_gpu} of {count} layers streamed, {on_gpu} on the GPU with their states{states}"),
        *([("experts", experts_text(runtime))] if runtime.experts else []),
        ("states outside the layers", f"on the {outside}"),
        (
            "activations",
            f"{len(placement.kept)} layers kept ({kept_bytes / GIB:.1f} GiB), "
            f"{len(placement.offloaded)} offloaded, {recomputed} recomputed"
            + (f", {away} of them from offloaded inputs" if away else "")
            + (f", {attending} of them without recomputing attention" if attending else "")
            + (f" (its results on the host for {both})" if both else "")
            + budgets,
        ),
        *([("pieces", f"{step_profile.samples} samples of the batch at once in each layer")] if step_profile.samples else []),
        *([("tiles", tiles_text(runtime))] if runtime.token_tile else []),
        ("GPU memory", f"{plan.predicted_bytes / GIB:.1f} of {budget_bytes / GIB:.1f} GiB"),
        ("host memory", f"{host / GIB:.1f} GiB"),
    ]
    if plan.usual_share < 1.0:
        kept = f"{len(plan.usual_placement.kept)} layers kept, {plan.usual_bytes / GIB:.1f} GiB of GPU memory"
        rows.append(("a batch of the mean size", kept))
    if time is not None:
        parts = f"compute {time.compute:.3f}, H2D {time.h2d:.3f}, D2H {time.d2h:.3f}, host step {time.host_step:.3f} s"
        step = f"{time.seconds:.3f} s, bound by {time.bound_by} ({parts})"
        rows.append(("its step" if plan.usual_share < 1.0 else "step", step))
    width = max(len(name) for name, _ in rows)
    lines = ["megatrain: plan"]
    for name, text in rows:
        first, *others = textwrap.wrap(text, _TABLE_COLUMNS - width - 4)
        lines += [f"  {name:<{width}}  {first}", *(f"  {'':<{width}}  {other}" for other in others)]
    return "\n".join(lines)


def experts_text(runtime: StreamingRuntime) -> str:
    counts = sorted({len(experts.parts) for experts in runtime.experts})
    largest = max(part.unit.layout.weight_bytes for experts in runtime.experts for part in experts.parts)
    parts = " or ".join(str(count) for count in counts)
    return f"those of {len(runtime.experts)} layers streamed in {parts} parts, of up to {largest / GIB:.2f} GiB"


def tiles_text(runtime: StreamingRuntime) -> str:
    """For each class of layers, the modules in them that run by tiles, or that none does."""
    tiled: dict[str, list[str]] = {}
    for layer in runtime.layers:
        names = tiled.setdefault(type(layer.module).__name__, [])
        names += [name for name in layer.tiles.tiled_names if name not in names]
    parts = [
        f"{', '.join(names)} of {kind}" if names else f"none in {kind}, which runs whole" for kind, names in tiled.items()
    ]
    outside = runtime.outside_tiles.tiled_names
    parts += [f"{', '.join(outside)} outside the layers"] if outside else []
    return f"{runtime.token_tile} tokens: {'; '.join(parts)}"
