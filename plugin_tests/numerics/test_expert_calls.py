"""Calls of experts in parts that aren't plain: beside trials, after writes, repeated, cut, empty, failed, or wrong.

Gradients are compared with plain PyTorch's in fp32: a sum over a token's experts may be added in another order, some units in
the last place of the largest element.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import Training, assert_equal_states, attach, train_streamed
from part_models import EXPERTS, tiny_experts
from plain_torch import token_batches
from torch import nn

from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.gradients.fp32_sums import Fp32Sums
from megatrain_accelerate.gradients.offload import GradientOffloader, UnitGradients
from megatrain_accelerate.layers import expert_function, token_tiles
from megatrain_accelerate.layers.expert_function import ExpertStreams, Routing
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

TOLERANCE = 1e-5


def assert_close_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        scale = max(1e-2, float(other.grad.abs().max()))
        assert float((mine.grad - other.grad).abs().max()) <= TOLERANCE * scale, name


class Again(nn.Module):
    """Experts that are called as often as is said, on other inputs."""

    def __init__(self, experts: nn.Module, calls: Callable[[], int] = lambda: 2) -> None:
        super().__init__()
        self.inner = experts
        self.calls = calls

    def forward(self, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        made = hidden
        for _ in range(self.calls()):
            made = made + self.inner(made, *routing)
        return made


def with_calls(model: nn.Module, calls: Callable[[], int] = lambda: 2) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp.experts = Again(layer.mlp.experts, calls)
    return model


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Collects what ``note`` makes of the arguments of each call of a method."""
    noted: list[Any] = []
    original = getattr(owner, name)

    def spied(*args: Any, **kwargs: Any) -> Any:
        noted.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, spied)
    return noted


def test_parts_of_layers_that_are_tried_for_tiles_take_no_call_of_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "verdicts", {})
    theirs = tiny_experts()
    engine = attach(ours := copy.deepcopy(theirs), bf16=False, expert_parts=3, token_tile=16)
    ids = token_batches(1)[0]
    for model in (ours, theirs):
        model(ids).logits.square().sum().backward()  # without names the plan doesn't run ahead
    found = engine.runtime.layers[0].tiles.found
    assert_close_gradients(ours, theirs)
    assert found["mlp"] == "its experts stream in parts"
    assert found["input_layernorm"] is None
    engine.close()


@pytest.mark.parametrize(
    "settings", [{"kept_layers": 3}, {"offloaded_layers": 3}, {}], ids=["kept", "offloaded", "recomputed"]
)
def test_weights_written_between_steps_are_those_of_the_next_backward(settings: dict[str, Any]) -> None:
    theirs = tiny_experts()
    engine = attach(ours := copy.deepcopy(theirs), bf16=False, expert_parts=3, **settings)
    first, second = token_batches(2)
    ours(input_ids=first, labels=first).loss.backward()
    ours.zero_grad()
    for model in (ours, theirs):
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj.mul_(0.5)
        model(input_ids=second, labels=second).loss.backward()
    assert_close_gradients(ours, theirs)
    engine.close()


@pytest.mark.parametrize("repeats", ["pieces", "calls"])
def test_repeated_calls_of_experts_are_foreseen(repeats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_experts()
    if repeats == "calls":
        with_calls(model)
    engine = attach(model, bf16=False, expert_parts=3, micro_batch_size=2 if repeats == "pieces" else None)
    ids = token_batches(1, batch=3)[0]
    fetched = spy(monkeypatch, ExpertStreams, "fetched", lambda _, part, upcoming, __: (part.index, list(upcoming)))
    for _ in range(2):
        fetched.clear()
        loss = model(input_ids=ids, labels=ids).loss
        forward = len(fetched)
        loss.backward()
    called = [index for index, _ in fetched]
    assert called[:forward] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 6, 7, 8]
    assert called[forward:] == called[:forward][::-1]
    for place, (_, upcoming) in enumerate(fetched):
        following = called[place + 1 : place + 3]
        if place == forward - 2:
            following = [8, 8]  # the end of forward, and again the begin of backward
        elif place == forward - 1:
            following = [8, 7]
        assert upcoming == following, place
    engine.close()


def test_pairs_are_sorted_once_for_forward_and_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_experts()
    engine = attach(model, bf16=False, expert_parts=3, kept_layers=1)
    ids = token_batches(1)[0]
    sorted_ = spy(monkeypatch, Routing, "of", lambda experts, *_: experts.name)
    model(input_ids=ids, labels=ids).loss  # noqa: B018
    sorted_.clear()
    loss = model(input_ids=ids, labels=ids).loss
    assert len(sorted_) == 3
    loss.backward()
    assert len(sorted_) == 3
    engine.close()


@pytest.mark.parametrize("has_graph", [True, False])
def test_a_call_without_tokens_gives_none_and_zero_gradients(has_graph: bool) -> None:
    model = tiny_experts(num_hidden_layers=1)
    engine = attach(model, bf16=False, expert_parts=3)
    experts = model.model.layers[0].mlp.experts
    hidden, weights = torch.empty(0, 64, requires_grad=has_graph), torch.empty(0, 2, requires_grad=has_graph)
    with torch.set_grad_enabled(has_graph):
        made = experts(hidden, torch.empty(0, 2, dtype=torch.int64), weights)
    assert made.shape == (0, 64)
    if has_graph:
        made.sum().backward()
        engine.runtime.offloader.wait()
        assert hidden.grad.shape == (0, 64)
        assert weights.grad.shape == (0, 2)
        assert all(float(parameter.grad.abs().max()) == 0.0 for parameter in experts.parameters())
    engine.close()


def test_norms_of_sums_are_taken_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_experts(num_hidden_layers=1)
    engine = attach(model, bf16=False, expert_parts=3, micro_batch_size=1)
    norms = spy(monkeypatch, Fp32Sums, "host_norm", lambda _, gradient, __: tuple(gradient.shape))
    ids = token_batches(1, batch=4)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    engine.runtime.collect_gradients()
    total = engine.runtime.clipping.total_norm(model.parameters())
    # Three pieces of four are added to earlier ones.
    assert len(norms) == len(list(model.model.layers[0].mlp.experts.parameters()))
    expected = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    engine.close()


@pytest.mark.parametrize("bf16", [True, False])
def test_zeros_of_parts_without_tokens_needn_t_travel_to_be_added(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two tokens with two choices each meet 4 of 6 experts at most. Sums of the first step leave residuals in memory.
    model, batches = tiny_experts(), token_batches(6, batch=1, length=2)

    def run() -> Any:
        return train_streamed(model, batches, bf16=bf16, max_norm=None, accumulation=3, expert_parts=EXPERTS)

    take = UnitGradients.take
    copies = spy(monkeypatch, GradientOffloader, "send", lambda _, slot, name, *rest: name)
    ours = run()
    fewer = len(copies)
    copies.clear()

    def with_zeros(self: Any, part: Any, gradients: Any) -> None:
        take(self, part, [None] * len(self.rows) if gradients is None else gradients)

    monkeypatch.setattr(UnitGradients, "take", with_zeros)
    theirs = run()
    # Of each layer's parts at least two, in the second and third batch of both steps.
    assert fewer <= len(copies) - 2 * 3 * 4
    assert ours.losses == theirs.losses
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


def test_zeros_take_the_place_of_a_gradient_that_somebody_dropped() -> None:
    first, second = token_batches(2, batch=1, length=2)

    def gradients(*batches: torch.Tensor) -> list[torch.Tensor]:
        engine = attach(model := tiny_experts(), bf16=False, expert_parts=EXPERTS)
        experts = [layer.mlp.experts for layer in model.model.layers]
        for ids in batches:
            for each in experts:
                each.down_proj.grad = None
            model(input_ids=ids, labels=ids).loss.backward()
        found = [each.down_proj.grad.clone() for each in experts]
        engine.close()
        return found

    for ours, theirs in zip(gradients(first, second), gradients(second), strict=True):
        assert torch.equal(ours, theirs)


def test_experts_that_are_called_more_often_in_recompute_change_no_gradient() -> None:
    calls = 1
    model = with_calls(tiny_experts(num_hidden_layers=1), lambda: calls)
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, expert_parts=3)
    ids = token_batches(1)[0]
    loss = model(input_ids=ids, labels=ids).loss
    plain(input_ids=ids, labels=ids).loss.backward()
    calls = 2
    loss.backward()  # the recompute ends where it has what the forward saved, before the second call
    assert_close_gradients(model, plain)
    engine.close()


def test_experts_with_other_arguments_are_refused() -> None:
    model = tiny_experts(num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    own = experts.forward
    experts.forward = lambda hidden, index, weights, scale: scale * own(hidden, index, weights)
    engine = attach(model, bf16=False, expert_parts=3)
    hidden, index, weights = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    with pytest.raises(UnsupportedError, match=r"\(3, 64\), \(3, 2\), \(3, 2\), float, .*expert_parts to 1"):
        experts(hidden, index, weights, scale=2.0)
    with pytest.raises(UnsupportedError, match=r"\(1, 3, 64\), \(3, 2\), \(3, 2\), NoneType, .*expert_parts to 1"):
        experts(hidden[None], index, weights, None)
    engine.close()


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_an_experts_parameter_that_isn_t_the_adopted_one_is_refused(change: str) -> None:
    model = tiny_experts(num_hidden_layers=1)
    engine = attach(model, bf16=False, expert_parts=3)
    experts = model.model.layers[0].mlp.experts
    own, ids = experts.down_proj, token_batches(1)[0]
    if change == "replaced":
        experts.down_proj = nn.Parameter(own.detach().clone())
    else:
        del experts.down_proj
    with pytest.raises(StateError, match=r"was (added or )?replaced"):
        model(input_ids=ids, labels=ids)
    experts.down_proj = own
    engine.close()


class Fault(Exception):
    """Of a test's own making."""


@pytest.mark.parametrize("place", ["forward", "recompute"])
@pytest.mark.parametrize("kept_layers", [0, 3])
def test_a_step_after_one_that_failed_in_a_part_is_as_if_it_hadn_t_been(
    place: str, kept_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_part, batches = expert_function.run_part, token_batches(3)
    states = []
    for fails in (False, True):
        model = tiny_experts()
        engine = attach(model, expert_parts=3, kept_layers=kept_layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        training = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
        training.step(batches[0])
        if fails:
            # 9 parts in forward; in the middle of a layer's.
            left = 4 if place == "forward" else 13

            def failing(*args: Any) -> torch.Tensor:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Fault
                return run_part(*args)

            monkeypatch.setattr(expert_function, "run_part", failing)
            with pytest.raises(Fault):
                training.step(batches[1])
            monkeypatch.setattr(expert_function, "run_part", run_part)
            optimizer.zero_grad()
        training.step(batches[2])
        states.append(training.state())
        engine.close()
    assert_equal_states(*states)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_an_evaluation_gives_the_bits_of_a_forward_with_gradients(implementation: str) -> None:
    model = tiny_experts(implementation)
    engine = attach(model, expert_parts=4)
    ids = token_batches(1)[0]
    expected = model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected)
    engine.close()
