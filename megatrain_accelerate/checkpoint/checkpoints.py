"""Checkpoints of the Trainer and fp32 masters that are complete or absent: written aside first, then renamed."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import nn

from megatrain_accelerate.checkpoint.disk import REPLACED, flush_file, flush_folder, require_free_bytes, staging_folder
from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.optim.host_step import parameters_of
from megatrain_accelerate.optim.moment_states import saved_bytes, views_of
from megatrain_accelerate.pages import libc
from megatrain_accelerate.progress import progress_bar
from megatrain_accelerate.units import GIB

STAGING_PREFIX = ".megatrain-incomplete"
"""Prefix of the folders beside the checkpoints in which the next one is written. Those of killed runs are removed."""
_TRAINER_STATE = "trainer_state.json"
"""A file of all the Trainer's checkpoints, but not of a folder that a script made for its own files."""

# Weights, adapters and training state. An older checkpoint's would be read by a resume or from_pretrained() beside the new.
_FILES_OF_A_CHECKPOINT = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|adapter_config\.json|trainer_state\.json|training_args\.bin"
    r"|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth"
)

_SPACE_REMEDY = (
    "Free some space, set output_dir to another disk, or save less (save_only_model, save_strategy). save_total_limit deletes "
    "an older checkpoint only when the new one is complete."
)


def save_checkpoint(
    original: Callable[..., Any], trainer: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
) -> None:
    """Writes a checkpoint aside and renames it when it is complete, so that a kill never leaves a broken one. With several
    ranks the first makes the folder, all write to it, and the first renames it when all have written."""
    engine = engine_of(trainer.model)
    ranks = None if engine is None else engine.runtime.ranks
    saves = trainer.args.should_save
    if engine is None or not (saves or ranks is not None):
        original(trainer, model, trial, *args, **kwargs)
        return
    run_dir = Path(trainer._get_output_dir(trial=trial))
    meet = ranks.meet if ranks is not None else (lambda _: None)
    engine.runtime.bring_states()
    name = f"checkpoint-{trainer.state.global_step}"
    with checkpoint_staging(run_dir, name) if saves else contextlib.nullcontext(run_dir) as staging:
        expected = _require_room(run_dir, trainer.model, trainer.optimizer, engine, trainer.args) if saves else 0
        if ranks is not None:
            staging = ranks.broadcast(staging)
        shows = saves and not trainer.args.disable_tqdm
        with _saving_progress(staging, expected, show=shows), _saving_to(trainer, staging):
            original(trainer, model, trial, *args, **kwargs)
        meet("a written checkpoint")
        if saves:
            _point_best_checkpoint(trainer, staging, run_dir)
            for folder in staging.iterdir():
                if (folder / _TRAINER_STATE).exists():
                    trainer.state.save_to_json(str(folder / _TRAINER_STATE))
            published = publish(staging)
    if saves:
        _rotate(trainer, run_dir)
    meet("a published checkpoint")
    if not saves:
        _point_best_checkpoint(trainer, staging, run_dir)
    elif trainer.args.push_to_hub:  # reads the whole output folder, where nothing is aside now
        for folder in published:
            trainer._push_from_checkpoint(str(folder))


@contextlib.contextmanager
def _saving_to(trainer: Any, folder: Path) -> Iterator[None]:
    """Makes the Trainer write its checkpoint below ``folder``, and not upload it from there, since uploads outlive the save.
    Log messages name the checkpoint by its final path."""
    make = logging.getLogRecordFactory()

    def renamed(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with contextlib.suppress(TypeError, ValueError):  # a message that doesn't fit its arguments is logging's to report
            if folder.name in (message := record.getMessage()):
                record.msg, record.args = message.replace(f"{folder.name}/", ""), ()
        return record

    trainer._get_output_dir = lambda trial: str(folder)
    trainer._push_from_checkpoint = lambda checkpoint_folder: None
    logging.setLogRecordFactory(renamed)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        del trainer._get_output_dir, trainer._push_from_checkpoint


def _point_best_checkpoint(trainer: Any, staging: Path, run_dir: Path) -> None:
    """Replaces the path of the best checkpoint, which the Trainer noted in the staging folder, by its final one."""
    best, best_step = trainer.state.best_model_checkpoint, getattr(trainer.state, "best_global_step", None)
    if best and Path(best).parent == staging:
        trainer.state.best_model_checkpoint = str(run_dir / Path(best).name)
    elif best_step and (run_dir / f"checkpoint-{best_step}").exists():
        trainer.state.best_model_checkpoint = str(run_dir / f"checkpoint-{best_step}")


def _rotate(trainer: Any, run_dir: Path) -> None:
    """Deletes old checkpoints by the Trainer's own rule, moved aside first: a kill leaves each of them whole or gone."""
    limit, best, delete = trainer.args.save_total_limit, trainer.state.best_model_checkpoint, shutil.rmtree
    if not limit or limit <= 0:
        return
    with checkpoint_staging(run_dir) as staging:

        def move_aside(path: Any, *args: Any, **kwargs: Any) -> None:
            if Path(path).parent == run_dir:
                os.rename(path, staging / f"{Path(path).name}.deleted")
            else:  # a call of another thread
                delete(path, *args, **kwargs)

        with replaced(shutil, "rmtree", move_aside):
            try:
                from transformers.trainer_utils import rotate_checkpoints
            except ImportError:  # transformers 4
                trainer._rotate_checkpoints(use_mtime=True, output_dir=str(run_dir))
            else:
                rotate_checkpoints(str(run_dir), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)


def load_optimizer_and_scheduler(original: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """Maps the file with the optimizer's state. Reading it whole would take 10 bytes a parameter more."""
    if checkpoint is None or engine_of(trainer.model) is None:
        original(trainer, checkpoint)
        return
    with optimizer_files_mapped():
        original(trainer, checkpoint)


@contextlib.contextmanager
def optimizer_files_mapped() -> Iterator[None]:
    """While the body runs, ``torch.load`` maps files of optimizer states, and leaves them on the host: with several GPUs the
    Trainer and Accelerate ask for 10 bytes a parameter on each."""
    load = torch.load

    def load_mapped(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and Path(file).name.startswith("optimizer"):
            # torch.load's own setting (load.mmap) came with torch 2.6.
            return load(file, "cpu", *args, **{**kwargs, "mmap": True})
        return load(file, map_location, *args, **kwargs)

    with replaced(torch, "load", load_mapped):
        yield


def checkpoint_bytes(model: nn.Module, optimizer: Any, engine: Engine, save_only_model: bool) -> dict[str, int]:
    """Bytes of the tensors in the Trainer's next checkpoint, by what they are. Weights count in the dtype in which they are
    saved, with PEFT only the trained ones. AdamW's state counts as it will be after its first step, that of other optimizers
    as it is now."""
    adapters_only = bool(getattr(model, "peft_config", None))
    saved = (tensor for _, tensor in _saved_tensors(model) if tensor.requires_grad or not adapters_only)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in saved)
    if save_only_model or optimizer is None:
        return {"weights": weights}
    states = optimizer.state  # each look at it waits for a step that is under way
    entries = {parameter: dict(states.get(parameter, {})) for parameter in parameters_of(optimizer)}
    for parameter, entry in entries.items():
        if (state := engine.runtime.state_of(parameter)) is not None and state.entry.spec.trainable:
            entry.update(views_of(state, engine.runtime.owner_of(state).unit.promised_moments(state)))
    return {"weights": weights, "optimizer": saved_bytes(entries, engine.config.host_memory_gib)}


def _require_room(run_dir: Path, model: nn.Module, optimizer: Any, engine: Engine, args: Any) -> int:
    """Raises ``DiskError`` if the disk has no room for a checkpoint. Returns the bytes that it will take."""
    parts = checkpoint_bytes(model, optimizer, engine, args.save_only_model)
    require_free_bytes(run_dir, parts, "a checkpoint", _SPACE_REMEDY)
    return sum(parts.values())


def require_saving_possible(args: Any, model: nn.Module, optimizer: Any, engine: Engine) -> None:
    """Raises ``DiskError`` if checkpoints are wanted and the output folder can't be written to, or has no room. Removes what
    killed runs left in it."""
    if not args.should_save or getattr(args.save_strategy, "value", args.save_strategy) == "no":
        return
    run_dir = Path(args.output_dir)
    with checkpoint_staging(run_dir):
        _require_room(run_dir, model, optimizer, engine, args)


def checkpoint_staging(run_dir: Path, what: str = "checkpoints") -> contextlib.AbstractContextManager[Path]:
    """A :func:`.disk.staging_folder` beside the checkpoints. Entering it shows that they can be saved."""
    return staging_folder(run_dir, STAGING_PREFIX, what, _SPACE_REMEDY)


@contextlib.contextmanager
def _saving_progress(folder: Path, expected_bytes: int, show: bool) -> Iterator[None]:
    """Draws a bar of the bytes written under ``folder`` while the body runs."""
    bar, done = progress_bar(expected_bytes, "saving", "B", show=show), threading.Event()
    if bar.disable:
        yield
        return

    def draw() -> None:
        with bar:
            while not done.wait(0.5):
                written = 0
                for path in folder.rglob("*"):
                    with contextlib.suppress(OSError):  # files come and go while they are written
                        written += path.stat().st_size
                bar.update(min(written, expected_bytes) - bar.n)

    thread = threading.Thread(target=draw, name="megatrain-saving-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def publish(staging: Path) -> list[Path]:
    """Moves every checkpoint in a staging folder into place, each by one rename once it is safely on disk, and returns their
    paths. One of the same name is replaced: at every instant the older or the new one is there, complete. If the file system
    can't exchange names, a kill may leave neither, and the next staging folder puts the older one back. Files that a user or a
    script put into the older one are kept; its own weights and training state, which would be read with the new ones or
    instead, aren't. Raises ``OSError`` if the disk can't take them; earlier checkpoints are then as they were."""
    published = []
    for folder in sorted(staging.iterdir()):
        target = staging.parent / folder.name
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                flush_file(path)
        _keep_files_of_others(target, folder)
        for path in (folder, *folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                flush_folder(path)
        if not (target.exists() and exchange(folder, target)):
            if target.exists():
                os.rename(target, staging / f"{folder.name}{REPLACED}")
            os.rename(folder, target)
        published.append(target)
    flush_folder(staging.parent)
    return published


def _keep_files_of_others(target: Path, folder: Path) -> None:
    """Gives the new checkpoint those files of the older one that aren't the Trainer's, as hard links if possible."""
    was_checkpoint = (target / _TRAINER_STATE).exists()
    for where, folders, files in os.walk(target):
        place = folder / Path(where).relative_to(target)
        if not place.is_dir():
            continue
        for name in (*folders, *files):
            path, kept = Path(where, name), place / name
            stale = was_checkpoint and place == folder and _FILES_OF_A_CHECKPOINT.fullmatch(name)
            if stale or os.path.lexists(kept):
                continue
            if path.is_dir() and not path.is_symlink():
                kept.mkdir()
                continue
            try:
                os.link(path, kept, follow_symlinks=False)
            except OSError:  # file systems without hard links
                shutil.copy2(path, kept, follow_symlinks=False)
                if not kept.is_symlink():
                    flush_file(kept)


def exchange(first: Path, second: Path) -> bool:
    """Swaps the names of two folders in one move. Returns False if the system or the file system can't."""
    rename = getattr(libc, "renameat2", None)
    at_working_directory, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of <linux/fs.h>
    names = at_working_directory, os.fsencode(first), at_working_directory, os.fsencode(second)
    return rename is not None and rename(*names, exchange) == 0


def write_masters(model: nn.Module, engine: Engine, folder: Path, max_shard_gib: float) -> list[Path]:
    """Does the work of :func:`.api.export_masters`. Reads parameters from the store one by one, and writes tied ones once,
    under the first name, as ``save_pretrained`` does. A parameter larger than a shard gets a file of its own."""
    if max_shard_gib <= 0:
        raise ConfigError(f"max_shard_gib must be above 0, got {max_shard_gib}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and isn't an empty folder; name another one for the fp32 weights")
    engine.runtime.bring_states()
    what, remedy = "the fp32 export", "Free some space, or name a folder on another disk."
    with staging_folder(folder.parent, f".{folder.name}.incomplete", what, remedy) as staging:
        weights = sum(_fp32_bytes(tensor) for _, tensor in _saved_tensors(model))
        require_free_bytes(folder.parent, {"weights": weights}, what, remedy)
        complete = staging / folder.name
        complete.mkdir()
        names = _write_shards(model, engine, complete, int(max_shard_gib * GIB))
        if folder.exists():
            folder.rmdir()
        os.rename(complete, folder)
    return [folder / name for name in names]


def _write_shards(model: nn.Module, engine: Engine, folder: Path, max_shard_bytes: int) -> list[str]:
    tensors = dict(_saved_tensors(model))
    split = split_state_dict_into_shards_factory(
        tensors, get_storage_size=_fp32_bytes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
    )
    for file, names in split.filename_to_tensors.items():
        values = {}
        for name in names:
            tensor = tensors[name]
            if (state := engine.runtime.state_of(tensor)) is not None:
                values[name] = engine.runtime.owner_of(state).unit.read_master(state)
            else:
                kept = torch.float32 if tensor.is_floating_point() else tensor.dtype
                values[name] = tensor.detach().to("cpu", kept, copy=True, memory_format=torch.contiguous_format)
        save_file(values, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", torch.float32)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    return list(split.filename_to_tensors)


def _fp32_bytes(tensor: torch.Tensor) -> int:
    return (4 if tensor.is_floating_point() else tensor.element_size()) * tensor.numel()


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors: each parameter once, then the buffers that are saved."""
    yield from model.named_parameters()
    for owner, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{owner}.{name}" if owner else name, buffer
