"""A run that is killed at any instant of a save leaves complete checkpoints, and goes on as if it never was."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint_runs import CHECKPOINT_FILES, make_trainer
from fresh_process import run_test_file
from plain_torch import tiny_model
from safetensors.torch import load_file
from trainer_runs import plugin
from transformers.trainer_utils import get_last_checkpoint

from megatrain_accelerate.checkpointing import STAGING_FOLDER

KILL_STEPS = 10


def slow_down_saving(signal_file: Path) -> None:
    """Stretches every part of a save in this process, and says when a save begins."""
    save, unlink = torch.save, os.unlink

    def slow_save(thing: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        signal_file.touch()
        save(thing, file, *args, **kwargs)
        content = Path(file).read_bytes()
        with open(file, "wb") as stream:
            for start in range(0, len(content), len(content) // 8 + 1):
                stream.write(content[start : start + len(content) // 8 + 1])
                stream.flush()
                time.sleep(0.004)

    def slow_unlink(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.004)
        unlink(*args, **kwargs)

    torch.save = slow_save
    os.unlink = slow_unlink  # shutil.rmtree deletes with it


def train_for_kills(folder: Path) -> None:
    """Trains on from the last checkpoint, if there is one."""
    with plugin():
        # The order of the data is drawn before a resume reads the RNG state.
        model = tiny_model(hidden_size=32, intermediate_size=64, num_hidden_layers=2, attention_dropout=0.3)
        trainer = make_trainer(model, folder, bf16=True, max_steps=KILL_STEPS, save_total_limit=2)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))


def assert_complete(checkpoint: Path) -> int:
    """Every file of the checkpoint is there and reads to its end; returns its step."""
    assert {path.name for path in checkpoint.iterdir()} == CHECKPOINT_FILES
    step = int(checkpoint.name.rpartition("-")[2])
    load_file(checkpoint / "model.safetensors")
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert all(state["step"] == step for state in optimizer["state"].values())
    torch.load(checkpoint / "scheduler.pt", weights_only=True)
    torch.load(checkpoint / "rng_state.pth", weights_only=False)
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == step
    return step


def kill_again_and_again(folder: Path, seed: int) -> dict[str, int]:
    """Trains to the end in children that are killed at random instants after a save began.

    Children are forks of this process, which has imported everything and never trained.

    Returns:
        How many children were killed, and in how many cases within a save.
    """
    randomness = random.Random(seed)
    killed = within = last_step = 0
    signal_file = folder.parent / "saving"
    while last_step < KILL_STEPS:
        assert killed < 100, "no progress"
        signal_file.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                slow_down_saving(signal_file)
                train_for_kills(folder)
                os._exit(0)
            finally:
                os._exit(1)
        ended = 0
        while not ended and not signal_file.exists():
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.002)
        if not ended:
            time.sleep(randomness.uniform(0, 0.5))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            within += (folder / STAGING_FOLDER).exists()
        else:
            assert os.WEXITSTATUS(status) == 0
        steps = [assert_complete(path) for path in folder.glob("checkpoint-*")]
        assert len(steps) <= 3, "one more than the limit may be there before the rotation"
        last = get_last_checkpoint(str(folder))
        assert max(steps, default=0) >= last_step, "a complete checkpoint was lost"
        last_step = assert_complete(Path(last)) if last else 0
    return {"killed": killed, "within": within}


def test_a_kill_at_any_instant_of_a_save_leaves_complete_checkpoints_only(tmp_path: Path) -> None:
    counts = json.loads(run_test_file(__file__, "kill", tmp_path / "run").strip().splitlines()[-1])
    print(counts)
    assert counts["killed"] >= 5
    assert counts["within"] >= 3, "the kills must hit saves for the test to mean something"
    # And the run that was killed so often ended as one that never was.
    train_for_kills(tmp_path / "whole")
    killed, whole = (torch.load(tmp_path / name / f"checkpoint-{KILL_STEPS}" / "optimizer.pt") for name in ("run", "whole"))
    for index, state in whole["state"].items():
        assert all(torch.equal(killed["state"][index][key], value) for key, value in state.items())
    names = [f"checkpoint-{step}" for step in (KILL_STEPS - 1, KILL_STEPS)]
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == sorted(names)


if __name__ == "__main__":
    _, target = sys.argv[1:]
    Path(target).mkdir()
    print(json.dumps(kill_again_and_again(Path(target), seed=1)))
