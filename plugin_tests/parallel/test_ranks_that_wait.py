"""A rank that waits for one that is alive and doesn't come says for which, and ends; each has its part of the CPUs."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from rank_runs import join_ranks, require_success, run_ranks

from megatrain_accelerate import config
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.parallel import lifeline

TIMEOUT = datetime.timedelta(seconds=8)
NOTICE_SECONDS = 1.0
SECONDS = 5.0
"""Within which the others end with a rank that has left."""


def main() -> None:
    """What each rank does: the second one doesn't come to its second step."""
    case, written = sys.argv[1], Path(sys.argv[2])
    rank = join_ranks(timeout=TIMEOUT)
    if case == "CPUs":
        cpus = set(range(8)) if sys.argv[3] == "same" else set(range(8 * rank, 8 * rank + 8))
        os.sched_getaffinity = lambda pid: cpus  # type: ignore[assignment]
        config.CPU_QUOTA = written  # no such file
        print(f"threads: {attach(tiny_model()).kernels.threads}")
        return
    lifeline._NOTICE_SECONDS = NOTICE_SECONDS
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    for step, ids in enumerate(token_batches(2)):
        loss = model(input_ids=ids, labels=ids).loss
        if step == rank == 1:
            written.write_text(str(time.time()))
            if case == "leaves":
                sys.exit()
        loss.backward()
        if step == rank == 1:
            time.sleep(60)
        optimizer.step()
        optimizer.zero_grad()


def seconds_and_outputs(case: str, tmp_path: Path) -> tuple[float, list[str]]:
    """How long it took until both had ended, and what each wrote."""
    results = run_ranks(__file__, 2, case, tmp_path / "since")
    assert results[0][0] != 0, results[0][1]
    return time.time() - float((tmp_path / "since").read_text()), [output for _, output in results]


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named_and_all_end_at_the_timeout(tmp_path: Path) -> None:
    seconds, outputs = seconds_and_outputs("sleeps", tmp_path)
    assert 0.8 * TIMEOUT.total_seconds() < seconds < TIMEOUT.total_seconds() + SECONDS
    assert all("rank 0 has waited for rank 1 (process " in output for output in outputs)
    assert "which was last at 'optimizer.step()', for 1 s, and goes on waiting" in outputs[0]
    assert "which was last at 'optimizer.step()', for 7 s (ddp_timeout)" in outputs[0]


def test_ranks_end_with_one_that_left_without_an_error(tmp_path: Path) -> None:
    seconds, outputs = seconds_and_outputs("leaves", tmp_path)
    assert seconds < SECONDS + 1.0  # and the end of this process's wait
    assert "ended before, without an error" in outputs[0]


@pytest.mark.parametrize(("cpus", "threads"), [("same", 4), ("own", 6)])
def test_ranks_divide_the_cpus_that_they_share(tmp_path: Path, cpus: str, threads: int) -> None:
    # Of 8 CPUs two are for launcher and copies, of 4 none. OMP_NUM_THREADS is 1 under torchrun.
    results = run_ranks(__file__, 2, "CPUs", tmp_path / "none", cpus, OMP_NUM_THREADS="1")
    require_success(results)
    assert [f"threads: {threads}" in output for _, output in results] == [True, True]


if __name__ == "__main__":
    main()
