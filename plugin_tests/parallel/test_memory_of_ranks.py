"""Host memory doesn't grow with the ranks: they map one store."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from engine_runs import Training, attach, place
from plain_torch import tiny_model, token_batches
from rank_runs import join_ranks, require_success, run_ranks

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan.placement import Counts

MIB = 2**20
SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}


def proportional_bytes() -> int:
    """Of this process's memory, in which a page of several processes counts in parts."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    """What each rank does: tells what memory its training has taken, and what the store has."""
    rank = join_ranks(bucket_bytes=64 * MIB)
    model = tiny_model(**SHAPE)
    before = proportional_bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model)
    training = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    for ids in token_batches(2, batch=1, length=2):
        training.step(ids)
    engine.drain()
    torch.distributed.barrier()
    taken = proportional_bytes() - before
    torch.distributed.barrier()
    taken += sum(parameter.numel() * 4 for parameter in model.parameters())  # the model's own memory, which went
    taken -= sum(engine.device_plan.budget.held_bytes_by_kind().values())  # which here is the host's
    store = engine.host_bytes_by_kind()
    Path(sys.argv[1], str(rank)).write_text(f"{taken} {sum(store.values())}")
    place(engine.device_plan, Counts(on_device=SHAPE["num_hidden_layers"]).placement(SHAPE["num_hidden_layers"]))
    moments = engine.host_bytes_by_kind()["moments"]
    assert moments == store["moments"] > 0, "what the layers have written to the file of all ranks stays there"


def test_two_ranks_take_the_memory_of_one_store(tmp_path: Path) -> None:
    require_success(run_ranks(__file__, 2, tmp_path, fresh=True))
    found = [tuple(map(int, (tmp_path / str(rank)).read_text().split())) for rank in range(2)]
    store_bytes = found[0][1]
    assert store_bytes > 300 * MIB
    assert sum(taken for taken, _ in found) < store_bytes + 2 * 64 * MIB


if __name__ == "__main__":
    main()
