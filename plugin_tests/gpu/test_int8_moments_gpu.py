"""Moments in 8 bits with a GPU: all states stay on the host, whatever the plan could move, and the bits with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_runs import attach, train_streamed
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"slots": 2}, {"slots": 3}),
        ({"schedule": "serial"}, {"schedule": "backward", "host_gradients": "passing"}),
    ],
    ids=["placement", "schedule"],
)
def test_placement_and_schedule_do_not_change_the_bits_on_the_gpu(first: dict[str, Any], second: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            train_streamed(
                tiny_model(num_hidden_layers=4),
                token_batches(6),
                device="cuda",
                max_norm=None,
                moments_dtype="int8",
                **settings,
            )
            for settings in (first, second)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for name, master in runs[0].masters.items():
        assert torch.equal(runs[1].masters[name], master), name


def test_a_plan_with_room_for_all_leaves_the_states_on_the_host() -> None:
    placed = {}
    for dtype in ("fp32", "int8"):
        model = tiny_model().train()
        engine = attach(model, device="cuda", moments_dtype=dtype, device_layers=None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        adopt_optimizer(optimizer, engine.runtime, "deferred")
        for ids in token_batches(2):
            ids = ids.cuda()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        placed[dtype] = sum(unit.is_on_device for unit in engine.runtime.units)
        engine.close()
    assert placed["fp32"] > 0
    assert placed["int8"] == 0
