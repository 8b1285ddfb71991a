"""The tables of what fits which machine are those of docs/gpu_table.json, and that is what `megatrain estimate` says."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "docs"))

import make_gpu_table as table  # noqa: E402

MACHINES, RECIPE = table.saved()


@pytest.mark.parametrize(("page", "name", "made"), table.tables(MACHINES, RECIPE), ids=lambda value: str(value)[-20:])
def test_pages_show_what_was_computed(page: Path, name: str, made: str) -> None:
    assert table.between(page, name)[1] == made, "run `PYTHONPATH=. python docs/make_gpu_table.py`"


def test_every_machine_is_there() -> None:
    assert [(cell.gpu, cell.host_gib) for cell in MACHINES] == [(gpu, gib) for gpu in table.GPUS for gib in table.HOST_GIB]
    assert all(cell.host_used_gib <= cell.host_gib for cell in MACHINES)


def test_measured_figures_stand_in_the_benchmarks() -> None:
    benchmarks = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    by_machine = {(cell.gpu, cell.host_gib): cell for cell in MACHINES}
    for machine, measured in table.MEASURED.items():
        cell = by_machine[machine]
        row = (
            rf"^(?=.*\| {cell.gpu}\b|.* {cell.gpu} )\|.* Qwen2\.5 {cell.model.upper()}, 8 x 4,096 tokens \|.* {measured:,} \|"
        )
        assert re.search(row, benchmarks, re.M), machine
        # A prediction that far off would be a finding.
        assert cell.tokens_per_second == pytest.approx(measured, rel=0.25)


def assert_equal(found: table.Cell | None, shown: table.Cell) -> None:
    assert found is not None
    for name, value in dataclasses.asdict(shown).items():
        # Another torch may fuse and cut layers a little otherwise.
        expected = pytest.approx(value, rel=0.02) if isinstance(value, float) else value
        assert getattr(found, name) == expected, name


@pytest.mark.slow
@pytest.mark.parametrize("machine", [("RTX3090", 64), ("H200", 128)], ids=str)
def test_a_machine_is_what_the_estimate_says(machine: tuple[str, int]) -> None:
    (shown,) = [cell for cell in MACHINES if (cell.gpu, cell.host_gib) == machine]
    assert_equal(table.largest(*machine), shown)


@pytest.mark.slow
def test_the_recipe_for_24_gib_takes_what_the_estimate_says() -> None:
    assert_equal(table.of_the_recipe("7b"), RECIPE[0])
