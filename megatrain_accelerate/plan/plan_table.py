"""The plan as a short table, shown when a training begins and when it is planned anew."""

from __future__ import annotations

import textwrap

from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.plan.plan_record import PlanRecord
from megatrain_accelerate.plan.step_profile import StepOutline
from megatrain_accelerate.plan.step_ways import tiles_text
from megatrain_accelerate.units import GIB

_COLUMNS = 80


def plan_table(plan: PlanRecord, runtime: StreamingRuntime, budget_bytes: int, outline: StepOutline) -> str:
    """What lies where once the plan is applied, the predicted memory and step, and what bounds it."""
    placement, time = plan.placement, plan.predicted_time
    outline = outline.at(*placement.budgets)
    count, on_gpu = len(runtime.layers), len(placement.on_device)
    recomputed = count - len(placement.kept) - len(placement.offloaded)
    there = [unit for unit in runtime.units if not unit.is_on_device]
    host = plan.offloaded_bytes + sum(sum(unit.bytes_by_kind().values()) + unit.promised_bytes for unit in there)
    calls = [(outline.profiles[event.kind], event.layer) for event in outline.forward_calls]
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
            + (f", {away} of them from inputs on the host" if away else "")
            + (f", {attending} of them but for attention" if attending else "")
            + (f" (its results on the host for {both})" if both else "")
            + budgets,
        ),
        *([("pieces", f"{outline.samples} samples of the batch at once in each layer")] if outline.samples else []),
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
        first, *others = textwrap.wrap(text, _COLUMNS - width - 4)
        lines += [f"  {name:<{width}}  {first}", *(f"  {'':<{width}}  {other}" for other in others)]
    return "\n".join(lines)


def experts_text(runtime: StreamingRuntime) -> str:
    counts = sorted({len(experts.parts) for experts in runtime.experts})
    largest = max(part.unit.layout.weight_bytes for experts in runtime.experts for part in experts.parts)
    parts = " or ".join(str(count) for count in counts)
    return f"those of {len(runtime.experts)} layers streamed in {parts} parts, of up to {largest / GIB:.2f} GiB"
