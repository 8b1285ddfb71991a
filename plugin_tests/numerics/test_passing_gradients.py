"""Gradients that pass through a few host buffers: the same bits in 12 bytes a parameter, and errors where that can't be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Training, attach, train_streamed
from plain_torch import PlainRun, tiny_model, token_batches, train_bf16_with_masters
from torch import nn
from trainer_runs import assert_same_run, run_trainer, tiny_llama

from megatrain_accelerate.errors import ConfigError, StateError, UnsupportedError
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.store.unit import PASSING_BUFFERS

pytestmark = pytest.mark.usefixtures("profiled_once")

PASSING: dict[str, Any] = {"host_gradients": "passing", "max_norm": None, "schedule": "backward"}
LAYERS = 2 * PASSING_BUFFERS
"""So that each buffer is used again within a backward."""


def assert_bit_equal(ours: PlainRun, theirs: PlainRun) -> None:
    assert ours.losses == theirs.losses
    for name, weight in theirs.weights.items():
        assert torch.equal(ours.weights[name], weight), name
        assert torch.equal(ours.masters[name], theirs.masters[name]), name


@pytest.mark.usefixtures("exact_torch_sqrt")
@pytest.mark.parametrize("bf16", [True, False])
def test_weights_have_the_bits_that_they_have_with_gradients_that_stay(bf16: bool) -> None:
    model, batches = tiny_model(num_hidden_layers=LAYERS), token_batches(10)
    passing = train_streamed(model, batches, bf16=bf16, **PASSING)
    if bf16:
        assert_bit_equal(passing, train_bf16_with_masters(model, batches, max_norm=None))
    assert_bit_equal(passing, train_streamed(model, batches, bf16=bf16, max_norm=None, schedule="backward"))


@pytest.mark.parametrize(
    "settings",
    [
        {"device_layers": 2},
        {"micro_batch_size": 1},
        pytest.param({"kept_layers": 3}, marks=pytest.mark.long),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_placement_does_not_change_the_bits(settings: dict[str, Any]) -> None:
    model, batches = tiny_model(num_hidden_layers=LAYERS), token_batches(6)
    kept = train_streamed(model, batches, max_norm=None, schedule="backward", **settings)
    assert_bit_equal(train_streamed(model, batches, **{**PASSING, **settings}), kept)


def test_a_buffer_is_not_filled_again_while_a_step_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = tiny_model(num_hidden_layers=LAYERS), token_batches(3)
    kept = train_streamed(model, batches, max_norm=None, schedule="backward")
    step = HostKernels.adamw

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.01)
        step(*args, **kwargs)

    monkeypatch.setattr(HostKernels, "adamw", slow)
    assert_bit_equal(train_streamed(model, batches, **PASSING), kept)


class Block(nn.Module):
    """Its second weight has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(70, 3))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def test_a_parameter_without_a_gradient_is_not_stepped() -> None:
    states = []
    for host_gradients in ("kept", "passing"):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(LAYERS)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        engine = attach(model, bf16=False, host_gradients=host_gradients)
        adopt_optimizer(optimizer, engine.runtime, "backward")
        for _ in range(3):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
        states.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    assert torch.equal(states[1]["0.unused"], torch.ones(70, 3))
    assert not torch.equal(states[1]["0.linear.weight"], states[1]["1.linear.weight"])
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


@pytest.mark.parametrize("training", [True, False])
def test_layers_take_12_bytes_a_parameter_and_the_plan_knows_it(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[dict[str, int]] = []
    monkeypatch.setattr("megatrain_accelerate.engine.require_host_bytes", lambda parts, *_, **__: planned.append(parts))
    model = tiny_model(num_hidden_layers=20)
    engine = attach(model, host_gradients="passing", training=training)
    if not training:
        engine.enable_training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "backward"))
    assert engine.host_bytes_by_kind()["gradients"] == 0
    run.step(token_batches(1)[0])
    held = engine.host_bytes_by_kind()
    assert planned[-1]["gradients"] == pytest.approx(held["gradients"], abs=PASSING_BUFFERS * 4096)  # whole pages
    in_layers = [layer.unit.layout for layer in engine.runtime.layers]
    outside = sum(group.unit.layout.gradient_bytes for group in engine.runtime.groups)
    assert held["gradients"] - outside == pytest.approx(
        PASSING_BUFFERS * in_layers[0].gradient_bytes, abs=PASSING_BUFFERS * 4096
    )
    count = sum(layout.parameter_count for layout in in_layers)
    of_layers = [layer.unit.bytes_by_kind() for layer in engine.runtime.layers]
    assert sum(sum(kinds.values()) for kinds in of_layers) == pytest.approx(12 * count, rel=0.01)
    engine.close()


def trained(optimizer_class: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = tiny_model(num_hidden_layers=LAYERS)
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    engine = attach(model, host_gradients="passing", **settings)
    adopt_optimizer(optimizer, engine.runtime, "backward")
    return model, engine, optimizer


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = token_batches(1)[0]
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_consumed_gradient_shows_not_a_number(set_to_none: bool) -> None:
    model, engine, optimizer = trained()
    for _ in range(2):
        loss_of(model).backward()
        gradient = model.model.layers[0].mlp.up_proj.weight.grad
        assert gradient.shape == model.model.layers[0].mlp.up_proj.weight.shape
        assert gradient.isnan().all()
        assert model.model.norm.weight.grad.isfinite().all()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    engine.close()


def test_a_second_backward_before_the_step_is_an_error() -> None:
    model, engine, _ = trained()
    loss_of(model).backward()
    with pytest.raises(StateError, match=r"gradients of layer model\.layers\.\d can't be consumed.*host_gradients to 'kept'"):
        loss_of(model).backward()
    engine.close()


def test_a_backward_after_a_step_whose_gradients_were_not_cleared_is_an_error() -> None:
    model, engine, optimizer = trained()
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"earlier step weren't cleared, call optimizer\.zero_grad\(\)"):
        loss_of(model).backward()
    engine.close()


def test_a_second_backward_through_a_graph_whose_layers_were_stepped_is_an_error() -> None:
    model, engine, _ = trained()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    with pytest.raises(StateError, match=r"an earlier backward through the same graph took.*step_schedule to 'deferred'"):
        loss.backward()
    engine.close()


def test_two_forwards_before_one_backward_are_an_error() -> None:
    model, engine, _ = trained()
    first = loss_of(model)
    with pytest.raises(StateError, match="several forwards before one backward"):
        (first + loss_of(model)).backward()
    engine.close()


def test_a_gradient_that_the_script_set_is_an_error_before_anything_is_stepped() -> None:
    model, engine, optimizer = trained()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(StateError, match=r"12 gradients of layer model\.layers\.0 .*set by the script.*to 'kept'"):
        optimizer.step()
    engine.drain()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    engine.close()


def test_a_second_step_with_consumed_gradients_is_an_error() -> None:
    model, engine, optimizer = trained()
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"consumed by an earlier step and not cleared.*call zero_grad\(\)"):
        optimizer.step()
    engine.close()


def test_an_optimizer_without_a_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"SGD has no fused host kernel.*host_gradients to 'kept'"):
        trained(torch.optim.SGD)


def test_the_trainer_trains_the_same_without_clipping(tmp_path: Path) -> None:
    runs = [
        run_trainer(
            tiny_llama,
            tmp_path / setting,
            streamed=True,
            settings={"host_gradients": setting},
            max_grad_norm=0.0,
            gradient_accumulation_steps=1,
        )
        for setting in ("kept", "passing")
    ]
    assert_same_run(runs[1], runs[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_grad_norm": 1.0, "gradient_accumulation_steps": 1}, "max_grad_norm is above 0; set max_grad_norm to 0"),
        ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2; set it to 1"),
        (
            {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "auto_find_batch_size": True},
            "auto_find_batch_size tries one again that ran out of memory; leave it off",
        ),
    ],
)
def test_the_trainers_clipping_accumulation_and_second_tries_are_refused_before_the_first_step(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_trainer(tiny_llama, tmp_path, streamed=True, settings={"host_gradients": "passing"}, **arguments)
