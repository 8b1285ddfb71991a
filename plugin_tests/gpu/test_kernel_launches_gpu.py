"""Layers that launch Triton kernels of their own, past torch's dispatcher: planned for and trained."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine_runs import train_streamed
from plain_torch import tiny_model, token_batches
from torch import nn

triton = pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@triton.jit
def scale_kernel(x, out, factor, count, BLOCK: triton.language.constexpr):
    at = triton.language.program_id(0) * BLOCK + triton.language.arange(0, BLOCK)
    inside = at < count
    triton.language.store(out + at, triton.language.load(x + at, mask=inside) * factor, mask=inside)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 256),)](x, out, factor, x.numel(), BLOCK=256)
    return out


class ScaledByTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return scaled(x, 0.5)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return scaled(grads[0], 0.5)


class Halved(nn.Module):
    def __init__(self, by_triton: bool) -> None:
        super().__init__()
        self.by_triton = by_triton

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledByTriton.apply(x) if self.by_triton else x * 0.5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"kept_layers": 0},
        {"kept_layers": None},
        {"kept_layers": None, "device_layers": None, "offloaded_layers": None},
    ],
    ids=["recomputed", "kept", "planned"],
)
def test_kernels_of_a_layer_are_planned_for_and_train_as_torchs_own(
    settings: dict[str, Any], compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for by_triton in (True, False):
        model = tiny_model().train()
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, Halved(by_triton))
        batches = [ids.cuda() for ids in token_batches(4)]
        with caplog.at_level(logging.INFO):
            runs.append(train_streamed(model, batches, device="cuda", compile_layers=compiled, **settings))
    ours, theirs = runs
    assert "can't be predicted" not in caplog.text
    if compiled:  # Inductor fuses less around a kernel that it doesn't know: bf16 rounds at other places
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-2)
    else:
        assert ours.losses == theirs.losses
        assert all(torch.equal(master, theirs.masters[name]) for name, master in ours.masters.items())
