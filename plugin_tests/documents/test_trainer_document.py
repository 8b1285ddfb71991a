"""docs/trainer.md says something of every argument, and names tests that exist."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest
import transformers
from transformers import TrainingArguments

TESTS = Path(__file__).parents[1]
DOCUMENT = (TESTS.parent / "docs" / "trainer.md").read_text(encoding="utf-8")
OURS = {"megatrain", "megatrain_config"}

Row = tuple[str, str, list[str], str]


def between(start: str, end: str) -> str:
    return DOCUMENT.split(f"<!-- {start}")[1].split(f"<!-- {end} -->")[0]


def rows(text: str) -> list[Row]:
    """(name, verdict, tests, note) of each row."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    found = [(a, b, re.findall(r"`([^`]+)`", c), d) for a, b, c, d in cells if a not in ("argument", "feature", "---")]
    assert found
    return found


ARGUMENTS = rows(between("arguments", "end of arguments"))
FEATURES = rows(between("features", "end of features"))
OTHERS = re.findall(r"`(\w+)`", between("others", "end of others"))


@pytest.mark.skipif(not transformers.__version__.startswith("5.23."), reason="the document is of transformers 5.23")
def test_every_argument_is_listed_once() -> None:
    listed = Counter([name.strip("`") for name, *_ in ARGUMENTS] + OTHERS)
    assert [name for name, count in listed.items() if count > 1] == []
    fields = {field.name for field in dataclasses.fields(TrainingArguments)} - OURS
    assert sorted(fields - listed.keys()) == []
    assert sorted(listed.keys() - fields) == []


@pytest.mark.parametrize("row", [*ARGUMENTS, *FEATURES], ids=lambda row: row[0].strip("`"))
def test_a_row_has_a_verdict_and_tests_that_exist(row: Row) -> None:
    _, verdict, tests, note = row
    assert verdict in ("same", "note", "refused")
    assert verdict == "same" or note, "what is not the same is explained"
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        (path,) = TESTS.rglob(file)
        assert re.search(rf"^ *def {name}\(", path.read_text(encoding="utf-8"), re.M), test


def test_tests_named_in_the_text_exist() -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", DOCUMENT)
    assert len(named) > 60
    for file, name in named:
        (path,) = TESTS.rglob(file)
        assert re.search(rf"^ *def {name}\(", path.read_text(encoding="utf-8"), re.M), f"{file}::{name}"
