"""Offloaded activations on a GPU: bits, races with slow copies, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from engine_runs import attach, train_streamed
from plain_torch import PlainRun, tiny_model, token_batches

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.transfer import activation_offload
from megatrain_accelerate.transfer.activation_offload import ActivationOffloader
from megatrain_accelerate.units import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLEEP_CYCLES = 4_000_000  # about 2 ms a copy: far longer than the kernels of the tiny models here

STREAMED: dict[str, Any] = {
    "device_layers": 0,
    "offloaded_layers": 0,
    "kept_layers": 0,
    "compile_layers": False,
}
"""What a test doesn't ask for: the plan would put all of so small a model on the GPU."""

PLACEMENTS: list[dict[str, Any]] = [
    {"kept_layers": 0, "offloaded_layers": 4},
    {"kept_layers": 1, "offloaded_layers": 2},
    {"kept_layers": 0, "offloaded_inputs": True},
    {"kept_layers": 1, "offloaded_layers": 1, "offloaded_inputs": True},
]


@pytest.fixture
def small_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = ActivationOffloader.copy

    def slow_copy(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)  # on the copy's own stream
        copy(self, *args, **kwargs)

    monkeypatch.setattr(ActivationOffloader, "copy", slow_copy)


def trained(count: int = 4, **settings: Any) -> PlainRun:
    model = tiny_model(attn_implementation="eager", attention_dropout=0.1).train()
    torch.manual_seed(5)
    return train_streamed(model, token_batches(count), device="cuda", **{**STREAMED, **settings})


def same_bits(run: PlainRun, other: PlainRun) -> bool:
    masters = all(torch.equal(run.masters[name], master) for name, master in other.masters.items())
    return masters and run.losses == other.losses and run.norms == other.norms


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_offloaded_layers_are_bit_equal_to_recomputed_ones_on_the_gpu(
    placement: dict[str, Any], small_tensors_leave: None
) -> None:
    assert same_bits(trained(20, **placement), trained(20, kept_layers=0))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_kernels_wait_for_slow_copies_and_memory_for_both_ways(
    placement: dict[str, Any], small_tensors_leave: None, slow_copies: None
) -> None:
    assert same_bits(trained(**placement), trained(kept_layers=0))


@pytest.mark.parametrize("missing", ["wait_for", "give_up"])
def test_the_race_tests_see_a_missing_wait(
    missing: str, small_tensors_leave: None, slow_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = trained(kept_layers=0)
    brought_back, copy = [], ActivationOffloader.copy

    def copy_and_hold(self: Any, block: Any, storage: Any, to_host: bool) -> None:
        # Memory that is given back too early would take its late copy in the place of token ids, which ends the CUDA context.
        brought_back.append(None if to_host else storage)
        copy(self, block, storage, to_host)

    def use_at_once(self: Any, arrival: Any) -> None:
        arrival.is_waited_for = True

    def give_up_at_once(self: Any, copies_out: Any) -> None:
        for copy_out in copies_out:
            self.leaving.remove(copy_out)
            for saved in copy_out.storages:
                saved.leave_device()

    monkeypatch.setattr(ActivationOffloader, "copy", copy_and_hold)
    monkeypatch.setattr(ActivationOffloader, missing, use_at_once if missing == "wait_for" else give_up_at_once)
    # With the weights on the GPU, so that no wait for a later copy of weights covers one of activations.
    assert not same_bits(trained(kept_layers=0, offloaded_layers=4, device_layers=4), reference)


def measured_and_predicted(**settings: Any) -> tuple[int, int]:
    """Peak of the device's memory in three steps of an eight-layer model on 8 x 1024 tokens, and its prediction."""
    gc.collect()  # what a run before left in cycles would leave in the middle of this one
    shape = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
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


def test_the_peak_falls_by_what_was_predicted() -> None:
    torch.use_deterministic_algorithms(False)
    kept, kept_predicted = measured_and_predicted(kept_layers=8)
    for settings in ({"offloaded_layers": 8}, {"kept_layers": 2, "offloaded_layers": 6}, {"offloaded_layers": 4}):
        peak, predicted = measured_and_predicted(**{"kept_layers": 0, **settings})
        assert peak <= predicted
        fall, predicted_fall = kept - peak, kept_predicted - predicted
        # Two of the layers' activations are on the device in any case, and 4 of 8 layers or more go out.
        assert fall > 0.25 * kept
        assert fall == pytest.approx(predicted_fall, rel=0.1, abs=8 * MIB), settings
    inputs, inputs_predicted = measured_and_predicted(kept_layers=0, offloaded_inputs=True)
    recomputed, recomputed_predicted = measured_and_predicted(kept_layers=0)
    # Eight inputs of 8 x 1024 x 256 bf16 values, 4 MiB each; some are on their way at the peak.
    assert recomputed - inputs >= 12 * MIB
    assert recomputed - inputs == pytest.approx(recomputed_predicted - inputs_predicted, abs=8 * MIB)


def test_a_step_synchronises_nothing_pins_nothing_and_does_not_grow(
    small_tensors_leave: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = {**STREAMED, "kept_layers": 1, "offloaded_layers": 2, "offloaded_inputs": True}
    engine = attach(model, device="cuda", **placement)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    pool, sizes, allocated = engine.runtime.activations.pool, [], []
    for step, ids in enumerate(token_batches(8)):
        ids = ids.cuda()
        if step == 1:  # the first one plans and measures
            monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("device-wide synchronisation in a step"))
        model(input_ids=ids, labels=ids).loss.backward()
        engine.runtime.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.current_stream().synchronize()
        allocated.append(torch.cuda.memory_allocated())
        sizes.append(pool.size_bytes)
    assert len(set(allocated[2:])) == 1
    assert len(set(sizes)) == 1
    assert pool.take(1)[0].is_pinned()
    monkeypatch.undo()
    engine.close()
