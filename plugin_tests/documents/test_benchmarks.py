"""The benchmarks' own arithmetic: cases, data, ratios, tables, limits of time, and that padding is no speed."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "recipes" / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of the benchmarks' folder by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def test_a_cases_name_is_all_of_it(scripts: Any) -> None:
    cases = scripts("bench_cases")
    for case in (*cases.TABLE, *cases.STOCK_TABLE, *cases.TINY, cases.Case("0.5b", 1, 8, 7.5, real=True)):
        assert cases.Case.parse(case.name) == case
    assert cases.Case("3b", 8, 4096, 24.0).name == "3b-8x4096-24gib"
    assert cases.Case("1.5b", 8, 2048, real=True).name == "1.5b-real-8x2048"
    for wrong in ("3b", "3b-8", "3b-8x", "3b-8x4096-24", "3b-8x4096-real", "3b-true-8x4096"):
        with pytest.raises(ValueError, match="a case is PRESET-BATCHxLENGTH"):
            cases.Case.parse(wrong)


def test_a_sweep_measures_each_batch_once(scripts: Any) -> None:
    cases = scripts("bench_cases")
    names = [case.name for case in cases.chosen(["3b-2x64", "7b-4x64-9gib"], None, [2, 4])]
    assert names == ["3b-2x64", "7b-4x64-9gib", "3b-4x64", "7b-2x64-9gib"]
    assert cases.chosen([], None, []) == cases.TABLE
    assert cases.chosen([], "tiny", []) == cases.TINY
    stock = [case.name for case in cases.chosen([], None, [], stock=True)]
    assert stock == ["1.5b-real-8x2048", "0.5b-4x1024", "1.5b-4x2048"]
    assert {case.preset for case in cases.chosen([], "3b", [])} == {"3b"}
    with pytest.raises(ValueError, match="no case has the preset '9b'"):
        cases.chosen([], "9b", [])
    for names, sweep, wrong in ((["99b-1x8"], [], "no preset '99b'"), (["3b-1x0"], [], "1 or more"), ([], [0], "3b-0x4096")):
        with pytest.raises(ValueError, match=wrong):
            cases.chosen(names, None, sweep)


def test_attention_counts_half_of_all_pairs_of_tokens_forward_and_twice_backward(scripts: Any) -> None:
    shapes = scripts("model_shapes")
    model = shapes.build_model("tiny", 64, layers=3)
    assert len(model.model.layers) == 3
    weights, both = shapes.step_flops(model.config, 1000, batch=2, length=64)
    assert weights == 6 * 1000 * 2 * 64
    pairs = 64 * 64 / 2
    assert both - weights == 3 * 2 * (2 * 2 * pairs * 64) * 3


def test_attention_under_a_window_counts_the_pairs_in_it(scripts: Any) -> None:
    shapes = scripts("model_shapes")
    config = shapes.shape_config("gpt_oss_120b", 1024, layers=2)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    weights, both = shapes.step_flops(config, 1000, batch=3, length=1024)
    pairs = (1024 * 128 - 128 * 128 / 2) + 1024 * 1024 / 2
    assert both - weights == 3 * 3 * (2 * 2 * pairs * 64 * 64)


@pytest.mark.parametrize(
    ("preset", "billions", "active"),
    [
        ("0.5b", 0.494, 0.494),
        ("1.5b", 1.54, 1.54),
        ("7b", 7.62, 7.62),
        ("32b", 32.8, 32.8),
        ("30b_a3b", 30.5, 3.35),
        ("llama_70b", 70.6, 70.6),
        ("gpt_oss_120b", 116.8, 5.7),
    ],
)
def test_shapes_have_the_published_numbers_of_parameters(scripts: Any, preset: str, billions: float, active: float) -> None:
    shapes = scripts("model_shapes")
    model = shapes.build_model(preset, 4096, without_weights=True)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    # gpt-oss is published with 5.1 active ones, of which the input embedding, which counts here, is no part.
    assert shapes.active_parameters(model) / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("placement.slots=3", ("placement.slots", 3)),
        ("token_tile=auto", ("token_tile", "auto")),
        ("tiled_loss=false", ("tiled_loss", False)),
    ],
)
def test_settings_are_json_or_text(scripts: Any, text: str, setting: tuple[str, Any]) -> None:
    assert scripts("bench_cases").parse_setting(text) == setting


def test_a_setting_without_a_value_is_refused(scripts: Any) -> None:
    with pytest.raises(ValueError, match="a setting is KEY=VALUE"):
        scripts("bench_cases").parse_setting("token_tile")


def test_the_stock_trainers_job_knows_nothing_of_the_plugin_and_has_as_many_threads(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CONFIG", "{}")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.delenv("OMP_NUM_THREADS")
    environment = scripts("bench_cases").stock_environment()
    assert [name for name in environment if name.startswith(("MEGATRAIN_", "ACCELERATE_"))] == ["MEGATRAIN_DISABLE"]
    assert (environment["MEGATRAIN_DISABLE"], environment["OMP_NUM_THREADS"]) == ("1", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert scripts("bench_cases").stock_environment()["OMP_NUM_THREADS"] == "3"


def test_ratios_are_to_peers_of_the_same_shape_only(scripts: Any) -> None:
    report = scripts("bench_report")
    ours = {"system": report.OURS, "shape": ["3b", 2, 64], "data": "random", "tokens": 128, "tokens_per_second": 300.0}
    rows = [
        {**ours, "case": "3b-2x64"},
        {**ours, "case": "3b-2x64-24gib", "tokens_per_second": 150.0, "bound_by": "h2d"},
        {**ours, "case": "3b-real-2x64", "data": "real"},
        report.peer_row(
            "3b-2x64", ("3b", 2, 64), "slow", {"ok": True, "tokens_per_s": 100.0, "step_s": 1.28, "tflops_6nt": 1.0}
        ),
        report.peer_row("3b-4x64", ("3b", 4, 64), "other", {"ok": True, "tokens_per_s": 10.0, "step_s": 25.6}),
        report.peer_row("3b-2x64", ("3b", 2, 64), "broken", {"ok": False, "error": "out of memory"}),
        {**ours, "case": "3b-2x64-24gib", "system": "0da90fc", "tokens_per_second": 120.0, "has_settings": True},
    ]
    report.add_ratios(rows)
    ratios = [{"slow": 3.0}, {"slow": 1.5, "0da90fc": 1.25}, {}, None, None, None, None]
    assert [row.get("ratios") for row in rows] == ratios
    lines = report.format_table(rows).splitlines()
    assert lines[1].endswith("3.00 x slow")
    assert "h2d" in lines[2]
    assert lines[6].endswith("failed: out of memory")


def test_each_of_our_figures_stands_beside_the_stock_trainers_of_the_same_work(scripts: Any) -> None:
    report = scripts("bench_report")
    names = ("first_step_seconds", "mean_step_seconds", "late_step_seconds", "tokens_per_second")

    def row(system: str, case: str, data: str, values: list[float | None], plans: int = 0) -> dict[str, Any]:
        figures = dict(zip(names, values, strict=True))
        same = {"shape": ["1.5b", 8, 64], "data": data, "plans": plans, "all_plans_seconds": 1.5 * plans}
        return {"system": system, "case": case, **same, **figures}

    table = report.format_stock_table(
        [
            row(report.STOCK, "1.5b-real-8x64", "real", [2.0, 0.5, 0.4, 1000.0]),
            row(report.OURS, "1.5b-real-8x64", "real", [5.0, 1.0, 0.3, 500.0], plans=2),
            row(report.STOCK, "1.5b-8x64", "random", [1.0, 0.5, 0.5, 100.0]),
            row(report.OURS, "1.5b-8x64", "random", [2.0, None, None, 50.0], plans=1),
            {"system": report.OURS, "case": "1.5b-8x64-9gib", "shape": ["1.5b", 8, 64], "data": "random", "error": "failed"},
            row(report.OURS, "1.5b-4x64", "random", [1.0, 1.0, 1.0, 1.0]) | {"shape": ["1.5b", 4, 64]},
        ]
    )
    lines = [line.split() for line in table.splitlines()[1:]]
    ours_first, stock_first, ratio = "5.00", "2.00", "2.50"
    rest = ["1.000", "0.500", "2.00", "0.300", "0.400", "0.75", "500", "1,000", "0.50", "2", "in", "3.0"]
    assert lines == [
        ["1.5b-real-8x64", ours_first, stock_first, ratio, *rest],
        ["1.5b-8x64", "2.00", "1.00", "2.00", "-", "-", "50", "100", "0.50", "1", "in", "1.5"],
    ]


def test_a_command_past_its_limit_is_ended_with_what_it_started(scripts: Any, tmp_path: Path) -> None:
    run = scripts("run")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    begin = time.perf_counter()
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as held:
        error = run.run_logged(["bash", "-c", f"(echo begun; sleep 60) > {fifo} & sleep 60"], tmp_path / "log", 1.0)
        assert "not over after 1 s" in error
        os.set_blocking(held.fileno(), True)
        assert held.read() == "begun\n"
    assert time.perf_counter() - begin < 30.0, "what was started held the file until it ended by itself"


def test_a_commands_failure_names_its_log(scripts: Any, tmp_path: Path) -> None:
    run = scripts("run")
    assert (
        run.run_logged(["bash", "-c", "echo why; exit 3"], tmp_path / "log", 30.0) == f"exit status 3; see {tmp_path / 'log'}"
    )
    assert (tmp_path / "log").read_text() == "why\n"
    assert run.run_logged(["true"], tmp_path / "log", 30.0) is None


def test_padding_is_refused_and_never_counted(scripts: Any) -> None:
    collate = scripts("bench_data").Collator(4)
    row = torch.arange(4)
    assert collate([{"input_ids": row, "labels": row}] * 2)["input_ids"].shape == (2, 4)
    assert collate.lengths == [[4, 4]]
    padded = torch.tensor([0, 1, 2, -100])
    for wrong in ({"input_ids": row, "labels": padded}, {"input_ids": row[:3], "labels": row[:3]}):
        with pytest.raises(ValueError, match="a batch has padding"):
            collate([wrong])
    assert collate.lengths == [[4, 4]]


def test_documents_are_padded_to_the_longest_of_their_batch_and_counted_without_padding(scripts: Any) -> None:
    collate = scripts("bench_data").PaddingCollator()
    short, long = torch.tensor([7, 8]), torch.tensor([1, 2, 3, 4])
    batch = collate([{"input_ids": short, "labels": short}, {"input_ids": long, "labels": long}])
    assert batch["input_ids"].tolist() == [[7, 8, 0, 0], [1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[7, 8, -100, -100], [1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert collate([{"input_ids": short, "labels": short}])["input_ids"].shape == (1, 2)
    assert collate.lengths == [[2, 4], [2]]


def test_documents_are_the_same_each_time_and_of_many_lengths_up_to_the_longest(scripts: Any) -> None:
    data = scripts("bench_data")
    texts = data.SourceTexts(200, 512, 300)
    lengths = [len(texts[index]["input_ids"]) for index in range(len(texts))]
    assert len(lengths) == 200
    assert 16 <= min(lengths) < 64, "shorter ones than a thirty-second of the longest are left out"
    assert max(lengths) == 512
    assert len(set(lengths)) > 50
    ids = torch.cat([texts[index]["input_ids"] for index in range(len(texts))])
    assert (int(ids.min()), int(ids.max())) == (0, 299), "all of the vocabulary, and no more"
    again = data.SourceTexts(20, 512, 300)
    assert all(torch.equal(again[index]["input_ids"], texts[index]["input_ids"]) for index in range(20))


def test_more_documents_than_there_are_come_again_in_order(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = scripts("bench_data")
    monkeypatch.setattr(data, "_definitions", lambda: iter([["a"] * 9, ["b"], ["c"] * 40]))
    texts = data.SourceTexts(5, 64, 10)
    assert [len(texts[index]["input_ids"]) for index in range(len(texts))] == [9, 40, 9, 40, 9]
    monkeypatch.setattr(data, "_definitions", lambda: iter([["b"]]))
    with pytest.raises(ValueError, match="no source files"):
        data.SourceTexts(1, 64, 10)


def test_medians_are_over_the_logs_that_have_the_number(scripts: Any) -> None:
    logs = [{"megatrain/a": 1.0, "loss": 9.0}, {"megatrain/a": 3.0, "megatrain/b": 5.0}, {"megatrain/a": 100.0}]
    assert scripts("trainer_run").medians(logs) == {"megatrain/a": 3.0, "megatrain/b": 5.0}


def test_an_emulated_machine_has_fewer_cores_and_never_more(scripts: Any, tmp_path: Path) -> None:
    result = tmp_path / "result.jsonl"
    case, cores = scripts("bench_cases").TINY[0], sorted(os.sched_getaffinity(0))
    script = scripts("bench_cases").script_command(case, 2, 1, result, ["--emulate", "1", "20"])
    watched = f"import os, runpy, sys; sys.argv = {script!r}; os._exit = lambda _: None; sys.path.insert(0, {str(FOLDER)!r})\n"
    watched += "runpy.run_path(sys.argv[0], run_name='__main__'); print(len(os.sched_getaffinity(0)))"
    run = scripts("run")
    environment = scripts("bench_cases").stock_environment()
    assert run.run_logged([sys.executable, "-c", watched], tmp_path / "log", 300, environment) is None
    assert (tmp_path / "log").read_text().split()[-1] == "1"
    row = scripts("bench_report").trainer_row(case.name, case.shape, "megatrain", run.read_lines(result)[0])
    assert row["note"] == "emulated: 1 cores and a link of 20 GB/s"
    with pytest.raises(ValueError, match="can't be emulated"):
        scripts("emulation").emulate(len(cores) + 1, 20.0)
