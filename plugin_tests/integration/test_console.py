"""What a person sees while a Trainer runs: short lines, and bars where they can be drawn."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fresh_process import clean_environment
from torch import nn
from trainer_runs import TrainerRun, examples, make_arguments, plugin, run_trainer, tiny_llama
from transformers import Trainer, TrainerCallback, ViTConfig, ViTForImageClassification

pytestmark = pytest.mark.usefixtures("profiled_once")


def tiny_vit() -> ViTForImageClassification:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=4, **sizes))


FIGURES = {"tokens_per_second", "gpu_gib", "host_gib"}


class Tracker(TrainerCallback):
    """Keeps what trackers get; user's callbacks come after those of the trackers and before the printer."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def ours(logs: dict[str, Any]) -> set[str]:
    return {name.removeprefix("megatrain/") for name in logs if name.startswith("megatrain/")}


def training_lines(printed: str) -> list[dict[str, Any]]:
    entries = [ast.literal_eval(line) for line in re.findall(r"\{.*\}", printed)]
    return [entry for entry in entries if "loss" in entry]


def run_with_tracker(tmp_path: Path, trainer_class: type[Trainer] = Trainer, **arguments: Any) -> tuple[TrainerRun, Tracker]:
    tracker = Tracker()
    run = run_trainer(
        tiny_llama,
        tmp_path,
        streamed=True,
        options=lambda model: {"callbacks": [tracker], "eval_dataset": examples(2)},
        trainer_class=trainer_class,
        **{"max_steps": 3, **arguments},
    )
    return run, tracker


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_a_line_on_the_console_shows_stock_entries_and_three_figures_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disable_tqdm: bool
) -> None:
    run_trainer(tiny_llama, tmp_path / "stock", streamed=False, max_steps=3, disable_tqdm=disable_tqdm)
    stock = training_lines(capsys.readouterr().out)
    run, tracker = run_with_tracker(tmp_path / "streamed", disable_tqdm=disable_tqdm)
    lines = training_lines(capsys.readouterr().out)
    assert [line.keys() - FIGURES for line in lines] == [line.keys() for line in stock]
    assert [line["loss"] for line in lines] == [line["loss"] for line in stock]
    for line in lines:
        assert line.keys() & FIGURES == {"tokens_per_second", "host_gib"}, "all but the GPU's, which the CPU has not"
    # Trackers and the history have everything.
    history = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    tracked = [entry for entry in tracker.seen if "loss" in entry]
    for line, logged, entry in zip(lines, history, tracked, strict=True):
        assert ours(logged) == ours(entry) >= {"tokens_per_second", "host_peak_gib", "h2d_gb", "bound_share_compute"}
        assert float(line["tokens_per_second"]) == pytest.approx(entry["megatrain/tokens_per_second"], rel=1e-3)
        assert not FIGURES & (logged.keys() | entry.keys())


def test_a_figure_of_the_scripts_own_keeps_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(Trainer):
        def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "host_gib": "mine"}, *args, **kwargs)

    run_with_tracker(tmp_path, Own)
    assert [line["host_gib"] for line in training_lines(capsys.readouterr().out)] == ["mine"] * 3


def test_the_tables_of_trl_are_as_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks", reason="TRL isn't installed")
    pytest.importorskip("rich")
    with plugin():
        args = make_arguments(tmp_path, max_steps=2)
        trainer = Trainer(
            model=tiny_llama(), args=args, train_dataset=examples(), callbacks=[callbacks.RichProgressCallback()]
        )
        trainer.train()
    printed = capsys.readouterr().out
    assert "tokens_per_second" in printed
    assert "bound_share" not in printed


def renamed(logs: dict[str, Any]) -> dict[str, Any]:
    return {{"loss": "embedding_loss"}.get(name, name): value for name, value in logs.items()}


def nested(logs: dict[str, Any]) -> dict[str, Any]:
    return {"train": logs} if "loss" in logs else logs


@pytest.mark.parametrize("change", [renamed, nested])
def test_a_loss_by_another_name_is_logged_with_the_figures(tmp_path: Path, change: Any) -> None:
    class Changed(Trainer):
        def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            super().log(change(logs), *args, **kwargs)

    run, _ = run_with_tracker(tmp_path, Changed, eval_strategy="steps", eval_steps=1)
    history = run.trainer.state.log_history
    training = [entry for entry in history if "embedding_loss" in entry or "train" in entry]
    assert len(training) == 3
    assert all(entry["megatrain/tokens_per_second"] > 0 for entry in training)
    others = [entry for entry in history if entry not in training]
    assert len(others) == 4, "three evaluations and the summary"
    assert not any(ours(entry) for entry in others)


class Features(nn.Module):
    """Takes its inputs as one mapping, as sentence-transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()

    def forward(self, features: dict[str, Any]) -> Any:
        return self.inner(**features)


class GivesFeatures(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(dict(inputs)).loss


def test_tokens_of_inputs_in_a_mapping_are_counted(tmp_path: Path) -> None:
    run = run_trainer(Features, tmp_path, streamed=True, trainer_class=GivesFeatures, max_steps=2, remove_unused_columns=False)
    entries = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    assert [entry["megatrain/tokens_per_second"] > 0 for entry in entries] == [True, True]


def test_a_model_of_images_has_no_figures_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = [{"pixel_values": torch.randn(3, 32, 32), "labels": label % 4} for label in range(8)]
    run = run_trainer(tiny_vit, tmp_path, streamed=True, dataset=images, max_steps=2)
    lines = training_lines(capsys.readouterr().out)
    assert [line.keys() & FIGURES for line in lines] == [{"host_gib"}] * 2
    assert not {"tokens_per_second", "tflops"} & set().union(*map(ours, run.trainer.state.log_history))


def test_what_a_script_logs_within_a_step_takes_no_figures_from_the_trainers_entry(tmp_path: Path) -> None:
    class Chatty(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.log({"auxiliary_loss": 1.0})
            return super().compute_loss(*args, **kwargs)

    run, _ = run_with_tracker(tmp_path, Chatty, max_steps=4, logging_steps=2)
    history = run.trainer.state.log_history
    assert not any(ours(entry) for entry in history if "auxiliary_loss" in entry)
    first, second = (entry for entry in history if "loss" in entry)
    assert ours(first) >= ours(second) > {"tokens_per_second"}


def test_two_entries_of_one_step_have_the_same_figures(tmp_path: Path) -> None:
    class Twice(Trainer):
        def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                super().log({"my_loss": logs["loss"]})
            super().log(logs, *args, **kwargs)

    run, _ = run_with_tracker(tmp_path, Twice)
    history = run.trainer.state.log_history
    pairs = list(zip(*([entry for entry in history if name in entry] for name in ("my_loss", "loss")), strict=True))
    assert len(pairs) == 3
    for mine, theirs in pairs:
        assert ours(mine) == ours(theirs)
        assert all(mine[f"megatrain/{name}"] == theirs[f"megatrain/{name}"] for name in ours(mine))


TRAININGS = """
import gc, os, sys
from trainer_runs import examples, make_arguments, tiny_llama
from transformers import Trainer
import megatrain_accelerate

gc.freeze()  # a collection in a child would copy all that it shares with this process

def train(folder, bars):
    megatrain_accelerate.enable()
    changes = {"disable_tqdm": bars == "off", "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    Trainer(model=tiny_llama(), args=make_arguments(folder, **changes), train_dataset=examples()).train()

for name in sys.argv[2:]:
    out, errors, bars = name.split(":")
    child = os.fork()
    if child == 0:
        os.dup2(int(out), 1)
        os.dup2(int(errors), 2)
        train(f"{sys.argv[1]}/{out}", bars)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, name
"""
"""Each in a fork of one process, which has imported everything and never trains itself."""


class Terminal:
    """A terminal of 80 columns, and what was written to it."""

    def __init__(self) -> None:
        self._main, self.file = pty.openpty()
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._main, 4096):
                self._written.extend(chunk)
        except OSError:  # the other end is closed
            pass

    def close(self) -> str:
        """What was written."""
        os.close(self.file)
        self._reader.join()
        os.close(self._main)
        return self._written.decode()


def run_trainings(folder: Path, *trainings: str, files: list[int], **env: str) -> None:
    """Trains with outputs and errors in open files: ``"<output>:<errors>:<on or off>"``, with bars on or off."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = clean_environment(**{"PYTHONPATH": os.pathsep.join(filter(None, paths)), **env})
    command = (sys.executable, "-c", TRAININGS, str(folder), *trainings)
    subprocess.run(command, env=environment, pass_fds=files, check=True, timeout=300)


class Written(NamedTuple):
    """What trainings with bars ``on`` or ``off`` wrote."""

    terminals: dict[str, str]
    outputs: dict[str, str]
    errors: dict[str, str]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Of a training on a terminal and one into files each."""
    folder = tmp_path_factory.mktemp("written")
    terminals = {bars: Terminal() for bars in ("on", "off")}
    trainings, files = [f"{at.file}:{at.file}:{bars}" for bars, at in terminals.items()], []
    try:
        with contextlib.ExitStack() as stack:
            for bars in terminals:
                out, errors = (stack.enter_context(open(folder / f"{bars}.{name}", "w")).fileno() for name in ("out", "err"))
                trainings.append(f"{out}:{errors}:{bars}")
                files += [out, errors]
            run_trainings(folder, *trainings, files=[*files, *(at.file for at in terminals.values())])
    finally:
        shown = {bars: at.close() for bars, at in terminals.items()}
    return Written(shown, *({bars: (folder / f"{bars}.{name}").read_text() for bars in shown} for name in ("out", "err")))


def test_bars_are_drawn_on_a_terminal_unless_the_user_switched_bars_off(written: Written, tmp_path: Path) -> None:
    terminal = Terminal()
    try:
        run_trainings(tmp_path, f"{terminal.file}:{terminal.file}:on", files=[terminal.file], TQDM_DISABLE="1")
    finally:
        switched_off = terminal.close()
    assert "megatrain: adopting 3 layers" in written.terminals["on"]
    for shown in (written.terminals["off"], switched_off):
        assert "train_loss" in shown
        assert "megatrain: adopting" not in shown
        assert "megatrain: saving" not in shown


@pytest.mark.parametrize("bars", ["on", "off"])
def test_a_log_file_holds_a_line_for_the_model_and_no_fragments_of_bars(written: Written, bars: str) -> None:
    assert "train_loss" in written.outputs[bars]
    ours = [line for line in written.errors[bars].splitlines() if "megatrain" in line]
    count = sum(parameter.numel() for parameter in tiny_llama().parameters())
    assert ours == [f"megatrain: adopting 3 layers ({count:,} parameters)"]
