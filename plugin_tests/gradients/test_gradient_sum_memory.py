"""What fp32 sums of gradients take: host and device memory, bytes over the link; and when they are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from engine_runs import Training, attach
from plain_torch import tiny_model, token_batches
from torch import nn

import megatrain_accelerate
from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine
from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES
from megatrain_accelerate.store.layout import ALIGNMENT_ELEMENTS


@pytest.fixture
def model() -> nn.Module:
    return tiny_model(hidden_size=128, intermediate_size=352).train()


@pytest.fixture(autouse=True)
def plugin_off() -> Iterator[None]:
    yield
    megatrain_accelerate.disable()


def count_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def padding_elements(model: nn.Module) -> int:
    return ALIGNMENT_ELEMENTS * sum(1 for _ in model.parameters())


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 16), ("bf16", 14)])
def test_a_parameter_takes_16_bytes_while_gradients_are_summed_in_fp32(model: nn.Module, dtype: str, bytes_each: int) -> None:
    engine = attach(model, accumulation_dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred")).step(token_batches(1)[0])
    count = count_of(model)
    assert sum(engine.host_bytes_by_kind().values()) <= 14 * (count + padding_elements(model)), "nothing before it is needed"
    engine.expect_accumulation(1)
    assert sum(engine.host_bytes_by_kind().values()) <= 14 * (count + padding_elements(model))
    engine.expect_accumulation(2)
    assert bytes_each * count <= sum(engine.host_bytes_by_kind().values()) <= bytes_each * (count + padding_elements(model))
    engine.close()


def test_fp32_gradients_need_no_residuals(model: nn.Module) -> None:
    engine = attach(model, bf16=False)
    engine.expect_accumulation(2)
    assert "gradient_residuals" not in engine.host_bytes_by_kind()
    engine.close()


def test_sums_on_the_device_are_counted_there(model: nn.Module) -> None:
    engine = attach(model, device_layers=-1)
    before = sum(engine.device_plan.budget.held_bytes_by_kind().values())
    engine.expect_accumulation(2)
    held = engine.device_plan.budget.held_bytes_by_kind()
    assert held["gradient_residuals"] == pytest.approx(2 * count_of(model), rel=0.02)
    assert sum(held.values()) - before == held["gradient_residuals"]
    assert engine.host_bytes_by_kind().get("gradient_residuals", 0) == 0
    engine.close()


def test_a_run_that_will_accumulate_counts_the_sums_before_anything_is_allocated(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[dict[str, int]] = []
    monkeypatch.setattr("megatrain_accelerate.engine.require_host_bytes", lambda parts, *_, **__: planned.append(parts))
    config = MegatrainConfig.from_mapping({"placement": {"device_layers": 0}})
    engine = Engine(model, torch.device("cpu"), config, bf16=True, training=True, accumulates=True, show_progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    # What was counted once isn't refused later, when the machine has less free because of what was allocated since.
    monkeypatch.setattr("megatrain_accelerate.store.host_limits.available_host_bytes", lambda limit: 0)
    engine.expect_accumulation(4)
    run.step(token_batches(1)[0])
    assert planned[0]["gradient_residuals"] > 0
    assert planned[0] == engine.host_bytes_by_kind()
    engine.close()


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", True), ("bf16", False)])
def test_accelerate_says_before_adoption_that_gradients_accumulate(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, dtype: str, expected: bool
) -> None:
    planned: list[dict[str, int]] = []
    monkeypatch.setattr("megatrain_accelerate.engine.require_host_bytes", lambda parts, *_, **__: planned.append(parts))
    megatrain_accelerate.enable({"accumulation_dtype": dtype})
    Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4).prepare(model)
    assert ("gradient_residuals" in planned[0]) == expected


def refusal() -> str:
    return re.escape("set megatrain_config.accumulation_dtype to 'bf16'")


def test_sums_that_do_not_fit_are_refused_with_the_numbers_and_the_remedy(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = attach(model)
    count = count_of(model)
    free = CONSTANT_OVERHEAD_BYTES + 10 * count  # the moments, which an optimizer will make, and the residuals
    monkeypatch.setattr("megatrain_accelerate.store.host_limits.available_host_bytes", lambda limit: free)
    with pytest.raises(HostMemoryError, match=rf"moments .* GiB, gradient_residuals .* GiB.*{refusal()}"):
        engine.expect_accumulation(2)
    assert "gradient_residuals" not in engine.host_bytes_by_kind()
    # So does a backward that adds to gradients though nobody said that it would.
    first, second = token_batches(2)
    model(input_ids=first, labels=first).loss.backward()
    with pytest.raises(HostMemoryError, match=refusal()):
        model(input_ids=second, labels=second).loss.backward()
    staging = 2 * max(layer.unit.layout.gradient_bytes for layer in engine.runtime.layers)
    free = CONSTANT_OVERHEAD_BYTES + 10 * (count + padding_elements(model)) + staging
    engine.expect_accumulation(2)
    assert engine.host_bytes_by_kind()["gradient_residuals"] >= 2 * count
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [{}, {"moments_dtype": "bf16"}, {"moments_dtype": "int8"}, {"host_gradients": "passing"}],
    ids=str,
)
def test_only_what_is_still_to_be_allocated_counts_under_any_setting(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    engine = attach(model, **settings)
    adopt_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), engine.runtime, "backward")
    staging = 2 * max(layer.unit.layout.gradient_bytes for layer in engine.runtime.layers)
    free = CONSTANT_OVERHEAD_BYTES + 2 * (count_of(model) + padding_elements(model)) + staging
    monkeypatch.setattr("megatrain_accelerate.store.host_limits.available_host_bytes", lambda limit: free)
    engine.expect_accumulation(2)
    assert engine.host_bytes_by_kind()["gradient_residuals"] >= 2 * count_of(model)
    engine.close()


def test_without_sums_nothing_is_refused(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = attach(model, accumulation_dtype="bf16")
    monkeypatch.setattr("megatrain_accelerate.store.host_limits.available_host_bytes", lambda limit: 0)
    engine.expect_accumulation(2)
    for ids in token_batches(2):
        model(input_ids=ids, labels=ids).loss.backward()
    assert "gradient_residuals" not in engine.host_bytes_by_kind()
    engine.close()


def test_only_the_residuals_of_residents_travel_once_a_step() -> None:
    moved = {}
    for dtype in ("bf16", "fp32"):
        model = tiny_model().train()
        engine = attach(model, accumulation_dtype=dtype)
        batches = token_batches(4)
        for position, ids in enumerate(batches):
            engine.runtime.offloader.is_last_backward = lambda position=position: position == 3
            model(input_ids=ids, labels=ids).loss.backward()
        moved[dtype] = engine.runtime.meter.counters.d2h_bytes
        residents = sum(state.parameter.numel() for group in engine.runtime.groups for state in group.unit.states)
        engine.close()
    assert moved["fp32"] - moved["bf16"] == 2 * residents
