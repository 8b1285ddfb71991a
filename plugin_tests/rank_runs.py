"""Several ranks of one machine, as processes of a test, which talk by gloo."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_process import run_in_forks
from fresh_process import clean_environment

TIMEOUT_SECONDS = 480


BUCKET_BYTES = 2**20
"""Enough for the gradients of a tiny model's layer. An engine clears two buckets: those of 64 MiB take longer than a step."""


def join_ranks(backend: str = "gloo", timeout: datetime.timedelta | None = None, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Called by each process that :func:`run_ranks` started: returns its rank when all are there. ``timeout``: of collectives,
    as ``ddp_timeout`` sets it. ``bucket_bytes``: of gradients that are exchanged at a time."""
    from megatrain_accelerate.gradients import exchange

    exchange._BUCKET_BYTES = bucket_bytes
    place = {name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    dist.init_process_group(backend, init_method=f"file://{os.environ['MEETING_FILE']}", timeout=timeout, **place)
    return dist.get_rank()


def run_ranks(file: str, ranks: int, *args: str | Path, fresh: bool = False, **env: str) -> list[tuple[int, str]]:
    """Runs a test file as a script in each of several processes; returns the exit status and the output of each, by rank.

    Args:
        file: the test file.
        ranks: their number.
        args: of the script.
        fresh: in new interpreters rather than in forks of one that has imported what the file begins with.
        env: of all ranks.
    """
    folder = tempfile.mkdtemp()
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    shared = {"MEETING_FILE": f"{folder}/meeting", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "GLOO_SOCKET_IFNAME": "lo", **env}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    if not fresh:
        return run_in_forks(file, *args, environments=environments, timeout_seconds=TIMEOUT_SECONDS)
    processes = [
        subprocess.Popen(
            [sys.executable, file, *map(str, args)],
            env=clean_environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]
    end = time.monotonic() + TIMEOUT_SECONDS
    try:
        outputs = [process.communicate(timeout=max(1.0, end - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def require_success(results: Sequence[tuple[int, str]]) -> None:
    """All ranks ended in order."""
    for rank, (status, output) in enumerate(results):
        assert status == 0, f"rank {rank} ended with {status}:\n{output}"


def runs_of(file: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank's script, which is given the folder and the number of ranks, has saved as its number with ``.pt``."""
    require_success(run_ranks(file, ranks, folder, str(ranks)))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A collator: a batch of texts of their own lengths."""
    length = max(len(row["input_ids"]) for row in rows)
    filled = [row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows]
    mask = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
    ids, mask_BT = torch.tensor(filled), torch.tensor(mask)
    return {"input_ids": ids, "attention_mask": mask_BT, "labels": ids.masked_fill(mask_BT == 0, -100)}


def common_arguments(folder: str) -> dict[str, Any]:
    """Of each Trainer, ours and stock."""
    return {
        "output_dir": folder,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "max_grad_norm": 0.5,
    }


def end_of_stock_run() -> None:
    """Ends a process of stock data parallelism at once: gloo's threads have crashed the interpreter at its exit, and hung."""
    if "MEGATRAIN_DISABLE" in os.environ:
        if dist.is_initialized():
            dist.barrier()
            time.sleep(0.2)  # until the others have heard of it, too
        os._exit(0)
