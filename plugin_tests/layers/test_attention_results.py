"""Attention's results that are kept spare the recompute its kernels, and change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import attach, train_streamed, used_bytes
from plain_torch import tiny_model, token_batches
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatrain_accelerate.layers.attention_results import AttentionResults, attention_flops, is_attention
from megatrain_accelerate.plan.placement import Counts
from megatrain_accelerate.transfer import activation_offload

pytestmark = pytest.mark.usefixtures("profiled_once")


class Counted(TorchDispatchMode):
    """Counts attention's kernels that run in the body, forward ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += is_attention(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "products"), [("forward", 2), ("backward", 5)])
@pytest.mark.parametrize("function", ["_scaled_dot_product_flash_attention", "_flash_attention", "_flash_attn"])
def test_attention_costs_two_or_five_products_of_all_tokens_in_either_layout(function: str, name: str, products: int) -> None:
    heads_first = "scaled" in function
    query, key = (torch.empty((2, 8, 96, 16) if heads_first else (2, 96, 8, 16)), torch.empty((2, 4, 64, 16)))
    key = key if heads_first else key.transpose(1, 2)
    given = [query, query, key, key] if name == "backward" else [query, key, key]
    assert attention_flops(f"{function}_{name}", given) == products * 2 * 2 * 8 * 96 * 64 * 16


def heads(seed: int) -> torch.Tensor:
    return torch.randn(2, 4, 32, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    first = scaled_dot_product_attention(q, k, v, is_causal=True)
    return scaled_dot_product_attention(first, k, v).sin()


def test_what_was_recorded_comes_again_without_its_kernels_and_with_its_gradients() -> None:
    inputs = [heads(seed) for seed in range(3)]
    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    results = AttentionResults()
    with Counted() as counted, results.recording():
        attend(*inputs)
    assert counted.kernels == 2
    assert results.size_bytes >= 2 * inputs[0].nbytes
    with Counted() as counted, results.replaying():
        output = attend(*inputs)
    assert counted.kernels == 0
    for found, gradient in zip(torch.autograd.grad(output.sum(), inputs), expected, strict=True):
        assert torch.equal(found, gradient)


def test_what_is_recorded_holds_no_graph() -> None:
    inputs = [heads(seed) for seed in range(3)]
    results = AttentionResults()
    with results.recording():
        attend(*inputs)
    tensors = [leaf for leaf in tree_flatten(results.results)[0] if isinstance(leaf, torch.Tensor)]
    assert tensors
    assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in tensors)


class WithoutDropping(TorchDispatchMode):
    """The CPU's kernel refuses dropout: it stands in for one that draws."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args[:3]) if is_attention(func) else func(*args, **(kwargs or {}))


def test_attention_that_drops_runs_again() -> None:
    results = AttentionResults()
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = (heads(seed).detach() for seed in range(3))
    with WithoutDropping(), Counted() as counted:
        with results.recording():
            kernel(q, k, v, dropout_p=0.0)
            kernel(q, k, v, dropout_p=0.5)
        assert counted.kernels == 2
        with results.replaying():
            kernel(q, k, v, dropout_p=0.0)
            assert counted.kernels == 2
            kernel(q, k, v, dropout_p=0.5)
            assert counted.kernels == 3


@pytest.fixture
def small_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)


@pytest.mark.usefixtures("small_tensors_leave")
@pytest.mark.parametrize("changes", [{}, {"attention_dropout": 0.3}, {"attn_implementation": "eager"}], ids=str)
def test_layers_that_keep_attention_have_the_bits_of_recomputed_ones(changes: dict[str, Any]) -> None:
    model, batches = tiny_model(**changes).train(), token_batches(3)
    runs = []
    away = {"kept_attention": 3, "offloaded_inputs": True}
    for settings in ({}, {"kept_attention": 4}, {"kept_layers": 1, "kept_attention": 2, "micro_batch_size": None}, away):
        torch.manual_seed(1)
        runs.append(train_streamed(model, batches, **{"kept_layers": 0, **settings}))
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms
        assert all(torch.equal(run.masters[name], master) for name, master in runs[0].masters.items())


def backward_kernels(loss: torch.Tensor, **arguments: Any) -> int:
    with Counted() as counted:
        loss.backward(**arguments)
    return counted.kernels


@pytest.mark.parametrize(("settings", "again"), [({}, 4), ({"kept_attention": 3}, 1), ({"kept_attention": 9}, 0)], ids=str)
def test_backward_runs_attention_of_the_other_layers_only_and_once_more_if_asked_twice(
    settings: dict[str, Any], again: int
) -> None:
    model = tiny_model().train()
    engine = attach(model, kept_layers=0, **settings)
    (ids,) = token_batches(1)
    loss = model(input_ids=ids, labels=ids).loss
    assert backward_kernels(loss, retain_graph=True) == again
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    # The graph holds the results as long as it is there.
    assert backward_kernels(loss) == again
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, first[name]), name
    engine.close()


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"attention_kept": 3}, {7, 8, 9}),
        ({"attention_kept": 3, "kept": 2}, {5, 6, 7}),
        ({"attention_kept": 99, "kept": 2}, set(range(8))),
        ({"kept": 10, "attention_kept": 2}, set()),
        ({"attention_kept": 3, "kept": 2, "offloaded": 1}, {5, 6}),
        ({"attention_kept": 99, "offloaded": 2}, {0, 1, 2, 3, 5, 6, 7, 8}),
    ],
)
def test_layers_that_keep_attention_are_recomputed_and_before_the_kept_ones(
    counts: dict[str, int], expected: set[int]
) -> None:
    assert Counts(**counts).placement(10).attention_kept == expected


@pytest.mark.usefixtures("small_tensors_leave")
@pytest.mark.parametrize("offloaded_inputs", [False, True])
def test_pieces_of_a_batch_keep_theirs(offloaded_inputs: bool) -> None:
    model, batches = tiny_model(), token_batches(2, batch=4)
    make: Callable[..., Any] = lambda **settings: train_streamed(model, batches, micro_batch_size=1, **settings)  # noqa: E731
    recomputed, kept = make(kept_layers=0), make(kept_layers=0, kept_attention=4, offloaded_inputs=offloaded_inputs)
    assert recomputed.losses == kept.losses
    assert recomputed.norms == kept.norms


@pytest.mark.usefixtures("small_tensors_leave")
def test_results_wait_on_the_host_where_the_inputs_do_and_come_back_for_backward() -> None:
    waiting, results = {}, 0
    (ids,) = token_batches(1, length=64)
    for attention in (0, 4):
        model = tiny_model().train()
        engine = attach(model, kept_layers=0, kept_attention=attention, offloaded_inputs=True)
        loss = model(input_ids=ids, labels=ids).loss
        engine.runtime.activations.settle()
        waiting[attention] = used_bytes(engine.runtime.activations.pool)
        results = 4 * ids.numel() * model.config.hidden_size * 2
        assert backward_kernels(loss) == 4 - attention
        assert used_bytes(engine.runtime.activations.pool) == 0
        engine.close()
    assert waiting[4] - waiting[0] >= results
