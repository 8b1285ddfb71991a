"""Ranks that gather weights fetch the same layers in the same order, whatever each does beside training and however late its
steps are: bit for bit what they train when each fetches whole layers, with a part of the copies."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Training, attach
from plain_torch import tiny_model, token_batches
from rank_runs import join_ranks, require_success, run_ranks

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

STEPS, RANKS = 5, 2


def training(gathers: bool, **settings: Any) -> Training:
    model = tiny_model(num_hidden_layers=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model, **settings)
    engine.runtime.prefetcher.gathers = gathers
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


def evaluate(run: Training, ids: torch.Tensor) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(input_ids=ids)
    run.model.train()


def plain(run: Training, rank: int, step: int, ids: torch.Tensor) -> None: ...


def evaluated_by_one_rank(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    if step in (1, 3) and rank == 0:
        evaluate(run, ids)


def with_a_graph_by_one_rank(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    if step == 2 and rank == 1:
        run.model.eval()
        run.model(input_ids=ids, labels=ids)
        run.model.train()


def late_steps(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    if step == 0:
        adamw = run.engine.kernels.adamw

        def slow(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.02 * (rank + 1))
            adamw(*args, **kwargs)

        run.engine.kernels.adamw = slow  # type: ignore[method-assign]


def other_layers(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    """Expected ones aren't called, whose copies may be chosen already, and one rank goes on with something of its own."""
    late_steps(run, rank, step, ids)
    run.model.config.num_hidden_layers = 6 if step % 2 else 3
    if rank == 0:
        evaluate(run, ids)


class Backwards(torch.nn.ModuleList):
    """Layers that a model runs in the other order."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return torch.nn.ModuleList(list(found)[::-1]) if isinstance(index, slice) else found


BESIDE: dict[str, Callable[[Training, int, int, torch.Tensor], None]] = {
    beside.__name__: beside for beside in (plain, evaluated_by_one_rank, with_a_graph_by_one_rank, late_steps, other_layers)
}


def trained(rank: int, beside: str, gathers: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The weights after some steps, and the bytes that were copied for them."""
    run = training(gathers)
    for step, ids in enumerate(token_batches(STEPS * RANKS)[rank::RANKS]):
        BESIDE[beside](run, rank, step, ids)
        run.step(ids)
    run.engine.drain()
    weights = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    copied = run.engine.runtime.meter.counters.h2d_bytes
    run.engine.close()
    return weights, copied


def main() -> None:
    """What each rank does."""
    rank = join_ranks()
    if sys.argv[2] == "diverges":
        run = training(gathers=True)
        if rank == 1:
            run.model.model.layers.__class__ = Backwards
        run.step(token_batches(1)[0])
        return
    runs = {beside: [trained(rank, beside, gathers) for gathers in (False, True)] for beside in BESIDE}
    torch.save(runs, f"{sys.argv[1]}/{rank}.pt")


Runs = list[dict[str, list[tuple[dict[str, torch.Tensor], int]]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of each rank, by what it does beside training: with whole fetches, and with gathered ones."""
    folder: Path = tmp_path_factory.mktemp("gathered")
    require_success(run_ranks(__file__, RANKS, folder, "trains"))
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("beside", BESIDE)
def test_gathered_weights_train_as_whole_fetches_do(runs: Runs, beside: str) -> None:
    for run in runs:
        (whole, copied_whole), (gathered, copied) = run[beside]
        assert all(torch.equal(gathered[name], weight) for name, weight in whole.items())
        if beside == "plain":
            assert copied < 0.6 * copied_whole


def test_ranks_that_fetch_other_layers_end_and_both_are_named(tmp_path: Path) -> None:
    results = run_ranks(__file__, RANKS, tmp_path, "diverges")
    assert all(status != 0 for status, _ in results)
    output = "".join(text for _, text in results)
    assert "exchanges weights of" in output
    assert "run other layers, or in another order" in output


if __name__ == "__main__":
    main()
