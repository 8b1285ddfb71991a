"""Formats an estimate as a table, as JSON or as a picture, and estimates of several models likewise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.estimate.findings import MOST_BATCH, MOST_TOKENS, Estimate
from megatrain_accelerate.estimate.forecast import Forecast
from megatrain_accelerate.estimate.machine_description import MachineDescription
from megatrain_accelerate.plan.plan_record import experts_text
from megatrain_accelerate.tracing import empty_figure
from megatrain_accelerate.units import GB, GIB

STOCK_BYTES = 16
"""GPU memory per parameter of the stock Trainer in bf16 autocast: weight, gradient, two moments in fp32. FSDP2 divides it."""
FSDP2_OFFLOAD_BYTES, ZERO3_OFFLOAD_BYTES = 18, 20
"""Host memory per parameter if FSDP2 or DeepSpeed's ZeRO-3 offloads the states."""


def table(estimate: Estimate) -> Iterator[str]:
    """Yields the lines of the table, each as soon as it is known."""
    machine, forecaster, runtime = estimate.machine, estimate.forecaster, estimate.forecaster.engine.runtime
    needed_bytes, parameters, active = forecaster.host_store_bytes, forecaster.parameters, forecaster.active_parameters
    budget = "(--host-memory isn't given)" if machine.host_bytes is None else f"of {forecaster.host_bytes / GIB:,.1f} GiB"
    of_them = f", {active / 1e9:.2f} G of them active" if active < parameters else ""
    model_class, largest = type(forecaster.model).__name__, max(layer.parameter_count for layer in runtime.layers)
    yield _fact("model", f"{estimate.model}: {model_class}, {parameters / 1e9:.2f} G parameters{of_them}")
    yield _fact("layers", f"{len(runtime.layers)}, the largest of {largest / 1e6:,.0f} M parameters")
    if runtime.experts:
        yield _fact("experts", experts_text(runtime))
    yield from _machine_facts(machine)
    yield _fact(
        "host memory",
        f"needs {needed_bytes / GIB:,.1f} GiB{' on each machine' * (machine.machines > 1)} "
        f"({needed_bytes / parameters:.1f} bytes a parameter) {budget}",
    )
    if others := _other_tools(estimate):
        fits = "fits" if others["fsdp2_fits"] else "doesn't fit"
        yield _fact(
            "other tools",
            f"FSDP2 takes {others['fsdp2_gpu_gib']:,.1f} GiB of each GPU before activations, which {fits}; its CPU offload "
            f"{others['fsdp2_host_gib']:,.1f} GiB of host memory, DeepSpeed ZeRO-3's {others['zero3_host_gib']:,.1f}",
        )
    yield ""
    yield _line(_COLUMNS)
    rows = []
    for row in estimate.rows():
        rows.append(row)
        yield _line(_cells(row))
    limits = estimate.limits
    if limits is not None and limits.longest is not None:
        rows.append(limits.longest)
        yield _line(_cells(limits.longest))
    yield ""
    yield "layers: on the GPU with their states / activations kept / offloaded, of all"
    if any(row.joined for row in rows):
        yield "as one: the stock Trainer's micro-batches run as one batch (join_micro_batches)"
    if any(row.samples for row in rows):
        yield "by N: each layer computes N sequences at once"
    if any(row.candidate.placement.states_on_device for row in rows):
        yield "+N: N more layers are stepped on the GPUs, which divide their states"
    if machine.all_gpus > 1:
        of_all, each = ("tokens/s, host", "each") if machine.machines == 1 else ("tokens/s", "each GPU; host: of each machine")
        yield f"{of_all}: of all {machine.all_gpus} GPUs; sequences (per_device_train_batch_size) and the rest: of {each}"
    yield ""
    yield _fact("GPU memory", f"from {estimate.least_gpu_bytes / GIB:.1f} GiB, for one sequence of {estimate.length:,} tokens")
    if limits is not None:
        batch = "at least " * (limits.batch == MOST_BATCH) + f"{limits.batch:,}"
        context = "at least " * (limits.context == MOST_TOKENS) + f"{limits.context:,}"
        stated = f"; the configuration names {estimate.stated_positions:,}" if estimate.stated_positions else ""
        if (positions := estimate.table) is not None:
            stated = f"; the model has {positions.positions:,} positions ({positions.name})"
        yield _fact("largest batch", f"{batch} sequences of {estimate.length:,} tokens")
        yield _fact("longest context", f"{context} tokens, one sequence{stated}")
    yield from _verdict(estimate)


def _machine_facts(machine: MachineDescription) -> Iterator[str]:
    speeds = machine.machine
    sizes = f"{machine.gpu_total_bytes / GIB:.1f} GiB, planned with {machine.gpu_bytes / GIB:.1f}"
    yield _fact("GPU", f"{machine.gpus_text}, {sizes}" + " each" * (machine.gpus > 1))
    yield _fact(
        "speeds",
        f"products {speeds.device_flops / 1e12:.0f} TFLOPS, GPU memory {speeds.device_bytes / 1e12:.2f} TB/s, link "
        f"{speeds.h2d_bytes / GB:.0f} and {speeds.d2h_bytes / GB:.0f} GB/s, host step "
        f"{machine.gpus * speeds.host_step_parameters / 1e9:.1f} G parameters/s",
    )
    yield from (_fact("", note) for note in machine.notes)


def _fact(name: str, text: str) -> str:
    return f"{name:<15}  {text}"


_COLUMNS = {
    "sequences": 18,
    "tokens each": 11,
    "step, s": 9,
    "tokens/s": 9,
    "TFLOPS": 6,
    "GPU, GiB": 8,
    "host, GiB": 9,
    "layers": 20,
    "bound by": 0,
}
"""Names and widths, which are fixed, since lines are printed before later rows are known."""


def _line(cells: Iterable[str]) -> str:
    return "  ".join(map(str.rjust, cells, _COLUMNS.values()))


def _cells(row: Forecast) -> tuple[str, ...]:
    placement = row.candidate.placement
    on_device, stepped = len(placement.on_device), len(placement.states_on_device)
    counts = (f"{on_device}+{stepped}" if stepped else on_device, len(placement.kept), len(placement.offloaded))
    layers = " / ".join(map(str, counts)) + f" of {len(row.forecaster.engine.runtime.layers)}"
    batch = f"{row.batch:,}" + (f" x {row.micro_batches}" if row.micro_batches > 1 else "") + (" as one" if row.joined else "")
    batch += f" by {row.samples}" if row.samples else ""
    return (
        batch,
        f"{row.length:,}",
        f"{row.seconds:.3f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.tflops:.0f}",
        f"{row.gpu_bytes / GIB:.1f}",
        f"{row.host_bytes / GIB:.1f}",
        layers,
        row.candidate.time.bound_by + ("" if row.fits else " (doesn't fit)"),
    )


def _verdict(estimate: Estimate) -> Iterator[str]:
    """Yields a line on what is missing and what helps, or none if the model fits."""
    if estimate.missing_host_bytes > 0:
        missing = f"It doesn't fit: {estimate.missing_host_bytes / GIB:,.1f} GiB of host memory are missing"
        if (found := estimate.forecaster.settings_that_fit()) is None:
            yield f"{missing}, and no settings take so little: freeze a part of the model, or train LoRA adapters (PEFT)"
            return
        changes, needed = found
        costs = ["the Trainer's max_grad_norm must be 0"] * ("host_gradients" in changes)
        costs += ["such moments give slightly other numbers"] * ("moments_dtype" in changes)
        settings = " ".join(f"{name}={value}" for name, value in changes.items())
        yield f"{missing}. It fits with --set {settings} ({needed / GIB:,.1f} GiB; {'; '.join(costs)})"
    elif not estimate.fits:
        planned = estimate.machine.gpu_bytes
        more, there = f"{(estimate.least_gpu_bytes - planned) / GIB:,.1f} GiB", f"{planned / GIB:,.1f} GiB of GPU memory"
        remedy = "shorten it, or take a GPU with more"
        if estimate.limits is not None and estimate.limits.context == 0:
            remedy = "take a GPU with more: a single token doesn't fit either"
        yield (
            f"It doesn't fit: one sequence of {estimate.length:,} tokens takes {more} more than the {there} that are planned "
            f"with; {remedy}"
        )


def _other_tools(estimate: Estimate) -> dict[str, Any]:
    """Returns what other tools need for the model's states on each GPU and machine. Empty with a single GPU."""
    machine = estimate.machine
    if machine.all_gpus == 1:
        return {}
    parameters = estimate.forecaster.parameters / machine.machines
    return {
        "fsdp2_gpu_gib": _stock_bytes(estimate) / GIB,
        "fsdp2_fits": _stock_bytes(estimate) <= machine.gpu_bytes,
        "fsdp2_host_gib": FSDP2_OFFLOAD_BYTES * parameters / GIB,
        "zero3_host_gib": ZERO3_OFFLOAD_BYTES * parameters / GIB,
    }


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Returns the estimate as plain data, with units in the names."""
    machine, limits = estimate.machine, estimate.limits
    forecaster, runtime = estimate.forecaster, estimate.forecaster.engine.runtime
    return {
        "model": estimate.model,
        "model_class": type(forecaster.model).__name__,
        "parameters": forecaster.parameters,
        "active_parameters": forecaster.active_parameters,
        "layers": len(runtime.layers),
        "layer_parameters": max(layer.parameter_count for layer in runtime.layers),
        "experts": experts_text(runtime) if runtime.experts else None,
        "stated_positions": estimate.stated_positions,
        "table_positions": estimate.table and estimate.table.positions,
        "gpu": machine.gpu,
        **({"gpus": machine.gpus, "exchange_bytes": machine.exchange_bytes} if machine.gpus > 1 else {}),
        **({"machines": machine.machines, "network_bytes": machine.network_bytes} if machine.machines > 1 else {}),
        **_other_tools(estimate),
        "gpu_memory_gib": machine.gpu_total_bytes / GIB,
        "gpu_planned_gib": machine.gpu_bytes / GIB,
        "speeds": dataclasses.asdict(machine.machine),
        "notes": machine.notes,
        "stock_states_gib": STOCK_BYTES * forecaster.parameters / GIB,
        "host_needed_gib": forecaster.host_store_bytes / GIB,
        "host_memory_gib": None if machine.host_bytes is None else forecaster.host_bytes / GIB,
        "gpu_least_gib": estimate.least_gpu_bytes / GIB,
        "fits": estimate.fits,
        "length": estimate.length,
        "limits": limits
        and {
            "largest_batch": limits.batch,
            "largest_batch_is_least": limits.batch == MOST_BATCH,
            "longest_context": limits.context,
            "longest_context_is_least": limits.context == MOST_TOKENS,
            "longest": limits.longest and _row_as_json(limits.longest),
        },
        "rows": [_row_as_json(row) for row in estimate.rows()],
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
        "layers_stepped_on_gpu": len(placement.on_device) + len(placement.states_on_device),
        "layers_kept": len(placement.kept),
        "layers_offloaded": len(placement.offloaded),
        "outside_on_gpu": placement.groups_on_device,
        "offloaded_gib": row.offloaded_bytes / GIB,
        "bound_by": time.bound_by,
        "busy_seconds": {
            **{name: getattr(time, name) for name in ("compute", "h2d", "d2h", "host_step")},
            **({"network": time.network} if time.network else {}),
        },
    }


def ladder_table(estimates: Iterable[Estimate]) -> Iterator[str]:
    """Yields the lines of the table of several models, each as soon as its model's steps are known."""
    gpus, some_are_missing = 0, False
    for estimate in estimates:
        machine, forecaster, host = estimate.machine, estimate.forecaster, "as much as is needed"
        if not gpus:
            gpus = machine.all_gpus
            yield from _machine_facts(machine)
            yield _fact("host memory", host if machine.host_bytes is None else f"{machine.host_bytes / GIB:,.1f} GiB")
            yield ""
            titles = [f"{batch:,} x {estimate.length:,}" for batch in estimate.batches]
            stock = "stock, GPU GiB" if gpus == 1 else "FSDP2, GPU GiB"
            yield _ladder_line("model", "parameters", "host, GiB", stock, *titles)
        if estimate.missing_host_bytes > 0:
            some_are_missing = True
            cells = [f"{estimate.missing_host_bytes / GIB:,.1f} GiB of host memory are missing"]
        else:
            speeds = ((f"{row.tokens_per_second:,.0f} ({row.gpu_bytes / GIB:.1f})", row.fits) for row in estimate.rows())
            cells = [text if fits else "-" for text, fits in speeds]
        stock_bytes = _stock_bytes(estimate)
        stock = f"{stock_bytes / GIB:,.1f}" + ", doesn't fit" * (stock_bytes > machine.gpu_bytes)
        sizes = (f"{forecaster.parameters / 1e9:.2f} G", f"{forecaster.host_store_bytes / GIB:,.1f}", stock)
        yield _ladder_line(estimate.model, *sizes, *cells)
    yield ""
    if gpus == 1:
        yield "sequences x tokens: tokens/s, and GiB of the GPU in parentheses"
        yield f"stock: states of the stock Trainer with bf16=True, {STOCK_BYTES} bytes a parameter; activations come on top"
    else:
        yield f"sequences x tokens of each GPU: tokens/s of all {gpus}, and GiB of each GPU in parentheses"
        yield "experts are fetched whole (expert_parts=1)"
        yield f"FSDP2: its part of the states on each GPU, {STOCK_BYTES} bytes a parameter in all; activations come on top"
    if some_are_missing:
        yield "with a model's name megatrain estimate says which settings take less host memory"


def _ladder_line(model: str, parameters: str, host: str, stock: str, *cells: str) -> str:
    return "  ".join((f"{model:<15}", f"{parameters:>10}", f"{host:>9}", f"{stock:>17}", *map("{:>15}".format, cells)))


def _stock_bytes(estimate: Estimate) -> float:
    """Returns the states' memory on each GPU with the stock Trainer, or with FSDP2 if there are several GPUs."""
    return STOCK_BYTES * estimate.forecaster.parameters / estimate.machine.all_gpus


def plot(estimates: Sequence[Estimate], path: Path) -> None:
    """Draws tokens per second against the batch for each model whose states fit, in the format of the path's suffix. Raises an
    UnsupportedError if matplotlib isn't installed, and a ConfigError if the file, or that format, can't be written."""
    estimates = [estimate for estimate in estimates if estimate.missing_host_bytes <= 0] or estimates[:1]
    columns = math.ceil(len(estimates) ** 0.5)
    lines = math.ceil(len(estimates) / columns)
    figure = empty_figure((3 + 5 * columns, 1 + 4 * lines), "--plot", "take --json")
    figure.suptitle("Predicted: tokens a second, GPU memory, what bounds a step", fontsize=10)
    for place, estimate in enumerate(estimates, 1):
        axes = figure.add_subplot(lines, columns, place)
        # The title has only the name of a local model's folder: no path of this machine.
        name = Path(estimate.model.removesuffix("/config.json")).name
        host = f"{estimate.forecaster.host_store_bytes / GIB:,.1f} GiB of host memory"
        axes.set_title(f"{name} on {estimate.machine.gpus_text}, {host}", fontsize=9)
        rows = sorted(estimate.rows(), key=lambda row: row.batch)
        for bar, row in enumerate(rows):
            axes.bar(bar, row.tokens_per_second, color="#9fc9f2" if row.fits else "#e4e4e4")
            text = f"{row.tokens_per_second:,.0f} tokens/s\n{row.gpu_bytes / GIB:.0f} GiB\n{row.candidate.time.bound_by}"
            text += "" if row.fits else "\ndoesn't fit"
            axes.text(bar, row.tokens_per_second, text, ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(rows)), [f"{row.batch:,}" for row in rows])
        axes.margins(y=0.25)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(f"sequences of {estimate.length:,} tokens in a batch", fontsize=8)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
