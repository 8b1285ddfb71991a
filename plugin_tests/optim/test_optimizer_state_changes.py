"""What a script does to the optimizer's state and groups between steps counts as it does for torch's own optimizers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_runs import slow
from optimizer_runs import Change, assert_equal_masters, assert_same_as_torch, streamed
from plain_torch import token_batches
from torch import nn
from torch.optim import Optimizer

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import StateError

StateDict = dict[Any, Any]

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------------------------------- states


def clear(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def assign(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def empty_some(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.model.layers[0].parameters():
        del optimizer.state[parameter]
    for parameter in model.lm_head.parameters():
        optimizer.state[parameter] = {}


def replace_moments(model: nn.Module, optimizer: Optimizer) -> None:
    for values in optimizer.state.values():
        values["exp_avg"] = torch.full_like(values["exp_avg"], 0.25)
        values["exp_avg_sq"] = torch.full_like(values["exp_avg_sq"], 0.5)


def replace_entries(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in optimizer.state:
        zeros = torch.zeros_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def count_anew(model: nn.Module, optimizer: Optimizer) -> None:
    for values in optimizer.state.values():
        values["step"].fill_(3.0)


def replace_counts(model: nn.Module, optimizer: Optimizer) -> None:
    for values in optimizer.state.values():
        values["step"] = torch.tensor(float(values["exp_avg"].ndim))


@pytest.mark.parametrize("schedule", ["deferred", "backward"])
@pytest.mark.parametrize("change", [clear, assign, empty_some, replace_moments, replace_entries, count_anew, replace_counts])
def test_a_reset_or_replaced_state_is_stepped_from_as_by_torch(change: Change, schedule: str) -> None:
    run = assert_same_as_torch(change, schedule=schedule)
    for parameter, values in run.optimizer.state.items():
        state = run.engine.runtime.state_of(parameter)
        assert state is not None
        assert state.moments is not None
        assert values["exp_avg"] is state.moments.exp_avg
        assert values["exp_avg_sq"] is state.moments.exp_avg_sq


def late(model: nn.Module) -> Optimizer:
    """An optimizer whose steps are applied late."""
    slow(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def halve_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    for values in optimizer.state.values():
        values["exp_avg"].mul_(0.5)
        values["exp_avg_sq"].mul_(0.5)


@pytest.mark.parametrize("schedule", ["deferred", "backward"])
def test_moments_that_are_written_to_right_after_a_step_are_stepped_from(schedule: str) -> None:
    assert_same_as_torch(halve_in_place, late, schedule)


def test_moments_that_are_read_right_after_a_step_are_stepped() -> None:
    run = streamed(late)
    run.step(token_batches(1)[0])
    read = {parameter: values["exp_avg"].clone() for parameter, values in run.optimizer.state.items()}
    run.engine.drain()
    for parameter, values in run.optimizer.state.items():
        assert torch.equal(read[parameter], values["exp_avg"])
        assert read[parameter].any()


@pytest.mark.parametrize("change", [clear, replace_moments])
def test_a_layer_whose_states_lie_on_the_device_follows_too(change: Change) -> None:
    run = assert_same_as_torch(change, device_layers=1)
    assert any(unit.is_on_device for unit in run.engine.runtime.units)


@pytest.mark.parametrize("change", [clear, replace_moments])
def test_what_was_done_to_a_state_before_its_layer_moved_still_counts(change: Change) -> None:
    def change_and_move(model: nn.Module, optimizer: Optimizer) -> None:
        change(model, optimizer)
        if (engine := engine_of(model)) is not None:
            engine.runtime.place((0,), groups_on_device=True)

    run = assert_same_as_torch(change_and_move)
    assert any(unit.is_on_device for unit in run.engine.runtime.units)


def test_moments_in_8_bits_follow_a_reset_and_moments_given_in_fp32() -> None:
    run, twin = (streamed(moments_dtype="int8") for _ in range(2))
    batches = token_batches(3)
    for training in (run, twin):
        training.step(batches[0])
    clear(run.model, run.optimizer)
    twin.optimizer.load_state_dict({"state": {}, "param_groups": twin.optimizer.state_dict()["param_groups"]})
    for training in (run, twin):
        training.step(batches[1])
    given = copy.deepcopy(run.optimizer.state_dict())
    for values in given["state"].values():
        values["exp_avg"] *= 2
    twin.optimizer.load_state_dict(copy.deepcopy(given))
    for parameter, values in zip(run.model.parameters(), given["state"].values(), strict=True):
        run.optimizer.state[parameter]["exp_avg"] = values["exp_avg"]
        run.optimizer.state[parameter]["exp_avg_sq"] = values["exp_avg_sq"]
    for training in (run, twin):
        training.step(batches[2])
        training.engine.drain()
    assert_equal_masters(run, twin)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def reversed_keys(states: StateDict) -> StateDict:
    return {len(states) - 1 - key: values for key, values in states.items()}


@pytest.mark.parametrize("make", [lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), momentum])
def test_hooks_of_a_load_change_and_see_what_is_loaded(make: Callable[[nn.Module], Optimizer]) -> None:
    def in_the_order_of_now(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        return {**state_dict, "state": reversed_keys(state_dict["state"])}

    def half_them(optimizer: Optimizer) -> None:
        assert len(optimizer.state) == len(optimizer.param_groups[0]["params"])
        for values in optimizer.state.values():
            for value in values.values():
                if value is not None and value.ndim:
                    value.mul_(0.5)

    def load(model: nn.Module, optimizer: Optimizer) -> None:
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["state"] = reversed_keys(state_dict["state"])
        optimizer.register_load_state_dict_pre_hook(in_the_order_of_now)
        optimizer.register_load_state_dict_post_hook(half_them)
        optimizer.load_state_dict(state_dict)

    assert_same_as_torch(load, make)


def test_steps_that_nobody_interferes_with_do_not_wait_for_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    run = streamed()
    batches = token_batches(3)
    run.step(batches[0])
    waits = []
    drain = run.engine.runtime.worker.drain
    monkeypatch.setattr(run.engine.runtime.worker, "drain", lambda: (waits.append(1), drain()))
    run.step(batches[1])
    assert waits == []
    clear(run.model, run.optimizer)
    run.step(batches[2])
    assert waits


def test_a_state_emptied_after_its_layers_were_stepped_in_backward_is_refused() -> None:
    run = streamed(schedule="backward")
    batches = token_batches(2)
    run.step(batches[0])
    run.model(input_ids=batches[1], labels=batches[1]).loss.backward()
    run.optimizer.state.clear()
    with pytest.raises(StateError, match=r"emptied or replaced between backward and step\(\)"):
        run.optimizer.step()
