"""README.md is short, and says what is measured and what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 900


def test_it_is_read_in_five_minutes() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_its_speed_beside_deepspeed_is_the_benchmarks() -> None:
    runs = json.loads((REPOSITORY / "docs" / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    ratios = [row["ratios"]["ds3"] for run in runs for row in run["rows"] if "ds3" in row.get("ratios", {})]
    assert len(ratios) >= 5
    ((least, most),) = re.findall(r"\*\*.*?(\d\.\d) to (\d)\stimes as fast as DeepSpeed ZeRO-3 offload", README, re.S)
    assert (float(least), float(most)) == (min(ratios), int(max(ratios)))
    # Its picture is made of the same file.
    assert "](docs/benchmarks/tokens_per_second.png)" in README


def test_its_count_of_model_families_is_the_tables() -> None:
    (count,) = re.findall(r"(\d+) families\]\(docs/models\.md\)", README)
    models = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    assert int(count) == len(re.findall(r"^\|.*equal bit by bit \|$", models, re.M))


def test_it_says_that_demo_and_tests_do_the_set_up() -> None:
    assert re.search(r"\$ make demo\n\$ make test\n", README)
    assert "do all the set-up by themselves" in README
