"""Ranks that gather weights fetch the same layers in the same order, whatever each does beside training and however late its
steps are: bit for bit what they train when each fetches whole layers and does nothing else, with a part of the copies."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_runs import Training, attach
from plain_torch import tiny_model, token_batches
from profile_cache import remembering
from rank_runs import join_ranks, require_success, run_ranks

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan import device_plan
from megatrain_accelerate.transfer.meter import UpdateGate

STEPS, LAYERS = 4, 6
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 88}
SECONDS = {"faster on the slowest rank": ((2.0, 1.0), (1.0, 3.0)), "slower on it": ((3.0, 1.0), (1.0, 2.0))}
"""That a gathered fetch and a whole one are said to take, on each rank."""


def training(gathers: bool, is_frozen: bool = False, **settings: Any) -> Training:
    """``is_frozen``: whether a layer is."""
    model = tiny_model(**SIZES).train()
    model.model.layers[2].requires_grad_(not is_frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model, **settings)
    engine.runtime.prefetcher.gathers = gathers
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


class Reordered(torch.nn.ModuleList):
    """Layers that a model runs in another order: 5, 3, 1, 0, 2, 4."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return torch.nn.ModuleList([*found][::-2] + [*found][::2]) if isinstance(index, slice) else found


@contextlib.contextmanager
def reordered(run: Training) -> Iterator[None]:
    layers, run.model.model.layers.__class__ = run.model.model.layers, Reordered
    yield
    layers.__class__ = torch.nn.ModuleList


def evaluate(run: Training, ids: torch.Tensor) -> None:
    """A forward without gradients."""
    run.model.eval()
    with torch.no_grad():
        run.model(input_ids=ids)
    run.model.train()


def train(run: Training, ids: torch.Tensor, between: Callable[[], object] = lambda: None) -> None:
    """A step, with something between its forward and its backward."""
    loss = run.model(input_ids=ids, labels=ids).loss
    between()
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def plain(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    train(run, ids)


def one_rank_brings_states(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    train(run, ids, run.engine.runtime.bring_states if rank == step % 2 else lambda: None)


def one_rank_moves_its_units_before_a_step(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    """As an evaluation does that needs their room."""
    run.model(input_ids=ids, labels=ids).loss.backward()
    if rank == 1 and step == 1:
        run.engine.runtime.place((), groups_on_device=False)
    run.optimizer.step()
    run.optimizer.zero_grad()


def one_rank_evaluates(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    if step in (1, 3) and rank == 0:
        evaluate(run, ids)
    train(run, ids)


def one_rank_evaluates_layers_in_another_order(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    """What is expected after a layer is what followed it in the pass before."""
    if rank == 1:
        with reordered(run):
            evaluate(run, ids)
    train(run, ids)


def one_rank_evaluates_some_layers(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    if rank == 0:
        run.model.config.num_hidden_layers = 2 + step % 3
        evaluate(run, ids)
        run.model.config.num_hidden_layers = LAYERS
    train(run, ids)


def one_rank_evaluates_before_a_backward(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    """The last layers of the forward, with which the backward begins, are in slots on the other ranks only."""
    train(run, ids, between=lambda: rank == step % 2 and evaluate(run, ids))


def one_rank_holds_layers(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    """In slots of their own, which the others don't have, before a forward and before a second backward through its graph."""

    def hold() -> None:
        if rank == 0:
            run.engine.runtime.prefetcher.let_go()
            for layer in (1, 2, 4):
                run.engine.runtime.prefetcher.hold(layer)
            evaluate(run, ids)

    hold()
    loss = run.model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    hold()
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def one_rank_generates(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    if rank == 1:
        run.model.eval()
        run.model.generate(ids[:, :4], max_new_tokens=1 + step, do_sample=False, pad_token_id=0)
        run.model.train()
    train(run, ids)


def one_rank_makes_a_graph(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    if rank == 1:
        run.model.eval()
        run.model(input_ids=ids, labels=ids)
        run.model.train()
    train(run, ids)


class EarlySeen(UpdateGate):
    """A rank that is so late that it finds all steps applied."""

    @property
    def is_open(self) -> bool:
        self.wait()
        return True


class LateSeen(UpdateGate):
    """One that never finds any applied before it waits for it."""

    @property
    def is_open(self) -> bool:
        return not self._steps


def late_steps(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    """For one rank a step is applied before others ask for it, for the rest not. They meet before their backward."""
    for layer in run.engine.runtime.layers:
        layer.gate.__class__ = LateSeen if rank else EarlySeen
    train(run, ids, between=dist.barrier)


def late_steps_of_other_layers(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    """Layers that are expected aren't called, when it may have been chosen where they go, and a rank evaluates then."""
    run.model.config.num_hidden_layers = LAYERS if step % 2 else 3
    late_steps(run, rank, step, ids)
    if rank == 0:
        evaluate(run, ids)


def accumulation(run: Training, rank: int, step: int, ids: torch.Tensor, is_reordered: bool = False) -> None:
    """A backward ends with the fetches of the next forward's first layers, which one rank loses."""
    if step == 0:
        run.engine.expect_accumulation(2)
    run.engine.runtime.offloader.is_last_backward = lambda: is_last
    for is_last in (False, True):
        with reordered(run) if is_last and is_reordered else contextlib.nullcontext():
            run.model(input_ids=ids, labels=ids).loss.backward()
        if rank == 0:
            evaluate(run, ids)
    run.optimizer.step()
    run.optimizer.zero_grad()


def accumulation_in_another_order(run: Training, rank: int, step: int, ids: torch.Tensor) -> None:
    """The second forward begins with a layer that isn't there, when those in slots are what backward left."""
    accumulation(run, rank, step, ids, is_reordered=True)


CASES: dict[str, tuple[Callable[[Training, int, int, torch.Tensor], None], dict[str, Any]]] = {
    **{
        case.__name__.replace("_", " "): (case, {})
        for case in (
            plain,
            one_rank_evaluates,
            one_rank_evaluates_layers_in_another_order,
            one_rank_evaluates_some_layers,
            one_rank_evaluates_before_a_backward,
            one_rank_holds_layers,
            one_rank_generates,
            one_rank_makes_a_graph,
            late_steps,
            late_steps_of_other_layers,
            accumulation,
            accumulation_in_another_order,
        )
    },
    "in another order, three slots": (one_rank_evaluates_layers_in_another_order, {"slots": 3}),
    "before a backward, three slots": (one_rank_evaluates_before_a_backward, {"slots": 3}),
    "accumulation, three slots": (accumulation, {"slots": 3}),
    "accumulation in another order, three slots": (accumulation_in_another_order, {"slots": 3}),
    "late steps of other layers, three slots": (late_steps_of_other_layers, {"slots": 3}),
    "late steps, two layers on the device": (late_steps, {"device_layers": 2}),
    "states on the devices": (plain, {"device_states": -1}),
    "states on the devices, one rank evaluates": (one_rank_evaluates, {"device_states": -1}),
    "states on the devices, of which one rank moves its own": (one_rank_moves_its_units_before_a_step, {"device_states": -1}),
    "states on the devices, which one rank brings": (one_rank_brings_states, {"device_states": -1}),
    "states on some devices, late steps": (late_steps, {"device_states": 3, "slots": 3}),
    "states on the devices, accumulation": (accumulation, {"device_states": -1}),
    "pieces of a batch": (one_rank_evaluates_before_a_backward, {"micro_batch_size": 1}),
}
"""What happens in each step, and the settings."""
WHOLE = (
    "accumulation in another order",
    "accumulation",
    "late steps of other layers",
    "one rank holds layers",
    "pieces of a batch",
    "plain",
)
"""Those that are also run with whole fetches. What ranks do beside training changes no bit, nor do slots and places."""


def trained(case: str, rank: int, ranks: int, gathers: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The weights after some steps, and the bytes that were copied for them."""
    does, settings = CASES[case]
    run = training(gathers, **settings)
    for step, ids in enumerate(token_batches(STEPS * ranks)[rank::ranks]):
        does(run, rank, step, ids)
    run.engine.drain()
    weights = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    outside = [weight for name, weight in run.model.state_dict().items() if "layers" not in name]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in outside), "else they look like tied ones"
    copied = run.engine.runtime.meter.counters.h2d_bytes
    run.engine.close()
    return weights, copied


def planned(rank: int, case: str, is_frozen: bool) -> bool:
    """Whether the plan has ranks gather, for which copies take so long."""
    gathered, whole = SECONDS[case][rank]

    def seconds_of(_: torch.device, work: Any) -> float:
        work()
        return gathered if getattr(work, "args", ()) == (True,) else whole

    run = training(gathers=False, is_frozen=is_frozen, gpu_memory_gib=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_plan, "seconds_of", seconds_of)
        train(run, token_batches(2)[rank])
    run.engine.close()
    return run.engine.runtime.prefetcher.gathers


def main() -> None:
    """What each rank does."""
    rank, folder, what = join_ranks(), *sys.argv[1:]
    device_plan.profile_step = remembering(device_plan.profile_step, {})
    if what == "diverges":
        run = training(gathers=True)
        if rank == 1:
            run.model.model.layers.__class__ = Reordered
        train(run, token_batches(1)[0])
    elif what == "leaves":
        run = training(gathers=True)
        for step, ids in enumerate(token_batches(STEPS)):
            if rank == 1 and step == 2:
                run.model.model.layers[3].register_forward_pre_hook(lambda *_: os._exit(9))
            train(run, ids)
    elif what == "plans":
        runs = {(case, frozen): planned(rank, case, frozen) for case in SECONDS for frozen in (False, True)}
        torch.save(runs, f"{folder}/{rank}.pt")
    else:
        ranks, groups = int(what), []
        new_group = dist.new_group
        dist.new_group = lambda **settings: groups.append(settings) or new_group(**settings)
        whole = {case: trained(case, rank, ranks, gathers=False) for case in WHOLE}
        gathered = {case: trained(case, rank, ranks, gathers=True) for case in CASES}
        assert len(groups) == 2, "communicators of all engines: each takes device memory as long as the process lives"
        torch.save((whole, gathered), f"{folder}/{rank}.pt")


Run = dict[str, tuple[dict[str, torch.Tensor], int]]
Runs = list[tuple[Run, Run]]
"""Of each rank, with whole fetches and with gathered ones."""


@pytest.fixture(scope="module", params=[2, *(pytest.param(more, marks=pytest.mark.long) for more in (3, 4))])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder: Path = tmp_path_factory.mktemp("gathered")
    require_success(run_ranks(__file__, request.param, folder, str(request.param)))
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("case", CASES)
def test_gathered_weights_train_as_whole_fetches_do(runs: Runs, case: str) -> None:
    trained_alike = next((name for name in WHOLE if case.startswith(name) or f", {name}" in case), "plain")
    for whole, gathered in runs:
        weights, _ = gathered[case]
        assert all(torch.equal(weights[name], weight) for name, weight in whole[trained_alike][0].items())


def test_a_rank_copies_its_part_of_the_weights(runs: Runs) -> None:
    for whole, gathered in runs:
        (_, of_whole), (_, of_parts) = whole["plain"], gathered["plain"]
        assert of_parts < 1.2 * of_whole / len(runs), "parts are rounded up"


def test_a_rank_copies_no_weights_of_which_its_part_is_on_its_device_with_the_states(runs: Runs) -> None:
    for whole, gathered in runs:
        (_, of_whole), (_, of_parts) = whole["plain"], gathered["plain"]
        of_layers = (of_whole - of_parts) / (1 - 1 / len(runs))
        in_parts, outside = of_layers / len(runs), of_whole - of_layers
        _, without_states = gathered["states on the devices"]
        assert without_states < 1.2 * (in_parts / STEPS + outside / STEPS), "none of layers after the first step, nor outside"
        assert in_parts > 2 * outside


def test_the_plan_has_ranks_gather_where_that_is_faster_and_none_may_leave_a_layer_out(tmp_path: Path) -> None:
    require_success(run_ranks(__file__, 2, tmp_path, "plans"))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert [case for case, gathers in found.items() if gathers] == [("faster on the slowest rank", False)]


def test_ranks_that_fetch_other_layers_end_and_both_are_named(tmp_path: Path) -> None:
    results = run_ranks(__file__, 2, tmp_path, "diverges")
    assert all(status != 0 for status, _ in results)
    output = "".join(text for _, text in results)
    assert "exchanges weights of" in output
    assert "run different layers, or the same ones in a different order" in output


def test_a_rank_that_ends_in_its_forward_ends_those_that_gather(tmp_path: Path) -> None:
    (status, output), (gone, _) = run_ranks(__file__, 2, tmp_path, "leaves")
    assert (status, gone) == (1, 9)
    assert "rank 1" in output


if __name__ == "__main__":
    main()
