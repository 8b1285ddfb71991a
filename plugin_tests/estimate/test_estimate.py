"""The parts of an estimate: an engine without memory, counted layers, machines, limits."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
import torch
from engine_runs import attach
from flat_settings import nested
from machine_options import machine_options, machine_with
from meta_models import SHAPE, meta_experts, meta_model
from plain_torch import tiny_model
from torch.autograd.graph import saved_tensors_hooks

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.estimate import forecast as forecast_module
from megatrain_accelerate.estimate import machine_description
from megatrain_accelerate.estimate.command import parse_size
from megatrain_accelerate.estimate.findings import largest
from megatrain_accelerate.estimate.forecast import Forecaster
from megatrain_accelerate.estimate.layer_costs import ATTENTION, FUSED, PRODUCTS, SINGLE, with_times
from megatrain_accelerate.estimate.machine_description import (
    KNOWN_GPUS,
    describe_machine,
    host_step_parameters,
)
from megatrain_accelerate.estimate.meta_engine import ForecastPlan, MetaEngine
from megatrain_accelerate.layers import output_recorder
from megatrain_accelerate.loss.products import standing_for_a_gpu
from megatrain_accelerate.plan import step_ways
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.placement_search import PlacementSearch
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_profile import LayerProfile, SavedInForward, StepProfile
from megatrain_accelerate.units import GIB, MIB

MACHINE = Machine(h2d_bytes=5e10, d2h_bytes=5e10, host_step_parameters=6e9, device_bytes=4e12, device_flops=7e14)
STREAMED = {"kept_layers": 0, "offloaded_layers": 0, "device_layers": 0}


def forecaster(gpu_bytes: int = GIB, **settings: object) -> Forecaster:
    return Forecaster(meta_model(), MegatrainConfig.from_mapping(nested(settings)), machine_with(MACHINE, gpu_bytes))


# ---------------------------------------------------------------- the engine without memory


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_engine_without_memory_has_the_sizes_of_the_real_one(micro_batches: int) -> None:
    real = attach(tiny_model(**SHAPE).train())
    real.device_plan.micro_batches = micro_batches
    meta = ForecastPlan(MetaEngine(meta_model(), MegatrainConfig(), machine_with(MACHINE)), MegatrainConfig(), micro_batches)
    assert meta.model_sizes() == real.device_plan.model_sizes()
    step_profile = StepProfile((), 0, OpCosts(), {}, samples=2)
    assert meta.budget.fixed_bytes_by_kind(step_profile) == real.device_plan.budget.fixed_bytes_by_kind(step_profile)


@pytest.mark.parametrize("moments_dtype", ["fp32", "bf16", "int8"])
def test_the_store_is_what_the_engine_allocates(moments_dtype: str) -> None:
    real = attach(tiny_model(**SHAPE).train(), moments_dtype=moments_dtype)
    for unit in real.runtime.units:
        unit.allocate("gradients")
        unit.allocate("moments")
    config = MegatrainConfig(moments_dtype=moments_dtype)
    plan = ForecastPlan(MetaEngine(meta_model(), config, machine_with(MACHINE)), config)
    assert plan.store_bytes == sum(real.host_bytes_by_kind().values())


def test_the_leanest_step_is_the_one_that_the_engine_predicts() -> None:
    settings = {"kept_layers": 0, "compile_layers": False}
    model = tiny_model(**SHAPE).train()
    ids = torch.zeros((4, 64), dtype=torch.long)
    real = attach(model, **settings)
    real.device_plan.follow(model, {"input_ids": ids, "labels": ids})
    assert forecaster(**settings).least_gpu_bytes(4, 64) == real.device_plan.current.predicted_bytes


def test_no_parameter_has_memory_however_large_the_model() -> None:
    model = meta_model(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)
    found = Forecaster(model, MegatrainConfig(), machine_with(MACHINE, 80 * GIB, 2000 * GIB))
    assert found.parameters > 5e10
    assert 13.9 * found.parameters < found.plan.store_bytes < 14.1 * found.parameters
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_nothing_that_is_placed_moves() -> None:
    found = forecaster().forecast(2, 64)
    assert found.candidate.placement.on_device
    assert found.fits


# ---------------------------------------------------------------- step profiles


def test_every_call_of_an_profile_has_a_profile_with_times() -> None:
    step_profile, _ = forecaster().fastest(2, 64)
    assert {event.kind for event in step_profile.events} == set(step_profile.profiles)
    assert all(profile.forward_seconds and profile.backward_seconds for profile in step_profile.profiles.values())
    assert step_profile.outside_seconds
    assert step_profile.outside_seconds > 0


def test_pieces_of_a_batch_take_less_memory_and_no_less_time() -> None:
    whole, pieces = forecaster(), forecaster(micro_batch_size=2)
    (of_whole,), (of_pieces,) = (list(found.fastest(16, 256)[0].profiles.values()) for found in (whole, pieces))
    assert of_pieces.pieces == 8
    assert of_pieces.recomputed_bytes < 0.5 * of_whole.recomputed_bytes
    assert of_pieces.forward_seconds == pytest.approx(of_whole.forward_seconds, rel=0.3)
    assert of_pieces.forward_seconds >= of_whole.forward_seconds  # weights are read for each piece


@pytest.mark.parametrize(
    "settings", [{"host_gradients": "passing"}, pytest.param({"step_schedule": "backward"}, marks=pytest.mark.long)]
)
def test_a_step_in_backward_hides_under_more_than_one_after_it(settings: dict[str, str]) -> None:
    slow_host = dataclasses.replace(MACHINE, host_step_parameters=2e7)
    seconds = [
        Forecaster(meta_model(), MegatrainConfig.from_mapping(nested({**STREAMED, **some})), machine_with(slow_host))
        .forecast(8, 256)
        .seconds
        for some in ({}, settings)
    ]
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize("length", [128, pytest.param(96, marks=pytest.mark.long)])
def test_sequences_of_a_batch_run_by_tiles_together(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(forecast_module, "AUTO_TILE_TOKENS", 256)
    monkeypatch.setattr(step_ways, "AUTO_TILE_TOKENS", 256)
    found = forecaster(compile_layers=False)
    whole = found._step_profile(64, length)
    least_of_whole = found.plan.fixed_bytes(whole) + found.plan.search_for(whole).leanest().peak_bytes
    assert found.least_gpu_bytes(64, length) < least_of_whole


def test_accumulation_does_several_batches_before_a_step() -> None:
    settings = MegatrainConfig()
    once, four = (Forecaster(meta_model(), settings, machine_with(MACHINE), count).forecast(2, 64) for count in (1, 4))
    assert four.tokens == 4 * once.tokens
    assert once.seconds < four.seconds < 4 * once.seconds + 1e-9
    assert four.host_bytes > once.host_bytes


def of_experts(records_routing: bool, **settings: object) -> Forecaster:
    settings_of = MegatrainConfig.from_mapping(nested(settings))
    return Forecaster(meta_experts(records_routing), settings_of, machine_with(MACHINE))


def layer_of_experts(batch: int, records_routing: bool = True, **settings: object) -> LayerProfile:
    (profile,) = of_experts(records_routing, **settings)._step_profile(batch, 64).profiles.values()
    return profile


@pytest.mark.parametrize("known", [True, False])
def test_a_layer_whose_router_is_recorded_is_estimated_compiled_if_the_hook_is_known(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:  # as one of a later transformers that has another name
        monkeypatch.setattr(output_recorder, "captures_inside", lambda module: None)
    wanted, not_wanted = (layer_of_experts(2, compile_layers=compiles) for compiles in (True, False))
    # transformers' hook, which records the router's logits for the auxiliary loss, is inside the layer.
    assert (wanted.backward_seconds < not_wanted.backward_seconds) is known
    assert (wanted.recomputed_bytes == not_wanted.recomputed_bytes) is not known


# ---------------------------------------------------------------- layers


SAVED = SavedInForward(operand_bytes=0, score_bytes=0, output_bytes=0, costs=OpCosts())


def counted(batch: int = 2, length: int = 128, **shape: int) -> tuple[LayerProfile, SavedInForward]:
    """Of a layer, by a run without data."""
    found: list[tuple[LayerProfile, SavedInForward]] = []
    model = meta_model(**shape)
    engine = MetaEngine(model, MegatrainConfig(), machine_with(MACHINE))
    ids = torch.zeros((batch, length), dtype=torch.long)

    def note(layer: object, profile: LayerProfile, saved: SavedInForward) -> LayerProfile:
        found.append((profile, saved))
        return profile

    with standing_for_a_gpu():
        profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, torch.device("cpu"), note)
    return found[0]


def test_products_and_causal_attention_are_counted_to_the_last() -> None:
    profile, _ = counted()
    layer = meta_model().get_submodule("model.layers.0")
    matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() == 2)
    # Two products of all pairs of tokens, half of them: 2 sequences, hidden size 128.
    attention_flops = 0.5 * 2 * 2 * 2 * 128 * 128 * 128
    assert profile.forward.attention_flops == profile.attention.attention_flops == attention_flops
    assert profile.backward.attention_flops == 2.5 * attention_flops
    assert profile.forward.flops - attention_flops == 2 * 2 * 128 * matrices
    assert profile.backward.flops - 2.5 * attention_flops == 2 * 2 * 2 * 128 * matrices


def test_a_recompute_is_counted_without_the_last_product() -> None:
    profile, saved = counted()
    last = meta_model().get_submodule("model.layers.0.mlp.down_proj").weight.numel()  # type: ignore[union-attr, operator]
    assert profile.forward.flops - saved.costs.flops == 2 * 2 * 128 * last
    assert saved.costs.attention_flops == profile.forward.attention_flops
    assert 0 < saved.costs.traffic_bytes < profile.forward.traffic_bytes


def test_a_layer_is_estimated_to_keep_what_a_compiled_one_saves() -> None:
    profile, saved = counted()
    kept_bytes = with_times(profile, saved, True, MACHINE).kept_bytes
    model = tiny_model(**SHAPE).to(torch.bfloat16).train()
    layer = model.get_submodule("model.layers.0")
    hidden = torch.randn(2, 128, 128, dtype=torch.bfloat16, requires_grad=True)
    rotary = (torch.randn(1, 128, 32, dtype=torch.bfloat16),) * 2
    known = {tensor.untyped_storage().data_ptr() for tensor in [hidden, *rotary, *layer.parameters()]}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        compiled(hidden, position_embeddings=rotary, attention_mask=None)
    saved_bytes = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in known)
    # That backend's decompositions are others for a few small things.
    assert kept_bytes == pytest.approx(saved_bytes, rel=0.15)


def test_scores_that_a_product_reads_as_softmax_made_them_are_kept_twice() -> None:
    profile, saved = counted()
    plain, of_scores = (
        with_times(profile, dataclasses.replace(saved, score_bytes=score_bytes), True, MACHINE) for score_bytes in (0, MIB)
    )
    assert of_scores.kept_bytes == plain.kept_bytes + MIB
    assert of_scores.kept_backward_bytes == plain.kept_backward_bytes + MIB
    assert of_scores.recomputed_bytes == plain.recomputed_bytes + 2 * MIB


def test_seconds_are_those_of_products_attention_and_bytes() -> None:
    costs = OpCosts(flops=7e14, traffic_bytes=4e12, attention_flops=1e14)
    profile = dataclasses.replace(counted()[0], forward=costs)
    of_flops = 6 / 7 / PRODUCTS + 1 / 7 / ATTENTION
    for compiles, of_bytes in ((True, FUSED), (False, 1 / SINGLE)):
        assert with_times(profile, SAVED, compiles, MACHINE).forward_seconds == pytest.approx(of_flops + of_bytes)


def test_costs_grow_with_the_batch_and_attention_with_the_square_of_the_length() -> None:
    (one, _), (two, _), (long, _) = (counted(batch, length) for batch, length in ((1, 64), (2, 64), (1, 128)))
    assert two.forward.attention_flops == 2 * one.forward.attention_flops
    assert long.forward.attention_flops == 4 * one.forward.attention_flops
    assert one.forward.traffic_bytes < two.forward.traffic_bytes < 2.1 * one.forward.traffic_bytes


# ---------------------------------------------------------------- machines


def test_a_known_gpu_is_found_however_it_is_written() -> None:
    def found(name: str) -> str:
        return describe_machine(machine_options(gpu=name), MegatrainConfig()).gpu

    for name in ("H200", "h200", "NVIDIA H200"):
        assert found(name) == "H200"
    for name in ("RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090"):
        assert found(name) == "RTX4090"
    assert found("A100 80GB") == found("A100") == "A100-80"
    with pytest.raises(ConfigError, match=r"known are .*GH200"):
        found("H300")


def test_every_known_gpu_is_a_machine_that_is_slower_than_its_data_sheet() -> None:
    for gpu in KNOWN_GPUS:
        found = describe_machine(machine_options(gpu=gpu.name), MegatrainConfig())
        assert 0.5 * gpu.dense_flops < found.machine.device_flops < gpu.dense_flops
        assert found.machine.h2d_bytes < gpu.link_bytes
        memory_gib = gpu.memory_gib / (4 if gpu.shares_memory else 1)
        assert 0.8 * memory_gib * GIB < found.gpu_bytes < 0.9 * memory_gib * GIB
        assert (found.host_bytes is None) is not gpu.shares_memory


def test_what_the_options_say_overrides_the_table() -> None:
    options = machine_options(
        gpu="H200", gpu_memory_bytes=40 * GIB, host_memory_bytes=7 * GIB, link_bytes=1e9, dense_flops=2e12, device_bytes=3e9
    )
    options = machine_options(options, host_step_parameters=4e6)
    found = describe_machine(options, MegatrainConfig())
    share = machine_description.STEP_SHARE_BESIDE_COPIES
    assert found.machine == Machine(1e9, 1e9, 4e6, 3e9, 2e12, 0.010, step_share_beside_copies=share)
    assert found.gpu_total_bytes == 40 * GIB
    assert found.host_bytes == 7 * GIB
    limited = describe_machine(options, MegatrainConfig(gpu_memory_gib=5.0, host_memory_gib=9.0))
    assert (limited.gpu_bytes, limited.host_bytes) == (5 * GIB, 7 * GIB)


def test_gpu_and_host_share_one_memory_where_a_machine_has_only_that() -> None:
    shared = describe_machine(machine_options(gpu="GB10"), MegatrainConfig())
    assert shared.host_bytes == pytest.approx(3 * shared.gpu_total_bytes)
    divided = machine_options(gpu="GB10", gpu_memory_bytes=40 * GIB)
    assert describe_machine(divided, MegatrainConfig()).host_bytes == int(119.6 * GIB) - 40 * GIB
    with pytest.raises(ConfigError, match=r"119.6 GiB that GB10 has for both; lower one"):
        describe_machine(machine_options(divided, host_memory_bytes=80 * GIB), MegatrainConfig())


def test_an_unknown_gpu_must_be_described_whole() -> None:
    with pytest.raises(ConfigError, match=r"--gpu-memory, --gpu-bandwidth, --link"):
        describe_machine(machine_options(dense_flops=1e14), MegatrainConfig())
    whole = machine_options(dense_flops=1e14, gpu_memory_bytes=GIB, device_bytes=1e12, link_bytes=2e10)
    speeds = describe_machine(whole, MegatrainConfig()).machine
    assert (speeds.device_flops, speeds.device_bytes, speeds.h2d_bytes) == (1e14, 1e12, 2e10)


def test_a_short_products_speed_is_not_taken_for_what_a_gpu_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Machine(5e10, 5e10, 7e9, 3.8e12, 794e12, 0.010)
    monkeypatch.setattr(machine_description, "measured_machine", lambda *_: measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (130 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    found = describe_machine(machine_options(), MegatrainConfig())
    assert found.machine == dataclasses.replace(measured, device_flops=716e12)
    assert found.notes == ["speeds that no option names are as measured on this machine"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 4090")
    unknown = describe_machine(machine_options(), MegatrainConfig())
    assert unknown.machine == measured, "no training was measured on that one"
    with pytest.raises(ConfigError, match=r"--cores is of another host.*--host-step"):
        describe_machine(machine_options(cores=8), MegatrainConfig())
    larger = describe_machine(machine_options(gpu_memory_bytes=200 * GIB), MegatrainConfig())
    assert (larger.gpu_total_bytes, larger.gpu_bytes) == (200 * GIB, int(0.9 * 200 * GIB))


def test_what_measuring_left_in_the_allocator_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_description, "measured_machine", lambda *_: Machine(5e10, 5e10, 7e9, 3.8e12, 7e14, 0.010))
    memory = (("mem_get_info", (70 * GIB, 80 * GIB)), ("memory_reserved", 2 * GIB), ("memory_allocated", GIB))
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_name", "NVIDIA H200"), *memory):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert describe_machine(machine_options(), MegatrainConfig()).gpu_bytes == int(0.9 * 71 * GIB)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to measure")
def test_without_a_gpu_one_must_be_described() -> None:
    with pytest.raises(ConfigError, match="--gpu H200"):
        describe_machine(machine_options(), MegatrainConfig())


def test_the_hosts_step_is_bound_by_threads_and_then_by_memory() -> None:
    assert host_step_parameters(8, 1e12) == pytest.approx(0.5 * host_step_parameters(14, 1e12))
    assert host_step_parameters(1, 1e12) > 0
    assert host_step_parameters(4, 1e12) == host_step_parameters(6, 1e12), "few cores all work, as in training"
    assert host_step_parameters(1000, 26e9) == pytest.approx(1e9)


# ---------------------------------------------------------------- limits and arguments


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("budget", [0, 9, 10, 11, 100, 1000, 12345, 10**9])
def test_the_largest_that_fits_is_found(power: int, budget: int) -> None:
    asked: list[int] = []

    def needs(count: int) -> int:
        asked.append(count)
        return 3 + 7 * count**power

    found = largest(needs, budget, 4000)
    assert found == max((count for count in range(1, 4001) if needs(count) <= budget), default=0)


@pytest.mark.parametrize("power", [1, 2])
def test_few_are_tried_before_the_largest_is_found(power: int) -> None:
    asked: list[int] = []

    def needs(count: int) -> int:
        asked.append(count)
        return 1000 + 7 * count**power

    found = largest(needs, 1000 + 7 * 3000**power, 1 << 20, tolerance=0.02)
    assert 0.98 * 3000 <= found <= 3000
    assert len(asked) <= (6 if power == 1 else 40)


@pytest.mark.parametrize(
    ("text", "size"), [("1.5TiB", 1536 * GIB), ("24", 24 * GIB), ("80GB", 80 * 10**9), ("512 MiB", GIB // 2)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "12 parsecs", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="size"):
        parse_size(text)


def test_the_search_is_the_plans_own() -> None:
    found = forecaster()
    step_profile, _ = found.fastest(2, 64)
    budget = found.plan.budget.whole_bytes() - found.plan.fixed_bytes(step_profile)
    search = PlacementSearch(
        step_profile,
        found.plan.model_sizes(),
        MACHINE,
        budget,
        host_budget_bytes=found.plan._host_budget_bytes(),
        fixed=found.plan._fixed_counts(),
    )
    assert search.best() == found.forecast(2, 64).candidate
