"""Disks that are full, can't be written to, or refuse a part: an error that names it, and nothing lost."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint_runs import CHECKPOINT_FILES, make_trainer
from engine_runs import attach
from plain_torch import tiny_model
from safetensors.torch import load_file
from torch import nn
from trainer_runs import plugin
from transformers import Trainer

import megatrain_accelerate
from megatrain_accelerate.checkpoint.checkpoints import STAGING_PREFIX, checkpoint_bytes, checkpoint_staging
from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import DiskError
from megatrain_accelerate.units import MIB

pytestmark = pytest.mark.usefixtures("profiled_once")

DISK_BYTES = 16 * MIB
Fill = Callable[[int], None]


def small_model(seed: int = 0) -> nn.Module:
    """A checkpoint of 4.1 MiB in fp32, which bookkeeping is a small part of."""
    return tiny_model(seed, hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=256)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of :data:`DISK_BYTES`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"file systems can't be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, left: int) -> None:
    """Leaves ``left`` bytes free."""
    with open(disk / "ballast", "ab") as ballast:
        ballast.write(bytes(max(0, shutil.disk_usage(disk).free - left)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_loads(checkpoint: Path) -> None:
    assert {path.name for path in checkpoint.iterdir()} == CHECKPOINT_FILES
    load_file(checkpoint / "model.safetensors")
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    assert all(entry["step"] == int(checkpoint.name.rpartition("-")[2]) for entry in state.values())


def assert_one_line(error: DiskError, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert STAGING_PREFIX not in text
    for part in parts:
        assert part in text


# ---------------------------------------------------------------------------------------- room


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {"bf16": True}),
        ({}, {}),
        ({}, {"bf16": True, "save_only_model": True}),
        ({"moments_dtype": "bf16"}, {"bf16": True}),
        ({"moments_dtype": "int8"}, {"bf16": True}),
        ({}, {"bf16": True, "optim": "sgd"}),
    ],
    ids=str,
)
def test_the_size_of_a_checkpoint_is_known_before_the_first_step(
    settings: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[int] = []

    def note(folder: Path, parts: dict[str, int], *args: Any) -> None:
        predicted.append(sum(parts.values()))

    monkeypatch.setattr("megatrain_accelerate.checkpoint.checkpoints.require_free_bytes", note)
    with plugin(**settings):
        make_trainer(small_model(), tmp_path, max_steps=2, **arguments).train()
    tensor_files = ("model.safetensors", "optimizer.pt")
    written = [
        sum(path.stat().st_size for path in (tmp_path / f"checkpoint-{step}").iterdir() if path.name in tensor_files)
        for step in (1, 2)
    ]
    assert len(predicted) == 3, "when training begins and before each of two saves"
    # The files' headers, and each parameter's count of steps.
    for bytes_predicted in predicted:
        assert all(0 <= bytes_written - bytes_predicted < 40_000 for bytes_written in written), (predicted, written)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
def test_adapters_are_counted_without_their_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with plugin():
        model = peft.get_peft_model(small_model(), peft.LoraConfig(target_modules=["q_proj"], r=8))
        trainer = make_trainer(model, tmp_path, max_steps=1, bf16=True)
        trainer.train()
        engine = engine_of(trainer.model)
        assert engine is not None
        parts = checkpoint_bytes(trainer.model, trainer.optimizer, engine, save_only_model=False)
    folder = tmp_path / "checkpoint-1"
    assert 0 <= (folder / "adapter_model.safetensors").stat().st_size - parts["weights"] < 2_000
    assert 0 <= (folder / "optimizer.pt").stat().st_size - parts["optimizer"] < 16_000


def test_a_disk_without_room_for_a_checkpoint_ends_training_before_step_1(disk: Path) -> None:
    fill(disk, 2 * MIB)
    with plugin():
        trainer = make_trainer(small_model(), disk)
        with pytest.raises(DiskError, match="are free in") as caught:
            trainer.train()
        assert trainer.state.global_step == 0
        assert_one_line(caught.value, "a checkpoint takes 4.14 MiB", "2.00 MiB are free", str(disk), "save_only_model")
        assert caught.value.errno == errno.ENOSPC
        assert names(disk) == ["ballast"]
        # A checkpoint without the optimizer's state fits.
        make_trainer(small_model(), disk, max_steps=1, save_only_model=True).train()
        shutil.rmtree(disk / "checkpoint-1")
        fill(disk, 0)
        make_trainer(small_model(), disk, max_steps=1, save_strategy="no").train()
    assert names(disk) == ["ballast"]


def test_what_killed_runs_left_counts_as_free(disk: Path) -> None:
    left = disk / f"{STAGING_PREFIX}-4711" / "checkpoint-1"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(DISK_BYTES - MIB))
    with plugin():
        make_trainer(small_model(), disk, max_steps=1).train()
    assert names(disk) == ["checkpoint-1"]


def fill_before(monkeypatch: pytest.MonkeyPatch, disk: Path, method: str, step: int, left: int) -> None:
    """Other programs write to the disk while the Trainer is about to run a method at a step."""
    original = getattr(Trainer, method)

    @functools.wraps(original)
    def filling(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            fill(disk, left)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, method, filling)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("_maybe_log_save_evaluate", "a checkpoint takes 4.14 MiB"),
        ("save_model", "checkpoint-3 can't be written: No space left on device"),
        ("_save_optimizer_and_scheduler", "checkpoint-3 can't be written: No space left on device"),
    ],
)
def test_a_disk_that_fills_up_costs_the_checkpoint_in_hand_only(
    method: str, reason: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plugin():
        trainer = make_trainer(small_model(), disk, save_total_limit=1)
        with monkeypatch.context() as patched:
            fill_before(patched, disk, method, 3, 512 * 1024)
            with pytest.raises(DiskError) as caught:
                trainer.train()
        assert_one_line(caught.value, reason, str(disk), "Free some space")
        assert caught.value.errno == errno.ENOSPC
        assert names(disk) == ["ballast", "checkpoint-2"]
        assert_loads(disk / "checkpoint-2")
        assert shutil.disk_usage(disk).free >= 512 * 1024, "what the failed save had written must be given back"
        (disk / "ballast").unlink()
        make_trainer(small_model(1), disk, save_total_limit=1).train(resume_from_checkpoint=True)
    assert names(disk) == ["checkpoint-4"]
    assert_loads(disk / "checkpoint-4")


def test_fp32_weights_that_do_not_fit_are_refused_before_any_is_written(disk: Path) -> None:
    engine = attach(model := small_model())
    fill(disk, MIB)
    with pytest.raises(DiskError, match=r"the fp32 export takes 1\.38 MiB") as caught:
        megatrain_accelerate.export_masters(model, disk / "fp32")
    assert_one_line(caught.value, "1.00 MiB are free", str(disk), "another disk")
    assert names(disk) == ["ballast"]
    (disk / "ballast").unlink()
    assert megatrain_accelerate.export_masters(model, disk / "fp32")
    assert names(disk) == ["fp32"]
    engine.close()


# ---------------------------------------------------------------------------------------- folders that can't be written to


def test_a_read_only_output_folder_ends_training_before_step_1(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with plugin():
        trainer = make_trainer(small_model(), disk)
        with pytest.raises(DiskError) as caught:
            trainer.train()
        assert trainer.state.global_step == 0
        assert_one_line(
            caught.value,
            "checkpoints can't be written: Read-only file system",
            str(disk),
            "Name a folder that can be written to",
        )
        assert caught.value.errno == errno.EROFS
        make_trainer(small_model(), disk, max_steps=1, save_strategy="no").train()


def test_a_file_in_the_place_of_the_output_folder_ends_training_before_step_1(tmp_path: Path) -> None:
    with plugin():
        trainer = make_trainer(small_model(), tmp_path / "out")
        (tmp_path / "out").rmdir()
        (tmp_path / "out").write_text("a file")
        with pytest.raises(DiskError) as caught:
            trainer.train()
        assert trainer.state.global_step == 0
    assert_one_line(caught.value, "checkpoints can't be written", "File exists", str(tmp_path / "out"))


def test_a_fault_of_a_script_in_a_save_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Trainer, output_dir: str) -> None:
        raise RuntimeError("not a matter of disks")

    monkeypatch.setattr(Trainer, "_save_scaler", broken)
    with plugin(), pytest.raises(RuntimeError, match="not a matter of disks"):
        make_trainer(small_model(), tmp_path).train()
    assert names(tmp_path) == []


# ---------------------------------------------------------------------------------------- file systems that refuse a part


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES])
def test_a_file_system_may_refuse_to_flush_folders(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush, refused = os.fsync, []

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    with plugin():
        make_trainer(small_model(), tmp_path, max_steps=1).train()
    assert refused
    assert_loads(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_file_that_cannot_be_flushed_is_an_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with plugin():
        make_trainer(small_model(), tmp_path, max_steps=1).train()

        def broken(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(DiskError) as caught:
            make_trainer(small_model(), tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    assert_one_line(caught.value, f"checkpoint-2 can't be written: {os.strerror(number)}")
    assert names(tmp_path) == ["checkpoint-1"]
    assert_loads(tmp_path / "checkpoint-1")


def test_what_cannot_be_deleted_does_not_end_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, left = shutil.rmtree, []

    def leaves_a_file(path: Path, *args: Any, **kwargs: Any) -> None:
        """As on NFS, where a file that a process maps is renamed when it is deleted, and its folder stays."""
        remove(path, *args, **kwargs)
        if Path(path).name.startswith(STAGING_PREFIX):
            Path(path).mkdir()
            (Path(path) / ".nfs0001").touch()
            left.append(path)

    monkeypatch.setattr(shutil, "rmtree", leaves_a_file)
    with plugin():
        make_trainer(small_model(), tmp_path, max_steps=3, save_total_limit=1).train()
        monkeypatch.undo()
        assert left
        assert [name for name in names(tmp_path) if not name.startswith(STAGING_PREFIX)] == ["checkpoint-3"]
        make_trainer(small_model(), tmp_path, save_total_limit=1).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-4"]
    assert_loads(tmp_path / "checkpoint-4")


def test_the_staging_folder_of_a_live_run_is_left_alone(tmp_path: Path) -> None:
    with checkpoint_staging(tmp_path) as first:
        with checkpoint_staging(tmp_path) as second:
            assert first.is_dir()
            assert second != first
        assert names(tmp_path) == [first.name]
    assert names(tmp_path) == []


# ---------------------------------------------------------------------------------------- what is logged


def test_log_messages_name_the_folder_in_which_a_checkpoint_comes_to_lie(tmp_path: Path) -> None:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, before = Keep(), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    transformers.logging.add_handler(handler)
    factory = logging.getLogRecordFactory()
    try:
        with plugin():
            make_trainer(small_model(), tmp_path, max_steps=2, save_total_limit=1).train()
    finally:
        transformers.logging.remove_handler(handler)
        transformers.logging.set_verbosity(before)
    assert f"Saving model checkpoint to {tmp_path / 'checkpoint-1'}" in messages
    assert f"Configuration saved in {tmp_path / 'checkpoint-1' / 'config.json'}" in messages
    assert not any(STAGING_PREFIX in message for message in messages)
    assert logging.getLogRecordFactory() is factory
