"""Batches that run in pieces on a GPU: the same bits under every placement, and a smaller working set."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from engine_runs import attach, train_streamed
from plain_torch import PlainRun, tiny_model, token_batches

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.transfer import activation_offload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


STREAMED: dict[str, Any] = {
    "device_layers": 0,
    "offloaded_layers": 0,
    "kept_layers": 0,
    "compile_layers": False,
}
"""What a test doesn't ask for: the plan would put all of so small a model on the GPU."""


def trained(**settings: Any) -> PlainRun:
    model = tiny_model(attn_implementation="eager", attention_dropout=0.1).train()
    torch.manual_seed(5)
    return train_streamed(model, token_batches(10, batch=5), device="cuda", **{**STREAMED, **settings})


@pytest.mark.parametrize(
    "placement",
    [
        {"kept_layers": 4},
        {"kept_layers": 0, "offloaded_layers": 4},
        {"kept_layers": 1, "offloaded_layers": 1, "offloaded_inputs": True, "slots": 3},
        {"kept_layers": 0, "schedule": "serial"},
    ],
)
def test_placement_never_changes_the_numbers_of_pieces(placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    reference, run = trained(kept_layers=0, micro_batch_size=2), trained(micro_batch_size=2, **placement)
    assert run.losses == reference.losses
    assert run.norms == reference.norms
    for name, master in reference.masters.items():
        assert torch.equal(run.masters[name], master), name


def peak_of(**settings: Any) -> tuple[int, int]:
    """Peak of the device's memory in three steps of a four-layer model on 8 x 1024 tokens, and its prediction."""
    gc.collect()  # what a run before left in cycles would leave in the middle of this one
    shape = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024}
    model = tiny_model(max_position_embeddings=1024, **shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    base = torch.cuda.memory_allocated()
    engine = attach(model, device="cuda", **{**STREAMED, **settings})
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    torch.cuda.reset_peak_memory_stats()
    for ids in token_batches(3, length=1024, batch=8, vocabulary=64):
        model(input_ids=ids.cuda(), labels=ids.cuda()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peak, predicted = torch.cuda.max_memory_allocated() - base, engine.device_plan.current.predicted_bytes
    engine.close()
    return peak, predicted


def test_the_working_set_of_a_layer_shrinks_to_that_of_a_piece() -> None:
    torch.use_deterministic_algorithms(False)
    (whole, whole_predicted), (pieces, predicted) = peak_of(), peak_of(micro_batch_size=1)
    assert pieces < 0.7 * whole
    assert pieces <= predicted
    assert whole - pieces == pytest.approx(whole_predicted - predicted, rel=0.15)
