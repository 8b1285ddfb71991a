"""A profiler's trace becomes named lanes: streams told by what ran on them, clocks tied, results written."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain_accelerate import cli, tracing
from megatrain_accelerate.tracing import Span

PID, MAIN, BACKWARD_THREAD, WORKER_THREAD = 100, 100, 101, 102
OFFSET_US = 5000.0
"""The trace's clock is this much ahead of the host's."""


def span(name: str, start: float, end: float, thread: int = MAIN) -> dict[str, Any]:
    times = {"ts": start + OFFSET_US, "dur": end - start}
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": PID, "tid": thread, **times}


def device(
    name: str, start: float, end: float, stream: int, launched: float, thread: int, number: int
) -> list[dict[str, Any]]:
    """Work of the GPU, and its launch."""
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    launch = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "launch",
        "pid": PID,
        "tid": thread,
        "ts": launched + OFFSET_US,
        "dur": 1,
    }
    work = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start + OFFSET_US, "dur": end - start}
    return [{**event, "args": {"correlation": number}} for event in (launch, work)]


@pytest.fixture
def raw() -> dict[str, Any]:
    """A GPU's trace of two layers, and the notes: a period from 100 to 1100 us."""
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7"}},
        {"ph": "M", "name": "thread_name", "pid": PID, "tid": MAIN, "ts": 0, "args": {"name": "thread 100 (python)"}},
        span("megatrain::forward (model.layers.0)", 40, 60),
        span("megatrain::prefetch (model.layers.1)", 110, 120),
        span("megatrain::forward (model.layers.1)", 200, 300),
        span("megatrain::backward (model.layers.1)", 400, 500, BACKWARD_THREAD),
        span("megatrain::copy_gradients (model.layers.1)", 510, 520, BACKWARD_THREAD),
        *device("gemm of the period before", 50, 90, 7, 45, MAIN, 1),
        *device("Memcpy HtoD (Pinned -> Device)", 120, 320, 13, 115, MAIN, 2),
        *device("gemm", 250, 450, 7, 210, MAIN, 3),
        *device("gemm", 460, 700, 7, 410, BACKWARD_THREAD, 4),
        *device("Memcpy DtoH (Device -> Pinned)", 700, 900, 17, 515, BACKWARD_THREAD, 5),
        *device("Memcpy HtoD (Pinned -> Device)", 330, 340, 13, 329, WORKER_THREAD, 6),
        *device("loss", 450, 454, 7, 350, MAIN, 7),
    ]
    notes = {
        "step": 5,
        "device": "a card",
        "pid": PID,
        "threads": {tracing.LAUNCHER: MAIN, tracing.WORKER: WORKER_THREAD},
        "begin_ns": 100_000,
        "end_ns": 1_100_000,
        "clock_to_unix_ns": 9_005_000_000,
        "worker_spans": [["step (model.layers.1)", 90_000, 150_000], ["step (model.norm)", 5_000, 6_000]],
        "wait_ms": {},
        "shares": {},
        "bound": "is bound by h2d (h2d 60%)",
    }
    return {"traceEvents": events, "baseTimeNanoseconds": 9_000_000_000, "schemaVersion": 1, tracing.NOTES: notes}


def test_streams_and_threads_become_lanes_with_the_layers_names(raw: Any) -> None:
    found, _ = tracing.build(raw)
    assert found.period_us == pytest.approx(1000.0)
    assert list(found.lanes) == list(tracing.LANES)
    assert found.lanes[tracing.COMPUTE] == [
        Span(150.0, 350.0, "forward", "model.layers.1"),
        Span(350.0, 354.0, tracing.OTHER, ""),
        Span(360.0, 600.0, "backward", "model.layers.1"),
    ]
    assert found.lanes[tracing.H2D] == [
        Span(20.0, 220.0, "copy of weights", "model.layers.1"),
        Span(230.0, 240.0, "copy of weights", ""),
    ]
    assert found.lanes[tracing.D2H] == [Span(600.0, 800.0, "copy of gradients", "model.layers.1")]
    assert [span.kind for span in found.lanes[tracing.AUTOGRAD]] == ["backward", "copy of gradients"]
    # What began before the period is cut off at its begin; what ended before isn't there.
    assert found.lanes[tracing.WORKER] == [Span(0.0, 50.0, "host step", "model.layers.1")]


def test_the_loss_is_what_was_launched_in_its_tiles(raw: Any) -> None:
    raw["traceEvents"].append(span("megatrain::loss_tile", 340, 360))
    lanes = tracing.build(raw)[0].lanes
    (loss,) = (span for span in lanes[tracing.LAUNCHER] if span.kind == tracing.LOSS)
    assert (loss.start, loss.end, loss.label) == (240.0, 260.0, "loss")
    of_tile = [found for found in lanes[tracing.COMPUTE] if found.kind == tracing.LOSS]
    assert [(found.start, found.end) for found in of_tile] == [(350.0, 354.0)], "its kernel was launched in the tile"


def test_the_summary_says_what_was_hidden_and_what_bounded(raw: Any) -> None:
    text = tracing.format_summary(tracing.build(raw)[0])
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert rows["compute"] == ["0.44", "44%"]  # 200 + 4 + 240 of 1000 us
    assert rows["GPU idle"] == ["0.56", "56%"]
    assert rows["h2d under compute"][:2] == ["0.08", "38%"]  # 70 + 10 of 210 us
    assert rows["d2h under compute"][:2] == ["0.00", "0%"]
    assert text.endswith("the step is bound by h2d (h2d 60%)")


def test_perfetto_events_are_those_of_the_period_with_names(raw: Any) -> None:
    _, events = tracing.build(raw)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (0, 7): "compute",
        (0, 13): "h2d",
        (0, 17): "d2h",
        (PID, MAIN): "launcher thread",
        (PID, BACKWARD_THREAD): "autograd thread",
        (PID, WORKER_THREAD): "megatrain-step-worker",
    }
    assert sum(e["name"] == "thread_name" for e in events) == len(names), "the profiler's own names are gone"
    shown = [e["name"] for e in events if e["ph"] == "X"]
    assert "megatrain::step (model.layers.1)" in shown
    assert "gemm of the period before" not in shown
    assert "megatrain::forward (model.layers.0)" not in shown


def test_overlap_is_that_of_sets_of_points() -> None:
    ours = tracing.union([(0, 10), (5, 20), (30, 40)])
    assert ours == [(0, 20), (30, 40)]
    assert tracing.overlap(ours, [(15, 32), (39, 100)]) == 5 + 2 + 1
    assert tracing.overlap(ours, []) == 0


def write_raw(folder: Path, raw: Any) -> None:
    with gzip.open(folder / tracing.RAW_TRACE, "wt") as file:
        json.dump(raw, file)


def test_results_are_a_perfetto_file_a_picture_and_a_table(
    tmp_path: Path, raw: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_raw(tmp_path, raw)
    cli.write_results(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [tracing.PICTURE, tracing.PERFETTO_TRACE]
    assert (tmp_path / tracing.PICTURE).read_bytes().startswith(b"\x89PNG")
    trace = json.loads(gzip.decompress((tmp_path / tracing.PERFETTO_TRACE).read_bytes()))
    assert trace["schemaVersion"] == 1
    assert trace["megatrain"]["step"] == 5
    assert "GPU idle" in capsys.readouterr().out


def test_the_table_is_printed_in_one_piece(tmp_path: Path, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: printed.append(text))
    write_raw(tmp_path, raw)
    cli.write_results(tmp_path)
    (text,) = printed
    assert text.startswith("\nstep 5")
    assert text.count("written: ") == 2


def test_without_matplotlib_the_perfetto_file_is_written_and_the_remedy_named(
    tmp_path: Path, raw: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_raw(tmp_path, raw)
    cli.write_results(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [tracing.PERFETTO_TRACE]
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(("unit", "number"), [("model.layers.17", "17"), ("model.norm", ""), ("", "")])
def test_layers_are_known_by_their_number(unit: str, number: str) -> None:
    assert Span(0, 1, "forward", unit).label == number


class TestCommand:
    def test_the_first_step_has_no_period(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["trace", "--out", str(tmp_path), "--step", "1", "--", "true"]) == 1
        assert "use 2 or more" in capsys.readouterr().err

    def test_a_missing_command_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            cli.main(["trace", "--out", str(tmp_path)])
        assert "the training's command is missing" in capsys.readouterr().err

    def test_a_command_that_is_not_there_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["trace", "--out", str(tmp_path), "--", "no-such-command"]) == 1
        assert "no-such-command" in capsys.readouterr().err

    def test_a_command_that_traces_nothing_is_no_success(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / tracing.RAW_TRACE).write_text("left by an earlier run")
        assert cli.main(["trace", "--out", str(tmp_path), "--", sys.executable, "-c", "pass"]) == 1
        assert "reach optimizer step 5" in capsys.readouterr().err

    def test_the_commands_own_failure_is_handed_on(self, tmp_path: Path) -> None:
        assert cli.main(["trace", "--out", str(tmp_path), "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7

    @pytest.mark.parametrize(("option", "step"), [(["--step", "9"], "9"), ([], "5")])
    def test_the_request_is_handed_on_by_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], option: list[str], step: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        names = tracing.ENV_TRACE_DIR, tracing.ENV_TRACE_STEP
        code = f"import os; print(*map(os.environ.get, {names}))"
        assert cli.main(["trace", "--out", "x", *option, "--", sys.executable, "-c", code]) == 1
        assert capfd.readouterr().out.split() == [str(tmp_path / "x"), step]
