"""Layers with graphs of their own inside, and backwards that begin inside layers or end there: gradients are those of plain
PyTorch, element by element.
"""

from __future__ import annotations

import copy
import gc
from collections import UserDict
from typing import Any

import pytest
import torch
from layer_uses import (
    PLACEMENTS,
    WIDTH,
    Case,
    Layer,
    Net,
    backward_of,
    check,
    each_placement,
    loss_of,
    net,
    one_step,
    placed,
    random_rows,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import output_capturing

from megatrain_accelerate.errors import StateError, UnsupportedError

pytestmark = pytest.mark.usefixtures("profiled_once")


class ChecksPointsWithABackwardOfItsOwn(Layer):
    """A part of the layer is under a reentrant checkpoint, whose recompute is differentiated by another backward."""

    def forward(self, hidden: torch.Tensor) -> Any:
        inner = checkpoint(lambda rows: self.activation(self.up(rows * self.scale)), hidden, use_reentrant=True)
        return hidden + self.down(inner)


class Product(torch.autograd.Function):
    """Keeps what its backward needs in attributes, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.weight = rows.detach(), weight.detach()
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.weight, gradient.t() @ ctx.rows


class HidesItsWeight(Layer):
    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden + self.down(self.activation(Product.apply(hidden, self.up.weight)))


class ProductWithALeaf(Product):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.weight = rows.detach(), weight
        return rows @ weight.t()


class HidesItsLeaf(Layer):
    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden + self.down(self.activation(ProductWithALeaf.apply(hidden, self.up.weight)))


class HidesItsWeightAndCounts(HidesItsWeight):
    """Writes to a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(self.dropout(hidden)) * self.calls


class DifferentiatesInside(Layer):
    def forward(self, hidden: torch.Tensor) -> Any:
        with torch.enable_grad():
            output = self.mlp(hidden)
            (slope,) = torch.autograd.grad(output.sum(), hidden, retain_graph=True)
        return hidden + output + slope.detach()


class DifferentiatesInsideAndCounts(DifferentiatesInside):
    """Is computed again within its own forward, when the buffer has another value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(hidden * self.calls)


def backward_within_a_backward(model: Any) -> list[torch.Tensor]:
    """A hook inside the third layer, when some of its weights have their gradients, differentiates through the layer."""
    activations: list[torch.Tensor] = []
    handle = model.layers[2].activation.register_forward_hook(lambda module, args, output: activations.append(output))
    hidden = [model.projection(random_rows())]
    for layer in model.layers:
        hidden.append(layer(hidden[-1]))
    handle.remove()
    loss, other = hidden[-1].pow(2).sum(), hidden[3].sum()
    seen: list[torch.Tensor] = []

    def differentiate(_: torch.Tensor) -> None:
        handle.remove()  # the inner backward comes here too
        seen.extend(torch.autograd.grad(other, hidden[2], retain_graph=True))

    handle = activations[0].register_hook(differentiate)
    loss.backward(retain_graph=True)
    return [loss, *seen]


def first_layer_again_and_again(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Its calls come to lie in different slots, and in those of other layers."""
    for place in (0, 1, 0, 2, 3, 0, 2):
        hidden = layers[place](hidden)
    return hidden


def two_backwards_through_one_graph(model: Any) -> list[torch.Tensor]:
    """The first is of what is asked for by name alone, and another forward and backward come between."""
    hidden = model.projection(random_rows())
    loss = model.run(model.layers, hidden).pow(2).sum()
    seen = torch.autograd.grad(loss, hidden, retain_graph=True)
    return [*seen, *one_step(model), *backward_of(loss)]


def another_call_within_a_backward(model: Any) -> list[torch.Tensor]:
    """Inside the backward of a layer's second call, its first call is differentiated, which was in another slot."""
    layer, activations, seen = model.layers[0], list[torch.Tensor](), list[torch.Tensor]()
    inputs = model.projection(random_rows())
    first = layer(inputs)
    other, hidden = first.sum(), model.layers[2](model.layers[1](first))
    handle = layer.activation.register_forward_hook(lambda module, args, output: activations.append(output))
    loss = layer(hidden).pow(2).sum()
    handle.remove()
    activations[0].register_hook(lambda _: seen.extend(torch.autograd.grad(other, inputs, retain_graph=True)))
    return [*backward_of(loss), *seen]


INSIDE = {
    "checkpoint_with_a_backward_of_its_own": net(ChecksPointsWithABackwardOfItsOwn),
    "weight_hidden_from_hooks": net(HidesItsWeight),
    "weight_hidden_from_hooks_beside_a_buffer": net(HidesItsWeightAndCounts),
    "leaf_hidden_from_hooks": net(HidesItsLeaf),
    "weight_hidden_beside_layers_on_the_device": net(HidesItsWeight, settings={"device_layers": 2}),
    "weight_hidden_in_calls_of_one_layer": net(HidesItsWeight, first_layer_again_and_again),
    "weight_hidden_from_two_backwards": net(HidesItsWeight, step=two_backwards_through_one_graph),
    "weight_hidden_from_a_backward_within_a_backward": net(HidesItsWeight, step=backward_within_a_backward),
    "weight_hidden_from_the_backward_of_another_call": net(HidesItsWeight, step=another_call_within_a_backward),
    "derivative_in_the_forward": net(DifferentiatesInside),
    "derivative_in_the_forward_beside_a_buffer": net(DifferentiatesInsideAndCounts),
    "backward_within_a_backward": net(
        step=backward_within_a_backward,
    ),
}


@each_placement(INSIDE)
def test_gradients_of_graphs_inside_layers_are_those_of_plain_pytorch(case: Case, placement: str) -> None:
    check(case, placement)


class BeginsABackward(HidesItsWeight):
    """The backward of what is given to it, within its own forward."""

    def forward(self, hidden: torch.Tensor, loss: torch.Tensor | None = None) -> Any:
        if loss is not None:
            loss.backward()
        return super().forward(hidden)


def test_a_hidden_weight_is_not_fetched_over_one_of_a_layer_that_runs() -> None:
    model = Net(BeginsABackward)
    with placed(model, "kept"):
        first = model.layers[0](model.projection(random_rows()))
        second = model.layers[1](first)
        with pytest.raises(StateError, match="needs a weight slot, but running layers use all 1;"):
            model.layers[2](second.detach(), loss=first.sum())


class LeavesAHiddenProduct(Layer):
    """Leaves a loss on itself that depends on a hidden weight, and on nothing that it returns."""

    def forward(self, hidden: torch.Tensor) -> Any:
        self.left = Product.apply(hidden, self.up.weight).sum()
        return super().forward(hidden)


@pytest.mark.parametrize("placement", ["kept", "recomputed"])
def test_a_backward_past_the_outputs_is_refused_where_weights_are_hidden(placement: str) -> None:
    model = Net(LeavesAHiddenProduct)
    with placed(model, placement):
        loss_of(model)
        with pytest.raises(UnsupportedError, match=r"without passing through its outputs.*save_for_backward"):
            model.layers[0].left.backward()


class HidesItsWeightAndRecords(HidesItsWeight):
    """Hands its result to transformers' side channel too."""

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden = super().forward(hidden)
        output_capturing._active_collector.get()["results"].append(hidden)
        return hidden


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_what_such_a_layer_records_in_its_first_call_is_recorded_once(placement: str, micro_batch_size: int | None) -> None:
    model, results = Net(HidesItsWeightAndRecords), list[torch.Tensor]()
    token = output_capturing._active_collector.set({"results": results})
    try:
        with placed(model, placement, micro_batch_size=micro_batch_size):
            output = model(torch.randn(5, 3, WIDTH))
    finally:
        output_capturing._active_collector.reset(token)
    assert len(results) == 4
    assert torch.equal(results[-1], output)


# ------------------------------------------------------------------------------ backwards that fail


class UsersError(Exception):
    """Raised by a script's own code."""


def fail_in_backward(model: Any) -> None:
    """A backward that raises in the middle of the second layer."""

    def fail(_: torch.Tensor) -> None:
        raise UsersError

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = model.layers[1].up.register_forward_hook(hook)
    with pytest.raises(UsersError):
        loss_of(model).backward()
    handle.remove()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_after_a_failed_backward_the_weights_of_now_are_trained(placement: str) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    plain = copy.deepcopy(model)
    with placed(model, placement) as engine:
        one_step(model)
        fail_in_backward(model)
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
        assert engine.runtime.open_forwards == 0
        for each in (model, plain):
            each.zero_grad()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.add_(0.5)
        ours, theirs = one_step(model), one_step(plain)
        assert torch.equal(ours[0], theirs[0])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, plain.get_parameter(name).grad), name


# ------------------------------------------------------------------------------ what layers share through a mapping


class Hands(Layer):
    """Writes what it made into a mapping that all layers get."""

    def forward(self, hidden: torch.Tensor, shared: UserDict[str, torch.Tensor]) -> Any:
        output = super().forward(hidden)
        shared["made"] = output * 2 + shared.get("made", 0)
        return output


def with_a_mapping(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    shared: UserDict[str, torch.Tensor] = UserDict()
    for layer in layers:
        hidden = layer(hidden, shared=shared)
    return hidden + shared["made"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_dropped_forward_of_layers_that_share_a_mapping_leaves_nothing(placement: str) -> None:
    model = Net(Hands, with_a_mapping)
    with placed(model, placement) as engine:
        loss_of(model)
        gc.collect()
        assert engine.runtime.open_forwards == 0
    check(net(Hands, with_a_mapping), placement)
