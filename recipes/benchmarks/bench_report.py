"""What `run.py` makes of its results: one table, the facts of the machine, and plots."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

OURS = "megatrain"
STOCK = "stock"
"""The Trainer without the plugin."""
RESOURCES = {"compute": "#4c9be8", "h2d": "#57b36a", "d2h": "#b06fc4", "host_step": "#c9463d"}
"""What a step is split into, with colours."""
Row = dict[str, Any]


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
    return {
        "case": case,
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
        "predicted_step_ms": logged.get("predicted_step_ms"),
        "gpu_peak_gib": logged.get("gpu_peak_gib"),
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
    return "\n".join(lines)


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


def _series(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows that differ in the batch only, by a name for the legend."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        preset, _, length = row["shape"]
        cap = row["case"].rpartition("-")[2] if row["case"].endswith("gib") else ""
        of_documents = ", documents" if row["data"] == "real" else ""
        found[f"{row['system']} {preset}, length {length:,}{of_documents} {cap}".rstrip()].append(row)
    return {name: sorted(members, key=lambda row: row["tokens"]) for name, members in found.items()}


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Plots of speed, of the step's split and of memory.

    Returns:
        The pictures' paths; those that the rows have nothing for are left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = [row for row in rows if "error" not in row]
    paths = []

    def figure(width: float = 8.0) -> tuple[Any, Any]:
        made = Figure(figsize=(width, 4.5), layout="constrained")
        FigureCanvasAgg(made)
        return made, made.add_subplot()

    def save(made: Any, name: str) -> None:
        made.savefig(folder / name, dpi=120)
        paths.append(folder / name)

    if good:
        made, axes = figure()
        for name, members in _series(good).items():
            style = "o-" if members[0]["system"] == OURS else "s--"
            axes.plot([row["tokens"] for row in members], [row["tokens_per_second"] for row in members], style, label=name)
        axes.set(xlabel="tokens a step", ylabel="tokens a second", xscale="log", ylim=(0, None), title="Speed")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        save(made, "tokens_per_second.png")
    split = [row for row in good if row.get("split_ms")]
    if split:
        made, axes = figure(max(8.0, 1.1 * len(split)))
        bottoms = [0.0] * len(split)
        for resource, colour in RESOURCES.items():
            heights = [row["split_ms"].get(resource, 0.0) for row in split]
            axes.bar([row["case"] for row in split], heights, bottom=bottoms, color=colour, label=resource)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.set(ylabel="ms", title="A step: compute, and what the GPU stood still for")
        axes.tick_params(axis="x", rotation=30)
        axes.legend()
        save(made, "step_split.png")
    if good:
        made, axes = figure(max(8.0, 1.3 * len(good)))
        places = range(len(good))
        kinds = (("gpu_peak_gib", "GPU, peak"), ("gpu_predicted_gib", "GPU, predicted"), ("host_peak_gib", "host, peak"))
        for offset, (key, label) in zip((-0.27, 0.0, 0.27), kinds, strict=True):
            axes.bar([place + offset for place in places], [row.get(key) or 0.0 for row in good], 0.25, label=label)
        axes.set_xticks(list(places), [f"{row['case']}\n{row['system']}" for row in good], fontsize=7)
        axes.set(ylabel="GiB", title="Memory")
        axes.legend()
        save(made, "memory.png")
    return paths
