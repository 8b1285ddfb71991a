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
    rows = [row for run in runs for row in run["rows"] if "ds3" in row.get("ratios", {})]
    without_room = [row["ratios"]["ds3"] for row in rows if row["case"].endswith("24gib") or row["case"].startswith("14b")]
    assert len(without_room) >= 3
    ((least, most),) = re.findall(r"(\d\.\d) to (\d\.\d)\stimes as fast as DeepSpeed ZeRO-3 offload where", README)
    assert (float(least), float(most)) == (round(min(without_room), 1), round(max(without_room), 1))
    # Its picture is made of the same file.
    assert "](docs/benchmarks/tokens_per_second.png)" in README


def test_its_count_of_model_families_is_the_tables() -> None:
    (count,) = re.findall(r"(\d+) models\]\(docs/models\.md\)", README)
    models = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    assert int(count) == len(re.findall(r"^\|.*equal bit for bit \|$", models, re.M))


def test_it_says_that_demo_and_tests_do_the_set_up() -> None:
    assert re.search(r"\$ make demo\n\$ make test\n", README)
    assert "do all the set-up by themselves" in README
