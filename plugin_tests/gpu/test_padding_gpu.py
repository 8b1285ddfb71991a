"""Padding on a GPU: layers leave it out, the plan counts what is left, and attention's kernels suit any length."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model

from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "vocab_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TOLERANCE = 0.02
"""Of a gradient's norm, in bf16: products of other numbers of rows round otherwise, here and in what follows them."""


def batch(lengths: Sequence[int], width: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 2048, (len(lengths), width), generator=torch.Generator().manual_seed(width))
    mask = torch.stack([(torch.arange(width) < length).long() for length in lengths])
    found = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.cuda() for name, tensor in found.items()}


@pytest.mark.parametrize(
    "settings", [{"kept_layers": 0}, {"device_layers": None, "kept_layers": None}], ids=["streams", "fits"]
)
def test_gradients_are_those_of_all_tokens(settings: dict[str, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    put_back = RealTokens.batch
    monkeypatch.setattr(RealTokens, "batch", lambda self, row: (rows.append(len(self.index)), put_back(self, row))[1])
    model = tiny_model(num_hidden_layers=3, **SHAPE).to(torch.bfloat16).train()
    plain = copy.deepcopy(model).cuda()
    engine = attach(model, device="cuda", compile_layers=False, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    for lengths, width in (((512, 200, 90, 17), 512), ((100, 300, 5, 44), 300), ((640, 30, 40, 50), 640)):
        inputs = batch(lengths, width)
        expected = plain(**inputs).loss
        expected.backward()
        loss = model(**inputs).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
        engine.drain()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            difference = (ours.grad.cuda() - theirs.grad).float().norm() / theirs.grad.float().norm()
            assert float(difference) < TOLERANCE, name
        model.zero_grad()
        plain.zero_grad()
    assert set(rows) >= {832, 512, 768}  # and those of a larger batch that the plan leaves room for
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # from the second length on
    engine.close()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_step_of_padded_batches_takes_the_memory_that_was_predicted() -> None:
    model = tiny_model(num_hidden_layers=8, max_position_embeddings=2048, **SHAPE).to(torch.bfloat16).train()
    engine = attach(model, device="cuda", compile_layers=False, device_layers=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    inputs = batch((2048, *[100] * 15), 2048)
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peak, predicted = torch.cuda.max_memory_allocated(), engine.device_plan.current.predicted_bytes
    assert 0.9 * predicted < peak < 1.02 * predicted
    engine.close()


def test_attention_may_run_in_cudnn_again_when_the_model_is_gone() -> None:
    model = tiny_model(num_hidden_layers=2, **SHAPE).to(torch.bfloat16).train()
    engine = attach(model, device="cuda", compile_layers=False)
    for lengths, width in (((512, 200), 512), ((100, 300), 300)):
        model(**batch(lengths, width)).loss.backward()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    del model, engine
    gc.collect()
    assert torch.backends.cuda.cudnn_sdp_enabled()
