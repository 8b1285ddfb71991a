"""The script that counts the files which a weight and a gradient pass."""

from __future__ import annotations

import re
from pathlib import Path

from forked_process import run_forked

WALKS = Path(__file__).parents[2] / ".ci" / "walks.py"


def test_a_weight_and_a_gradient_pass_no_more_files_than_today() -> None:
    printed = run_forked(str(WALKS))
    counts = {name: int(count) for name, count in re.findall(r"^a (\w+): (\d+) files$", printed, re.M)}
    assert counts["weight"] <= 8
    assert counts["gradient"] <= 8
