"""`megatrain trace` around trainings that know nothing of it, each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from trace_runs import LAYERS, LOOP_SCRIPT, TRAINER_SCRIPT, spans_by_lane, trace_script
from trainer_runs import tiny_llama

from megatrain_accelerate.cli import main
from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.integrations import telemetry
from megatrain_accelerate.tracing import ENV_TRACE_DIR

CONFIG = Path(__file__).parents[2] / "recipes" / "megatrain_cpu.yaml"


class Traced(NamedTuple):
    """A step that was traced."""

    step: int
    printed: str
    trace: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((TRAINER_SCRIPT, 4), id="trainer"),
        pytest.param((LOOP_SCRIPT, 2), id="loop", marks=pytest.mark.long),
    ],
)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A step of a training by the Trainer, or by a loop of the user's own."""
    script, step = request.param
    return Traced(step, *trace_script(tmp_path_factory.mktemp("traced"), script, step, CONFIG))


def test_one_step_of_a_training_is_traced(traced: Traced) -> None:
    step, printed, trace = traced
    lanes = spans_by_lane(trace)
    for layer in range(LAYERS):
        for work in ("forward", "recompute", "backward", "copy_gradients"):
            name = f"megatrain::{work} (model.layers.{layer})"
            # Once: it is one period, and no more.
            assert lanes["launcher thread"].count(name) == 1, name
        assert lanes["megatrain-step-worker"].count(f"megatrain::step (model.layers.{layer})") == 1
    ours = [name for name in lanes["launcher thread"] if name.startswith("megatrain::")]
    forwards = [ours.index(f"megatrain::forward (model.layers.{layer})") for layer in range(LAYERS)]
    assert forwards == sorted(forwards)
    assert ours.index("megatrain::backward (model.layers.0)") > ours.index(f"megatrain::backward (model.layers.{LAYERS - 1})")
    assert trace["megatrain"]["step"] == step
    assert sum(trace["megatrain"]["shares"].values()) == pytest.approx(1.0)
    assert f"step {step} on the CPU" in printed
    assert "the step is bound by " in printed


def test_host_steps_lie_before_the_forward_of_their_layer(traced: Traced) -> None:
    spans = {e["name"]: e for e in traced.trace["traceEvents"] if e["ph"] == "X" and e["name"].startswith("megatrain::")}
    for layer in range(LAYERS):
        step, forward = (spans[f"megatrain::{work} (model.layers.{layer})"] for work in ("step", "forward"))
        # Of two clocks that are tied within some tens of microseconds.
        assert step["ts"] + step["dur"] <= forward["ts"] + 200


@pytest.mark.parametrize("below", ["", "runs"])
def test_a_file_is_no_folder_for_a_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str], below: str) -> None:
    (tmp_path / "file").write_text("")
    assert main(["trace", "--out", str(tmp_path / "file" / below), "--", "echo", "started"]) == 1
    shown = capfd.readouterr()
    assert f"megatrain trace: --out {tmp_path / 'file' / below}: " in shown.err
    assert "started" not in shown.out


@pytest.mark.usefixtures("active")
class TestWithoutTheCommand:
    def prepare(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, prepared = Accelerator(cpu=True).prepare(model, optimizer)
        ids = torch.randint(0, 128, (1, 8))
        for _ in range(6):
            model(input_ids=ids, labels=ids).loss.backward()
            prepared.step()
            prepared.zero_grad()
        return model, optimizer

    def test_a_training_is_not_touched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(ENV_TRACE_DIR, raising=False)
        monkeypatch.setattr(telemetry, "_trace", lambda *_: pytest.fail("a training that nobody asked to trace is followed"))
        model, optimizer = self.prepare()
        engine = engine_of(model)
        assert engine is not None
        assert engine.runtime.worker.on_work_done is None
        assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]

    def test_and_is_followed_with_it(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(ENV_TRACE_DIR, str(tmp_path))
        begun = []
        monkeypatch.setattr(telemetry, "_trace", lambda *_: map(begun.append, range(1, 7)))
        _, optimizer = self.prepare()
        assert len(optimizer._optimizer_step_pre_hooks) == 1  # type: ignore[attr-defined]
        assert begun == list(range(1, 7))
