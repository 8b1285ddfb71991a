"""docs/benchmarks.md and its pictures are what docs/make_benchmarks.py makes of results.json."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
RESULTS = (DOCS / "benchmarks" / "results.json").read_text(encoding="utf-8")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|home|root|opt|work|usr|mnt|data)/")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names of the script; what it imports from the recipes goes again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield runpy.run_path(str(DOCS / "make_benchmarks.py"))
    for name in set(sys.modules) - before:
        if "recipes" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_page_is_what_its_script_makes(script: Any) -> None:
    assert script["page"](script["results"]()) == PAGE, "run `python docs/make_benchmarks.py`"


@pytest.mark.parametrize("name", ["tokens_per_second", "step_split", "memory"])
def test_the_pictures_were_drawn_of_the_results(script: Any, name: str) -> None:
    with Image.open(DOCS / "benchmarks" / f"{name}.png") as picture:
        drawn_of = picture.info["Source"]
    assert drawn_of == script["digest"](script["results"]()), "run `python docs/make_benchmarks.py`"


def test_no_path_of_a_machine_is_in_page_or_results() -> None:
    assert MACHINE_PATH.findall(PAGE + RESULTS) == []


def test_every_run_is_in_a_table_with_its_machine_versions_and_command(script: Any) -> None:
    for document in script["results"]():
        assert script["table_of"](document) in script["TABLES"]
        assert document["gpu"]
        assert document["versions"]["torch"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d.*", document["date"])
        assert re.match(r"(python|accelerate launch .*) ?recipes/benchmarks/\w+\.py ", document["command"])


def test_figures_agree_with_each_other() -> None:
    """Of what was copied by hand, too: TFLOPS by their formula, speeds by the step's time."""
    rows = [row for document in json.loads(RESULTS) for row in document["rows"]]
    flops = [row for row in rows if "tflops" in row and "active_parameters" in row]
    assert len(flops) > 20
    for row in flops:
        assert 6 * row["active_parameters"] * row["tokens_per_second"] / 1e12 == pytest.approx(row["tflops"], rel=0.01), row
    for row in rows:
        if "step_ms" in row and row["data"] == "random":
            assert row["tokens"] / row["step_ms"] * 1e3 == pytest.approx(row["tokens_per_second"], rel=0.005), row


def of_run(date: str, speed: float, *others: dict[str, Any]) -> dict[str, Any]:
    """A document of `run.py`: ours beside the stock Trainer, and rows of others."""
    same = {"case": "3b-2x64", "shape": ["3b", 2, 64], "data": "random", "tokens": 128, "parameters": 3e9}
    figures = {"tokens_per_second": speed, "step_ms": 1e3 * 128 / speed, "predicted_step_ms": None, "split_ms": {}}
    rows = [{**same, "system": system, **figures} for system in ("stock", "megatrain")]
    raw = [
        {"case": "3b-2x64", "system": row["system"], "accumulation": 2, "max_grad_norm": 1.0, "command": ["/opt/python"]}
        for row in rows
    ]
    machine = {"gpu": ["NVIDIA H100"], "cpu": "CPU", "cpus": 16, "memory": "131981020 kB", "python": "3.12"}
    of_job = {"versions": {"torch": "2.11"}, "commit": "", "settings": {"token_tile": 8}, "steps": 9, "warmup": 3}
    return {**machine, **of_job, "date": date, "rows": [*rows, *(same | other for other in others)], "results": raw}


def test_what_is_added_has_no_failed_rows_no_paths_and_its_command(script: Any) -> None:
    failed = {"system": "0da90fc", "error": "exit status 1; see /tmp/log.txt"}
    earlier = {"system": "0da90fc", "has_settings": True, "tokens_per_second": 1.0}
    document = script["condensed"](of_run("2026-01-01", 100.0, failed, earlier))
    assert [row["system"] for row in document["rows"]] == ["stock", "megatrain"]
    assert document["rows"][1]["ratios"] == {"stock": 1.0}
    assert not MACHINE_PATH.search(json.dumps(document))
    command = (
        "python recipes/benchmarks/run.py --cases 3b-2x64 --steps 9 --warmup 3 --stock --accumulation 2 --set token_tile=8"
    )
    assert document["command"] == command


def test_the_newest_run_of_a_case_on_a_kind_of_gpu_stays(script: Any) -> None:
    first, other_gpu, second = (script["condensed"](of_run(f"2026-01-0{day}", 10.0 * day)) for day in (1, 2, 3))
    other_gpu["gpu"] = ["NVIDIA H200"]
    documents: list[Any] = []
    for document in (second, other_gpu, first):
        documents = script["added"](documents, document)
    assert [document["date"] for document in documents] == ["2026-01-01", "2026-01-02"], "what is added last replaces"
