"""What `run.py` makes of its results: one table, the facts of the machine, and plots."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

OURS = "megatrain"
STOCK = "stock"
"""The Trainer without the plugin."""
SYSTEMS = {
    OURS: "megatrain_accelerate",
    STOCK: "stock Trainer",
    "ds3": "DeepSpeed ZeRO-3 offload",
    "ds2": "DeepSpeed ZeRO-2 offload",
    "ds3super": "DeepSpeed SuperOffload",
    "fsdp2": "FSDP2 CPU offload",
    "torchao": "torchao CPU offload",
    "roundpipe": "RoundPipe",
    "roundpipe_async": "RoundPipe, weights a step old",
    "masters": "plain PyTorch, all on the GPU",
}
"""What a reader knows the systems by. Others are called as their benches are."""
MODELS = {
    **{preset: f"Qwen2.5 {preset.upper()}" for preset in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")},
    "30b_a3b": "Qwen3-30B-A3B",
    "llama_70b": "Llama 3 70B",
    "gpt_oss_120b": "gpt-oss-120b",
}
"""What a reader knows the presets by."""
RESOURCES = {
    "compute": ("#4c9be8", "computes"),
    "h2d": ("#57b36a", "waits for weights"),
    "d2h": ("#b06fc4", "waits for copies to the host"),
    "host_step": ("#c9463d", "waits for the host's AdamW"),
}
"""What a step is split into: colours, and what the GPU does."""
FLOPS = "6 x parameters that a token meets x tokens a second"
"""What TFLOPS are: nothing that is computed again counts, nor attention's products of tokens by tokens."""
Row = dict[str, Any]
Document = dict[str, Any]
"""What `run.py` writes as results.json."""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _lines_of(path: str, key: str) -> list[str]:
    try:
        return [line.split(":", 1)[1].strip() for line in Path(path).read_text().splitlines() if line.startswith(key)]
    except OSError:
        return []


def facts() -> dict[str, Any]:
    """Machine, versions and commit."""
    here = str(Path(__file__).parent)
    versions = {}
    for name in ("torch", "transformers", "accelerate", "megatrain-accelerate"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "gpu": _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines(),
        "cpu": (_lines_of("/proc/cpuinfo", "model name") or [platform.processor()])[0],
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": (_lines_of("/proc/meminfo", "MemTotal") or [""])[0],
        "python": platform.python_version(),
        "versions": versions,
        "commit": _output("git", "-C", here, "rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")),
    }


def trainer_row(case: str, shape: tuple[str, int, int], system: str, result: dict[str, Any]) -> Row:
    """The row of a Trainer's job, ours or the stock one, of `trainer_run.py`'s JSON line."""
    logged = {name.removeprefix("megatrain/"): value for name, value in result["log_medians"].items()}
    shares = {name: logged[f"bound_share_{name}"] for name in RESOURCES if f"bound_share_{name}" in logged}
    step_ms = 1e3 * result["step_seconds"]
    cores, gb_per_second = result.get("emulated") or (None, None)
    return {
        "case": case,
        **({"note": f"emulated: {cores:g} cores and a link of {gb_per_second:g} GB/s"} if cores else {}),
        "system": system,
        "shape": list(shape),
        "data": result["data"],
        "tokens": result["tokens"],
        "tokens_per_second": result["tokens_per_second"],
        "tflops": result["tflops_6n"],
        "tflops_with_attention": result.get("tflops_with_attention"),
        "step_ms": step_ms,
        "first_step_seconds": result["first_step_seconds"],
        "mean_step_seconds": result["mean_step_seconds"],
        "late_step_seconds": result["late_step_seconds"],
        "plans": result["plans"],
        "all_plans_seconds": result["all_plans_seconds"],
        "parameters": result["parameters"],
        "active_parameters": result["active_parameters"],
        # Of documents, that of the largest batch that the plan is for.
        "predicted_step_ms": None if result["data"] == "real" else logged.get("predicted_step_ms"),
        "gpu_peak_gib": logged.get("gpu_peak_gib")
        or max((at.get("gpu_peak_gib", 0) for at in result["rows"]), default=0)
        or None,
        "gpu_predicted_gib": logged.get("gpu_predicted_gib"),
        "host_peak_gib": result["host_peak_gib"],
        "split_ms": {name: share * step_ms for name, share in shares.items()},
        "bound_by": max(shares, key=lambda name: shares[name]) if shares else None,
    }


def peer_row(case: str, shape: tuple[str, int, int], system: str, result: dict[str, Any]) -> Row:
    """The row of a peer, of its JSON line."""
    row: Row = {"case": case, "system": system, "shape": list(shape), "data": "random", "tokens": shape[1] * shape[2]}
    if not result.get("ok"):
        return {**row, "error": str(result.get("error", "not ok"))}
    return {
        **row,
        "tokens_per_second": result["tokens_per_s"],
        "tflops": result.get("tflops_6nt"),
        "step_ms": 1e3 * result["step_s"],
        "gpu_peak_gib": result.get("peak_gpu_gib"),
        "host_peak_gib": result.get("peak_host_used_gib"),
    }


def add_ratios(rows: list[Row]) -> None:
    """Gives each of our rows its speed over that of each peer that ran the same work, the fastest peer last."""
    for row in rows:
        if row["system"] == OURS and "error" not in row:
            peers = [r for r in rows if r["system"] != OURS and _same_work(r, row) and "error" not in r]
            peers.sort(key=lambda peer: peer["tokens_per_second"])
            row["ratios"] = {peer["system"]: row["tokens_per_second"] / peer["tokens_per_second"] for peer in peers}


def _same_work(other: Row, row: Row) -> bool:
    """Whether a row of another system is of the work of ours."""
    # Only the plugin knows settings, such as a cap on memory.
    if other.get("has_settings") and row["case"] != other["case"]:
        return False
    return row["shape"] == other["shape"] and row["data"] == other["data"]


_COLUMNS = (
    ("case", 20, ""),
    ("system", 12, ""),
    ("tokens/s", 10, ",.0f"),
    ("TFLOPS", 8, ".1f"),
    ("step, ms", 10, ",.1f"),
    ("predicted", 10, ",.1f"),
    ("GPU GiB", 9, ".2f"),
    ("predicted", 10, ".2f"),
    ("host GiB", 9, ".2f"),
)
_KEYS = ("case", "system", "tokens_per_second", "tflops", "step_ms", "predicted_step_ms", "gpu_peak_gib", "gpu_predicted_gib",
         "host_peak_gib")  # fmt: skip


def format_table(rows: list[Row]) -> str:
    """The rows as text; what a system didn't tell is a dash."""
    lines = ["".join(f"{title:<{width}}" if not form else f"{title:>{width}}" for title, width, form in _COLUMNS)]
    lines[0] += "  bound by    ratio to the peers"
    for row in rows:
        if "error" in row:
            lines.append(f"{row['case']:<20}{row['system']:<12}failed: {row['error']}")
            continue
        cells = []
        for key, (_, width, form) in zip(_KEYS, _COLUMNS, strict=True):
            value = row.get(key)
            cells.append(f"{'-' if value is None else format(value, form):{'>' if form else '<'}{width}}")
        ratios = ", ".join(f"{ratio:.2f} x {peer}" for peer, ratio in row.get("ratios", {}).items())
        lines.append("".join(cells) + f"  {row.get('bound_by') or '-':<10}  {ratios}".rstrip())
    return "\n".join([*lines, f"TFLOPS: {FLOPS}"])


_STOCK_COLUMNS = (
    ("first step, s", "first_step_seconds", ".2f"),
    ("mean step, s", "mean_step_seconds", ".3f"),
    ("late step, s", "late_step_seconds", ".3f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
)


def format_stock_table(rows: list[Row]) -> str:
    """Our rows beside those of the stock Trainer as text: each figure of both, and ours over the stock one's."""
    lines = [f"{'ours, stock, ratio':<20}" + "".join(f"{title:>27}" for title, _, _ in _STOCK_COLUMNS) + "   plans, s"]
    for row in rows:
        stocks = [r for r in rows if r["system"] == STOCK and _same_work(r, row) and "error" not in r]
        if row["system"] != OURS or "error" in row or not stocks:
            continue
        cells = f"{row['case']:<20}"
        for _, key, form in _STOCK_COLUMNS:
            ours, stock = row[key], stocks[0][key]
            cells += f"{ours:>10{form}}{stock:>10{form}}{ours / stock:>7.2f}" if ours and stock else f"{'-':>27}"
        lines.append(f"{cells}   {row['plans']} in {row['all_plans_seconds']:.1f}")
    return "\n".join(lines)


def cap(row: Row) -> str:
    """What the plugin was held to, in words; empty if to nothing."""
    gib = row["case"].rpartition("-")[2]
    return f"{gib.removesuffix('gib')} GiB of the GPU" if gib.endswith("gib") else ""


def job(row: Row) -> str:
    """What a row's system trains in a step, in words."""
    preset, batch, length = row["shape"]
    sequences = f"{batch} documents of up to {length:,}" if row["data"] == "real" else f"{batch} x {length:,}"
    return ", ".join(filter(None, (MODELS.get(preset, preset), f"{sequences} tokens", row.get("note"))))


def work(row: Row) -> str:
    """The row's job, with what it was held to."""
    return ", ".join(filter(None, (job(row), cap(row))))


def machine(document: Document) -> str:
    """A document's machine in a few words."""
    gpu = ", ".join(line.split(",")[0].removeprefix("NVIDIA ") for line in document["gpu"]) or "no GPU"
    kib = document["memory"].removesuffix(" kB")
    memory = f"{int(kib) / 2**20:.0f} GiB" if kib.isdecimal() else document["memory"]
    return f"{gpu}, {document['cpus']} cores, {memory}"


Bar = tuple[float, str]
"""Length and colour of a part of a bar."""
Line = tuple[str, list[Bar], str]
"""What stands left of a bar, its parts, and what stands right of it; a heading has no parts."""


def _name(row: Row) -> str:
    return ", ".join(filter(None, (SYSTEMS.get(row["system"], row["system"]), cap(row))))


def _speed_lines(rows: list[Row]) -> Iterator[Line]:
    for row in rows:
        speed = row["tokens_per_second"]
        yield _name(row), [(speed, RESOURCES["compute"][0] if row["system"] == OURS else "#b9b2a7")], f"{speed:,.0f}"


def _split_lines(rows: list[Row]) -> Iterator[Line]:
    for row in rows:
        split = row.get("split_ms") or {}
        if not sum(split.values()):
            continue
        waits = [
            f"{text} {split[name]:,.0f} ms"
            for name, (_, text) in RESOURCES.items()
            if name != "compute" and round(split.get(name, 0.0))
        ]
        said = "; ".join([f"computes {split['compute']:,.0f} ms", *waits])
        yield _name(row), [(split.get(name, 0.0), colour) for name, (colour, _) in RESOURCES.items()], said


def _memory_lines(rows: list[Row]) -> Iterator[Line]:
    for row in rows:
        for key, place, colour in (("gpu_peak_gib", "GPU", "#57b36a"), ("host_peak_gib", "host", "#c8b26b")):
            if (gib := row.get(key)) is not None:
                predicted = row.get("gpu_predicted_gib") if place == "GPU" else None
                said = f"{gib:,.1f}" + (f" ({predicted:,.1f} predicted)" if predicted else "")
                yield f"{_name(row)}: {place}", [(gib, colour)], said


PICTURES: dict[str, tuple[Callable[[list[Row]], Iterator[Line]], str]] = {
    "tokens_per_second.png": (_speed_lines, "tokens a second"),
    "step_split.png": (_split_lines, "ms of a step"),
    "memory.png": (_memory_lines, "GiB at the peak"),
}
SPEED_AND_MEMORY, SPLIT = ("tokens_per_second.png", "memory.png"), ("step_split.png",)


def draw(
    documents: Sequence[Document],
    folder: Path,
    names: Sequence[str] = (*SPEED_AND_MEMORY, *SPLIT),
    metadata: dict[str, str] | None = None,
) -> list[Path]:
    """Pictures of speed, of the step's split and of memory: bars with their names and figures beside them.

    Args:
        documents: whose rows are drawn; rows of one job stand below each other.
        folder: where the pictures go.
        names: of the pictures that are wanted.
        metadata: what the files say of themselves.

    Returns:
        The pictures' paths; those that the rows have nothing for are left out.
    """
    paths = []
    for name in names:
        lines_of, unit = PICTURES[name]
        lines: list[Line] = []
        for document in documents:
            good = [row for row in document["rows"] if "error" not in row]
            for title in dict.fromkeys(map(job, good)):
                of_job = list(lines_of([row for row in good if job(row) == title]))
                lines += [(f"{title}; {machine(document)}", [], ""), *of_job] if of_job else []
        if lines:
            _draw_bars(lines, unit, folder / name, metadata)
            paths.append(folder / name)
    return paths


def _draw_bars(lines: Sequence[Line], unit: str, path: Path, metadata: dict[str, str] | None) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.9 + 0.3 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max(sum(length for length, _ in bars) for _, bars, _ in lines)
    for place, (label, bars, said) in enumerate(lines):
        if not bars:
            axes.text(0, place + 0.15, label, va="center", fontsize=9, weight="bold")
        begin = 0.0
        for length, colour in bars:
            axes.barh(place, length, 0.75, left=begin, color=colour)
            begin += length
        axes.text(begin + 0.01 * longest, place, said, va="center", fontsize=9)
    named = [(place, label) for place, (label, bars, _) in enumerate(lines) if bars]
    axes.set_yticks([place for place, _ in named], [label for _, label in named], fontsize=9)
    axes.set(ylim=(len(lines) - 0.4, -0.6), xlim=(0, 1.35 * longest), xlabel=unit)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata=metadata)
