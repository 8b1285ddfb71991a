"""An estimate of a model with dropout in its attention, which a GPU's kernels do without scores in memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flat_settings import nested
from machine_options import machine_with
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.estimate.forecast import Forecaster
from megatrain_accelerate.estimate.layer_costs import WithoutAttentionDropout
from megatrain_accelerate.plan.machine import Machine

pytestmark = pytest.mark.usefixtures("profiled_once")

MACHINE = Machine(h2d_bytes=5e10, d2h_bytes=5e10, host_step_parameters=6e9, device_bytes=4e12, device_flops=7e14)


def forecaster(rate: float, **settings: object) -> Forecaster:
    shape = GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=512, vocab_size=512, attn_pdrop=rate)
    with torch.device("meta"):
        model = GPT2LMHeadModel(shape).to(torch.bfloat16)
    config = MegatrainConfig.from_mapping(nested({"kept_layers": 0, **settings}))
    return Forecaster(model, config, machine_with(MACHINE))


@pytest.mark.parametrize("compiles", [True, False])
def test_attention_with_dropout_is_estimated_as_the_kernel_that_it_is_on_a_gpu(compiles: bool) -> None:
    with_dropout, without = (forecaster(rate, compile_layers=compiles).forecast(2, 512) for rate in (0.1, 0.0))
    assert dataclasses.replace(with_dropout, candidate=without.candidate) == without
    assert with_dropout.seconds == without.seconds


def test_results_of_attention_with_dropout_are_not_kept_as_in_a_run() -> None:
    for rate in (0.1, 0.0):
        found = forecaster(rate, token_tile=256)
        (profile,) = found.fastest(9, 512)[0].profiles.values()
        assert (profile.attention_bytes > 0) is (rate == 0)
        assert bool(profile.attention_seconds) is (rate == 0)


def test_attention_drops_nothing_out_however_it_is_called() -> None:
    query = torch.randn(1, 2, 8, 4)
    plain = scaled_dot_product_attention(query, query, query)
    with WithoutAttentionDropout() as mode:
        assert torch.equal(scaled_dot_product_attention(query, query, query), plain)
        assert not mode.has_dropped
        assert torch.equal(scaled_dot_product_attention(query, query, query, dropout_p=0.9), plain)
        assert torch.equal(scaled_dot_product_attention(query, query, query, None, 0.9), plain)
        assert mode.has_dropped
        assert not torch.equal(scaled_dot_product_attention(query, query, query, None, 0.9, True), plain)
    assert not torch.equal(scaled_dot_product_attention(query, query, query, dropout_p=0.9), plain)


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_within_torchs_own_module_drops_nothing_out(need_weights: bool) -> None:
    query = torch.randn(2, 8, 16)
    attention = torch.nn.MultiheadAttention(16, 2, dropout=0.9, batch_first=True)
    plain, _ = attention.eval()(query, query, query, need_weights=need_weights)
    attention.train()
    with WithoutAttentionDropout() as mode:
        torch.testing.assert_close(attention(query, query, query, need_weights=need_weights)[0], plain)
    assert mode.has_dropped
