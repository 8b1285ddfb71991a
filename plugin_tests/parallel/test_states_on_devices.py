"""States of a share on the device are read as those on the host are: by one rank alone, by ranks that others have left, and
after writes. Each run is compared with one whose states are on the host."""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_runs import Training, assert_equal_states, attach
from plain_torch import tiny_model, token_batches
from profile_cache import remembering
from rank_runs import join_ranks, require_success, run_ranks

from megatrain_accelerate.errors import StateError, StepWorkerError
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan import device_plan
from megatrain_accelerate.plan.placement import Counts, UnitSizes, held_bytes
from megatrain_accelerate.store.device_states import DeviceStates

Seen = Callable[..., list[list[dict[str, torch.Tensor]]]]
KINDS = {"host": {}, "devices": {"device_states": -1}, "some devices": {"device_layers": 1, "device_states": 1}}


def training(**settings: Any) -> Training:
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = attach(model, **settings)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of what ``state_dict()`` shows."""
    found = optimizer.state_dict()["state"]
    return {f"{key} {name}": value.clone() for key, entry in found.items() for name, value in entry.items()}


def seen_by_ranks(kind: str, rank: int, other: int | None) -> list[dict[str, torch.Tensor]]:
    """What the first rank sees of a training: alone, then after two steps more, when the second, of which ``other`` is a
    descriptor, has ended; without that, has dropped its model."""
    run, batches, found = training(**KINDS[kind]), token_batches(10)[rank::2], []
    for ids in batches[:3]:
        run.step(ids)
    if rank == 0:
        found.append(states_of(run.optimizer))
    dist.barrier()
    for ids in batches[3:]:
        run.step(ids)
    if rank == 0:
        if other is None:
            dist.barrier()
        else:
            assert select.select([other], [], [], 60)[0], "the other rank hasn't ended"
        found.append(states_of(run.optimizer))
    if other is None:
        del run
        gc.collect()
        if rank == 1:
            dist.barrier()
        dist.barrier()
    return found


def main() -> None:
    """What each rank does."""
    folder, *kinds = sys.argv[1:]
    rank = join_ranks()
    device_plan.profile_step = remembering(device_plan.profile_step, {})
    processes: list[int] = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    other = os.pidfd_open(processes[1 - rank])
    # In each training the other rank drops its model, and in the last it ends.
    found = [seen_by_ranks(kind, rank, None) for kind in kinds[:-1]]
    found.append(seen_by_ranks(kinds[-1], rank, other))
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    def run(*kinds: str) -> list[list[dict[str, torch.Tensor]]]:
        folder = tmp_path_factory.mktemp("seen")
        require_success(run_ranks(__file__, 2, folder, *kinds))
        found: list[list[dict[str, torch.Tensor]]] = torch.load(folder / "found.pt")
        return found

    return run


def test_a_rank_alone_sees_the_states_of_all_also_of_those_that_are_gone(seen: Seen) -> None:
    dropped, on_host = seen("devices", "host")
    (ended,) = seen("devices")
    assert len(on_host) == 2
    for on_devices in (dropped, ended):
        for ours, theirs in zip(on_devices, on_host, strict=True):
            assert_equal_states(ours, theirs)


@pytest.mark.parametrize("kind", ["devices", "some devices"])
def test_states_are_read_written_loaded_and_moved_as_those_on_the_host(kind: str) -> None:
    found = []
    for how in (kind, "host"):
        run, batches, own = training(**KINDS[how]), token_batches(8), []
        for ids in batches[:2]:
            run.step(ids)
        saved = run.optimizer.state_dict()
        own.append({key: value.clone() for key, value in saved["state"][3].items()})
        saved = {**saved, "state": {key: {**entry, "exp_avg": 2 * entry["exp_avg"]} for key, entry in saved["state"].items()}}
        run.step(batches[2])
        run.optimizer.load_state_dict(saved)
        run.step(batches[3])
        with torch.no_grad():
            next(iter(run.model.model.layers[1].parameters())).mul_(1.5)  # type: ignore[union-attr, operator]
        run.step(batches[4])
        run.engine.runtime.bring_states()
        entry = run.optimizer.state[run.model.model.layers[2].mlp.up_proj.weight]  # type: ignore[union-attr, index]
        entry["exp_avg_sq"].mul_(0.5)
        run.step(batches[5])
        runtime = run.engine.runtime
        runtime.place((), False, (0, 3) if how == "host" else ())
        run.step(batches[6])
        runtime.place((2,), False, (3,) if how == "host" else ())
        run.step(batches[7])
        own.append(run.state())
        run.engine.close()
        own.append({name: parameter.detach().clone() for name, parameter in run.model.named_parameters()})
        found.append(own)
    for ours, theirs in zip(*found, strict=True):
        assert_equal_states(ours, theirs)


def test_several_steps_on_the_same_gradients_are_those_on_the_host() -> None:
    found = []
    for kind in ("devices", "host"):
        run = training(**KINDS[kind])
        for ids in token_batches(2):
            run.model(input_ids=ids, labels=ids).loss.backward()
            for _ in range(3):
                run.optimizer.step()
            run.optimizer.zero_grad()
        found.append(run.state())
        run.engine.close()
    assert_equal_states(*found)


def test_the_plan_counts_the_memory_that_states_on_the_device_take() -> None:
    before = training()
    run = training(device_states=3)
    budget, sizes = run.engine.device_plan.budget, run.engine.device_plan.model_sizes()
    counts = Counts(states_on_device=3).placement(len(sizes.layers))
    taken = budget.held_bytes() - before.engine.device_plan.budget.held_bytes()
    nothing = held_bytes(sizes, Counts().placement(len(sizes.layers)))
    assert taken == held_bytes(sizes, counts) - nothing
    unit = run.engine.runtime.layers[0].unit
    assert taken > 3 * 12 * unit.layout.state_elements
    assert UnitSizes.of_unit(unit, is_summed=False).stepped_bytes == 12 * unit.layout.state_elements
    for each in (before, run):
        each.engine.close()


def test_writes_to_moments_that_the_device_has_are_refused() -> None:
    run = training(device_states=-1)
    ids = token_batches(1)[0]
    run.step(ids)
    entry = next(iter(run.optimizer.state.values()))
    entry["exp_avg"].zero_()
    with pytest.raises(StateError, match="written to while they are on the GPU"):
        run.step(ids)
    run.engine.close()


def test_a_failure_on_the_device_reaches_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training(device_states=-1)
    ids = token_batches(1)[0]

    is_stepped = threading.Event()

    def fail(*_: Any) -> None:
        is_stepped.wait(60)
        raise RuntimeError("refused by the device")

    monkeypatch.setattr(DeviceStates, "step", fail)
    run.step(ids)
    is_stepped.set()
    with pytest.raises(StepWorkerError, match="refused by the device"):
        run.step(ids)


if __name__ == "__main__":
    main()
