"""Compiled layers on a GPU: Inductor's kernels, the backward thread, slots that are refilled."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine_runs import attach, train_streamed
from plain_torch import tiny_model, token_batches
from torch import nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.layers import compiled_layer
from megatrain_accelerate.plan import layer_measurement
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.units import GIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS = 4
GRADIENT_TOLERANCE = 3e-2
"""bf16 gradients, relative to the largest: eager kernels round to 8 bits where fused ones keep fp32."""


def prepared(**settings: Any) -> tuple[nn.Module, Engine]:
    model = tiny_model(**settings.pop("changes", {})).train()
    return model, attach(model, device="cuda", **{"compile_layers": True, **settings})


def loss_of(model: nn.Module, batch: int = 2, length: int = 32) -> torch.Tensor:
    ids = token_batches(1, batch, length)[0].cuda()
    return model(input_ids=ids, labels=ids).loss


def one_pass(**settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one pass under autocast, as the Trainer runs it."""
    model, engine = prepared(**settings)
    torch.manual_seed(5)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    gradients = {name: parameter.grad.cpu().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return loss.item(), gradients


@pytest.mark.parametrize(("kept", "slots"), [(0, 2), (LAYERS, 3)])
def test_all_layers_share_one_compilation_also_in_the_backward_thread(kept: int, slots: int) -> None:
    model, engine = prepared(kept_layers=kept, slots=slots)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
    # The plan measures layers that are kept.
    assert engine.runtime.compiled.compilations == (1 if kept else 2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_kept_and_recomputed_layers_are_close_to_their_own_code_and_drop_the_same(dropout: float) -> None:
    changes = {"attention_dropout": dropout}
    recomputed, kept = (one_pass(kept_layers=count, changes=changes) for count in (0, LAYERS))
    eager = one_pass(compile_layers=False, changes=changes)
    for mine in (kept, recomputed):
        assert mine[0] == pytest.approx(eager[0], rel=1e-2)
        assert mine[1].keys() == eager[1].keys()
        for name, gradient in eager[1].items():
            scale = max(float(gradient.float().abs().max()), 1e-3)
            assert float((mine[1][name].float() - gradient.float()).abs().max()) <= GRADIENT_TOLERANCE * scale, name


def test_many_lengths_and_batch_sizes_take_few_compilations() -> None:
    model, engine = prepared(kept_layers=LAYERS)
    for batch, length in [(2, 32), (2, 64), (2, 40), (2, 33), (3, 57), (4, 80), (6, 16), (2, 32), (5, 24)]:
        loss_of(model, batch, length).backward()
    # One for the first shape, then any length, then any batch size; lengths that attention's kernels align may be apart.
    assert engine.runtime.compiled.compilations <= 5


def test_a_backward_that_recomputes_is_measured_with_what_it_makes() -> None:
    model, engine = prepared(
        changes={
            "num_hidden_layers": 2,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
        }
    )
    ids = token_batches(1, batch=4, length=2048, seed=1)[0].cuda()
    batch = {"input_ids": ids, "labels": ids}
    step_profile = layer_measurement.measure_layers(
        model, engine.runtime, batch, profile_step(model, engine.runtime, batch, ids.device), budget_bytes=0
    )
    for profile in step_profile.profiles.values():
        assert profile.recompute_seconds is not None
        # Activations that were recomputed are alive in backward.
        assert profile.recomputed_bytes > profile.kept_backward_bytes
    engine.close()


def test_a_recomputed_gated_mlp_overwrites_what_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 8192, "max_position_embeddings": 2048}
    found = {}
    for overwrites in (True, False):
        with monkeypatch.context() as patch, fresh_cache():
            if not overwrites:
                patch.setattr(compiled_layer, "overwriting_pass", lambda: None)
            model, engine = prepared(kept_layers=0, device_layers=0, offloaded_layers=0, changes=sizes)
            for _ in range(2):  # in the first one kernels are tried out on copies
                loss = loss_of(model, 4, 2048)
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
            found[overwrites] = peak, [parameter.grad.clone() for parameter in model.parameters()]
            engine.close()
    # Three results of the intermediate size in bf16 less at that place, after which others are next to the peak.
    one = 2 * 4 * 2048 * 8192
    assert 2 * one <= found[False][0] - found[True][0] <= 3 * one
    assert all(map(torch.equal, found[True][1], found[False][1]))


@pytest.mark.parametrize("kept", [0, LAYERS])
def test_backward_doesnt_read_what_forward_left_in_the_slots(kept: int) -> None:
    gradients = []
    for garbage in (False, True):
        model, engine = prepared(kept_layers=kept, slots=LAYERS)
        loss = loss_of(model)
        torch.cuda.synchronize()
        for slot in engine.runtime.prefetcher.slots if garbage else ():
            slot.buffer.fill_(0x7F)
            slot.contents = None
        torch.cuda.synchronize()
        loss.backward()
        gradients.append({name: parameter.grad.cpu().clone() for name, parameter in model.named_parameters()})
        engine.close()
    for name, gradient in gradients[0].items():
        scale = max(float(gradient.float().abs().max()), 1e-3)
        # Atomics in attention's backward sum in any order.
        assert float((gradients[1][name].float() - gradient.float()).abs().max()) <= 1e-2 * scale, name


def test_twenty_steps_agree_with_the_layers_own_code() -> None:
    model, batches = tiny_model(), token_batches(20)
    eager = train_streamed(model, batches, device="cuda", compile_layers=False)
    ours = train_streamed(model, batches, device="cuda", compile_layers=True, kept_layers=2)
    # bf16 products round to 8 bits; the loss averages them down.
    torch.testing.assert_close(ours.losses, eager.losses, rtol=1e-2, atol=1e-2)


def test_kernels_are_chosen_without_copies_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[bool] = []
    rooms: list[int] = []
    copy = CachingAutotuner.copy_args_to_cpu_if_needed

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.optimize_mem:  # in a backward; elsewhere nothing is copied to the host
            rooms.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        copies = copy(self, *args, **kwargs)
        copied.append(bool(copies))
        return copies

    monkeypatch.setattr(CachingAutotuner, "copy_args_to_cpu_if_needed", watched)
    # Attention of its own products: their softmax is computed in place, in backward too.
    model, engine = prepared(changes={"attn_implementation": "eager", "max_position_embeddings": 1024})
    ids = token_batches(1, 8, 1024)[0].cuda()
    with fresh_cache():  # what was chosen before isn't tried again
        batch = {"input_ids": ids, "labels": ids}
        step_profile = profile_step(model, engine.runtime, batch, ids.device)
        layer_measurement.measure_layers(model, engine.runtime, batch, step_profile, budget_bytes=0)
    assert rooms
    assert not any(copied)
    # Of copies that would raise the peak: by itself this small step leaves less room below its peak.
    assert min(rooms) > GIB


def test_a_compiler_that_fails_leaves_the_run_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def fails(graph: Any, inputs: list[Any]) -> Any:
        raise NotImplementedError("no such kernel")

    caplog.set_level(logging.WARNING, logger=compiled_layer.__name__)
    losses = []
    for compile_layers in (False, True):
        model, engine = prepared(compile_layers=compile_layers, changes={"attention_dropout": 0.3})
        engine.runtime.compiled.backend = fails
        torch.manual_seed(5)
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        engine.close()
    assert losses[0] == losses[1]
    assert sum("runs uncompiled: " in record.getMessage() for record in caplog.records) == 1


def test_small_layers_are_left_alone_by_default() -> None:
    model, engine = prepared(compile_layers="auto")
    loss_of(model).backward()
    assert engine.runtime.compiled.compilations == 0
