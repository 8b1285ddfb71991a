"""Moments in 8 bits in whole runs: the loss, placement and schedules, memory, checkpoints of either kind."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import attach
from moment_runs import assert_same_masters, losses
from plain_torch import tiny_model, token_batches
from torch import nn
from trainer_runs import run_trainer, tiny_llama

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.kernels.host import AdamArguments
from megatrain_accelerate.kernels.moments import Int8Moments
from megatrain_accelerate.optim import moment_states
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.store.segments import plan_segments, step_segments

pytestmark = pytest.mark.usefixtures("profiled_once")

Optimizer = torch.optim.Optimizer


def adopted(model: nn.Module, moments_dtype: str, **settings: Any) -> tuple[Engine, Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model, moments_dtype=moments_dtype, **settings)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    return engine, optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for ids in token_batches(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_is_close_to_that_with_fp32_moments_but_not_the_same() -> None:
    ours, theirs = losses(45, moments_dtype="int8"), losses(45)
    assert ours != theirs
    assert theirs[-1] < 0.5 * theirs[0]
    # Each moment is off by up to an eighth of itself, in the mean by nothing: a step's loss by about a hundredth.
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.03 * theirs[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"slots": 2, "host_threads": 1}, {"slots": 3, "host_threads": 2}),
        ({"schedule": "serial"}, {"schedule": "backward", "host_gradients": "passing"}),
        ({"accumulation": 2}, {"accumulation": 2, "schedule": "backward", "kept_layers": 1}),
    ],
    ids=["placement", "schedule", "accumulation"],
)
def test_placement_and_schedule_do_not_change_the_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert_same_masters(first, second, moments_dtype="int8")


def test_what_lies_between_two_parameters_changes_no_bit() -> None:
    # Parameters of 100 elements: of each block of 128 the last 28 belong to nobody.
    found = []
    for garbage in (0.0, 1e3):
        torch.manual_seed(0)
        model = tiny_model(hidden_size=20, intermediate_size=25, num_attention_heads=1, num_key_value_heads=1)
        engine, _ = adopted(model, "int8")
        unit = engine.runtime.layers[0].unit
        unit.allocate("gradients")
        unit.allocate("moments")
        assert unit.gradients is not None
        unit.gradients.view(torch.bfloat16).fill_(garbage)
        for state in unit.states:
            assert state.gradient is not None
            state.gradient.fill_(1e-3)
        settings = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
        segments = plan_segments([(state, settings) for state in unit.states])
        assert any(state.entry.spec.numel % 128 for state in unit.states)
        step_segments(unit.layout, unit.flat_states, segments, engine.kernels)
        moments = [state.moments for state in unit.states]
        found.append([tensor for each in moments if isinstance(each, Int8Moments) for tensor in each.decode()])
        engine.close()
    assert len(found[0]) > 4
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("settings", "bytes_each"), [({}, 8.06), ({"host_gradients": "passing"}, 7.0), ({"bf16": False}, 10.06)]
)
def test_a_trained_parameter_takes_6_bytes_less(
    settings: dict[str, Any], bytes_each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[dict[str, int]] = []
    monkeypatch.setattr("megatrain_accelerate.engine.require_host_bytes", lambda parts, *_, **__: planned.append(parts))
    model = tiny_model(hidden_size=128, intermediate_size=352, num_hidden_layers=6)
    engine, _ = adopted(model, "int8", **settings)
    engine.runtime.offloader.allocate_gradients(engine.runtime.units)
    for unit in engine.runtime.units:
        unit.allocate("moments")
    held = engine.host_bytes_by_kind()
    count = sum(p.numel() for p in model.parameters())
    assert held["moments"] == planned[0]["moments"] == pytest.approx(2.0625 * count, rel=0.01)
    if "host_gradients" not in settings:
        assert held == planned[0]
        assert sum(held.values()) == pytest.approx(bytes_each * count, rel=0.01)
    else:
        assert sum(planned[0].values()) < bytes_each * count + 3 * 2 * count / 6
    engine.close()


def test_the_plan_leaves_all_states_on_the_host() -> None:
    model = tiny_model()
    engine, optimizer = adopted(model, "int8", device_layers=None, gpu_memory_gib=8)
    train(model, optimizer, 2)
    assert not engine.runtime.states_may_move
    assert not any(unit.is_on_device for unit in engine.runtime.units)
    engine.close()


def test_an_optimizer_without_a_kernel_is_refused() -> None:
    model = tiny_model()
    engine = attach(model, moments_dtype="int8")
    with pytest.raises(UnsupportedError, match=r"SGD has no fused host kernel.*keeps its own states"):
        adopt_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), engine.runtime, "deferred")
    engine.close()


def test_moments_come_along_when_a_unit_moves() -> None:
    model = tiny_model()
    engine, optimizer = adopted(model, "int8")
    train(model, optimizer, 2)
    engine.drain()
    unit = engine.runtime.layers[1].unit
    assert isinstance(unit.moments, Int8Moments)
    before = unit.moments.decode()
    unit.move(torch.device("cpu"), engine.kernels)
    unit.move(None, engine.kernels)
    for ours, theirs in zip(unit.moments.decode(), before, strict=True):
        assert torch.equal(ours, theirs)
    engine.close()


@pytest.mark.parametrize("decodes", [True, False], ids=["fp32 in the file", "codes in the file"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    tmp_path: Path, decodes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"moments_dtype": "int8"}
    if not decodes:
        monkeypatch.setattr(moment_states, "available_host_bytes", lambda limit: 1000)
    with caplog.at_level(logging.WARNING):
        whole = run_trainer(
            tiny_llama, tmp_path / "whole", streamed=True, settings=settings, save_strategy="steps", save_steps=2
        )
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    key = "exp_avg_sq" if decodes else "exp_avg_sq_int8"
    assert {value[key].dtype for value in saved["state"].values()} == {torch.float32 if decodes else torch.uint8}
    assert ("exp_avg" in saved["state"][0]) is decodes
    assert ("moments are saved in 8 bits" in caplog.text) is not decodes
    resumed = run_trainer(
        tiny_llama,
        tmp_path / "resumed",
        streamed=True,
        settings={**settings, "slots": 3},
        script=lambda trainer: trainer.train(resume_from_checkpoint=str(checkpoint)),
    )
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


@pytest.mark.parametrize("enough_memory", [True, False], ids=["fp32 shown", "codes shown"])
@pytest.mark.parametrize("loaded", ["fp32", "bf16", "int8"])
def test_moments_in_8_bits_are_taken_over_by_any_setting(
    loaded: str, enough_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    engine, optimizer = adopted(model, "int8")
    train(model, optimizer, 3)
    exact = copy.deepcopy(optimizer.state_dict())
    if not enough_memory:
        monkeypatch.setattr(moment_states, "available_host_bytes", lambda limit: 1000)
    saved = copy.deepcopy(optimizer.state_dict())
    engine.close()
    monkeypatch.undo()
    engine, optimizer = adopted(tiny_model(), loaded)
    optimizer.load_state_dict(saved)
    found = optimizer.state_dict()
    for key, value in exact["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            expected = value[name].bfloat16() if loaded == "bf16" else value[name]
            assert expected.any()
            assert torch.equal(found["state"][key][name], expected)
    engine.close()


@pytest.mark.parametrize("saved", ["fp32", "bf16"])
def test_larger_moments_become_the_nearest_codes(saved: str) -> None:
    model = tiny_model()
    engine, optimizer = adopted(model, saved)
    train(model, optimizer, 3)
    states = copy.deepcopy(optimizer.state_dict())
    engine.close()
    engine, optimizer = adopted(tiny_model(), "int8")
    optimizer.load_state_dict(states)
    for key, value in optimizer.state_dict()["state"].items():
        theirs = states["state"][key]
        assert value["step"] == theirs["step"] == 3
        for name, smallest in (("exp_avg", 2.0**-16), ("exp_avg_sq", 2.0**-32)):
            wanted = theirs[name].float()
            # Half the distance of two codes, at most an eighth apart; the smallest ones lie farther from each other and zero.
            bound = wanted.abs() / 16 + float(wanted.abs().max()) * smallest * 1.25
            assert bool(((value[name] - wanted).abs() <= bound).all())
            assert not torch.equal(value[name], wanted)
    engine.close()


def test_torch_continues_with_what_the_state_dict_shows() -> None:
    model = tiny_model()
    engine, optimizer = adopted(model, "int8", bf16=False)
    train(model, optimizer, 3)
    engine.drain()
    stock = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in model.parameters()], lr=1e-3)
    stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for ours, theirs in zip(stock.param_groups[0]["params"], model.parameters(), strict=True):
        ours.grad = torch.full_like(ours, 1e-3)
        theirs.grad = ours.grad.clone()
    stock.step()
    optimizer.step()
    engine.drain()
    for ours, theirs in zip(stock.param_groups[0]["params"], model.parameters(), strict=True):
        # From the same weights, moments and number of steps: torch's step, but for the last bits of its square root.
        torch.testing.assert_close(theirs.detach(), ours.detach(), rtol=1e-6, atol=1e-8)
    engine.close()
