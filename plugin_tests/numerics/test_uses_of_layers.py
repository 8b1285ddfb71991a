"""What scripts do with forwards and backwards, and checkpoints of their own: as in plain PyTorch, element by element, whatever
becomes of the layers' activations.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from layer_uses import (
    PLACEMENTS,
    Case,
    Layer,
    LeavesHiddenStatesBehind,
    Net,
    backward_of,
    check,
    each_placement,
    loss_of,
    net,
    one_after_another,
    one_step,
    placed,
    random_rows,
)
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("profiled_once")

# ------------------------------------------------------------------------------ forwards, backwards and their order


def two_forwards_one_backward(model: nn.Module) -> list[torch.Tensor]:
    return backward_of(loss_of(model) + 2 * loss_of(model, seed=1, rows=2))


def two_forwards_two_backwards(model: nn.Module) -> list[torch.Tensor]:
    first, second = loss_of(model), loss_of(model, seed=1, rows=2)
    return [*backward_of(first), *backward_of(second)]


def two_forwards_two_backwards_in_reverse(model: nn.Module) -> list[torch.Tensor]:
    first, second = loss_of(model), loss_of(model, seed=1, rows=2)
    return [*backward_of(second), *backward_of(first)]


def two_backwards_of_one_graph(model: nn.Module) -> list[torch.Tensor]:
    loss = loss_of(model)
    return [*backward_of(loss, retain_graph=True), *backward_of(3 * loss)]


def four_micro_batches(model: nn.Module) -> list[torch.Tensor]:
    return [seen for seed in range(4) for seen in backward_of(loss_of(model, seed, rows=1 + seed) / 4)]


def forwards_without_a_backward(model: nn.Module) -> list[torch.Tensor]:
    dropped = loss_of(model).detach()
    waiting = loss_of(model)
    return [dropped, *one_step(model), waiting]


def evaluation_before_the_backward(model: nn.Module) -> list[torch.Tensor]:
    loss = loss_of(model)
    with torch.no_grad():
        evaluated = loss_of(model, seed=1)
    return [evaluated, *backward_of(loss)]


def backward_in_another_thread(model: nn.Module) -> list[torch.Tensor]:
    loss = loss_of(model)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(loss.backward).result()
    return [loss]


def gradients_of_inputs(model: Any) -> list[torch.Tensor]:
    """``torch.autograd.grad`` leaves no gradient on any parameter."""
    leaf = random_rows().requires_grad_()
    inner = model.layers[0](model.projection(leaf))
    loss = one_after_another(model.layers[1:], inner).pow(2).sum()
    gradients = [*torch.autograd.grad(loss, [leaf, inner], retain_graph=True), *torch.autograd.grad(loss, inner)]
    assert all(parameter.grad is None for parameter in model.parameters())
    return [*gradients, *one_step(model)]


def gradients_of_some_leaves(model: Any) -> list[torch.Tensor]:
    """``backward`` adds up the gradients that it is asked for, and no others."""
    leaf = random_rows().requires_grad_()
    loss = model(leaf).pow(2).sum()
    loss.backward(inputs=[leaf, model.projection.weight])
    assert leaf.grad is not None
    return [loss, leaf.grad]


def gradient_penalty(model: nn.Module) -> list[torch.Tensor]:
    leaf = random_rows().requires_grad_()
    loss = model(leaf).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return backward_of(loss + gradient.pow(2).sum())


ORDERS = {
    "two_forwards_one_backward": net(step=two_forwards_one_backward),
    "two_forwards_two_backwards": net(step=two_forwards_two_backwards),
    "two_forwards_two_backwards_in_reverse": net(step=two_forwards_two_backwards_in_reverse),
    "two_backwards_of_one_graph": net(step=two_backwards_of_one_graph),
    "four_micro_batches": net(step=four_micro_batches),
    "forwards_without_a_backward": net(step=forwards_without_a_backward),
    "evaluation_before_the_backward": net(step=evaluation_before_the_backward),
    "backward_in_another_thread": net(step=backward_in_another_thread),
    "gradients_of_inputs": net(step=gradients_of_inputs),
    "gradients_of_some_leaves": net(step=gradients_of_some_leaves),
    "gradient_penalty": net(step=gradient_penalty),
}


@each_placement(ORDERS)
def test_forwards_and_backwards_may_follow_each_other_in_any_order(case: Case, placement: str) -> None:
    check(case, placement)


# ------------------------------------------------------------------------------ failures


class UsersError(Exception):
    """Raised by a script's own code."""


def fail(*arguments: Any) -> None:
    raise UsersError


@contextlib.contextmanager
def failing_backwards(model: Any) -> Iterator[None]:
    """Backwards through the second layer raise in its middle."""

    def watch(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: fail() if failing else None)

    failing = [True]
    handle = model.layers[1].up.register_forward_hook(watch)
    try:
        yield
    finally:
        failing.clear()
        handle.remove()


def failed_forward(model: Any) -> list[torch.Tensor]:
    handle = model.layers[2].up.register_forward_pre_hook(fail)
    with pytest.raises(UsersError):
        loss_of(model)
    handle.remove()
    return one_step(model)


def failed_backward(model: nn.Module) -> list[torch.Tensor]:
    with failing_backwards(model):
        loss = loss_of(model)
        with pytest.raises(UsersError):
            loss.backward()
    model.zero_grad()
    return one_step(model)


def failed_backward_and_another_of_the_same_graph(model: nn.Module) -> list[torch.Tensor]:
    with failing_backwards(model):
        loss = loss_of(model)
        with pytest.raises(UsersError):
            loss.backward(retain_graph=True)
    model.zero_grad()
    return backward_of(loss)


FAILURES = {
    "forward": net(step=failed_forward),
    "backward": net(step=failed_backward),
    "backward_and_another_of_the_same_graph": net(step=failed_backward_and_another_of_the_same_graph),
}


@each_placement(FAILURES)
def test_a_step_after_a_failure_is_as_if_nothing_had_failed(case: Case, placement: str) -> None:
    check(case, placement)


# ------------------------------------------------------------------------------ checkpoints and hooks of the user's own


class Checkpointing(Layer):
    """Recomputes a part of itself."""

    def forward(self, hidden: torch.Tensor) -> Any:
        inner = checkpoint(lambda tensor: self.activation(self.up(tensor * self.scale)), hidden, use_reentrant=False)
        return hidden + self.down(inner)


def pairs_checkpointed(layers: Any, hidden: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    for place in (0, 2):
        pair = functools.partial(one_after_another, layers[place : place + 2])
        hidden = checkpoint(pair, hidden, use_reentrant=use_reentrant)
    return hidden


def saved_on_the_cpu(model: nn.Module) -> list[torch.Tensor]:
    with save_on_cpu():
        loss = loss_of(model)
    return backward_of(loss)


CHECKPOINTS = {
    "within_layers": net(Checkpointing),
    "around_pairs": net(run=functools.partial(pairs_checkpointed, use_reentrant=False)),
    "around_pairs_reentrant": net(run=functools.partial(pairs_checkpointed, use_reentrant=True)),
    "save_on_cpu": net(step=saved_on_the_cpu),
}


@each_placement(CHECKPOINTS)
def test_checkpoints_and_saved_tensor_hooks_of_the_users_own_work(case: Case, placement: str) -> None:
    check(case, placement)


# ------------------------------------------------------------------------------ memory


def dropped(model: nn.Module) -> None:
    loss_of(model)


def differentiated(model: nn.Module) -> torch.Tensor:
    loss = loss_of(model)
    loss.backward()
    return loss


def failed(model: nn.Module) -> None:
    with failing_backwards(model):
        loss = loss_of(model)
        with contextlib.suppress(UsersError):
            loss.backward()


def differentiated_and_left(model: Any) -> None:
    """Layers leave tensors of their graph on themselves; what these need is freed with them."""
    one_step(model)
    for layer in model.layers:
        del layer.left


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("layer", "use"),
    [(Layer, dropped), (Layer, differentiated), (Layer, failed), (LeavesHiddenStatesBehind, differentiated_and_left)],
    ids=lambda value: value.__name__,
)
def test_nothing_of_a_graph_stays_and_no_collector_is_needed_for_it(
    placement: str, layer: type[Layer], use: Callable[[Any], object]
) -> None:
    model: Any = Net(layer)
    made: list[StorageWeakRef] = []

    def note(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        made.append(StorageWeakRef(output.untyped_storage()))

    with placed(model, placement):
        one_step(model)
        for part in model.layers:
            part.activation.register_forward_hook(note)
        gc.disable()
        try:
            result = use(model)
            left = [reference for reference in made if not reference.expired()]
        finally:
            gc.enable()
        del result
    assert len(made) >= 4
    assert not left
