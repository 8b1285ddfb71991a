"""A model without weights is drawn on the GPU, and lands in host memory."""

from __future__ import annotations

import pytest
import torch
from engine_runs import attach, masters_of
from plain_torch import tiny_config
from transformers import Qwen2ForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_drawn_on_the_gpu_and_live_in_host_memory(dtype: torch.dtype) -> None:
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        with torch.device("meta"):
            model = Qwen2ForCausalLM(tiny_config()).to(dtype)
        engine = attach(model, device="cuda")
        drawn.append(masters_of(engine, model))
        assert all(layer.unit.weights.device.type == "cpu" for layer in engine.runtime.layers)
        ids = torch.randint(0, 128, (2, 32), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert torch.isfinite(loss)
        engine.close()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])
    # fp32 values keep all their bits as masters.
    assert (drawn[0][name] != drawn[0][name].bfloat16()).any() == (dtype == torch.float32)
