"""Calls of layers that are cut into pieces of their batch, in use: the numbers are those of plain layers that run on one piece
after the other.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layer_uses import (
    PLACEMENTS,
    WIDTH,
    Case,
    Layer,
    Net,
    Run,
    backward_of,
    check,
    each_placement,
    one_after_another,
    placed,
)
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatrain_accelerate.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("profiled_once")

ROWS, TOKENS, SIZE = 5, 3, 2
"""Samples, tokens of each, and samples of a piece."""

Step = Callable[[Any], list[torch.Tensor]]


@dataclasses.dataclass
class Made:
    """What a layer may return."""

    rows: torch.Tensor


def inputs(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    loss: torch.Tensor = model(inputs(seed, rows)).pow(2).sum()
    return loss


def one_step(model: nn.Module) -> list[torch.Tensor]:
    return backward_of(loss_of(model))


def in_pieces(layer: type[Layer]) -> type[Layer]:
    """The layer, which runs on one piece of its batch after the other."""

    class InPieces(layer):  # type: ignore[valid-type,misc]
        def forward(self, hidden: torch.Tensor, *shared: torch.Tensor) -> Any:
            outputs = [layer.forward(self, piece, *shared) for piece in hidden.split(SIZE)]
            if isinstance(outputs[0], torch.Tensor):
                return torch.cat(outputs)
            if isinstance(outputs[0], Made):
                return Made(torch.cat([output.rows for output in outputs]))
            return tuple(torch.cat(column) for column in zip(*outputs, strict=True))

    return InPieces


class NetOnFrozenInputs(Net):
    """Nothing below the first layer is trained."""

    def __init__(self, layer: type[Layer], run: Run) -> None:
        super().__init__(layer, run)
        self.projection.requires_grad_(False)


def cut(
    layer: type[Layer] = Layer, run: Run = one_after_another, step: Step = one_step, model: Any = Net, **more: Any
) -> Case:
    """The case of a :class:`Net` whose calls are cut."""
    return Case(
        build=functools.partial(model, layer, run),
        plain_build=functools.partial(model, in_pieces(layer), run),
        step=step,
        settings={"micro_batch_size": SIZE},
        **more,
    )


# ------------------------------------------------------------------------------ layers


class ReturnsMore(Layer):
    """Returns something that nobody uses, of weights that have no other part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden), self.unused(hidden)


def firsts(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        hidden, _ = layer(hidden)
    return hidden


class ReturnsADataclass(Layer):
    def forward(self, hidden: torch.Tensor) -> Any:
        return Made(super().forward(hidden))


def out_of_dataclasses(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        hidden = layer(hidden).rows
    return hidden


class TakesTable(Layer):
    """Scales by what all samples share, which needs a gradient."""

    def forward(self, hidden: torch.Tensor, table: torch.Tensor) -> Any:
        return super().forward(hidden) * table


def with_a_table(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    table = hidden.mean(0, keepdim=True)
    for layer in layers:
        hidden = layer(hidden, table * 1)  # gradients of pieces are added here, those of layers there
    return hidden


class Checkpointing(Layer):
    """Recomputes a part of itself."""

    def forward(self, hidden: torch.Tensor) -> Any:
        inner = checkpoint(lambda tensor: self.activation(self.up(tensor * self.scale)), hidden, use_reentrant=False)
        return hidden + self.down(inner)


def each_checkpointed(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        hidden = checkpoint(layer, hidden, use_reentrant=False)
    return hidden


KINDS = {
    "layers": cut(),
    "without_gradients_of_inputs": cut(model=NetOnFrozenInputs),
    "what_nobody_uses": cut(ReturnsMore, firsts),
    "a_dataclass_of_tensors": cut(ReturnsADataclass, out_of_dataclasses),
    "a_table_for_all_samples": cut(TakesTable, with_a_table, lambda model: backward_of(loss_of(model, rows=4))),
    "checkpoints_within": cut(Checkpointing),
    "checkpoints_around": cut(run=each_checkpointed),
}


@each_placement(KINDS)
def test_layers_run_on_one_piece_after_the_other(case: Case, placement: str) -> None:
    check(case, placement)


class ReadsMapping(Layer):
    """Scales its result by what the first layer left in a mapping that all of them share."""

    def forward(self, hidden: torch.Tensor, mapping: UserDict[str, torch.Tensor]) -> Any:
        hidden = super().forward(hidden)
        if "first" not in mapping:
            mapping["first"] = hidden * self.scale
        return hidden * mapping["first"]


def with_a_mapping(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    mapping: UserDict[str, torch.Tensor] = UserDict()
    for layer in layers:
        hidden = layer(hidden, mapping)
    return hidden


def assert_close_gradients(model: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        # Sums over pieces in another order: a few roundings of fp32.
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5 * float(theirs.grad.abs().max()))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_mappings_that_layers_share_are_cut_and_joined(placement: str) -> None:
    model: Any = Net(ReadsMapping, with_a_mapping)
    for layer in model.layers:
        layer.dropout.p = 0.0
    plain = copy.deepcopy(model)
    with placed(model, placement, micro_batch_size=SIZE) as engine:
        one_step(model)
        one_step(plain)
        engine.runtime.collect_gradients()
        assert_close_gradients(model, plain)


# ------------------------------------------------------------------------------ orders of backwards


def two_backwards(model: nn.Module) -> list[torch.Tensor]:
    loss = loss_of(model)
    return [*backward_of(loss, retain_graph=True), *backward_of(3 * loss)]


def two_forwards_first(model: nn.Module) -> list[torch.Tensor]:
    losses = [loss_of(model, seed, rows) for seed, rows in enumerate((ROWS, 2, 4))]
    return [seen for loss in losses for seen in backward_of(loss)]


def saved_on_the_cpu(model: nn.Module) -> list[torch.Tensor]:
    with save_on_cpu():
        loss = loss_of(model)
    return backward_of(loss)


def gradients_of_inputs(model: nn.Module) -> list[torch.Tensor]:
    leaf = inputs().requires_grad_()
    loss = model(leaf).pow(2).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return [gradient, *one_step(model)]


@contextlib.contextmanager
def called_in_backwards(model: Any, call: Callable[[], object]) -> Iterator[None]:
    """The function is called once in a backward, in the middle of the second of three pieces of the second layer."""

    def watch(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        pieces.append(output)
        if len(pieces) % 3 == 2:
            output.register_hook(lambda gradient: waiting.pop()() if waiting else None)
        if len(pieces) % 3 == 0:
            pieces.clear()

    pieces: list[torch.Tensor] = []
    waiting = [call]
    handle = model.layers[1].up.register_forward_hook(watch)
    try:
        yield
    finally:
        pieces.clear()
        waiting.clear()
        handle.remove()


def one_backward_within_another(model: Any) -> list[torch.Tensor]:
    """Through the same layers, one of which has summed a piece when it begins."""
    other = loss_of(model, seed=1)
    with called_in_backwards(model, other.backward):
        return one_step(model)


ORDERS = {
    "two_backwards": cut(step=two_backwards),
    "two_forwards_first": cut(step=two_forwards_first),
    "save_on_cpu": cut(step=saved_on_the_cpu),
    "gradients_of_inputs": cut(step=gradients_of_inputs),
    "one_backward_within_another": cut(step=one_backward_within_another),
}


@each_placement(ORDERS)
def test_backwards_may_follow_each_other_in_any_order(case: Case, placement: str) -> None:
    check(case, placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_layers_that_run_twice_add_up_the_gradients_of_their_calls(placement: str) -> None:
    def twice(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
        return one_after_another(layers, one_after_another(layers, hidden))

    torch.manual_seed(0)
    plain, model = Net(in_pieces(Layer), twice), Net(Layer, twice)
    model.load_state_dict(plain.state_dict())
    with placed(model, placement, micro_batch_size=SIZE) as engine:
        for run in (plain, model):
            torch.manual_seed(1)
            one_step(run)
        engine.runtime.collect_gradients()
        assert_close_gradients(model, plain)  # the sums of the two calls are added, in plain PyTorch all pieces


# ------------------------------------------------------------------------------ failures


class UsersError(Exception):
    """Raised by a script's own code."""


def fail() -> None:
    raise UsersError


def failed_backward(model: nn.Module, **options: Any) -> torch.Tensor:
    """The loss of a backward that raised between two pieces of a layer."""
    with called_in_backwards(model, fail):
        loss = loss_of(model)
        with pytest.raises(UsersError):
            loss.backward(**options)
    model.zero_grad()
    return loss


def a_step_after_a_failure(model: nn.Module) -> list[torch.Tensor]:
    failed_backward(model)
    return one_step(model)


def another_backward_after_a_failure(model: nn.Module) -> list[torch.Tensor]:
    return backward_of(failed_backward(model, retain_graph=True))


FAILURES = {
    "a_step": cut(step=a_step_after_a_failure),
    "another_backward": cut(step=another_backward_after_a_failure),
}


@each_placement(FAILURES)
def test_what_follows_a_failure_is_as_if_nothing_had_failed(case: Case, placement: str) -> None:
    check(case, placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_failed_backward_leaves_no_sums(placement: str) -> None:
    model: Any = Net()
    with placed(model, placement, micro_batch_size=SIZE) as engine:
        backwards, sums = engine.runtime.calls.backwards, engine.runtime.piece_sums
        during: list[int] = []
        with called_in_backwards(model, lambda: during.extend(len(one._pieces) for one in backwards.values())):
            one_step(model)
        assert during == [1], "only of the layer whose pieces are under way"
        failed_backward(model)
        assert not backwards
        assert sums.user is not None
        assert sums.user() is None


def failed(model: nn.Module) -> None:
    with called_in_backwards(model, fail):
        loss = loss_of(model)
        with contextlib.suppress(UsersError):
            loss.backward()
    # Autograd keeps the pieces that it hadn't come to in its queue until the thread's next backward, in plain PyTorch too.
    torch.ones((), requires_grad=True).square().backward()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("use", [loss_of, one_step, failed], ids=lambda value: value.__name__)
def test_nothing_of_a_cut_call_stays_and_no_collector_is_needed_for_it(placement: str, use: Callable[[Any], object]) -> None:
    model: Any = Net()
    made: list[StorageWeakRef] = []

    def note(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        made.append(StorageWeakRef(output.untyped_storage()))

    with placed(model, placement, micro_batch_size=SIZE):
        one_step(model)
        for part in model.layers:
            part.activation.register_forward_hook(note)
        gc.disable()
        try:
            use(model)
            left = [reference for reference in made if not reference.expired()]
        finally:
            gc.enable()
    assert len(made) >= 3 * 4
    assert not left


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_layer_that_writes_to_its_pieces_is_refused(placement: str) -> None:
    class WritesToItsInput(Layer):
        def forward(self, hidden: torch.Tensor) -> Any:
            hidden += 1
            return super().forward(hidden)

    model = Net(WritesToItsInput)
    with (
        placed(model, placement, micro_batch_size=SIZE),
        pytest.raises(UnsupportedError, match="writes to its inputs in place"),
    ):
        loss_of(model)
