"""The Trainer's logs say what bounded a step. The CPU plays the device here; plugin_tests/gpu does the same on a GPU."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from engine_runs import place
from trainer_runs import TrainerRun, run_trainer, tiny_llama

from megatrain_accelerate.optim import fused_step
from megatrain_accelerate.plan.device_plan import DevicePlan
from megatrain_accelerate.plan.placement import Counts
from megatrain_accelerate.plan.step_simulation import StepTime
from megatrain_accelerate.transfer import prefetch

pytestmark = pytest.mark.usefixtures("profiled_once")

KEYS = (
    *(f"gpu_wait_{cause}_ms" for cause in ("h2d", "d2h", "host_step", "backward_end")),
    *(f"bound_share_{name}" for name in ("compute", "h2d", "d2h", "host_step")),
    *("h2d_gb_per_second", "d2h_gb_per_second"),
)


def megatrain_logs(run: TrainerRun) -> list[dict[str, Any]]:
    """The plugin's numbers by step, without the prefix."""
    return [
        {key.removeprefix("megatrain/"): value for key, value in entry.items() if key.startswith("megatrain/")}
        for entry in run.trainer.state.log_history
        if "loss" in entry
    ]


def word(entry: dict[str, Any]) -> str:
    return max(("compute", "h2d", "d2h", "host_step"), key=lambda name: entry[f"bound_share_{name}"])


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    original = getattr(owner, name)

    def slowed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slowed)


def test_every_log_holds_numbers_that_every_tracker_can_draw(tmp_path: Path) -> None:
    run = run_trainer(tiny_llama, tmp_path, streamed=True)
    path = tmp_path / "trainer_state.json"
    run.trainer.state.save_to_json(str(path))
    saved = json.loads(path.read_text())["log_history"]
    logs = [entry for entry in saved if "loss" in entry]
    assert len(logs) == 6
    for entry in logs:
        for key in KEYS:
            assert isinstance(entry[f"megatrain/{key}"], float), key
        assert sum(entry[f"megatrain/bound_share_{name}"] for name in ("compute", "h2d", "d2h", "host_step")) == pytest.approx(
            1.0, abs=1e-3
        )
    # A step is applied after it is logged: the rate is that of what was applied meanwhile, if anything was.
    rates = [
        entry["megatrain/host_step_gparams_per_second"] for entry in logs if "megatrain/host_step_gparams_per_second" in entry
    ]
    assert rates
    assert all(rate > 0 for rate in rates)


def test_the_step_that_the_plan_expects_is_logged_where_it_expects_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_trainer(tiny_llama, tmp_path / "unplanned", streamed=True)
    assert all("predicted_step_ms" not in entry for entry in megatrain_logs(run))
    follow = DevicePlan.follow

    def predicts(plan: DevicePlan, *args: Any) -> None:
        follow(plan, *args)
        plan.current = dataclasses.replace(plan.current, predicted_time=StepTime(0.25, 0.0, 0.0, 0.0, 0.0))

    monkeypatch.setattr(DevicePlan, "follow", predicts)
    run = run_trainer(tiny_llama, tmp_path / "planned", streamed=True)
    assert [entry["predicted_step_ms"] for entry in megatrain_logs(run)] == [250.0] * 6


def test_the_time_that_a_plan_took_is_logged_where_there_was_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow, forwards = DevicePlan.follow, 0

    def plans(plan: DevicePlan, *args: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 4:
            plan.forget()
        time.sleep(0.1 * forwards)  # in all others a rank waits for another one
        follow(plan, *args)

    monkeypatch.setattr(DevicePlan, "follow", plans)
    run = run_trainer(tiny_llama, tmp_path, streamed=True)
    seconds = {step: entry["plan_seconds"] for step, entry in enumerate(megatrain_logs(run), 1) if "plan_seconds" in entry}
    assert list(seconds) == [1, 4]
    assert seconds[1] >= 0.1
    assert seconds[4] >= 0.4


def test_what_lies_where_is_logged_once_for_each_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow, steps = DevicePlan.follow, 0

    def replans(plan: DevicePlan, *args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            place(plan, Counts(kept=3).placement(4))
        follow(plan, *args)

    monkeypatch.setattr(DevicePlan, "follow", replans)
    run = run_trainer(tiny_llama, tmp_path, streamed=True)
    found = {step: entry["kept_layers"] for step, entry in enumerate(megatrain_logs(run), 1) if "kept_layers" in entry}
    assert found == {1: 0.0, 4: 3.0}


def test_a_slow_host_step_bounds_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow(monkeypatch, fused_step, "step_segments", 0.05)
    run = run_trainer(tiny_llama, tmp_path, streamed=True, max_steps=12)
    entry = megatrain_logs(run)[-1]
    assert word(entry) == "host_step"
    # Three layers, the embedding and the rest: each step takes 50 ms longer, most of it with nothing else to do.
    assert entry["gpu_wait_host_step_ms"] > 100
    assert "is bound by host_step (host_step " in capsys.readouterr().out


def test_what_bounds_is_printed_once_it_is_known_and_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(seconds: dict[int, float], steps: int, **changes: Any) -> list[tuple[int, str]]:
        """(step, word) of each line, where the steps from some on spend so long in the host's AdamW."""
        now, follow, apply = 0, DevicePlan.follow, fused_step.step_segments

        def begin(plan: DevicePlan, *args: Any) -> None:
            nonlocal now
            now += 1
            time.sleep(0.03)  # in no copy and no step: it counts as compute
            follow(plan, *args)

        def slowed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds[max(step for step in seconds if step <= now)])
            return apply(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(DevicePlan, "follow", begin)
            patched.setattr(fused_step, "step_segments", slowed)
            run_trainer(tiny_llama, tmp_path / str(len(list(tmp_path.iterdir()))), streamed=True, max_steps=steps, **changes)
        lines = capsys.readouterr().out.splitlines()
        found = [re.fullmatch(r"megatrain: step (\d+) is bound by (\w+) \(.*\)", line) for line in lines]
        return [(int(line[1]), line[2]) for line in found if line]

    assert words({0: 0.0}, steps=8) == [], "too few steps to tell"
    assert words({0: 0.0}, steps=19, logging_steps=6) == [(18, "compute")]
    (first, second) = words({0: 0.0, 16: 0.06}, steps=32)
    assert first == (11, "compute"), "ten steps after the first, which has the plan"
    assert second[1] == "host_step"
    assert second[0] in range(25, 29), "ten steps after the change"


def test_steps_with_a_plan_do_not_tell_what_bounds_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow = DevicePlan.follow

    def plans(plan: DevicePlan, *args: Any) -> None:
        plan.forget()
        follow(plan, *args)

    monkeypatch.setattr(DevicePlan, "follow", plans)
    run_trainer(tiny_llama, tmp_path, streamed=True, max_steps=14)
    assert "is bound by" not in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["serial", "backward"])
def test_a_slow_host_step_is_seen_under_every_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    slow(monkeypatch, fused_step, "step_segments", 0.05)
    settings = {"step_schedule": schedule}
    run = run_trainer(tiny_llama, tmp_path, streamed=True, settings=settings, max_grad_norm=0.0)
    assert word(megatrain_logs(run)[-1]) == "host_step"


def test_slow_copies_to_the_device_bound_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = prefetch.Meter.copying

    def slow_copying(self: Any, direction: Any, copied_bytes: int, beside_compute: bool = False) -> Any:
        class Slow:
            def __enter__(self) -> None:
                inner.__enter__()
                if direction is prefetch.Cause.H2D:
                    time.sleep(0.05)

            def __exit__(self, *error: Any) -> None:
                inner.__exit__(*error)

        inner = original(self, direction, copied_bytes, beside_compute)
        return Slow()

    monkeypatch.setattr(prefetch.Meter, "copying", slow_copying)
    run = run_trainer(tiny_llama, tmp_path, streamed=True)
    entry = megatrain_logs(run)[-1]
    assert word(entry) == "h2d"
    assert entry["h2d_gb_per_second"] < entry["d2h_gb_per_second"]
