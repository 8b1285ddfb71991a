"""The predicted device memory of a step, against what the step is known to need."""

from __future__ import annotations

import contextlib

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.loss.products import standing_for_a_gpu
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.placement import peak_bytes
from megatrain_accelerate.plan.step_memory import LiveBytes, buffers_restored


def predicted(length: int = 32, **changes: object) -> int:
    model = tiny_model(**changes).train()
    engine = attach(model)
    ids = token_batches(1, length=length)[0]
    step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    sizes = engine.device_plan.model_sizes()
    step_bytes = peak_bytes(step_profile, sizes, Placement()) - sizes.slot_bytes - sizes.gradient_slot_bytes
    engine.close()
    return step_bytes


def test_live_bytes_counts_what_is_alive_at_once_and_not_what_was_there() -> None:
    present = torch.zeros(1 << 20)
    with LiveBytes([present]) as live:
        present.view(-1).t()
        first = torch.zeros(1 << 20)
        del first
        second = torch.zeros(1 << 19)
    assert live.peak_bytes == 4 << 20
    assert live.live_bytes == second.nbytes


def softmax_backward(stands_for_gpu: bool) -> LiveBytes:
    with FakeTensorMode(), standing_for_a_gpu() if stands_for_gpu else contextlib.nullcontext():
        scores = torch.empty(64, 1024, dtype=torch.bfloat16, requires_grad=True)
        probabilities = scores.softmax(-1)
        with LiveBytes([scores, probabilities]) as live:
            torch.autograd.grad(probabilities, scores, torch.empty_like(probabilities))
    return live


def test_a_gpus_softmax_backward_takes_a_temporary_of_its_gradients_size() -> None:
    here, there = softmax_backward(False), softmax_backward(True)
    size = 2 * 64 * 1024
    assert there.peak_bytes - here.peak_bytes == size
    assert there.costs.traffic_bytes - here.costs.traffic_bytes == 3 * size


@pytest.mark.parametrize(("key_heads", "extra"), [(8, 2), (2, 4)])
def test_a_gpus_backward_of_attention_sums_in_fp32_and_by_the_heads_of_queries(key_heads: int, extra: int) -> None:
    def peak(stands_for_gpu: bool) -> int:
        with FakeTensorMode(), standing_for_a_gpu() if stands_for_gpu else contextlib.nullcontext():
            shapes = [(2, 8, 256, 64), *[(2, key_heads, 256, 64)] * 2]
            inputs = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
            result = nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=key_heads != 8)
            with LiveBytes([*inputs, result]) as live:
                torch.autograd.grad(result, inputs, torch.empty_like(result))
        return live.peak_bytes

    # An fp32 query's gradient is as much as two in bf16; expanded keys' and values' gradients are one each.
    assert peak(True) - peak(False) == extra * 2 * 2 * 8 * 256 * 64


def test_products_with_the_matrices_of_experts_are_operations_and_no_traffic() -> None:
    with FakeTensorMode(), LiveBytes() as live:
        tokens = torch.empty(96, 128, dtype=torch.bfloat16)
        matrices = torch.empty(8, 128, 64, dtype=torch.bfloat16)
        ends = torch.empty(8, dtype=torch.int32)
        before = live.costs
        torch._grouped_mm(tokens, matrices, offs=ends)
    assert (live.costs - before).flops == 2 * 96 * 128 * 64
    assert (live.costs - before).traffic_bytes == 0


def test_prediction_leaves_the_model_as_it_was() -> None:
    model = tiny_model(attention_dropout=0.5).train()
    engine = attach(model)
    ids = token_batches(1)[0]
    before = {name: (id(p), p.data_ptr(), p.grad) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: (id(p), p.data_ptr(), p.grad) for name, p in model.named_parameters()} == before
    assert engine.runtime.meter.counters.weight_fetches == 0
    engine.close()


def test_logits_dominate_for_a_large_vocabulary() -> None:
    tokens, small, large = 2 * 32, 128, 128 * 256
    growth = predicted(vocab_size=large) - predicted(vocab_size=small)
    # bf16 logits, their fp32 copy, log-softmax and its gradient: 10 to 18 bytes a token and entry, at once; and the
    # gradient of the head.
    head = (large - small) * 64 * 2
    per_entry = (growth - head) / (tokens * (large - small))
    assert 8 <= per_entry <= 18


def test_layers_cost_their_inputs_only() -> None:
    deep, shallow = predicted(num_hidden_layers=24, vocab_size=16), predicted(num_hidden_layers=8, vocab_size=16)
    inputs = 16 * 2 * 32 * 64 * 2  # 16 more layers, (2, 32, 64) bf16 each
    # Weights, their gradients and all other activations of a layer come and go. Small tensors (masks, positions) that
    # every segment keeps are a few hundred bytes each.
    assert inputs <= deep - shallow <= 1.5 * inputs


@pytest.mark.parametrize("length", [64, 128])
def test_prediction_grows_with_the_batch(length: int) -> None:
    assert predicted(length=length) > 1.5 * predicted(length=length // 2)


def test_buffers_hold_after_a_trial_run_what_they_held_before() -> None:
    norm = torch.nn.BatchNorm1d(4).train()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with buffers_restored(norm):
        norm(torch.randn(8, 4))
        assert not torch.equal(norm.running_mean, before["running_mean"])  # type: ignore[arg-type]
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


def test_a_branch_that_nothing_needs_counts_for_nothing() -> None:
    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.softmax(x.float(), -1)  # which saves what it returns
            return x

    kept = []
    for is_watched in (False, True):
        model = tiny_model().train()
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, Watched() if is_watched else nn.Identity())
        engine = attach(model)
        ids = token_batches(1)[0]
        step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
        (profile,) = step_profile.profiles.values()
        kept.append((profile.kept_bytes, step_profile.events[-1].live_bytes))
        engine.close()
    assert kept[0] == kept[1]
