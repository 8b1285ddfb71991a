"""A model that fits the device runs as plain modules do: what autograd, hooks and a second backward see of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_runs import Training, attach
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.streaming.graph_call import GraphCall

IDS = token_batches(1)[0]


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """A training in which no layer may run in another way."""
    model = tiny_model().train()
    engine = attach(model, device_layers=-1, kept_layers=4, compile_layers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monkeypatch.setattr(GraphCall, "run", lambda *_: pytest.fail("a layer's weights are looked for in a slot"))
    yield Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    engine.close()


def loss_of(run: Training) -> torch.Tensor:
    loss: torch.Tensor = run.model(input_ids=IDS, labels=IDS).loss
    return loss


def test_the_loss_falls(fitting: Training) -> None:
    losses = [fitting.step(IDS, max_norm=1.0) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.1


def test_a_backward_through_weights_that_were_stepped_raises(fitting: Training) -> None:
    loss = loss_of(fitting)
    loss.backward(retain_graph=True)
    fitting.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_forward_counts_as_open_as_long_as_its_graph_waits_for_backward(fitting: Training) -> None:
    runtime = fitting.engine.runtime
    loss = loss_of(fitting)
    assert runtime.open_forwards == 1
    loss.backward()
    assert runtime.open_forwards == 0
    loss = loss_of(fitting)
    assert runtime.open_forwards == 1
    del loss
    assert runtime.open_forwards == 0


def test_hooks_of_a_script_see_the_gradients_of_parameters(fitting: Training) -> None:
    seen: dict[str, Any] = {}
    for name, parameter in fitting.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    loss_of(fitting).backward()
    for name, parameter in fitting.model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(seen[name], parameter.grad)


def test_weights_that_a_script_writes_are_those_that_compute_and_are_stepped(fitting: Training) -> None:
    fitting.step(IDS)
    weight = fitting.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.zero_()
        before = loss_of(fitting).item()
        weight.add_(0.25)
        assert loss_of(fitting).item() != before
    state = fitting.engine.runtime.state_of(weight)
    assert state is not None
    assert torch.equal(state.weight, torch.full_like(weight, 0.25))
    fitting.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    fitting.step(IDS)
    assert torch.equal(weight.detach(), torch.full_like(weight, 0.25))


def test_a_hook_that_would_miss_the_sum_of_two_backwards_is_refused(fitting: Training) -> None:
    fitting.model.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda _: None)
    loss_of(fitting).backward()
    with pytest.raises(UnsupportedError, match="accumulation_dtype"):
        loss_of(fitting).backward()


def test_a_parameter_that_was_replaced_is_refused(fitting: Training) -> None:
    layer = fitting.model.model.layers[1].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.detach().clone(), requires_grad=False)
    with pytest.raises(StateError, match="was replaced after the model was prepared"):
        loss_of(fitting)
    with torch.no_grad(), pytest.raises(StateError, match="was replaced after the model was prepared"):
        loss_of(fitting)


def test_sums_are_fp32_also_after_data_of_another_dtype_were_there(fitting: Training) -> None:
    fitting.engine.runtime.offloader.gradients_complete = lambda: False
    weight = fitting.model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.float()
    for _ in range(2):
        loss_of(fitting).backward()
    state = fitting.engine.runtime.state_of(weight)
    assert state is not None
    assert state.handle.has_fp32_sum


def test_a_backward_goes_on_behind_a_step_of_other_weights_of_the_layer(fitting: Training) -> None:
    biases = [p for name, p in fitting.model.named_parameters() if name.endswith("q_proj.bias")]
    optimizer = torch.optim.AdamW(biases, lr=1e-2)
    adopt_optimizer(optimizer, fitting.engine.runtime, "deferred")
    loss = loss_of(fitting)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()
