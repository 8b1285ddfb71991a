"""Recomputes of compiled layers on a GPU: Inductor's Triton kernels and products, less what only the outputs need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_runs import attach
from expert_models import EXPERTS, gradients_of, of_experts, one_pass
from plain_torch import tiny_model, token_batches
from recompute_runs import poison_recomputes, run_layer
from torch import nn

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.integrations.output_recording import CapturedOutputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of transformers' cached questions about torch's version, while it is traced.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def prepared(device_layers: int | str = 0, **changes: Any) -> tuple[nn.Module, Engine]:
    model = tiny_model(num_hidden_layers=2, **changes).train()
    return model, attach(model, device="cuda", compile_layers=True, device_layers=device_layers)


def arguments(model: nn.Module, batch: int, length: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    size = model.config.hidden_size  # type: ignore[union-attr]
    hidden = torch.randn(batch, length, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    angles = model.model.rotary_emb(hidden, torch.arange(length, device="cuda")[None])  # type: ignore[union-attr, operator]
    return (hidden,), {"position_embeddings": angles, "attention_mask": None}


@pytest.mark.parametrize("lengths", [(128,), (128, 200, 64)])
def test_a_recompute_saves_the_bits_of_forward_without_the_last_product(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_recomputes(monkeypatch)
    model, engine = prepared(hidden_size=256, intermediate_size=768)
    for length in lengths:
        args, kwargs = arguments(model, 2, length)
        (whole, saved), (short, saved_again) = (run_layer(engine, args, kwargs, flag) for flag in (False, True))
        assert len(saved) > 10
        for mine, other in zip(saved_again, saved, strict=True):
            # Attention saves the generator's state; where it drops nothing it leaves that memory as it is.
            assert torch.equal(mine, other) or not other.is_floating_point()
        assert not whole.isnan().any()
        assert short.isnan().all(), "it isn't computed"
        assert (short.shape, short.stride(), short.dtype) == (whole.shape, whole.stride(), whole.dtype)
    left_out = engine.runtime.compiled.recomputes.left_out
    assert len(left_out) >= min(2, len(lengths)), "of one length, and of any"
    assert all(sum(kernel.endswith("mm") for kernel in kernels) == 1 for kernels in left_out), left_out
    engine.close()


def products_in(engine: Engine, args: Any, kwargs: Any, is_recompute: bool) -> int:
    """Operations that are products, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        run_layer(engine, args, kwargs, is_recompute)
    names = ("aten::mm", "aten::addmm", "aten::bmm")
    return sum(event.count for event in profiler.key_averages() if event.key in names)


def test_a_recompute_launches_one_product_less_and_takes_less_time() -> None:
    model, engine = prepared(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        device_layers="auto",
    )
    ids = token_batches(1, batch=4, length=2048, seed=1)[0].cuda()
    outline = engine.device_plan.foresee(model, {"input_ids": ids, "labels": ids})
    for profile in outline.profiles.values():
        assert profile.recompute_seconds is not None
        assert profile.kept_forward_seconds is not None
        # The last product is more than a quarter of the operations.
        assert profile.recompute_seconds < 0.9 * profile.kept_forward_seconds
    args, kwargs = arguments(model, 4, 2048)
    run_layer(engine, args, kwargs, is_recompute=False)
    whole, short = (products_in(engine, args, kwargs, flag) for flag in (False, True))
    assert whole == short + 1
    engine.close()


@pytest.mark.skipif(CapturedOutputs.for_installed_transformers() is None, reason="transformers records nothing by hooks")
@pytest.mark.parametrize("name", [None, *EXPERTS])
def test_recomputed_layers_train_as_kept_ones(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_recomputes(monkeypatch)
    gradients = []
    for kept in (False, True):
        model = tiny_model(num_hidden_layers=3).train() if name is None else of_experts(name)
        count = model.config.num_hidden_layers  # type: ignore[union-attr]
        engine = attach(model, device="cuda", compile_layers=True, keep_layers=count if kept else 0)
        one_pass(model, "cuda")
        assert engine.runtime.compiled.compilations > 0
        gradients.append(gradients_of(model))
        engine.close()
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[1].items():
        assert not gradients[0][key].isnan().any(), key
        # Atomics in backward sum in any order.
        scale = max(float(gradient.float().abs().max()), 1e-3)
        assert float((gradients[0][key].float() - gradient.float()).abs().max()) <= 1e-2 * scale, key
