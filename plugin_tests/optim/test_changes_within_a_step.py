"""What a script changes between a forward, its backward and the step counts as in plain PyTorch, wherever layers lie."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = pytest.mark.usefixtures("profiled_once")

PLACEMENTS = pytest.mark.parametrize("settings", [{}, {"kept_layers": 4}, {"offloaded_layers": 4}], ids=str)


class Projections(nn.Module):
    """A layer whose weights have the same shape, so that gradients may be mistaken for one another's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.norm = nn.BatchNorm1d(size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.third(torch.tanh(self.second(torch.tanh(self.first(hidden)))))
        return hidden + self.norm(inner)


class Stack(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Projections(size) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.fixture
def stacks() -> tuple[Stack, Stack]:
    """The same model twice: one for plain PyTorch."""
    torch.manual_seed(0)
    model = Stack().train()
    return copy.deepcopy(model), model


def inputs(count: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 16) for _ in range(count)]


def freeze(model: Stack) -> None:
    model.layers[2].first.weight.requires_grad_(False)


def unfreeze(model: Stack) -> None:
    model.layers[2].first.weight.requires_grad_(True)


@PLACEMENTS
@pytest.mark.parametrize(("before", "between"), [(unfreeze, freeze), (freeze, unfreeze)], ids=["frozen", "unfrozen"])
def test_what_is_frozen_or_unfrozen_between_forward_and_backward_gets_the_gradient_of_plain_pytorch(
    stacks: tuple[Stack, Stack],
    settings: dict[str, int],
    before: Callable[[Stack], None],
    between: Callable[[Stack], None],
) -> None:
    engine = attach(stacks[1], bf16=False, layer_classes=["Projections"], **settings)
    for model in stacks:
        before(model)
        loss = model(inputs()[0]).pow(2).mean()
        between(model)
        loss.backward()
    engine.drain()
    for (name, plain), ours in zip(stacks[0].named_parameters(), stacks[1].parameters(), strict=True):
        assert (plain.grad is None) == (ours.grad is None), name
        if plain.grad is not None:
            assert torch.equal(plain.grad, ours.grad), name
    assert stacks[1].layers[2].first.weight.grad is None
    engine.close()


@PLACEMENTS
def test_running_statistics_count_each_batch_once(stacks: tuple[Stack, Stack], settings: dict[str, int]) -> None:
    engine = attach(stacks[1], bf16=False, layer_classes=["Projections"], **settings)
    for batch in inputs(3):
        for model in stacks:
            model(batch).pow(2).mean().backward()
    engine.drain()
    assert int(stacks[1].layers[0].norm.num_batches_tracked) == 3
    for (name, plain), ours in zip(stacks[0].named_buffers(), stacks[1].buffers(), strict=True):
        assert torch.equal(plain, ours), name
    engine.close()


def test_a_buffer_that_a_layer_replaces_is_replaced_once() -> None:
    class Counting(Projections):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(hidden) * self.calls

    torch.manual_seed(0)
    model = Stack().train()
    model.layers = nn.ModuleList(Counting(16) for _ in range(3))
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, layer_classes=["Counting"])
    for batch in inputs(2):
        for each in (plain, model):
            each(batch).pow(2).mean().backward()
    engine.drain()
    assert [float(layer.calls) for layer in model.layers] == [2.0, 2.0, 2.0]
    for reference, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(reference.grad, ours.grad)
    engine.close()


def test_gradients_that_are_dropped_while_the_host_still_adds_to_them_do_not_come_back() -> None:
    model = tiny_model().train()
    engine = attach(model, bf16=False)
    engine.runtime.offloader.is_last_backward = lambda: False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    adopt_optimizer(optimizer, engine.runtime, "deferred")

    def backward(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    first, second, third = token_batches(3)
    backward(third)
    engine.drain()
    alone = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    backward(first)
    # The worker is behind by more than the launching thread will wait for by itself.
    let_go = threading.Event()
    engine.runtime.worker.submit("busy", lambda: let_go.wait(20.0))
    threading.Timer(1.0, let_go.set).start()
    backward(second)
    optimizer.zero_grad()
    backward(third)
    engine.drain()
    for parameter, expected in zip(model.parameters(), alone, strict=True):
        assert torch.equal(parameter.grad, expected)
    engine.close()


def test_a_hook_behind_the_accumulation_of_a_streamed_parameter_is_refused() -> None:
    model = tiny_model().train()
    engine = attach(model, bf16=False)
    model.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    ids = token_batches(1)[0]
    with pytest.raises(UnsupportedError, match="register_post_accumulate_grad_hook"):
        model(input_ids=ids, labels=ids).loss.backward()
    engine.close()
