"""bf16 runs with optimizers that have no fused kernel: what a checkpoint of theirs holds, and how it is gone on from."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import masters_of
from optimizer_runs import assert_equal_masters, small_model, streamed
from plain_torch import token_batches
from torch import nn, optim
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.optim.host_step import TAKEN_OVER
from megatrain_accelerate.optim.moment_states import RESIDUAL_KEY, RESIDUALS_KEY

pytestmark = pytest.mark.usefixtures("profiled_once")


class OwnAdamW(optim.AdamW):
    """A subclass, which isn't fused: its step may be another."""


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "AMSGrad": lambda parameters: optim.AdamW(parameters, lr=1e-3, amsgrad=True),
    "SGD with momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1),
    "NAdam": lambda parameters: optim.NAdam(parameters, lr=1e-3),
    "Adagrad": lambda parameters: optim.Adagrad(parameters, lr=1e-3),
    "Adafactor": lambda parameters: Adafactor(parameters, lr=1e-3, relative_step=False, beta1=0.9),
    "subclass": lambda parameters: OwnAdamW(parameters, lr=1e-3),
}


IN_LONG_RUNS = ("NAdam", "Adafactor", "subclass")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] if name in IN_LONG_RUNS else []) for name in MAKERS])
def make(request: pytest.FixtureRequest) -> Callable[[nn.Module], Optimizer]:
    maker = MAKERS[request.param]
    return lambda model: maker(model.parameters())


def through_a_file(*values: Any) -> Any:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_resumed_run_has_the_bits_of_one_that_went_on(make: Callable[[nn.Module], Optimizer]) -> None:
    batches = token_batches(4)
    whole, first, second = (streamed(make, bf16=True) for _ in range(3))
    for ids in batches:
        whole.step(ids)
    for ids in batches[:2]:
        first.step(ids)
    weights, states = through_a_file(first.model.state_dict(), first.optimizer.state_dict())
    given = copy.deepcopy(states)
    second.step(batches[3])  # what it did before is gone
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(states)
    assert_equal_masters(second, first)
    for ids in batches[2:]:
        second.step(ids)
    assert_equal_masters(second, whole)
    assert states["state"].keys() == given["state"].keys()
    assert all(RESIDUAL_KEY in entry for entry in states["state"].values())  # the caller's own dict
    assert all(RESIDUAL_KEY not in entry for entry in second.optimizer.state.values())
    ours, theirs = second.optimizer.state_dict()["state"], whole.optimizer.state_dict()["state"]
    for index, entry in theirs.items():
        assert ours[index].keys() == entry.keys()
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert ours[index][key].dtype == value.dtype
                assert torch.equal(ours[index][key], value), (index, key)


def test_such_a_checkpoint_loads_into_the_stock_optimizer(make: Callable[[nn.Module], Optimizer]) -> None:
    run = streamed(make, bf16=True)
    batches = token_batches(2)
    run.step(batches[0])
    (states,) = through_a_file(run.optimizer.state_dict())
    model = small_model()
    optimizer = make(model)
    optimizer.load_state_dict(states)
    model(input_ids=batches[1], labels=batches[1]).loss.backward()
    optimizer.step()


NEVER_STEPPED = {name: MAKERS[name] for name in ("NAdam", "SGD")} | {"AdamW": lambda p: optim.AdamW(p, lr=1e-3)}


@pytest.mark.parametrize("name", NEVER_STEPPED)
def test_parameters_that_were_never_stepped_get_no_entry_and_are_stepped_after_a_resume_with_the_same_bits(name: str) -> None:
    make = NEVER_STEPPED[name]
    run, resumed = (streamed(lambda model: make(model.parameters()), bf16=True) for _ in range(2))
    resumed.step(token_batches(3)[2])  # what it did before is gone
    batches = token_batches(2)
    run.model(input_ids=batches[0], labels=batches[0]).loss.backward()
    skipped = [run.model.lm_head.weight, *run.model.model.layers[1].parameters()]
    for parameter in skipped:
        parameter.grad = None
    run.optimizer.step()
    run.optimizer.zero_grad()
    count = 0 if name == "SGD" else len(list(run.model.parameters())) - len(skipped)
    assert len(run.optimizer.state_dict()["state"]) == count
    weights, saved = through_a_file(run.model.state_dict(), run.optimizer.state_dict())
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(saved)
    for each in (run, resumed):
        each.step(batches[1])
        each.engine.drain()
    assert_equal_masters(resumed, run)
    assert name == "SGD" or resumed.optimizer.state[resumed.model.lm_head.weight]["step"] == 1


@pytest.mark.parametrize("name", ["NAdam", "SGD", "AdamW"])
def test_an_optimizer_that_another_took_over_neither_saves_nor_loads_what_belongs_to_the_masters(name: str) -> None:
    run = streamed(lambda model: NEVER_STEPPED[name](model.parameters()), bf16=True)
    batches = token_batches(2)
    run.step(batches[0])
    first, own = run.optimizer, copy.deepcopy(run.optimizer.state_dict())
    run.driver.retire(TAKEN_OVER, copies=True)
    run.optimizer = optim.AdamW(run.model.parameters(), lr=1e-3)
    run.driver = adopt_optimizer(run.optimizer, run.engine.runtime, "deferred")
    retired = copy.deepcopy(first.state_dict())
    assert RESIDUALS_KEY not in retired
    assert not any(RESIDUAL_KEY in entry for entry in retired["state"].values())
    run.step(batches[1])
    run.engine.drain()
    before = masters_of(run.engine, run.model)
    for states in (own, retired):
        first.load_state_dict(states)
        after = masters_of(run.engine, run.model)
        assert all(torch.equal(after[key], master) for key, master in before.items())
    run.driver.retire(TAKEN_OVER, copies=True)
    adopt_optimizer(first, run.engine.runtime, "deferred")
    after = masters_of(run.engine, run.model)
    assert all(torch.equal(after[key], master) for key, master in before.items())


def test_an_optimizers_own_loading_gets_its_own_keys_alone() -> None:
    class Strict(optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert state_dict.keys() == {"state", "param_groups"}
            super().load_state_dict(state_dict)

    run = streamed(lambda model: Strict(model.parameters(), lr=0.1), bf16=True)
    run.step(token_batches(1)[0])
    states = run.optimizer.state_dict()
    assert RESIDUALS_KEY in states
    run.optimizer.load_state_dict(states)
