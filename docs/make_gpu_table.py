"""Makes the tables of what fits which GPU and host memory, in docs/what_fits.md and README.md.

Run it as ``PYTHONPATH=. python docs/make_gpu_table.py``. For each machine ``megatrain estimate`` looks at Qwen2.5's shapes
from the largest down, until one fits. What it says goes to docs/gpu_table.json, which the tables are made of. Where a training
was measured, its figure stands in the place of the predicted one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "recipes" / "benchmarks"))

from model_shapes import shape_config  # noqa: E402

from megatrain_accelerate.estimate import command  # noqa: E402
from megatrain_accelerate.estimate.findings import Estimate  # noqa: E402
from megatrain_accelerate.units import GIB  # noqa: E402

CELLS = REPOSITORY / "docs" / "gpu_table.json"
PAGE, README = REPOSITORY / "docs" / "what_fits.md", REPOSITORY / "README.md"
LADDER = ("72b", "32b", "14b", "7b", "3b", "1.5b", "0.5b")
"""Presets of `recipes/benchmarks/model_shapes.py`, the largest first."""
GPUS = {
    "RTX3090": "RTX 3090",
    "RTX4090": "RTX 4090",
    "RTX5090": "RTX 5090",
    "A100-80": "A100 80 GB",
    "H100": "H100",
    "H200": "H200",
}
"""Names of `megatrain estimate`, and those in the tables."""
HOST_GIB = (64, 128, 256, 512)
SEQUENCES, TOKENS = 8, 4096
"""Of a step."""
MEASURED = {
    ("H100", 64): 23_378,
    ("H100", 256): 4_580,
    ("H200", 64): 26_702,
    ("H200", 128): 12_154,
    ("H200", 256): 5_924,
    ("H200", 512): 2_583,
}
"""Tokens a second of trainings in docs/benchmarks.md, on a model and a batch of these tables, with no more host memory."""


RECIPE, RECIPE_MODELS = REPOSITORY / "recipes" / "rtx4090_sft.yaml", {"7b": "Qwen2.5 7B", "llama_8b": "Llama 3.1 8B"}
RECIPE_GPU, RECIPE_HOST_GIB = "RTX4090", 128


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model on a machine, as predicted."""

    gpu: str
    host_gib: int
    model: str
    sequences: int
    tokens: int
    """Of a sequence."""
    tokens_per_second: float
    step_seconds: float
    gpu_used_gib: float
    host_used_gib: float
    at_once: int | None
    """Sequences that a layer computes at once; None if all."""
    bound_by: str


def predict(model: str, gpu: str, host_gib: int, sequences: int, tokens: int) -> Cell | None:
    """A step of a training; None where it doesn't fit."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    machine = [
        "--gpu",
        gpu,
        "--host-memory",
        f"{host_gib}GiB",
        "--batch",
        str(sequences),
        "--length",
        str(tokens),
        "--no-limits",
    ]
    with tempfile.TemporaryDirectory() as folder:
        shape_config(model, tokens).save_pretrained(folder)
        found = Estimate(parser.parse_args([folder, *machine]))
    if found.missing_host_bytes > 0:
        return None
    (row,) = found.rows()
    sizes = (row.gpu_bytes / GIB, row.host_bytes / GIB, row.samples)
    cell = Cell(
        gpu, host_gib, model, sequences, tokens, row.tokens_per_second, row.seconds, *sizes, row.candidate.time.bound_by
    )
    return cell if row.fits else None


def largest(gpu: str, host_gib: int) -> Cell:
    """The largest model of the ladder that a machine trains."""
    return next(cell for model in LADDER if (cell := predict(model, gpu, host_gib, SEQUENCES, TOKENS)) is not None)


def of_the_recipe(model: str) -> Cell:
    """A model trained by the recipe for 24 GiB."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    size = (recipe["per_device_train_batch_size"], recipe["max_length"])
    cell = predict(model, RECIPE_GPU, RECIPE_HOST_GIB, *size)
    assert cell is not None, f"{model} doesn't fit"
    return cell


def speed(cell: Cell) -> str:
    """Tokens a second, and whether they are predicted or measured."""
    measured = MEASURED.get((cell.gpu, cell.host_gib))
    return f"{cell.tokens_per_second:,.0f}ᵖ" if measured is None else f"{measured:,}ᵐ"


def seconds(cell: Cell) -> float:
    """Of a step, predicted or measured as its tokens a second are."""
    measured = MEASURED.get((cell.gpu, cell.host_gib))
    return cell.step_seconds if measured is None else cell.sequences * cell.tokens / measured


def short_table(cells: list[Cell]) -> str:
    """GPUs by host memory. The model stands above its column, as host memory decides it."""
    models = {cell.host_gib: cell.model.upper() for cell in cells}
    assert all(models[cell.host_gib] == cell.model.upper() for cell in cells), "a column has several models"
    lines = [f"| GPU | {' | '.join(f'{gib} GiB: {models[gib]}' for gib in HOST_GIB)} |", f"| --- {'| --- ' * len(HOST_GIB)}|"]
    for gpu, name in GPUS.items():
        by_host = {cell.host_gib: speed(cell) for cell in cells if cell.gpu == gpu}
        lines.append(f"| {name} | {' | '.join(by_host[gib] for gib in HOST_GIB)} |")
    return "\n".join(lines)


def long_table(cells: list[Cell]) -> str:
    """A row for each machine."""
    lines = [
        "| GPU | host memory | model | tokens/s | step, s | GPU, GiB | host, GiB | bound by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        pieces = "" if cell.at_once is None else f", {cell.at_once} at once"
        lines.append(
            f"| {GPUS[cell.gpu]} | {cell.host_gib} GiB | {cell.model.upper()} | {speed(cell)} | {seconds(cell):,.1f} | "
            f"{cell.gpu_used_gib:.1f} | {cell.host_used_gib:.0f} | {cell.bound_by}{pieces} |"
        )
    return "\n".join(lines)


def recipe_table(cells: list[Cell]) -> str:
    """What the recipe for 24 GiB takes."""
    lines = [
        "| model | tokens/s | a step, s | 1,000 steps, h | GPU, GiB | host, GiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        hours = 1000 * cell.step_seconds / 3600
        lines.append(
            f"| {RECIPE_MODELS[cell.model]} | {cell.tokens_per_second:,.0f}ᵖ | {cell.step_seconds:.1f} | {hours:.1f} | "
            f"{cell.gpu_used_gib:.1f} | {cell.host_used_gib:.0f} |"
        )
    return "\n".join(lines)


def saved() -> tuple[list[Cell], list[Cell]]:
    """The machines and the recipe's models, as the last run of this script left them."""
    given = json.loads(CELLS.read_text(encoding="utf-8"))
    machines, recipe = ([Cell(**cell) for cell in given[name]] for name in ("machines", "recipe"))
    return machines, recipe


def tables(machines: list[Cell], recipe: list[Cell]) -> list[tuple[Path, str, str]]:
    """Each table: its page, its name there, and its text."""
    return [
        (README, "speeds", short_table(machines)),
        (PAGE, "speeds", short_table(machines)),
        (PAGE, "recipe", recipe_table(recipe)),
        (PAGE, "machines", long_table(machines)),
    ]


def between(page: Path, name: str) -> tuple[str, str, str]:
    """A page's text before its table `name`, the table, and what follows."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name}: made by docs/make_gpu_table.py -->\n")
    table, end, after = rest.partition(f"\n<!-- end of {name} -->")
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the table {name}")
    return before + begin, table, end + after


def main() -> None:
    """Computes all cells, and writes them and the tables."""
    machines = [largest(gpu, gib) for gpu in GPUS for gib in HOST_GIB]
    recipe = [of_the_recipe(model) for model in RECIPE_MODELS]
    cells = {"machines": machines, "recipe": recipe}
    as_json = {name: [dataclasses.asdict(cell) for cell in of_name] for name, of_name in cells.items()}
    CELLS.write_text(json.dumps(as_json, indent=1) + "\n", encoding="utf-8")
    for page, name, table in tables(machines, recipe):
        before, _, after = between(page, name)
        page.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
