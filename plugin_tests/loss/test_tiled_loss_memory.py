"""Memory of the tiled loss: one tile of logits, however many tokens; and its prediction."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.loss import products, tiled_cross_entropy
from megatrain_accelerate.loss.lazy_logits import lazy_linear
from megatrain_accelerate.loss.tiled_cross_entropy import strip_tokens, tile_tokens
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.placement import peak_bytes
from megatrain_accelerate.plan.step_memory import LiveBytes

VOCABULARY, HIDDEN = 4096, 32
TILE, STRIP = 64, 16


@pytest.fixture(autouse=True)
def tiles_of_64_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_cross_entropy, "TILE_BYTES", 0)
    monkeypatch.setattr(tiled_cross_entropy, "MIN_TILE_TOKENS", TILE)
    monkeypatch.setattr(tiled_cross_entropy, "STRIP_BYTES", 4 * VOCABULARY * STRIP)
    monkeypatch.setattr(products, "PART_BYTES", 4 * TILE * 256)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counts = [tensor.numel() for tensor in tree_flatten(result)[0] if type(tensor) is torch.Tensor]
        self.elements = max([self.elements, *counts])
        return result


def loss_and_backward(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A head call of ``tokens``, its loss and backward; the leaves."""
    hidden = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (tokens,))
    with LiveBytes([hidden, weight, labels]) as live, LargestTensor() as largest:
        logits = lazy_linear(hidden, weight, None, lambda: 0)
        functional.cross_entropy(torch.tanh(logits / 30.0).float(), labels).backward()
    return live.peak_bytes, largest.elements


def test_a_gpus_loss_of_logits_in_fp32_is_planned_as_one_kernel_without_strips() -> None:
    def live(has_softcap: bool) -> LiveBytes:
        with FakeTensorMode(), products.standing_for_a_gpu():
            hidden, weight = (torch.empty(n, HIDDEN, dtype=torch.bfloat16).requires_grad_() for n in (2 * TILE, VOCABULARY))
            labels = torch.empty(2 * TILE, dtype=torch.long)
            with LiveBytes([hidden, weight, labels]) as live:
                logits = lazy_linear(hidden, weight, None, lambda: 0)
                functional.cross_entropy((torch.tanh(logits) if has_softcap else logits).float(), labels).backward()
        return live

    by_kernel, by_chain = live(False), live(True)
    logits_bytes = 2 * 2 * TILE * VOCABULARY
    # A chain takes as much as four tensors of a strip's logits in fp32.
    assert by_chain.peak_bytes - by_kernel.peak_bytes == pytest.approx(4 * 4 * VOCABULARY * STRIP, rel=0.05)
    # All logits are read twice and written once, the chain moves many times as much.
    assert by_chain.costs.traffic_bytes - by_kernel.costs.traffic_bytes > 5 * logits_bytes
    assert by_kernel.costs.flops == by_chain.costs.flops


@pytest.mark.parametrize("hidden_size", [32, 1536])
def test_a_batch_whose_loss_is_one_kernel_takes_no_more_memory_than_a_larger_one_nor_than_whole_logits(
    hidden_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    shape = {"vocab_size": 32_000, "hidden_size": hidden_size, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    taken: dict[bool, list[int]] = {}
    for tiled in (True, False):
        engine = attach(model := tiny_model(**shape).train(), tiled_loss=tiled)
        taken[tiled] = []
        with products.standing_for_a_gpu():
            for tokens in (64, 128, 140, 500, 600, 2090, 2110, 4000):
                ids = torch.zeros(1, tokens, dtype=torch.long)
                step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
                taken[tiled].append(peak_bytes(step_profile, engine.device_plan.model_sizes(), Placement()))
        engine.close()
    slack = 4 * tiled_cross_entropy.UNTILED_BYTES
    assert all(less <= more + slack for less, more in pairwise(taken[True]))
    assert all(tiles <= whole + slack for tiles, whole in zip(taken[True], taken[False], strict=True))
    assert taken[True][-1] < taken[False][-1] / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tensor_of_tokens_by_vocabulary_is_made(dtype: torch.dtype) -> None:
    _, elements = loss_and_backward(8 * TILE, dtype)
    assert elements == max(TILE, HIDDEN) * VOCABULARY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_peak_grows_with_tokens_by_hidden_states_only(dtype: torch.dtype) -> None:
    few, many = (loss_and_backward(tokens, dtype)[0] for tokens in (4 * TILE, 64 * TILE))
    # The sum in fp32 and the gradient in the head's dtype, of a hidden state each; four more bytes a token are slack.
    per_token = HIDDEN * (4 + dtype.itemsize) + 4
    assert many - few <= 60 * TILE * per_token


def test_the_peak_is_one_tile_and_four_strips_beside_the_sums() -> None:
    tokens = 8 * TILE
    peak, _ = loss_and_backward(tokens, torch.bfloat16)
    sums = 4 * HIDDEN * (VOCABULARY + tokens)
    assert peak <= sums + 2 * TILE * VOCABULARY + 4 * 4 * STRIP * VOCABULARY + 4096 * 16


def test_tiles_are_bounded_in_bytes_and_have_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for vocabulary in (32_000, 152_064, 262_144, 1_000_000):
        tokens = tile_tokens(vocabulary, 2)
        assert tokens == 512 or (tokens % 128 == 0 and 2 * tokens * vocabulary <= 512 << 20)
        assert 4 * strip_tokens(vocabulary) * vocabulary <= 256 << 20
    assert tile_tokens(152_064, 2) == 1664


@pytest.mark.parametrize("tie", [False, True])
def test_the_prediction_sees_the_smaller_peak_and_is_that_of_the_real_step(tie: bool) -> None:
    predicted, real = {}, {}
    for tiled in (True, False):
        model = tiny_model(vocab_size=VOCABULARY, tie_word_embeddings=tie).train()
        engine = attach(model, tiled_loss=tiled)
        ids = torch.arange(512).view(2, 256)
        inputs = {"input_ids": ids, "labels": ids}
        step_profile = profile_step(model, engine.runtime, inputs, engine.device)
        predicted[tiled] = peak_bytes(step_profile, engine.device_plan.model_sizes(), Placement())
        with LiveBytes(model.parameters()) as live:
            model(**inputs).loss.backward()
        real[tiled] = live.peak_bytes
        engine.close()
    assert predicted[False] - predicted[True] > 2 * 512 * VOCABULARY * 4, "two fp32 tensors of all logits, at least"
    # What else lives in a real step, the engine's slots for one, is the same with and without tiles.
    assert real[False] - real[True] == pytest.approx(predicted[False] - predicted[True], rel=0.02)
    assert real[True] - predicted[True] == pytest.approx(real[False] - predicted[False], abs=0.03 * predicted[True])
