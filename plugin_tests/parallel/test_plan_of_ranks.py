"""All ranks run by one plan: that of the largest batch among them, in the smallest budget, also when a training is resumed.
It is made of the sizes that an estimate counts with."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Training, attach, masters_of
from machine_options import machine_with
from plain_torch import tiny_model, token_batches
from rank_runs import join_ranks, require_success, run_ranks

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.estimate.meta_engine import ForecastPlan, MetaEngine
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan import device_plan
from megatrain_accelerate.plan.machine import Machine

MIB = 2**20
BUDGETS = (300.0, 262.0)
"""MiB, of each rank."""
SECONDS = 1e-6
"""That an exchange is said to take."""
LENGTHS = ((16, 16, 40, 16), (24, 16, 16, 96))
"""Of each rank's batches: the second has the first and the last of the largest, the first one the third."""


def training(rank: int, **settings: Any) -> Training:
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    budget = BUDGETS[rank] / 1024
    engine = attach(model, gpu_memory_gib=budget, device_layers=None, offloaded_layers=None, **settings)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


def planned(run: Training) -> dict[str, Any]:
    plan = run.engine.device_plan
    return {
        "placement": repr(plan.current.placement),
        "predicted": plan.current.predicted_bytes,
        "where": [layer.unit.is_on_device for layer in run.engine.runtime.layers],
        "tile": run.engine.runtime.token_tile,
        "piece": run.engine.runtime.batch_cut.size,
        "lengths vary": run.engine.runtime.compiled.sizes_vary,
        "exchange": plan.model_sizes().exchange_bytes,
    }


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("as the planner says") from LookupError("where it began")


def main() -> None:
    """What each rank does: writes down its plans."""
    device_plan.seconds_of = lambda *_: SECONDS  # between GPUs; on one CPU it is so slow that nothing would live on the device
    rank, found = join_ranks(bucket_bytes=64 * MIB), []
    run = training(rank)
    sizes = repr(dataclasses.replace(run.engine.device_plan.model_sizes(), exchange_bytes=1e11, fetch_share=0.5, slot_bytes=0))
    run.engine.device_plan.foresee = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match="as the planner says") as raised:
        run.step(token_batches(1, length=LENGTHS[rank][0])[0])
    assert isinstance(raised.value.__cause__, LookupError) == (rank == 1), "the planner's own error, with its cause"
    del run.engine.device_plan.foresee
    for length in LENGTHS[rank]:
        run.step(token_batches(1, length=length)[0])
        found.append(planned(run))
    record = run.engine.device_plan.record
    run.engine.drain()
    norm = sum(master.double().norm().item() for master in masters_of(run.engine, run.model).values())
    run.engine.close()
    again = training(rank)
    again.engine.device_plan.expect_steps(10, None, record)
    again.step(token_batches(1, length=8 + rank)[0])  # the rank that made the plan has the larger batch
    resumed = planned(again)
    again.engine.close()
    exchange = run.engine.device_plan.budget.fixed_bytes_by_kind()["exchange"]
    own = {
        "plans": found,
        "norm": norm,
        "resumed": resumed,
        "record": record,
        "sizes": sizes,
        "exchange": exchange,
    }
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(own))


def test_ranks_run_by_the_plan_of_the_largest_batch_in_the_smallest_budget(tmp_path: Path) -> None:
    require_success(run_ranks(__file__, 2, tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    plans = first["plans"]
    assert all(0 < plan["predicted"] <= min(BUDGETS) * MIB for plan in plans)
    assert plans[0]["predicted"] < plans[-1]["predicted"], "the longest batch needs more"
    assert plans[0] == plans[1], "a batch that is covered changes nothing"
    assert plans[0]["lengths vary"], "those of the two ranks do"
    assert plans[0]["exchange"] == pytest.approx(2 * 64 * MIB / SECONDS), "a bucket goes out in shares and back as means"
    assert any(plans[0]["where"]), "there is room for some layers"
    assert first["record"]
    assert first["resumed"] == plans[-1]
    alone, fresh = training(1), training(1)
    alone.engine.device_plan.expect_steps(10, None, first["record"])
    for run in (alone, fresh):
        run.step(token_batches(1, length=9)[0])
        run.engine.close()
    assert planned(alone) == planned(fresh), "one process has all states of a layer on its device, and exchanges nothing"
    with torch.device("meta"):
        model = tiny_model().to(torch.bfloat16).train()
    config, machine = MegatrainConfig(), Machine(1e9, 1e9, 1e9, 1e9, 1e9)
    described = machine_with(machine, gpus=2, exchange_bytes=1e11)
    estimated = ForecastPlan(MetaEngine(model, config, described), config)
    sizes = estimated.model_sizes()
    assert sizes.fetch_share == pytest.approx(0.5 + 0.5 * 1e9 / 1e11), "half over the link, half from the other"
    # The ranks' slots are rounded up to equal parts.
    assert first["sizes"] == repr(dataclasses.replace(sizes, fetch_share=0.5, slot_bytes=0))
    assert first["exchange"] == estimated.budget.fixed_bytes_by_kind()["exchange"]
    model.model.layers[1].requires_grad_(False)
    sizes = ForecastPlan(MetaEngine(model, config, described), config).model_sizes()
    assert sizes.fetch_share == 1.0, "a rank may leave out a frozen layer"


if __name__ == "__main__":
    main()
