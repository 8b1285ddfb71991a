"""What a script does to the optimizer's groups, weights and gradients between steps counts as it does by plain torch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_runs import masters_of
from optimizer_runs import Change, assert_same_as_torch, streamed
from plain_torch import token_batches
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.gradients.offload import GradientOffloader

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------------------------------- options of groups


def adam_with_two_kinds_of_decay(model: nn.Module) -> Optimizer:
    layers, rest = list(model.model.layers.parameters()), [*model.model.embed_tokens.parameters(), *model.lm_head.parameters()]
    return Adam([{"params": layers, "decoupled_weight_decay": True}, {"params": rest}], lr=1e-2, weight_decay=0.5)


def exchange_kinds_of_decay(model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["decoupled_weight_decay"] = not group["decoupled_weight_decay"]


def leave(model: nn.Module, optimizer: Optimizer) -> None:
    """No change."""


@pytest.mark.parametrize("schedule", ["deferred", "backward"])
@pytest.mark.parametrize("change", [leave, exchange_kinds_of_decay])
def test_adam_decays_each_group_in_the_way_it_says_now(change: Change, schedule: str) -> None:
    assert_same_as_torch(change, adam_with_two_kinds_of_decay, schedule)


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_options_that_the_kernel_lacks_are_refused_when_they_come_later(option: str) -> None:
    run = streamed()
    batches = token_batches(3)
    run.step(batches[0])
    before = copy.deepcopy(run.optimizer.state_dict())
    loaded = copy.deepcopy(before)
    loaded["param_groups"][0][option] = True
    remedy = f"{option}=True before accelerator.prepare"
    with pytest.raises(UnsupportedError, match=remedy):
        run.optimizer.load_state_dict(loaded)
    assert not run.optimizer.param_groups[0][option]
    assert all(
        torch.equal(values["exp_avg"], before["state"][at]["exp_avg"])
        for at, values in run.optimizer.state_dict()["state"].items()
    )
    run.optimizer.param_groups[0][option] = True
    run.model(input_ids=batches[1], labels=batches[1]).loss.backward()
    with pytest.raises(UnsupportedError, match=remedy):
        run.optimizer.step()
    run.optimizer.param_groups[0][option] = False
    run.optimizer.step()
    run.engine.drain()


# ---------------------------------------------------------------------------------------- parameters added later


def without(model: nn.Module, added: Callable[[nn.Module], list[nn.Parameter]]) -> list[nn.Parameter]:
    left_out = {id(parameter) for parameter in added(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in left_out]


def a_layer(model: nn.Module) -> list[nn.Parameter]:
    return list(model.model.layers[0].parameters())


def the_head(model: nn.Module) -> list[nn.Parameter]:
    return list(model.lm_head.parameters())


def one_of_each_layer(model: nn.Module) -> list[nn.Parameter]:
    return [layer.mlp.up_proj.weight for layer in model.model.layers]


@pytest.mark.parametrize("schedule", ["deferred", "backward"])
@pytest.mark.parametrize("added", [a_layer, the_head, one_of_each_layer])
def test_a_group_that_is_added_later_trains(added: Callable[[nn.Module], list[nn.Parameter]], schedule: str) -> None:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        model.zero_grad()  # of parameters that nobody stepped
        optimizer.add_param_group({"params": iter(added(model)), "lr": 5e-3})

    assert_same_as_torch(change, lambda model: AdamW(without(model, added), lr=1e-2), schedule)


@pytest.mark.parametrize("on_device", [0, 1])
def test_parameters_put_into_a_group_by_hand_train_too(on_device: int) -> None:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        model.zero_grad()
        optimizer.param_groups[0]["params"].extend(a_layer(model))

    assert_same_as_torch(change, lambda model: AdamW(without(model, a_layer), lr=1e-2), device_layers=on_device)


def test_a_group_split_in_two_keeps_its_moments() -> None:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        parameters = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = parameters[:5]
        optimizer.add_param_group({"params": parameters[5:], "lr": 5e-3})

    assert_same_as_torch(change)


def test_an_optimizer_without_a_kernel_takes_a_group_added_later() -> None:
    def change(model: nn.Module, optimizer: Optimizer) -> None:
        model.zero_grad()
        optimizer.add_param_group({"params": a_layer(model), "lr": 5e-2})

    run = assert_same_as_torch(change, lambda model: torch.optim.SGD(without(model, a_layer), lr=1e-1, momentum=0.9))
    assert run.driver.parameter_ids == {id(parameter) for parameter in run.model.parameters()}


@pytest.mark.parametrize("kind", [AdamW, torch.optim.NAdam])
def test_an_added_group_of_another_streamed_model_is_refused_and_leaves_the_optimizer_as_it_was(kind: type[Optimizer]) -> None:
    run, still = (streamed(lambda model: kind(model.parameters(), lr=1e-2)) for _ in range(2))
    with pytest.raises(UnsupportedError, match="holds 2 trained parameters of another streamed model"):
        run.optimizer.add_param_group({"params": list(still.model.parameters())[:2]})
    assert len(run.optimizer.param_groups) == 1
    for ids in token_batches(2):
        assert run.step(ids) == still.step(ids)


# ---------------------------------------------------------------------------------------- weights and gradients


def test_a_checkpoint_after_a_write_to_a_weight_holds_the_residuals_that_training_goes_on_from() -> None:
    run = streamed(bf16=True)
    run.step(token_batches(1)[0])
    run.engine.drain()
    weight = run.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(0.9)
    saved, weights = copy.deepcopy(run.optimizer.state_dict()), copy.deepcopy(run.model.state_dict())
    run.engine.runtime.refresh_if_written()
    masters = masters_of(run.engine, run.model)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(saved)
    for name, master in masters_of(run.engine, run.model).items():
        assert torch.equal(master, masters[name]), name


class LateCopies:
    """A stream to the host that is far behind: copies of what the slots held are made when :attr:`may_go` is set."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.thread = ThreadPoolExecutor(1)

    def send(self, offloader: GradientOffloader, name: str, ready_event: Any, copies: Any, norms: Any) -> Any:
        held = [(target, source.clone()) for target, source in (*copies, *norms)]

        def copy_now() -> None:
            self.may_go.wait(10)
            for target, source in held:
                target.copy_(source)

        offloader.last_copied_event = CopiedEvent(self.thread.submit(copy_now))
        return offloader.last_copied_event


class CopiedEvent:
    def __init__(self, copied: Future[None]) -> None:
        self.copied = copied

    def synchronize(self) -> None:
        self.copied.result()

    def query(self) -> bool:
        return self.copied.done()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    late = LateCopies()
    monkeypatch.setattr(GradientOffloader, "send", lambda *args: late.send(*args))
    yield late
    late.may_go.set()
    late.thread.shutdown()


@pytest.mark.parametrize("kind", [AdamW, torch.optim.NAdam])
def test_gradients_zeroed_in_place_stay_zero_though_copies_of_them_were_on_their_way(
    kind: type[Optimizer], late_copies: LateCopies
) -> None:
    run = streamed(lambda model: kind(model.parameters(), lr=1e-2))
    run.engine.runtime.offloader.is_last_backward = lambda: False  # a micro-batch: nobody waits at its end
    run.engine.expect_accumulation(4)
    ids = token_batches(1)[0]
    run.model(input_ids=ids, labels=ids).loss.backward()
    threading.Timer(0.2, late_copies.may_go.set).start()
    run.optimizer.zero_grad(set_to_none=False)
    late_copies.thread.submit(lambda: None).result()
    for name, parameter in run.model.named_parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any(), name
