"""README.md is short, and says what is measured and what there is."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 900


def test_it_is_read_in_five_minutes() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_its_speeds_stand_in_the_benchmarks() -> None:
    benchmarks = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    speeds = README.split("\n## Speed\n")[1].split("\n## ")[0]
    figures = set(re.findall(r"\d+,\d{3}|\d\.\d\d", speeds))
    assert len(figures) > 10
    assert sorted(figure for figure in figures if figure not in benchmarks) == []


def test_its_count_of_model_families_is_the_tables() -> None:
    (count,) = re.findall(r"(\d+) families\]\(docs/models\.md\)", README)
    models = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    assert int(count) == len(re.findall(r"^\|.*equal bit by bit \|$", models, re.M))


def test_it_says_that_demo_and_tests_do_the_set_up() -> None:
    assert re.search(r"\$ make demo\n\$ make test\n", README)
    assert "do all the set-up by themselves" in README
