"""Kernels that overwrite their inputs: a backward of compiled layers takes less memory, and its bits stay."""

from __future__ import annotations

import functools
from itertools import accumulate

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.profiler import ProfilerActivity, profile

from megatrain_accelerate.layers import compiled_layer

INTERMEDIATE, BATCH, LENGTH = 4096, 4, 64
NEEDS_PASS = pytest.mark.skipif(
    not hasattr(inductor_config, "_post_fusion_custom_pass"), reason="this torch has no passes after fusion"
)


def backward(monkeypatch: pytest.MonkeyPatch, overwrites: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """The peak of a backward of two recomputed layers, compiled by Inductor, and the gradients."""
    with monkeypatch.context() as patch, fresh_cache():
        if not overwrites:
            patch.setattr(compiled_layer, "overwriting_pass", lambda: None)
        model = tiny_model(num_hidden_layers=2, intermediate_size=INTERMEDIATE).train()
        engine = attach(model, compile_layers=True, kept_layers=0, device_layers=0, offloaded_layers=0)
        ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 128
        loss = model(input_ids=ids, labels=ids).loss
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        engine.close()
    events = profiler.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]")), gradients


@NEEDS_PASS
def test_a_recomputed_gated_mlp_takes_three_tensors_less_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = functools.partial(backward, monkeypatch)
    (peak, gradients), (plain_peak, plain) = run(True), run(False)
    # Results of the intermediate size in bf16, which take the places of what the kernel reads.
    assert plain_peak - peak == pytest.approx(3 * 2 * BATCH * LENGTH * INTERMEDIATE, rel=0.1)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in plain.items())
