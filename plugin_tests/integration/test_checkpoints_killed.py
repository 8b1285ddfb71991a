"""A run that is killed at any instant of a save leaves complete checkpoints, and goes on as if it never was."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_runs import CHECKPOINT_FILES, make_trainer
from forked_process import run_forked
from plain_torch import tiny_model
from safetensors.torch import load_file
from trainer_runs import plugin
from transformers.trainer_utils import get_last_checkpoint

from megatrain_accelerate.checkpoint.checkpoints import STAGING_PREFIX
from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.plan import device_plan

KILL_STEPS = 10
KILLS = 8
"""While checkpoints are replaced, each in another eighth of the operations."""
NOTE = "my_notes.txt"
"""A file that a user puts into checkpoints."""


def die_at_an_operation(folder: Path, number: int | None) -> Iterator[int]:
    """Kills this process at the operation of a number that changes files under a folder.

    Operations are counted rather than time, so that a kill hits a save on machines of every speed: what Python creates,
    renames and deletes, and the eighths of what ``torch.save`` writes.

    Args:
        folder: the output folder.
        number: from 1; None kills nothing.

    Returns:
        The counter of operations.
    """
    operations = itertools.count(1)

    def note() -> None:
        if next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            is_change = bool(args[2] & (os.O_WRONLY | os.O_RDWR)) and str(args[0]).startswith(str(folder))
        elif event in ("os.mkdir", "os.rename", "os.link"):
            is_change = str(args[0]).startswith(str(folder))
        else:  # shutil.rmtree names files within an open folder
            is_change = event in ("os.remove", "os.rmdir") and (args[1] >= 0 or str(args[0]).startswith(str(folder)))
        if is_change:
            note()

    save = torch.save

    def save_in_parts(thing: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        save(thing, file, *args, **kwargs)
        content = Path(file).read_bytes()
        with open(file, "wb") as stream:
            for start in range(0, len(content), len(content) // 8 + 1):
                stream.write(content[start : start + len(content) // 8 + 1])
                stream.flush()
                note()

    sys.addaudithook(hook)
    torch.save = save_in_parts
    return operations


def _not_profiled(*_: Any) -> None:
    raise UnsupportedError("not in these children")


def train_for_kills(folder: Path, steps: int = KILL_STEPS, resume: str | None = None, **changes: Any) -> None:
    """Trains on from a checkpoint, the last one unless told otherwise, if there is one."""
    with plugin():
        # The order of the data is drawn before a resume reads the RNG state.
        model = tiny_model(hidden_size=32, intermediate_size=64, num_hidden_layers=2, attention_dropout=0.3)
        trainer = make_trainer(model, folder, **{"bf16": True, "max_steps": steps, "save_total_limit": 2, **changes})
        trainer.train(resume_from_checkpoint=resume or get_last_checkpoint(str(folder)))


def assert_complete(checkpoint: Path, others: frozenset[str] = frozenset()) -> int:
    """Every file of the checkpoint, and of others, is there and reads to its end; returns its step."""
    assert {path.name for path in checkpoint.iterdir()} == CHECKPOINT_FILES | others
    step = int(checkpoint.name.rpartition("-")[2])
    load_file(checkpoint / "model.safetensors")
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert all(state["step"] == step for state in optimizer["state"].values())
    torch.load(checkpoint / "scheduler.pt", weights_only=True)
    torch.load(checkpoint / "rng_state.pth", weights_only=False)
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == step
    return step


def train_in_a_child(folder: Path, kill_at: int | None, **how: Any) -> tuple[bool, bool]:
    """Trains in a child, which is killed at an operation on files; see :func:`die_at_an_operation`.

    The child is a fork of this process, which has imported everything and never trained.

    Args:
        folder: the output folder.
        kill_at: the operation's number; None lets it end.
        how: arguments of :func:`train_for_kills`.

    Returns:
        Whether the child was killed, and whether that was within a save.
    """
    child = os.fork()
    if child == 0:
        try:
            operations = die_at_an_operation(folder, kill_at)
            train_for_kills(folder, **how)
            counted_in(folder).write_text(str(next(operations) - 1))
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0
        return False, False
    return True, bool(list(folder.glob(f"{STAGING_PREFIX}*")))


def counted_in(folder: Path) -> Path:
    """The file with the operations that the last child counted that ended by itself."""
    return folder.with_name(f"{folder.name}-operations")


def kill_again_and_again(folder: Path, seed: int) -> dict[str, int]:
    """Trains to the end in children that are killed at random operations of their first two saves.

    Returns:
        How many children were killed, and in how many cases within a save.
    """
    whole = folder.with_name("measured")
    assert train_in_a_child(whole, None) == (False, False)
    two_saves = int(counted_in(whole).read_text()) * 2 // KILL_STEPS
    randomness = random.Random(seed)
    killed = within = last_step = 0
    while last_step < KILL_STEPS:
        assert killed < 100, "no progress"
        was_killed, was_within = train_in_a_child(folder, randomness.randint(1, two_saves))
        killed, within = killed + was_killed, within + was_within
        steps = [assert_complete(path) for path in folder.glob("checkpoint-*")]
        assert len(steps) <= 3, "one more than the limit may be there before the rotation"
        last = get_last_checkpoint(str(folder))
        assert max(steps, default=0) >= last_step, "a complete checkpoint was lost"
        last_step = assert_complete(Path(last)) if last else 0
    return {"killed": killed, "within": within}


def kill_while_checkpoints_are_replaced(folder: Path, seed: int) -> dict[str, int]:
    """Trains over checkpoints with a user's files, in children that are killed at random operations of all their saves.

    Returns:
        As :func:`kill_again_and_again`, and how many checkpoints were replaced.
    """
    randomness = random.Random(seed)
    assert train_in_a_child(folder, None, steps=3, save_total_limit=None) == (False, False)
    checkpoints = [folder / f"checkpoint-{step}" for step in (1, 2, 3)]
    for checkpoint in checkpoints:
        (checkpoint / NOTE).write_text(checkpoint.name)
    again: dict[str, Any] = {"steps": 3, "save_total_limit": None, "resume": str(checkpoints[0])}
    assert train_in_a_child(folder, None, **again) == (False, False)
    operations = int(counted_in(folder).read_text())
    kills = [int((part + randomness.random()) / KILLS * operations) + 1 for part in range(KILLS)]
    randomness.shuffle(kills)
    killed = within = replaced = 0
    for kill_at in kills:
        before = [checkpoint.stat().st_ino for checkpoint in checkpoints]
        was_killed, was_within = train_in_a_child(folder, kill_at, **again)
        killed, within = killed + was_killed, within + was_within
        replaced += sum(checkpoint.stat().st_ino != inode for checkpoint, inode in zip(checkpoints, before, strict=True))
        for checkpoint in checkpoints:
            assert_complete(checkpoint, frozenset({NOTE}))
            assert (checkpoint / NOTE).read_text() == checkpoint.name
    return {"killed": killed, "within": within, "replaced": replaced}


class Kills(NamedTuple):
    """What children left behind that were killed, and how often they were."""

    again: Path
    again_counts: dict[str, int]
    replaced: Path
    replaced_counts: dict[str, int]


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    """Both ways of killing, in one process that never trains itself."""
    again, replaced = (tmp_path_factory.mktemp(name) / "run" for name in ("again", "replaced"))
    counts = json.loads(run_forked(__file__, again, replaced).strip().splitlines()[-1])
    print(counts)
    return Kills(again, counts[0], replaced, counts[1])


def test_a_kill_at_any_instant_of_a_save_leaves_complete_checkpoints_only(kills: Kills, tmp_path: Path) -> None:
    counts = kills.again_counts
    assert counts["killed"] >= 5
    assert counts["within"] >= 3, "the kills must hit saves for the test to mean something"
    # And the run that was killed so often ended as one that never was.
    train_for_kills(tmp_path / "whole")
    killed, whole = (
        torch.load(folder / f"checkpoint-{KILL_STEPS}" / "optimizer.pt") for folder in (kills.again, tmp_path / "whole")
    )
    for index, state in whole["state"].items():
        assert all(torch.equal(killed["state"][index][key], value) for key, value in state.items())
    names = [f"checkpoint-{step}" for step in (KILL_STEPS - 1, KILL_STEPS)]
    assert sorted(path.name for path in kills.again.glob("checkpoint-*")) == sorted(names)


def test_a_kill_while_checkpoints_are_replaced_leaves_each_complete_with_the_files_of_its_user(kills: Kills) -> None:
    counts = kills.replaced_counts
    assert counts["killed"] >= 5
    assert counts["within"] >= 3, "the kills must hit saves for the test to mean something"
    assert counts["replaced"] >= 3, "checkpoints must be replaced for the test to mean something"
    train_for_kills(kills.replaced, steps=3, save_total_limit=None, resume=str(kills.replaced / "checkpoint-1"))
    assert sorted(path.name for path in kills.replaced.iterdir()) == [f"checkpoint-{step}" for step in (1, 2, 3)]


if __name__ == "__main__":
    # Without a budget a plan places nothing, and a child would take as long for it as for its steps.
    device_plan.profile_step = _not_profiled  # type: ignore[assignment]
    gc.freeze()  # a collection in a child would copy all that it shares with its parent
    again, replaced = (Path(argument) for argument in sys.argv[1:])
    for target in (again, replaced):
        target.mkdir(parents=True)
    print(json.dumps([kill_again_and_again(again, seed=1), kill_while_checkpoints_are_replaced(replaced, seed=1)]))
