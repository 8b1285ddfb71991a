"""An estimate as a table for people, as JSON for programs, and as a plot of tokens a second against batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.estimate.forecast import Forecast, Forecaster
from megatrain_accelerate.estimate.machine_description import MachineDescription
from megatrain_accelerate.estimate.meta_engine import PositionTable
from megatrain_accelerate.planning.plan_table import experts_text
from megatrain_accelerate.tracing import empty_figure
from megatrain_accelerate.units import GB, GIB


@dataclasses.dataclass(frozen=True)
class Limits:
    """What fits at most, where every layer streams and is recomputed, and inputs leave as far as the host has room."""

    batch: int
    """Sequences of the estimate's length."""
    context: int
    """Tokens of a single sequence."""
    longest: Forecast | None
    """The step on one sequence of the longest context."""
    batch_is_least: bool = False
    """Whether more than the batch wasn't tried."""
    context_is_least: bool = False
    """The same of the context."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """All that is found out about one model on one machine. Bytes; speeds a second."""

    model: str
    forecaster: Forecaster
    stated_positions: int | None
    """The longest sequence that the configuration names."""
    table: PositionTable | None
    """Of positions, which no sequence can be longer than; None if the model has none."""
    machine: MachineDescription
    length: int
    """Tokens of each sequence in the rows."""
    least_gpu_bytes: int
    """GPU memory of one sequence where it takes the least."""
    token_gpu_bytes: int | None
    """The same of a sequence of a single token; None if the GPU has room for the longer one."""
    limits: Limits | None
    rows: Sequence[Forecast]

    @property
    def fits(self) -> bool:
        """Whether the model trains at all: its states fit the host memory, and one sequence the GPU."""
        return self.missing_host_bytes <= 0 and self.least_gpu_bytes <= self.machine.gpu_bytes

    @property
    def missing_host_bytes(self) -> int:
        return self.forecaster.host_store_bytes - self.forecaster.host_bytes

    @property
    def facts(self) -> dict[str, Any]:
        forecaster, runtime = self.forecaster, self.forecaster.engine.runtime
        return {
            "model": self.model,
            "model_class": type(forecaster.model).__name__,
            "parameters": forecaster.parameters,
            "active_parameters": forecaster.active_parameters,
            "layers": len(runtime.layers),
            "layer_parameters": max(layer.parameter_count for layer in runtime.layers),
            "experts": experts_text(runtime) if runtime.experts else None,
            "stated_positions": self.stated_positions,
            "table_positions": self.table and self.table.positions,
        }


def table(estimate: Estimate) -> str:
    machine, speeds, model = estimate.machine, estimate.machine.machine, estimate.facts
    needed_bytes, budget_bytes = estimate.forecaster.host_store_bytes, estimate.forecaster.host_bytes
    parameters, active = model["parameters"], model["active_parameters"]
    budget = "(--host-memory isn't given)" if machine.host_bytes is None else f"of {budget_bytes / GIB:,.1f} GiB"
    of_them = f", {active / 1e9:.2f} G of them active" if active < parameters else ""
    facts = [
        ("model", f"{estimate.model}: {model['model_class']}, {parameters / 1e9:.2f} G parameters{of_them}"),
        ("layers", f"{model['layers']}, the largest of {model['layer_parameters'] / 1e6:,.0f} M parameters"),
        *([("experts", model["experts"])] if model["experts"] else []),
        ("GPU", f"{machine.gpu}, {machine.gpu_total_bytes / GIB:.1f} GiB, planned with {machine.gpu_bytes / GIB:.1f}"),
        (
            "speeds",
            f"products {speeds.device_flops / 1e12:.0f} TFLOPS, GPU memory {speeds.device_bytes / 1e12:.2f} TB/s, link "
            f"{speeds.h2d_bytes / GB:.0f} and {speeds.d2h_bytes / GB:.0f} GB/s, host step "
            f"{speeds.host_step_parameters / 1e9:.1f} G parameters/s",
        ),
        *(("", note) for note in machine.notes),
        ("host memory", f"needs {needed_bytes / GIB:,.1f} GiB ({needed_bytes / parameters:.1f} bytes a parameter) {budget}"),
        ("GPU memory", f"from {estimate.least_gpu_bytes / GIB:.1f} GiB, for one sequence of {estimate.length:,} tokens"),
    ]
    rows = [*estimate.rows]
    if (limits := estimate.limits) is not None:
        rows += [limits.longest] if limits.longest is not None else []
        batch, context = (
            f"at least {most:,}" if is_least else f"{most:,}"
            for most, is_least in ((limits.batch, limits.batch_is_least), (limits.context, limits.context_is_least))
        )
        stated = f"; the configuration names {estimate.stated_positions:,}" if estimate.stated_positions else ""
        if (positions := estimate.table) is not None:
            stated = f"; the model has {positions.positions:,} positions ({positions.name})"
        facts += [
            ("largest batch", f"{batch} sequences of {estimate.length:,} tokens"),
            ("longest context", f"{context} tokens, one sequence{stated}"),
        ]
    width = max(len(name) for name, _ in facts)
    lines = [f"{name:<{width}}  {text}" for name, text in facts]
    cells = [_HEADER, *map(_row, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["", *("  ".join(map(str.rjust, row, widths)) for row in cells)]
    lines += [
        "",
        "layers: on the GPU with their states / activations kept / offloaded, of all",
        *(
            ["as one: the stock Trainer's micro-batches run as one batch (join_micro_batches)"]
            * any(row.joined for row in rows)
        ),
        *(["by N: each layer computes N sequences at once"] * any(row.samples for row in rows)),
        *_verdict(estimate),
    ]
    return "\n".join(lines)


_HEADER = ("sequences", "tokens each", "step, s", "tokens/s", "TFLOPS", "GPU, GiB", "host, GiB", "layers", "bound by")


def _row(row: Forecast) -> tuple[str, ...]:
    placement = row.candidate.placement
    sets = (placement.on_device, placement.kept, placement.offloaded)
    layers = " / ".join(str(len(found)) for found in sets) + f" of {row.layers}"
    batch = f"{row.batch:,}" + (f" x {row.micro_batches}" if row.micro_batches > 1 else "") + (" as one" if row.joined else "")
    batch += f" by {row.samples}" if row.samples else ""
    return (
        batch + ("" if row.fits else " (doesn't fit)"),
        f"{row.length:,}",
        f"{row.seconds:.3f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.tflops:.0f}",
        f"{row.gpu_bytes / GIB:.1f}",
        f"{row.host_bytes / GIB:.1f}",
        layers,
        row.candidate.time.bound_by,
    )


def _verdict(estimate: Estimate) -> list[str]:
    if estimate.missing_host_bytes > 0:
        missing = f"It doesn't fit: {estimate.missing_host_bytes / GIB:,.1f} GiB of host memory are missing"
        if (found := estimate.forecaster.settings_that_fit()) is None:
            return [f"{missing}, and no settings take so little: freeze a part of the model, or train LoRA adapters (PEFT)"]
        changes, needed = found
        costs = ["the Trainer's max_grad_norm must be 0"] * ("host_gradients" in changes)
        costs += ["such moments give slightly other numbers"] * ("moments_dtype" in changes)
        settings = " ".join(f"{name}={value}" for name, value in changes.items())
        return [f"{missing}. It fits with --set {settings} ({needed / GIB:,.1f} GiB; {'; '.join(costs)})"]
    if estimate.fits:
        return []
    planned = estimate.machine.gpu_bytes
    what, needed, why = f"one sequence of {estimate.length:,} tokens", estimate.least_gpu_bytes, "; shorten it"
    if estimate.token_gpu_bytes is not None and estimate.token_gpu_bytes > planned:
        what, needed = "a single token", estimate.token_gpu_bytes
        why = ", for what lives outside the layers and the slots of streamed ones; take a GPU with more"
    more, there = f"{(needed - planned) / GIB:,.1f} GiB", f"{planned / GIB:,.1f} GiB of GPU memory"
    return [f"It doesn't fit: {what} takes {more} more than the {there} that are planned with{why}"]


def as_json(estimate: Estimate) -> dict[str, Any]:
    """The estimate as plain data; units are in the names."""
    machine, limits, token_bytes = estimate.machine, estimate.limits, estimate.token_gpu_bytes
    return {
        **estimate.facts,
        "gpu": machine.gpu,
        "gpu_memory_gib": machine.gpu_total_bytes / GIB,
        "gpu_planned_gib": machine.gpu_bytes / GIB,
        "speeds": dataclasses.asdict(machine.machine),
        "notes": list(machine.notes),
        "host_needed_gib": estimate.forecaster.host_store_bytes / GIB,
        "host_memory_gib": None if machine.host_bytes is None else estimate.forecaster.host_bytes / GIB,
        "gpu_least_gib": estimate.least_gpu_bytes / GIB,
        "gpu_token_gib": None if token_bytes is None else token_bytes / GIB,
        "fits": estimate.fits,
        "length": estimate.length,
        "limits": limits
        and {
            "largest_batch": limits.batch,
            "largest_batch_is_least": limits.batch_is_least,
            "longest_context": limits.context,
            "longest_context_is_least": limits.context_is_least,
            "longest": limits.longest and _row_as_json(limits.longest),
        },
        "rows": [_row_as_json(row) for row in estimate.rows],
    }


def _row_as_json(row: Forecast) -> dict[str, Any]:
    placement, time = row.candidate.placement, row.candidate.time
    return {
        **{name: getattr(row, name) for name in ("batch", "length", "micro_batches", "joined", "fits")},
        "sequences_at_once": row.samples,
        "step_seconds": row.seconds,
        "tokens_per_second": row.tokens_per_second,
        "tflops_6n": row.tflops,
        "gpu_gib": row.gpu_bytes / GIB,
        "host_gib": row.host_bytes / GIB,
        "layers_on_gpu": len(placement.on_device),
        "layers_kept": len(placement.kept),
        "layers_offloaded": len(placement.offloaded),
        "outside_on_gpu": placement.groups_on_device,
        "kept_gib": row.kept_bytes / GIB,
        "offloaded_gib": row.offloaded_bytes / GIB,
        "bound_by": time.bound_by,
        "busy_seconds": {"compute": time.compute, "h2d": time.h2d, "d2h": time.d2h, "host_step": time.host_step},
    }


def plot(estimate: Estimate, path: Path) -> None:
    """Draws tokens a second against the batch; the path's suffix names the picture's format.

    Raises:
        UnsupportedError: matplotlib isn't installed.
        ConfigError: nothing can be written there, or not in that format.
    """
    figure = empty_figure((8, 5), "--plot", "take --json")
    axes = figure.add_subplot()
    rows = sorted(estimate.rows, key=lambda row: row.batch)
    batches = [row.batch for row in rows]
    axes.plot(batches, [row.tokens_per_second for row in rows], color="#4c9be8", zorder=1)
    for fits, marker, label in ((True, "o", "fits"), (False, "x", "doesn't fit")):
        speeds = {row.batch: row.tokens_per_second for row in rows if row.fits is fits}
        if speeds:
            axes.scatter(list(speeds), list(speeds.values()), marker=marker, color="#1f5fa8", label=label, zorder=2)
    for row in rows:
        text = f"{row.gpu_bytes / GIB:.0f} GiB, {row.candidate.time.bound_by}"
        axes.annotate(text, (row.batch, row.tokens_per_second), textcoords="offset points", xytext=(4, -12), fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"sequences of {estimate.length:,} tokens in a batch")
    axes.set_ylabel("tokens a second")
    axes.set_title(f"{estimate.model} on {estimate.machine.gpu}, predicted", fontsize=10)
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
