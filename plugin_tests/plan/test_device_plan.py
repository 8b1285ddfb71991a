"""The plan at work on the CPU stand-in: it follows the batches, says what it did, and its predicted memory is the real one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import Training, attach, place
from pairs import long_unless, pairwise
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan import device_budget, device_plan, evaluation_weights, plan_record, step_ways
from megatrain_accelerate.plan.device_plan import LIBRARY_WORKSPACE_BYTES
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.other_batches import BatchExtent
from megatrain_accelerate.plan.placement import Counts, peak_bytes
from megatrain_accelerate.plan.step_memory import LiveBytes
from megatrain_accelerate.plan.step_profile import StepProfile
from megatrain_accelerate.transfer import activation_offload
from megatrain_accelerate.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("profiled_once")

FREE = {"device_layers": None, "offloaded_layers": None}
MACHINE = Machine(h2d_bytes=5e10, d2h_bytes=5e10, host_step_parameters=6e9, device_bytes=4e12, device_flops=7e14)
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 512}


@pytest.fixture(autouse=True)
def a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plan, "measured_machine", lambda *_: MACHINE)


IN_FP32 = {"bf16": False}
"""For tests that compute on many tokens: in bf16 some CPUs multiply matrices fifty times as slowly."""


def planned(budget_mib: float, **settings: Any) -> Training:
    model = tiny_model(**SHAPE).train()
    budget = (budget_mib * MIB + LIBRARY_WORKSPACE_BYTES) / GIB
    engine = attach(model, gpu_memory_gib=budget, **{**FREE, **settings})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


def batch(length: int = 64) -> torch.Tensor:
    return token_batches(1, batch=4, length=length, vocabulary=512)[0]


def held_tensors(run: Training) -> list[torch.Tensor]:
    """What the engine holds between steps, on the host and on the device."""
    runtime = run.engine.runtime
    found = [*run.model.parameters(), *run.model.buffers(), runtime.norms.norms, runtime.expert_streams.anchor]
    found += [runtime.piece_sums.buffer]  # type: ignore[list-item]
    found += [
        slot.buffer for slot in [*runtime.prefetcher.slots, *runtime.offloader.slots, *runtime.prefetcher.own_slots.values()]
    ]
    found += [slot.norms for slot in runtime.offloader.slots]
    found += runtime.activations.pool.buffers
    for unit in runtime.units:
        found += [unit.weights, unit.residuals, unit.gradients, *(unit.moments or ())]  # type: ignore[list-item]
        for state in unit.states:
            found += [state.weight, state.residual, state.gradient, *(state.moments or ())]  # type: ignore[list-item]
    return [tensor for tensor in found if tensor is not None]


def peak_of_a_step(run: Training, ids: torch.Tensor, *present: torch.Tensor) -> tuple[int, float]:
    """The most that a step has alive besides what the engine holds and what is ``present``, and what was predicted of it."""
    held = sum(run.engine.device_plan.budget.held_bytes_by_kind().values())
    with LiveBytes([*held_tensors(run), ids, *present]) as live:
        run.step(ids, max_norm=1.0)
        run.engine.drain()
    return live.peak_bytes, run.engine.device_plan.current.predicted_bytes - LIBRARY_WORKSPACE_BYTES - held


STEPS = pairwise([4, 8, 16, 32, 64, 200], [1e6, 6e9], [None, 2])


@pytest.mark.parametrize(
    ("budget_mib", "host_speed", "micro_batch_size"), long_unless([case for case in STEPS if case[0] in (8, 32, 200)], STEPS)
)
def test_the_predicted_step_is_what_the_step_takes(
    monkeypatch: pytest.MonkeyPatch, budget_mib: float, host_speed: float, micro_batch_size: int | None
) -> None:
    machine = dataclasses.replace(MACHINE, host_step_parameters=host_speed)
    monkeypatch.setattr(device_plan, "measured_machine", lambda *_: machine)
    run = planned(budget_mib, micro_batch_size=micro_batch_size, offloaded_layers=0)
    run.plan(batch())
    run.step(batch(8), max_norm=1.0)  # allocates moments
    taken, predicted = peak_of_a_step(run, batch())
    # Small tensors that every layer's call makes, such as masks and the norms of gradients, show at this size.
    assert 0.85 * predicted <= taken <= 1.03 * predicted + 0.1 * MIB


COUNTS = [(0, 2, 4), (1, 3, 0), (3, 3, 2), (0, 8, 0), (0, 1, 0)]
OFFLOADED = [(*counts, pieces, bf16) for counts in COUNTS for pieces in (None, 2) for bf16 in (True, False)]
# All ways at once, all layers offloaded, and a single one.
QUICK = [(3, 3, 2, None, True), (3, 3, 2, 2, True), (0, 8, 0, None, True), (0, 8, 0, 2, False), (0, 1, 0, 2, True)]


@pytest.mark.parametrize(("kept", "offloaded", "on_device", "micro_batch_size", "bf16"), long_unless(QUICK, OFFLOADED))
def test_the_predicted_step_counts_offloaded_layers_wherever_they_lie(
    monkeypatch: pytest.MonkeyPatch, kept: int, offloaded: int, on_device: int, micro_batch_size: int | None, bf16: bool
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    fixed = {"kept_layers": kept, "offloaded_layers": offloaded, "device_layers": on_device}
    run = planned(200, micro_batch_size=micro_batch_size, bf16=bf16, **fixed)
    run.step(batch(), max_norm=1.0)  # the pool grows
    assert len(run.engine.device_plan.current.placement.offloaded) == offloaded
    taken, predicted = peak_of_a_step(run, batch())
    # The graph gives up what has come back tensor by tensor; the plan counts a piece's until the piece is over.
    assert 0.85 * predicted <= taken <= 1.03 * predicted + 0.1 * MIB


@pytest.mark.parametrize(
    ("length", "micro_batches", "offloaded_inputs"), [(64, 1, None), (8, 2, None), (512, 1, True)], ids=str
)
def test_the_predicted_step_counts_the_sums_of_pieces_that_become_gradients(
    monkeypatch: pytest.MonkeyPatch, length: int, micro_batches: int, offloaded_inputs: bool | None
) -> None:
    """Pieces of one row: the gradients of a layer that lives on the device weigh more than what a piece saves. In a second
    micro-batch they are added to those of the first. Inputs that are on the host don't count meanwhile."""
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    if offloaded_inputs:
        monkeypatch.setattr(
            f"{__name__}.SHAPE", {**SHAPE, "intermediate_size": 128, "num_hidden_layers": 24, "vocab_size": 64}
        )
    vocabulary, layers = SHAPE["vocab_size"], SHAPE["num_hidden_layers"]
    fixed = {"kept_layers": 0, "offloaded_layers": 0, "device_layers": layers, "offloaded_inputs": offloaded_inputs}
    run = planned(200, micro_batch_size=1, **fixed, **IN_FP32)
    ids = token_batches(1, batch=4, length=length, vocabulary=vocabulary)[0]
    if micro_batches > 1:
        run.engine.expect_accumulation(micro_batches)
    run.step(ids, max_norm=1.0)
    gradients: list[torch.Tensor] = []
    if micro_batches > 1:
        run.model(input_ids=ids, labels=ids).loss.backward()
        gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
    taken, predicted = peak_of_a_step(run, ids, *gradients)
    assert 0.95 * predicted <= taken + sum(gradient.nbytes for gradient in gradients) <= 1.01 * predicted


def test_the_predicted_step_counts_two_pieces_of_a_batch_that_is_no_multiple_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    fixed = {"kept_layers": 0, "offloaded_layers": 1, "device_layers": 0}
    monkeypatch.setattr(f"{__name__}.SHAPE", {**SHAPE, "vocab_size": 64})  # layers decide, and not logits
    run = planned(200, micro_batch_size=2, **fixed, **IN_FP32)
    ids = token_batches(1, batch=5, length=128, vocabulary=64)[0]
    run.step(ids, max_norm=1.0)  # the pool grows
    taken, predicted = peak_of_a_step(run, ids)
    assert 0.95 * predicted <= taken <= 1.03 * predicted + 0.1 * MIB


def long_batch(length: int = 2048) -> torch.Tensor:
    return token_batches(1, batch=1, length=length, vocabulary=512)[0]


@pytest.mark.parametrize(
    ("kept", "offloaded_inputs"),
    [pytest.param(0, False, marks=pytest.mark.long), (0, True), pytest.param(2, False, marks=pytest.mark.long)],
    ids=str,
)
def test_attention_that_is_kept_takes_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch, kept: int, offloaded_inputs: bool
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    # In fp32 twice as much is copied; copies aren't what bounds these steps.
    machine = dataclasses.replace(MACHINE, h2d_bytes=4 * MACHINE.h2d_bytes, d2h_bytes=4 * MACHINE.d2h_bytes)
    monkeypatch.setattr(device_plan, "measured_machine", lambda *_: machine)
    fixed = {
        "offloaded_layers": 0,
        "device_layers": 0,
        "kept_layers": kept,
        "offloaded_inputs": offloaded_inputs,
    }
    predicted, seconds = {}, {}
    for attention in (0, 4):
        run = planned(200, token_tile=128, kept_attention=attention, **fixed, **IN_FP32)
        ids = long_batch(1024)
        run.plan(ids)
        run.step(ids if offloaded_inputs else long_batch(128), max_norm=1.0)  # allocates moments, and the pool
        taken, predicted[attention] = peak_of_a_step(run, ids)
        assert 0.95 * predicted[attention] <= taken <= 1.03 * predicted[attention] + 0.1 * MIB
        assert run.engine.device_plan.current.predicted_time is not None
        seconds[attention] = run.engine.device_plan.current.predicted_time.seconds
    results = 1024 * 128 * 4
    if offloaded_inputs:
        # Of the layer in backward and of the next one alone.
        assert results <= predicted[4] - predicted[0] < 3.5 * results
    else:
        assert predicted[4] - predicted[0] >= 4 * results
    assert seconds[4] < seconds[0]


@pytest.mark.parametrize("kept", [0, pytest.param(3, marks=pytest.mark.long)])
def test_tiles_take_what_is_predicted_and_less_than_whole_layers(kept: int) -> None:
    predicted = {}
    for tile in (0, 128):
        run = planned(200, token_tile=tile, kept_layers=kept, offloaded_layers=0, device_layers=0, **IN_FP32)
        ids = long_batch(1024)
        run.plan(ids)
        run.step(long_batch(128), max_norm=1.0)  # allocates moments
        taken, predicted[tile] = peak_of_a_step(run, ids)
        assert 0.95 * predicted[tile] <= taken <= 1.03 * predicted[tile] + 0.1 * MIB
    # Outside the layers, logits are what is large here.
    assert predicted[128] < 0.8 * predicted[0]


def test_a_batch_that_does_not_fit_is_trained_in_the_pieces_that_a_user_would_ask_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = token_batches(1, batch=16, length=128, vocabulary=512)[0]
    fixed: dict[str, Any] = {"offloaded_layers": 0, "offloaded_inputs": False, **IN_FP32}
    runs = {"free": planned(40, **fixed), "asked": planned(40, **fixed, micro_batch_size=8), "roomy": planned(200, **fixed)}
    chosen, tables = {}, {}
    for name, run in runs.items():
        run.engine.device_plan.show = True
        run.plan(ids) if name == "roomy" else run.step(ids, max_norm=1.0)
        chosen[name], tables[name] = run.engine.runtime.batch_cut.chosen, capsys.readouterr().err
        assert run.engine.runtime.token_tile == 0
    assert chosen == {"free": 8, "asked": None, "roomy": None}
    assert [name for name, table in tables.items() if "8 samples of the batch at once" in table] == ["free"]
    taken, predicted = peak_of_a_step(runs["free"], ids)
    assert 0.9 * predicted <= taken <= 1.03 * predicted + 0.1 * MIB
    assert runs["free"].engine.device_plan.current.predicted_bytes <= 40 * MIB + LIBRARY_WORKSPACE_BYTES
    runs["asked"].step(ids, max_norm=1.0)
    for run in runs.values():
        run.engine.drain()
    assert all(map(torch.equal, runs["free"].model.parameters(), runs["asked"].model.parameters()))
    # A smaller batch runs in the same pieces as long as its plan is that of the larger one.
    runs["free"].plan(ids[:12])
    assert runs["free"].engine.runtime.batch_cut.chosen == 8


def test_tiles_are_for_steps_that_do_not_fit_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_ways, "AUTO_TILE_TOKENS", 128)
    run = planned(22, offloaded_layers=0, offloaded_inputs=False)
    run.engine.device_plan.show = True
    run.plan(long_batch(512))
    assert run.engine.runtime.token_tile == 0
    assert "tiles" not in capsys.readouterr().err
    run.plan(long_batch())
    assert run.engine.runtime.token_tile == 128
    names = "input_layernorm, post_attention_layernorm, mlp of Qwen2DecoderLayer"
    assert f"128 tokens: {names}" in " ".join(capsys.readouterr().err.split())
    assert run.engine.device_plan.current.predicted_bytes <= 22 * MIB + LIBRARY_WORKSPACE_BYTES
    for whole in (planned(40), planned(22, token_tile=0)):
        whole.plan(long_batch())
        assert whole.engine.runtime.token_tile == 0


@pytest.mark.long
def test_long_sequences_that_fit_whole_run_by_tiles_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ways, "AUTO_TILE_TOKENS", 128)
    monkeypatch.setattr(step_ways, "LONG_TOKENS", 2048)
    fixed = {"device_layers": 0, "offloaded_layers": 0}
    seconds = {}
    for tile in (0, 128, "auto"):
        run = planned(36, token_tile=tile, **fixed)
        run.plan(long_batch())
        assert run.engine.device_plan.current.predicted_time is not None
        seconds[tile] = run.engine.device_plan.current.predicted_time.seconds
        chosen: int = run.engine.runtime.token_tile
    assert seconds["auto"] == min(seconds[0], seconds[128])
    assert seconds[chosen] == seconds["auto"]
    roomy = planned(200, **fixed)
    roomy.plan(long_batch())
    assert roomy.engine.runtime.token_tile == 0


class Frames(nn.Module):
    """Sound, 64 samples to a token, through equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = samples.unflatten(1, (-1, 64))
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": hidden.float().pow(2).mean()}


@pytest.mark.parametrize(("samples", "step_profiles"), [(1024, 1), (64 * 1024, 2)])
def test_how_long_a_sequence_is_counts_in_tokens_of_the_layers(
    monkeypatch: pytest.MonkeyPatch, samples: int, step_profiles: int
) -> None:
    monkeypatch.setattr(step_ways, "LONG_TOKENS", 1024)
    count = []
    run = device_plan.profile_step
    monkeypatch.setattr(device_plan, "profile_step", lambda *arguments: count.append(1) or run(*arguments))
    model = Frames().train()
    engine = attach(model, gpu_memory_gib=1.0, layer_classes=["Sequential"])
    engine.device_plan.follow(model, {"samples": torch.randn(1, samples)})
    assert len(count) == step_profiles
    engine.close()


def test_what_does_not_fit_in_any_way_takes_the_least(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_ways, "AUTO_TILE_TOKENS", 128)
    run = planned(4)
    run.plan(long_batch())
    assert run.engine.runtime.token_tile == 128
    assert "predicted to take" in caplog.text


@pytest.mark.long
def test_a_plan_that_is_only_weighed_leaves_the_layers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ways, "AUTO_TILE_TOKENS", 128)
    run = planned(22, offloaded_layers=0, offloaded_inputs=False)
    ids = long_batch()
    plan = run.engine.device_plan
    assert plan.search_for(plan.foresee(run.model, {"input_ids": ids, "labels": ids})).best() is not None
    assert run.engine.runtime.token_tile == 0
    run.plan(ids)
    assert run.engine.runtime.token_tile == 128


def test_more_memory_never_makes_a_slower_plan() -> None:
    seconds = []
    for budget_mib in (6, 12, 30, 50, 200):
        run = planned(budget_mib)
        run.plan(batch())
        assert run.engine.device_plan.current.predicted_time is not None
        assert run.engine.device_plan.current.predicted_bytes <= budget_mib * MIB + LIBRARY_WORKSPACE_BYTES
        seconds.append(run.engine.device_plan.current.predicted_time.seconds)
        run.engine.close()
    # As far as the search goes: it comes within a few percent of the best.
    assert all(later <= 1.03 * earlier for earlier, later in itertools.pairwise(seconds))
    assert seconds[-1] < 0.9 * seconds[0]


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the batches that are planned for."""
    shapes: list[tuple[int, ...]] = []
    profile_step = device_plan.profile_step

    def noted(model: object, runtime: object, inputs: dict[str, torch.Tensor], device: object) -> object:
        shapes.append(tuple(inputs["input_ids"].shape))
        return profile_step(model, runtime, inputs, device)  # type: ignore[arg-type]

    monkeypatch.setattr(device_plan, "profile_step", noted)
    return shapes


def test_from_the_second_plan_on_there_is_room_for_longer_batches(profiled: list[tuple[int, ...]]) -> None:
    run = planned(24)
    for length in (64, 32, 64, 65, 98, 50, 128, 256, 100):
        run.plan(batch(length))
        assert run.engine.device_plan.current.predicted_bytes <= 24 * MIB + LIBRARY_WORKSPACE_BYTES
    # Room for three times the tokens would cost batches of the mean size something: 1.5 times 65 and 2 times 128 tokens.
    # The second plan is asked first whether it holds 128 tokens.
    steps = [(4, 64), (4, 195), (4, 57), (4, 105), (4, 98), (4, 57), (4, 128)]
    assert profiled == [*steps, (6, 256), (6, 48), (6, 111), (4, 256), (4, 72), (4, 136)]
    assert run.engine.device_plan.current.planned.elements == 2 * 4 * 256


def test_there_is_room_for_three_times_the_tokens_where_it_costs_nothing(profiled: list[tuple[int, ...]]) -> None:
    run = planned(200)
    for length in (64, 65, 64, 190):
        run.plan(batch(length))
    assert profiled == [(4, 64), (4, 195), (4, 65)]
    assert len(run.engine.device_plan.current.placement.on_device) == 8


def test_as_much_room_is_left_as_fits_or_none(profiled: list[tuple[int, ...]]) -> None:
    run = planned(9, offloaded_layers=0, offloaded_inputs=False, token_tile=0)
    run.plan(batch(64))
    run.plan(batch(128))
    # 3, 1.5 and 1.22 times the tokens are too many.
    assert profiled == [(4, 64), (6, 256), (4, 192), (4, 157), (4, 128), (4, 96)]
    assert run.engine.device_plan.current.predicted_bytes <= 9 * MIB + LIBRARY_WORKSPACE_BYTES


def test_room_ends_where_the_positions_of_the_model_do(profiled: list[tuple[int, ...]]) -> None:
    run = planned(200)
    run.model.config.max_position_embeddings = 100
    run.plan(batch(64))
    run.plan(batch(80))
    assert profiled == [(4, 64), (10, 100), (10, 29)]  # 3 times the tokens, in rows of 100, and the mean of the two


def test_a_model_that_bounds_its_sequences_in_its_own_way_is_planned_for_up_to_there(profiled: list[tuple[int, ...]]) -> None:
    run = planned(200)
    forward = run.model.forward

    def bounded(input_ids: torch.Tensor, **kwargs: object) -> object:
        assert input_ids.shape[1] <= 80
        return forward(input_ids=input_ids, **kwargs)

    run.model.forward = bounded
    for length in (64, 72, 64):
        run.plan(batch(length))
    assert profiled == [(4, 64), (4, 216), (4, 108), (4, 89), (4, 72)]
    assert len(run.engine.device_plan.current.placement.kept) == 8


def test_numbers_beside_the_text_add_nothing_to_a_larger_batch(profiled: list[tuple[int, ...]]) -> None:
    run = planned(200)
    for length in (64, 80):
        ids = long_batch(length)
        inputs = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(length)}
        run.engine.device_plan.follow(run.model, inputs)
    assert profiled == [(1, 64), (1, 240), (1, 72)]


class PixelsOrText(nn.Module):
    """Takes either, as a model of images and text does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))

    def forward(self, ids: torch.Tensor | None = None, pixels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(ids) if ids is not None else pixels
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": hidden.float().pow(2).mean()}


def test_a_small_text_between_images_does_not_make_a_plan_that_images_do_not_fit() -> None:
    model = PixelsOrText().train()
    engine = attach(model, gpu_memory_gib=(8 * MIB + LIBRARY_WORKSPACE_BYTES) / GIB, layer_classes=["Sequential"], **FREE)
    plan = engine.device_plan
    images, text = {"pixels": torch.randn(32, 64, 64)}, {"ids": torch.ones(1, 64, dtype=torch.long)}
    for inputs in (images, text, images):
        plan.follow(model, inputs)
        exact = device_plan.profile_step(model, engine.runtime, images, engine.device)
        taken = plan.fixed_bytes(exact) + peak_bytes(exact, plan.model_sizes(), plan.current.placement)
        assert taken <= 8 * MIB + LIBRARY_WORKSPACE_BYTES
    assert len(plan.current.placement.kept) < 8
    engine.close()


def test_a_plan_covers_the_batches_before_it_too(profiled: list[tuple[int, ...]]) -> None:
    run = planned(30)
    many_short, few_long = token_batches(1, batch=32, length=16, vocabulary=512)[0], long_batch(100)
    for ids in (many_short, few_long, many_short):
        run.plan(ids)
    # 1.5 times the 512 tokens of the first, in rows of 1.5 times the second's length; three times would cost something.
    assert profiled == [(32, 16), (6, 256), (6, 51), (6, 115), (6, 150), (6, 52), (6, 88)]
    taken, predicted = peak_of_a_step(run, many_short)
    assert taken <= 1.03 * predicted + 0.1 * MIB


def test_a_batch_that_fits_the_plan_needs_no_new_one_also_after_a_resume(profiled: list[tuple[int, ...]]) -> None:
    run = planned(24)
    for length in (64, 65):
        run.plan(batch(length))
    plan, longer = run.engine.device_plan, long_batch(200)
    assert not plan.current.planned.covers(BatchExtent.of({"input_ids": longer, "labels": longer}))
    placement = plan.current.placement
    run.plan(longer)
    assert (plan.current.plans, plan.current.placement) == (2, placement)
    assert plan.predicted_peak_bytes <= 24 * MIB + LIBRARY_WORKSPACE_BYTES
    resumed = planned(24)
    resumed.engine.device_plan.expect_steps(10, None, json.loads(json.dumps(plan.record)))
    profiled.clear()
    resumed.plan(longer)
    assert (resumed.engine.device_plan.current.placement, profiled) == (placement, [])
    run.plan(batch(256))
    assert plan.current.plans == 3, "what doesn't fit"


def test_room_for_larger_batches_is_left_also_where_only_a_later_batch_has_to_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = []

    def measure(model: object, runtime: object, inputs: dict[str, Any], step_profile: StepProfile, *_: object) -> StepProfile:
        measured.append(inputs["input_ids"].shape[1])
        return step_profile

    monkeypatch.setattr(device_plan, "measure_layers", measure)
    monkeypatch.setattr(device_plan.DevicePlan, "measures", True)
    run = planned(100)
    plan = run.engine.device_plan
    for length in (32, 48, 200):
        run.plan(batch(length))
    assert measured == [200], "the first two surely fit"
    assert plan.current.planned.elements > plan.current.seen.elements
    plans = plan.current.plans
    run.plan(batch(220))
    assert plan.current.plans == plans == 3


@pytest.mark.parametrize("budget_mib", [40, pytest.param(80, marks=pytest.mark.long)])
def test_batches_of_all_shapes_have_few_plans_which_all_of_them_fit(
    capsys: pytest.CaptureFixture[str], budget_mib: float
) -> None:
    shapes = random.Random(budget_mib)
    run = planned(budget_mib)
    plan = run.engine.device_plan
    plan.show = True
    for _ in range(12):
        ids = token_batches(1, batch=shapes.randint(1, 8), length=shapes.randint(16, 256), vocabulary=512)[0]
        inputs = {"input_ids": ids, "labels": ids}
        plan.follow(run.model, inputs)
        exact = device_plan.profile_step(run.model, run.engine.runtime, inputs, run.engine.device)
        taken = plan.fixed_bytes(exact) + peak_bytes(exact, plan.model_sizes(), plan.current.placement)
        predicted = max(plan.predicted_peak_bytes, plan.current.predicted_bytes)
        assert taken <= predicted <= budget_mib * MIB + LIBRARY_WORKSPACE_BYTES
    assert 1 < capsys.readouterr().err.count("megatrain: plan") <= 3


def test_layers_are_measured_once_and_other_steps_are_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[StepProfile] = []

    def measures(model: nn.Module, runtime: object, inputs: object, step_profile: StepProfile, *_: object) -> StepProfile:
        """Kernels that keep half and take three times as long as is estimated from 1e12 operations a second."""
        profiles = {
            kind: dataclasses.replace(
                profile, kept_bytes=profile.kept_bytes // 2, forward_seconds=3e-12 * profile.forward.flops
            )
            for kind, profile in step_profile.profiles.items()
        }
        measured.append(dataclasses.replace(step_profile, profiles=profiles))
        return measured[-1]

    monkeypatch.setattr(device_plan, "measure_layers", measures)
    monkeypatch.setattr(device_plan.DevicePlan, "measures", True)
    monkeypatch.setattr(device_plan, "CERTAIN_SHARE", 0.0)
    # Products alone, so that a layer's time is that of its operations.
    monkeypatch.setattr(
        device_plan, "measured_machine", lambda *_: dataclasses.replace(MACHINE, device_bytes=1e30, device_flops=1e12)
    )
    run = planned(200)
    plan = run.engine.device_plan
    found = [plan.foresee(run.model, {"input_ids": batch(length), "labels": batch(length)}) for length in (64, 192)]
    assert measured == [found[0]]
    (profile,), (fake,) = (
        found[1].profiles.values(),
        step_profile_of(run, batch(192)).profiles.values(),
    )
    assert profile.kept_bytes == pytest.approx(fake.kept_bytes / 2, rel=0.01)
    assert profile.forward_seconds == pytest.approx(3e-12 * fake.forward.flops, rel=0.01)
    assert profile.backward_seconds is None


def test_a_training_that_accumulates_more_backwards_than_the_last_one_is_planned_for_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_plan, "measured_machine", lambda *_: dataclasses.replace(MACHINE, host_step_parameters=1e6))
    made = []
    for earlier in ((), (1,)):
        run = planned(45)
        for micro_batches in (*earlier, 4):
            run.engine.expect_accumulation(micro_batches)
            run.engine.device_plan.expect_steps(10)
            run.plan(batch())
        made.append(run.engine.device_plan.current)
        run.engine.close()
    assert made[1].placement == made[0].placement, "gradients of earlier backwards take memory beside it"
    assert made[1].predicted_bytes == made[0].predicted_bytes


def test_a_batch_too_large_for_the_budget_is_said_and_tried(caplog: pytest.LogCaptureFixture) -> None:
    run = planned(2)
    run.plan(batch(128))
    assert "predicted to take" in caplog.text
    assert "micro_batch_size" in caplog.text
    assert run.engine.device_plan.current.placement.kept == frozenset()


def test_the_table_says_what_lies_where_and_is_shown_once_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    run = planned(64)
    run.engine.device_plan.show = True
    run.plan(batch())
    run.plan(batch())
    shown = capsys.readouterr().err
    assert shown.count("megatrain: plan") == 1
    assert all(len(line) <= 80 for line in shown.splitlines())
    shown = " ".join(shown.split())
    placement = run.engine.device_plan.current.placement
    streamed = 8 - len(placement.on_device)
    assert f"{streamed} of 8 layers streamed" in shown
    assert f"{len(placement.kept)} layers kept" in shown
    assert "bound by" in shown
    assert run.engine.device_plan.current.predicted_time is not None
    assert f"{run.engine.device_plan.current.predicted_time.seconds:.3f} s" in shown


def test_the_table_counts_the_host_memory_that_steps_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_record, "GIB", MIB)
    run = planned(2, offloaded_layers=0, offloaded_inputs=False)
    run.engine.device_plan.show = True
    run.step(batch())
    held = sum(run.engine.host_bytes_by_kind().values())
    assert f"host memory {held / MIB:.1f} GiB" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("room", "compile_layers", "measured"), [(2.0, False, 0), (1.1, False, 1), (2.0, True, 1)])
def test_a_model_that_surely_fits_trains_without_a_measured_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], room: float, compile_layers: bool, measured: int
) -> None:
    everything = planned(200, **IN_FP32)
    everything.engine.device_plan.show = False
    everything.plan(batch())
    needed_mib = (everything.engine.device_plan.current.predicted_bytes - LIBRARY_WORKSPACE_BYTES) / MIB
    layers_measured = []

    def measure(model: object, runtime: object, inputs: object, step_profile: StepProfile, *_: object) -> StepProfile:
        layers_measured.append(step_profile)
        return dataclasses.replace(
            step_profile,
            profiles={kind: dataclasses.replace(at, forward_seconds=1e-3) for kind, at in step_profile.profiles.items()},
        )

    monkeypatch.setattr(device_plan, "measure_layers", measure)
    monkeypatch.setattr(device_plan.DevicePlan, "measures", True)
    monkeypatch.setattr(device_plan, "LIBRARY_WORKSPACE_BYTES", 0)
    run = planned(room * needed_mib - LIBRARY_WORKSPACE_BYTES / MIB, compile_layers=False, **IN_FP32)
    run.engine.runtime.compiled._is_on = compile_layers
    run.engine.runtime.compiled.backend = "aot_eager"
    for length in (64, 48, 64):
        run.step(batch(length))
    assert len(layers_measured) == measured
    assert len(run.engine.device_plan.current.placement.on_device) == len(run.engine.device_plan.current.placement.kept) == 8
    assert (run.engine.device_plan.current.predicted_time is None) == (not measured)
    shown = capsys.readouterr().err
    assert shown.count("megatrain: plan") == 1
    assert ("bound by" in shown) == bool(measured)


def test_a_model_that_decides_by_what_it_computes_trains_without_a_plan() -> None:
    run = planned(64, **IN_FP32)
    forward = run.model.forward

    def looks(input_ids: torch.Tensor, **kwargs: object) -> object:
        assert bool(run.model.get_input_embeddings()(input_ids).isfinite().all())  # type: ignore[operator]
        return forward(input_ids=input_ids, **kwargs)

    run.model.forward = looks
    losses = [run.step(batch()) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert run.engine.device_plan.current.predicted_bytes == 0


def test_a_model_that_decides_by_its_batch_is_planned_for() -> None:
    run = planned(64, **IN_FP32)
    forward = run.model.forward

    def looks(input_ids: torch.Tensor, **kwargs: object) -> object:
        assert int(input_ids.max()) < 512
        return forward(input_ids=input_ids, **kwargs)

    run.model.forward = looks
    run.step(batch())
    assert run.engine.device_plan.current.predicted_bytes > 0


def test_a_batch_given_by_position_is_planned_for_as_one_given_by_name() -> None:
    plans = []
    for by_position in (False, True):
        run = planned(64, **IN_FP32)
        ids = batch()
        logits = run.model(ids).logits if by_position else run.model(input_ids=ids).logits
        logits.float().sum().backward()
        plans.append((run.engine.device_plan.current.predicted_bytes, run.engine.device_plan.current.placement))
        run.engine.close()
    assert plans[0] == plans[1]
    assert plans[0][0] > 0


def test_arguments_without_a_name_leave_a_run_without_a_plan() -> None:
    run = planned(64)
    forward = run.model.forward
    run.model.forward = lambda *args: forward(*args)
    run.model(batch()).logits.float().sum().backward()
    assert run.engine.device_plan.current.predicted_bytes == 0
    run.engine.close()


def test_an_evaluation_that_would_not_fit_moves_layers_off_until_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = (planned(200, device_layers=3, **IN_FP32) for _ in range(2))
    for training in (run, plain):
        training.step(batch())
    plan, before = run.engine.device_plan, run.engine.device_plan.current.placement
    for part in (plan, plan.budget):
        monkeypatch.setattr(part, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(evaluation_weights, "evaluation_bytes", lambda *_: (10 * MIB, 0))
    free = {"bytes": 100 * MIB}
    for module, name in ((device_plan, "free_bytes"), (device_budget, "free_bytes"), (device_budget, "whole_free_bytes")):
        monkeypatch.setattr(module, name, lambda _: free["bytes"])
    run.model.eval()
    with torch.no_grad():
        roomy = run.model(input_ids=batch()).logits
        assert plan.current.placement == before
        free["bytes"] = MIB
        tight = run.model(input_ids=batch()).logits
    assert torch.equal(roomy, tight)
    assert not any(unit.is_on_device for unit in run.engine.runtime.units)
    for part in (plan, plan.budget):
        monkeypatch.setattr(part, "_device", torch.device("cpu"))
    run.model.train()
    assert run.step(batch()) == plain.step(batch())
    assert plan.current.placement == before
    assert sum(layer.unit.is_on_device for layer in run.engine.runtime.layers) == 3


def test_memory_that_another_will_take_again_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    engine = attach(model)
    plan = engine.device_plan
    monkeypatch.setattr(plan.budget, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900 * MIB, 1000 * MIB))
    for name in ("free_bytes", "whole_free_bytes"):
        monkeypatch.setattr(device_budget, name, lambda _: 900 * MIB)
    budget, left = plan.budget.whole_bytes(), plan.budget.left_bytes()
    assert left is not None
    plan.budget.reserved_share = 0.4
    taken = device_budget.USABLE_SHARE_OF_DEVICE * 400 * MIB
    assert budget - plan.budget.whole_bytes() == pytest.approx(taken, abs=2)
    assert left - plan.budget.left_bytes() == pytest.approx(taken, abs=2)
    engine.close()


def test_an_evaluation_is_predicted_to_make_its_logits_whole() -> None:
    run = planned(200)
    inputs = {"input_ids": batch(), "use_cache": False}
    run.model.eval()
    predicted, _ = evaluation_weights.evaluation_bytes(run.model, run.engine.runtime, inputs, run.engine.device)
    logits = batch().numel() * 512 * 2
    assert logits < predicted < 5 * logits


def test_two_forwards_before_one_backward_find_room_and_nothing_moves_between() -> None:
    losses = []
    for settings in ({"device_layers": 0, "kept_layers": 0}, {}):
        run = planned(26, **settings, **IN_FP32)
        found = []
        for _ in range(4):
            first = run.model(input_ids=batch(32), labels=batch(32)).loss
            version = [unit.version for unit in run.engine.runtime.units]
            second = run.model(input_ids=batch(64), labels=batch(64)).loss
            assert [unit.version for unit in run.engine.runtime.units] == version
            (first - 0.5 * second).backward()
            found += [first.item(), second.item()]
            run.optimizer.step()
            run.optimizer.zero_grad()
        losses.append(found)
        assert run.engine.device_plan.current.predicted_bytes <= 26 * MIB + LIBRARY_WORKSPACE_BYTES
        run.engine.close()
    assert losses[0] == losses[1]


class Rounds(nn.Module):
    """Runs its blocks one after another, some ``times``."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.embedding = nn.Embedding(512, 64)
        blocks = (nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.times * list(self.blocks):
            hidden = hidden + block(hidden)
        return hidden.float().pow(2).mean()


@pytest.mark.parametrize("on_device", [2, 4])
@pytest.mark.parametrize(("forwards", "times", "length"), [(2, 1, 32), (1, 2, 256)])
def test_gradients_that_are_added_in_one_backward_are_counted(forwards: int, times: int, length: int, on_device: int) -> None:
    model = Rounds(times).train()
    fixed = {"device_layers": on_device, "kept_layers": 0, "layer_classes": ["Sequential"]}
    engine = attach(model, bf16=False, gpu_memory_gib=1.0, **{**FREE, **fixed})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    ids = batch(length)

    def step() -> None:
        sum(model(ids) for _ in range(forwards)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        engine.drain()

    for _ in range(2):
        step()
    held = sum(engine.device_plan.budget.held_bytes_by_kind().values())
    with LiveBytes([*held_tensors(run), ids]) as live:
        step()
    predicted = engine.device_plan.current.predicted_bytes - LIBRARY_WORKSPACE_BYTES
    assert held + live.peak_bytes <= 1.03 * predicted + 0.1 * MIB
    engine.close()


def step_profile_of(run: Training, ids: torch.Tensor) -> StepProfile:
    """Of a step, as it runs without being measured."""
    return device_plan.profile_step(run.model, run.engine.runtime, {"input_ids": ids, "labels": ids}, run.engine.device)


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Layers are measured, as on a GPU, by a function of the test's."""

    def measure_by(measures: Callable[..., object]) -> None:
        monkeypatch.setattr(device_plan, "measure_layers", measures)
        monkeypatch.setattr(device_plan.DevicePlan, "measures", True)
        monkeypatch.setattr(device_plan, "CERTAIN_SHARE", 0.0)

    return measure_by


def test_layers_that_cannot_be_measured_are_estimated(measured_by: Callable[[Callable[..., object]], None]) -> None:
    def fails(*_: object) -> object:
        raise RuntimeError("this layer refuses gradients of ones")

    measured_by(fails)
    run = planned(64)
    assert run.engine.device_plan.foresee(run.model, {"input_ids": batch(), "labels": batch()}) == step_profile_of(
        run, batch()
    )


def test_measuring_that_runs_out_of_memory_is_tried_again_with_everything_off_the_device(
    monkeypatch: pytest.MonkeyPatch, measured_by: Callable[[Callable[..., object]], None]
) -> None:
    run = planned(200, **IN_FP32)
    run.step(batch())
    plan = run.engine.device_plan
    place(plan, Counts(on_device=4, groups_on_device=True).placement(8))
    on_device = []

    def measures(model: nn.Module, runtime: object, inputs: object, step_profile: StepProfile, *_: object) -> StepProfile:
        on_device.append(sum(unit.is_on_device for unit in run.engine.runtime.units))
        if on_device[-1]:
            raise torch.OutOfMemoryError("no room")
        return step_profile

    measured_by(measures)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    plan.foresee(run.model, {"input_ids": batch(32), "labels": batch(32)})
    assert on_device[0] > 4
    assert on_device[1] == 0


def test_a_batch_that_runs_out_of_memory_when_it_is_measured_leaves_smaller_ones_their_plan(
    measured_by: Callable[[Callable[..., object]], None],
) -> None:
    run = planned(200, device_layers=3, **IN_FP32)
    run.step(batch(64))
    before, policy = run.engine.device_plan.current, run.engine.runtime.calls.policy
    assert len(policy.kept) == 8

    def measures(*_: object) -> StepProfile:
        raise torch.OutOfMemoryError("no room")

    measured_by(measures)
    with pytest.raises(torch.OutOfMemoryError):
        run.step(batch(128))
    run.step(batch(64))
    assert run.engine.runtime.calls.policy == policy
    assert run.engine.device_plan.current.placement == before.placement
    assert [layer.unit.is_on_device for layer in run.engine.runtime.layers] == 3 * [True] + 5 * [False]
    run.engine.close()


def test_forwards_that_wait_take_what_they_take_by_the_tiles_that_were_chosen_after_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measures(model: nn.Module, runtime: object, inputs: object, step_profile: StepProfile, *_: object) -> StepProfile:
        if not step_profile.token_tile:
            raise torch.OutOfMemoryError("whole layers don't fit")
        return step_profile

    monkeypatch.setattr(step_ways, "AUTO_TILE_TOKENS", 128)
    monkeypatch.setattr(device_plan, "measure_layers", measures)
    monkeypatch.setattr(device_plan.DevicePlan, "measures", True)
    ids = long_batch()
    predicted = []
    for tile in ("auto", 128):
        run = planned(100, token_tile=tile)
        plan = run.engine.device_plan
        plan._note(forwards_at_once=3)
        plan.follow(run.model, {"input_ids": ids, "labels": ids})
        assert run.engine.runtime.token_tile == 128
        predicted.append(plan.current.predicted_bytes)
    assert predicted[0] == predicted[1]


def test_a_model_whose_step_can_not_be_predicted_says_so_at_the_default_level(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def looks_at_data(*_: object) -> StepProfile:
        raise ValueError("it looks at its data")

    monkeypatch.setattr(device_plan, "profile_step", looks_at_data)
    run = planned(400, **IN_FP32)
    with caplog.at_level(logging.WARNING, logger="megatrain_accelerate"):
        run.step(batch(), max_norm=1.0)
    run.engine.close()
    (said,) = [record.getMessage() for record in caplog.records if "can't be predicted" in record.getMessage()]
    assert "ValueError: it looks at its data" in said
    assert "set megatrain_config.placement.kept_layers" in said


def test_moments_in_bf16_make_the_predicted_step_of_the_host_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plan, "measured_machine", lambda *_: dataclasses.replace(MACHINE, host_step_parameters=1e6))
    host_step = {}
    for dtype in ("fp32", "bf16"):
        run = planned(200, moments_dtype=dtype, device_layers=0)
        run.engine.device_plan.follow(run.model, {"input_ids": batch(), "labels": batch()})
        assert run.engine.device_plan.current.predicted_time is not None
        host_step[dtype] = run.engine.device_plan.current.predicted_time.host_step
    assert host_step["bf16"] == pytest.approx(host_step["fp32"] * 18 / 26)


def test_moments_in_8_bits_are_counted_in_memory_but_not_as_a_faster_step() -> None:
    sizes = {}
    for dtype in ("fp32", "int8"):
        run = planned(200, moments_dtype=dtype, device_layers=0)
        sizes[dtype] = run.engine.device_plan.model_sizes().layers[0]
    saved = (8 - 2.0625) * sizes["fp32"].parameters
    assert sizes["fp32"].state_bytes - sizes["int8"].state_bytes == saved
    assert sizes["fp32"].step_bytes == sizes["int8"].step_bytes


def test_a_resumed_training_goes_on_by_its_plan_and_plans_nothing(profiled: list[tuple[int, ...]]) -> None:
    first = planned(24)
    for length in (64, 96):
        first.plan(batch(length))
    plan = first.engine.device_plan
    record = json.loads(json.dumps(plan.record))
    assert record is not None
    assert plan.record is not None
    count = len(profiled)
    resumed = planned(24)
    resumed.engine.device_plan.expect_steps(10, None, record)
    for run in (first, resumed):
        run.plan(batch(32))
    assert len(profiled) == count
    assert resumed.engine.device_plan.current.placement == plan.current.placement
    assert resumed.engine.device_plan.current.predicted_time == first.engine.device_plan.current.predicted_time
    assert resumed.engine.device_plan.current.predicted_bytes == first.engine.device_plan.current.predicted_bytes
    assert resumed.engine.device_plan.record == plan.record
    # A batch that the plan doesn't cover is planned for as it would have been.
    for run in (first, resumed):
        run.plan(batch(256))
    assert resumed.engine.device_plan.current.placement == plan.current.placement
    assert resumed.engine.device_plan.record == plan.record


def test_a_later_step_that_can_not_be_predicted_leaves_no_prediction_and_is_resumed_in_the_same_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looks_at_data(*_: object) -> StepProfile:
        raise ValueError("it looks at its data")

    first, resumed = (planned(22, offloaded_layers=0, offloaded_inputs=False) for _ in range(2))
    plan, ids = first.engine.device_plan, token_batches(1, batch=16, length=144, vocabulary=512)[0]
    first.plan(ids[:, :128])
    assert plan.current.predicted_time is not None
    monkeypatch.setattr(device_plan, "profile_step", looks_at_data)
    first.plan(ids)
    assert (plan.current.predicted_time, plan.current.predicted_bytes) == (None, 0)
    assert plan.current.at(0.5) == (plan.current.placement, 0)
    record = json.loads(json.dumps(plan.record))
    resumed.engine.device_plan.expect_steps(10, None, record)
    for run in (first, resumed):
        run.plan(ids[:, :128])
        assert run.engine.runtime.batch_cut.chosen == 8
        run.engine.close()
    assert resumed.engine.device_plan.record == plan.record


@pytest.mark.parametrize(
    "changes", [{"budget_mib": 20}, {"kept_layers": 0}, {"slots": 3}], ids=lambda changes: next(iter(changes))
)
def test_a_plan_that_was_made_for_something_else_is_not_taken_over(
    profiled: list[tuple[int, ...]], changes: dict[str, Any]
) -> None:
    first = planned(24)
    first.plan(batch(64))
    resumed = planned(**{"budget_mib": 24, **changes})
    resumed.engine.device_plan.expect_steps(10, None, first.engine.device_plan.record)
    resumed.plan(batch(32))
    assert profiled == [(4, 64), (4, 32)]


def test_a_plan_that_takes_no_host_memory_is_taken_over_where_none_is_left(
    profiled: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plan, "available_host_bytes", lambda *_: 0)
    first, resumed = planned(24, offloaded_inputs=False), planned(24, offloaded_inputs=False)
    first.plan(batch(64))
    resumed.engine.device_plan.expect_steps(10, None, first.engine.device_plan.record)
    resumed.plan(batch(64))
    assert profiled == [(4, 64)]


def test_a_plan_for_joined_micro_batches_is_taken_over_by_joined_ones_alone(profiled: list[tuple[int, ...]]) -> None:
    def step_of(run: Training, joined: bool) -> None:
        run.engine.runtime.batch_cut.asked = 2 if joined else None
        run.plan(batch(64))
        run.engine.runtime.batch_cut.asked = None

    first = planned(24)
    step_of(first, joined=True)
    for joined, plans in ((True, 0), (False, 1)):
        resumed = planned(24)
        resumed.engine.device_plan.expect_steps(10, None, first.engine.device_plan.record)
        profiled.clear()
        step_of(resumed, joined)
        assert len(profiled) == plans
    resumed = planned(24)
    resumed.engine.device_plan.expect_steps(10, None, first.engine.device_plan.record)
    resumed.engine.device_plan.forget()
    step_of(resumed, joined=True)
    assert len(profiled) == 2, "steps were to run in another way"


def test_a_plan_for_longer_batches_leaves_the_samples_of_this_one(profiled: list[tuple[int, ...]]) -> None:
    run = planned(200, micro_batch_size=2)
    run.model.config.max_position_embeddings = 64
    for length in (40, 56):
        run.plan(token_batches(1, batch=8, length=length, vocabulary=512)[0])
    assert profiled[-1][0] > 8


@pytest.mark.parametrize("change", [lambda record: record.pop("plans"), lambda record: record["placement"].pop("kept")])
def test_a_plan_that_another_version_recorded_is_made_anew(
    profiled: list[tuple[int, ...]], change: Callable[[dict[str, Any]], object]
) -> None:
    first = planned(24)
    first.plan(batch(64))
    record = json.loads(json.dumps(first.engine.device_plan.record))
    change(record)
    resumed = planned(24)
    resumed.engine.device_plan.expect_steps(10, None, record)
    resumed.plan(batch(32))
    assert profiled == [(4, 64), (4, 32)]


def test_before_the_first_plan_there_is_nothing_to_record() -> None:
    assert planned(24).engine.device_plan.record is None
    unplanned = attach(tiny_model().train())
    unplanned.device_plan.follow(unplanned.runtime.layers[0].module, {"input_ids": batch()})
    assert unplanned.device_plan.record is None
