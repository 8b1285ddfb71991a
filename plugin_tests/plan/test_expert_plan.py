"""Which experts stream in parts, what the parts take, and what can't be cut."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from engine_runs import attach
from flat_settings import nested
from machine_options import machine_with
from part_models import EXPERTS, tiny_experts
from peft import LoraConfig, get_peft_model
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine
from megatrain_accelerate.errors import ConfigError, StateError, UnsupportedError
from megatrain_accelerate.estimate.forecast import Forecaster
from megatrain_accelerate.gradients import offload as grad_offload
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan import layer_discovery
from megatrain_accelerate.plan.device_plan import LIBRARY_WORKSPACE_BYTES
from megatrain_accelerate.plan.layer_discovery import SLOTS_SHARE
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.placement import Counts, Model, UnitSizes
from megatrain_accelerate.plan.step_memory import LiveBytes, OpCosts
from megatrain_accelerate.plan.step_profile import Event, LayerProfile, StepProfile
from megatrain_accelerate.plan.step_simulation import simulate_step
from megatrain_accelerate.store.layout import expert_ranges
from megatrain_accelerate.transfer import activation_offload
from megatrain_accelerate.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("profiled_once")

MACHINE = Machine(h2d_bytes=5e10, d2h_bytes=5e10, host_step_parameters=6e9, device_bytes=4e12, device_flops=7e14)


def test_ranges_cover_all_experts_and_differ_by_one_at_most() -> None:
    for count in range(2, 12):
        for parts in range(1, count + 1):
            ranges = expert_ranges(count, parts)
            assert [expert for at in ranges for expert in range(at.first, at.last)] == list(range(count))
            sizes = [at.experts for at in ranges]
            assert max(sizes) - min(sizes) <= 1
            assert sizes[0] == max(sizes)


def test_a_part_lies_in_a_slot_as_in_the_store() -> None:
    model = tiny_experts()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = attach(model, bf16=False, expert_parts=4)
    for experts in engine.runtime.experts:
        for part in experts.parts:
            with engine.runtime.expert_streams.fetched(part, (), part) as views:
                for state, view in zip(experts.unit.states, views, strict=True):
                    whole = weights[f"{experts.name}.{state.name}"]
                    assert torch.equal(view, part.experts.of(whole))
    engine.close()


def test_parameters_keep_names_shapes_and_identity() -> None:
    model = tiny_experts()
    before = dict(model.named_parameters())
    state_dict = {name: value.clone() for name, value in model.state_dict().items()}
    engine = attach(model, bf16=False, expert_parts=3)
    assert dict(model.named_parameters()).keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert parameter.shape == state_dict[name].shape
    for name, value in model.state_dict().items():
        assert torch.equal(value, state_dict[name]), name
    model.load_state_dict({name: 2 * value for name, value in state_dict.items()})
    ids = token_batches(1)[0]
    loss = model(input_ids=ids, labels=ids).loss.item()
    engine.close()
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("parts", [2, 3, EXPERTS])
def test_slots_shrink_to_one_part(parts: int) -> None:
    engine = attach(tiny_experts(), expert_parts=parts, slots=3)
    held = engine.device_plan.budget.held_bytes_by_kind()
    rest, experts = engine.runtime.layers[0].unit.layout, engine.runtime.experts[0]
    of_part = experts.parts[0].unit.layout.weight_bytes
    engine.close()
    assert of_part == experts.unit.layout.weight_bytes // parts
    assert held["expert_slots"] == 3 * of_part
    assert held["slots"] == 3 * rest.weight_bytes
    assert held["gradient_slots"] == 2 * max(of_part, rest.gradient_bytes)


def test_the_predicted_peak_is_what_is_alive() -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}
    whole, in_parts = (peak_as_predicted(tiny_experts("grouped_mm", **sizes), expert_parts=parts) for parts in (1, 4))
    assert in_parts < 0.8 * whole


def test_where_inputs_leave_the_results_of_experts_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    model = functools.partial(tiny_experts, "grouped_mm", hidden_size=128, num_hidden_layers=8)
    stay, leave = (peak_as_predicted(model(), expert_parts=3, offloaded_inputs=offload) for offload in (False, True))
    # Inputs and results, of as many layers as aren't at work.
    assert stay - leave > 6 * 8 * 128 * 128 * (2 + 2)


def peak_as_predicted(model: nn.Module, **settings: Any) -> int:
    """The most that a step of 8 x 128 tokens has alive besides what the engine holds, after a look at the prediction."""
    engine = attach(model, tiled_loss=False, **settings)
    ids = token_batches(1, batch=8, length=128)[0]
    engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
    # Allocates gradients, and the pool of inputs that leave: for many tokens only where there are any.
    few = ids if settings.get("offloaded_inputs") else ids[:1, :16]
    model(input_ids=few, labels=few).loss.backward()
    predicted = (
        engine.device_plan.current.predicted_bytes
        - LIBRARY_WORKSPACE_BYTES
        - sum(engine.device_plan.budget.held_bytes_by_kind().values())
    )
    model.zero_grad()
    with LiveBytes(_present(model, engine)) as live:
        model(input_ids=ids, labels=ids).loss.backward()
    engine.close()
    # The routing of a step differs from the supposed one, and by it what a part takes.
    assert predicted == pytest.approx(live.peak_bytes, rel=0.05)
    return live.peak_bytes


def _present(model: nn.Module, engine: Engine) -> list[torch.Tensor]:
    """What was there before the step, on the device and, in the CPU's stand-in, on the host."""
    runtime = engine.runtime
    parts = runtime.expert_streams.prefetcher
    slots = [*runtime.prefetcher.slots, *(parts.slots if parts is not None else [])]
    found = [slot.buffer for slot in [*slots, *runtime.offloader.slots]] + [slot.norms for slot in runtime.offloader.slots]
    for unit in runtime.units:
        found += [unit.weights, *([unit.gradients] if unit.gradients is not None else [])]
        found += [t for state in unit.states for t in (state.weight, state.gradient, state.residual) if t is not None]
    return [*model.parameters(), *found, *runtime.activations.pool.buffers, runtime.norms.norms]


def test_a_plan_cuts_experts_only_where_whole_layers_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_discovery, "SMALLEST_PART_BYTES", 1)
    weight_bytes = max(2 * sum(p.numel() for p in layer.parameters()) for layer in tiny_experts().model.layers)
    parts = []
    for times in (4.1, 3.9, 1.7, 0.1):
        engine = attach(tiny_experts(), gpu_memory_gib=times * weight_bytes / SLOTS_SHARE / GIB)
        parts.append({len(experts.parts) for experts in engine.runtime.experts})
        engine.close()
    # Two slots for weights and two for gradients, of whole layers or of parts.
    assert parts == [set(), {2}, {3}, {EXPERTS}]


def test_memory_that_the_allocator_keeps_counts_as_free_for_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_discovery, "SMALLEST_PART_BYTES", 1)
    for name, value in (("mem_get_info", (0, 80 * GIB)), ("memory_reserved", 3 * GIB), ("memory_allocated", GIB)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    rooms: list[int] = []
    monkeypatch.setattr(layer_discovery, "_chosen_parts", lambda *arguments: rooms.append(arguments[-1]) or 1)
    found = layer_discovery.discover_layers(tiny_experts())
    layer_discovery.split_experts(found, MegatrainConfig(), {}, torch.device("cuda"), True, None)
    assert rooms == [int(0.9 * 2 * GIB)]


def parts_by_plan(model: nn.Module, gpu_memory_gib: float = 1e-6, **settings: Any) -> set[int]:
    engine = attach(model, gpu_memory_gib=gpu_memory_gib, **settings)
    found = {len(experts.parts) for experts in engine.runtime.experts}
    engine.close()
    return found


@pytest.mark.parametrize(("experts_in_part", "parts"), [(0.9, EXPERTS), (1.7, 3), (2.1, 2), (3.1, None)])
def test_no_parts_are_smaller_on_average_than_the_smallest_worth_a_copy(
    experts_in_part: float, parts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_experts()
    of_one = 2 * sum(p.numel() for p in model.model.layers[0].mlp.experts.parameters()) // EXPERTS
    monkeypatch.setattr(layer_discovery, "SMALLEST_PART_BYTES", int(experts_in_part * of_one))
    assert parts_by_plan(model) == ({parts} if parts else set())


@pytest.mark.parametrize(("head_dim", "parts"), [(16, EXPERTS), (512, 2), (2048, None)])
def test_experts_beside_a_large_rest_are_cut_no_finer_than_it_helps(
    head_dim: int, parts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_discovery, "SMALLEST_PART_BYTES", 1)
    # Attention's projections are 1.3, 11 and 43 times as large as the experts.
    assert parts_by_plan(tiny_experts(head_dim=head_dim)) == ({parts} if parts else set())


def test_evaluation_weights_that_are_to_be_resident_leave_experts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_discovery, "SMALLEST_PART_BYTES", 1)
    assert parts_by_plan(tiny_experts(), evaluation_weights="auto")
    assert not parts_by_plan(tiny_experts(), evaluation_weights="resident")


def test_an_engine_for_evaluation_needs_no_room_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_discovery, "SMALLEST_PART_BYTES", 1)
    weight_bytes = max(2 * sum(p.numel() for p in layer.parameters()) for layer in tiny_experts().model.layers)
    room_for_three = 3 * weight_bytes / SLOTS_SHARE / GIB
    assert parts_by_plan(tiny_experts(), room_for_three)
    assert not parts_by_plan(tiny_experts(), room_for_three, training=False)


def test_a_log_line_says_that_experts_in_parts_are_not_resident_in_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_experts()
    engine = attach(model, expert_parts=2, evaluation_weights="resident")
    with torch.no_grad():
        for _ in range(2):
            model(input_ids=token_batches(1)[0])
    engine.close()
    assert caplog.text.count("the experts of 3 layers") == 1


@pytest.mark.parametrize(
    ("settings", "names"),
    [({"expert_parts": EXPERTS + 1}, "6 experts"), ({"expert_parts": 2, "device_layers": 1}, "device_layers")],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        attach(tiny_experts(), **settings)


@pytest.mark.parametrize("value", [0, -1, "two", 1.5, True])
def test_a_number_of_parts_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="expert_parts"):
        MegatrainConfig.from_mapping(nested({"expert_parts": value}))


def test_a_log_line_says_that_layers_with_parts_are_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_experts()
    engine = attach(model, expert_parts=2, compile_layers=True)
    assert "experts stream in parts run uncompiled" in caplog.text
    ids = token_batches(1)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    assert engine.runtime.compiled.compilations == 0
    engine.close()


def test_gradients_that_pass_cannot_be_added_up_by_pieces() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size"):
        MegatrainConfig(expert_parts=2, micro_batch_size=1, host_gradients="passing")


def test_a_model_without_experts_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="expert_parts is 2, and the model has no experts"):
        attach(tiny_model(), expert_parts=2)


def _with_buffer(experts: nn.Module) -> None:
    experts.register_buffer("scale", torch.ones(1))


def _with_dropout(experts: nn.Module) -> None:
    experts.dropout = nn.Dropout(0.1)


def _with_another_shape(experts: nn.Module) -> None:
    experts.shared = nn.Parameter(torch.ones(EXPERTS + 1, 2))


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_with_buffer, "buffers"), (_with_dropout, "dropout"), (_with_another_shape, "first dimension")],
    ids=["buffer", "dropout", "shape"],
)
def test_experts_that_cannot_be_cut_are_refused_with_the_reason(change: Any, reason: str) -> None:
    model = tiny_experts()
    for layer in model.model.layers:
        change(layer.mlp.experts)
    with pytest.raises(UnsupportedError, match=reason):
        attach(model, expert_parts=2)


def test_parts_are_refused_where_the_experts_of_one_layer_cannot_be_cut() -> None:
    model = tiny_experts()
    _with_buffer(model.model.layers[1].mlp.experts)
    with pytest.raises(UnsupportedError, match=r"experts of 2 layers .*layers\.1\.mlp\.experts: it has buffers"):
        attach(model, expert_parts=2)


def test_a_step_between_forward_and_backward_is_refused() -> None:
    model = tiny_experts()
    engine = attach(model, expert_parts=2)
    optimizer = torch.optim.AdamW(model.model.layers[0].mlp.experts.parameters())
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    ids = token_batches(1)[0]
    first, second = (model(input_ids=ids, labels=ids).loss for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"experts model\.layers\.0\.mlp\.experts changed"):
        second.backward()
    engine.close()


def test_a_part_of_a_parameter_is_counted_in_elements_of_its_experts() -> None:
    engine = attach(tiny_experts(), expert_parts=4)
    unit = engine.runtime.experts[0].unit
    for entry in unit.layout.entries:
        bounds = [at.elements(entry) for at in expert_ranges(EXPERTS, 4)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == entry.spec.numel
        assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    engine.close()


def test_experts_under_an_adapter_stay_whole_and_are_refused_by_name() -> None:
    model = get_peft_model(tiny_experts(), LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj"]))
    with pytest.raises(UnsupportedError, match="target_parameters"):
        attach(model, expert_parts=2)


def test_adapters_on_attention_train_beside_frozen_experts_in_parts() -> None:
    losses = []
    for parts in (1, 3):
        model = get_peft_model(tiny_experts(), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        engine = attach(model, bf16=False, expert_parts=parts)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        adopt_optimizer(optimizer, engine.runtime, "deferred")
        losses.append([])
        for ids in token_batches(4):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        of_adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad) // len(engine.runtime.layers)
        assert engine.device_plan.budget.held_bytes_by_kind()["gradient_slots"] == 2 * of_adapters
        engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_model_without_weights_gets_them_part_by_part() -> None:
    with torch.device("meta"):
        model = tiny_experts()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    engine = attach(model, bf16=False, expert_parts=3)
    ids = token_batches(1)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()), name
        assert bool(parameter.grad.isfinite().all()), name
    experts = model.model.layers[0].mlp.experts.down_proj.detach()
    assert float(experts.std()) == pytest.approx(model.config.initializer_range, rel=0.1)
    engine.close()


def forecaster(gpu_bytes: int, **settings: Any) -> Forecaster:
    with torch.device("meta"):
        model = tiny_experts("grouped_mm", hidden_size=512, moe_intermediate_size=1024, num_experts=16).to(torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    fixed = {"kept_layers": 0, "device_layers": 0, "offloaded_layers": 0, "token_tile": 0}
    config = MegatrainConfig.from_mapping(nested({**fixed, "compile_layers": False, **settings}))
    return Forecaster(model, config, machine_with(MACHINE, gpu_bytes, 8 * GIB))


def test_an_estimate_plans_with_parts_where_a_plan_would_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_discovery, "SMALLEST_PART_BYTES", 16 * MIB)
    small, large = forecaster(GIB // 2), forecaster(16 * GIB)
    assert {len(experts.parts) for experts in small.engine.runtime.experts} == {2}
    assert large.engine.runtime.experts == []
    # Both hold the same on the host, and the slots of whole layers don't fit the smaller GPU.
    assert small.host_store_bytes == pytest.approx(large.host_store_bytes, rel=0.001)
    assert small.least_gpu_bytes(1, 256) < 0.7 * large.least_gpu_bytes(1, 256)


def test_an_estimate_cuts_nothing_where_the_engine_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_discovery, "SMALLEST_PART_BYTES", 16 * MIB)
    assert forecaster(GIB // 2, device_layers=1).engine.runtime.experts == []


def moved_bytes(model: nn.Module, engine: Engine) -> tuple[int, int, StepProfile, Model]:
    """What the third step moves to the device and back, and what a plan knows of it."""
    optimizer = torch.optim.AdamW(model.parameters())
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    counters, moved = engine.runtime.meter.counters, [(0, 0)]
    batches = token_batches(3, batch=6)
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.drain()
        moved.append((counters.h2d_bytes, counters.d2h_bytes))
    h2d, d2h = (after - before for after, before in zip(moved[-1], moved[-2], strict=True))
    plan = engine.device_plan
    return h2d, d2h, plan.foresee(model, {"input_ids": batches[0], "labels": batches[0]}), plan.model_sizes()


def test_parts_that_are_computed_again_with_their_layer_are_fetched_a_third_time() -> None:
    model = tiny_experts("grouped_mm")
    engine = attach(model, expert_parts=4, offloaded_inputs=True)  # which stay, since they are small
    h2d, _, step_profile, sizes = moved_bytes(model, engine)
    of_part = engine.runtime.experts[0].parts[0].unit.layout.weight_bytes
    engine.close()
    again, once = (
        simulate_step(step_profile, sizes, Counts(inputs_offloaded=count).placement(3), MACHINE).h2d * MACHINE.h2d_bytes
        for count in (3, 0)
    )
    # In each layer, what the slots hold at the turn isn't fetched.
    assert again - once >= 3 * 2 * of_part
    # The engine expects the backward of the layer where its experts are computed again, and another layer behind them.
    assert again <= h2d <= again + 3 * 2 * of_part


@pytest.mark.parametrize("accumulation_dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_a_simulated_step_in_pieces_moves_what_the_engine_moves(accumulation_dtype: str) -> None:
    model = tiny_experts("grouped_mm")
    engine = attach(model, expert_parts=4, micro_batch_size=2, accumulation_dtype=accumulation_dtype)
    h2d, d2h, step_profile, sizes = moved_bytes(model, engine)
    in_pieces = simulate_step(step_profile, sizes, Placement(), MACHINE)
    whole_profiles = {kind: dataclasses.replace(profile, pieces=1) for kind, profile in step_profile.profiles.items()}
    whole = simulate_step(dataclasses.replace(step_profile, profiles=whole_profiles), sizes, Placement(), MACHINE)
    of_part = engine.runtime.experts[0].parts[0].unit.layout.weight_bytes
    engine.close()
    # A part may be fetched for nothing, where the engine takes the first piece for the whole batch.
    assert in_pieces.h2d * MACHINE.h2d_bytes == pytest.approx(h2d, abs=1.1 * of_part)
    assert in_pieces.d2h * MACHINE.d2h_bytes == pytest.approx(d2h, rel=1e-3)  # the padding of resident groups stays
    # Two of three pieces are added to those before them.
    added = 2 * sum(p.numel() for layer in model.model.layers for p in layer.mlp.experts.parameters())
    of_one = 10 if accumulation_dtype == "fp32" else 6
    assert (in_pieces.host_step - whole.host_step) * MACHINE.host_step_traffic == pytest.approx(added * of_one, rel=1e-6)


def test_parts_that_are_stepped_in_backward_are_stepped_when_the_last_has_come() -> None:
    """A second for each part's gradients on the link, and one for its step; nothing else takes time."""
    nothing, part = UnitSizes(0, 0, 0, 0), UnitSizes(weight_bytes=1, gradient_bytes=1, parameters=1, state_bytes=6)
    profile = LayerProfile(OpCosts(), OpCosts(), 0, 0, 0, 0, 0, 0, 0, (True,))
    events = tuple(Event(is_backward, 0, "layer", 0, 0, OpCosts()) for is_backward in (False, True))
    sizes = Model([nothing], [], [], 2, 0, 0, True, 1, parts={0: [part] * 4})
    machine = Machine(h2d_bytes=1e30, d2h_bytes=1, host_step_parameters=1, device_bytes=1e30, device_flops=1e30)
    time = simulate_step(StepProfile(events, 0, OpCosts(), {"layer": profile}), sizes, Placement(), machine)
    assert time.seconds == pytest.approx(4 + 4)


def waiting_bytes(model: nn.Module, **settings: Any) -> int:
    """What a second forward that waits for its backward is planned to hold."""
    engine = attach(model, **settings)
    ids = token_batches(1, batch=1, length=4)[0]
    plan = engine.device_plan
    step_profile = plan.foresee(model, {"input_ids": ids, "labels": ids})
    one = plan.fixed_bytes(step_profile)
    # The second begins before the backward of the first.
    losses = [model(input_ids=ids, labels=ids).loss for _ in range(2)]
    two = plan.fixed_bytes(step_profile)
    del losses
    engine.close()
    return two - one


def test_forwards_that_wait_for_their_backward_hold_no_gradient_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for slots in (1, 4):
        monkeypatch.setattr(grad_offload, "GRADIENT_SLOTS", slots)
        found.append(waiting_bytes(tiny_experts("grouped_mm"), expert_parts=3))
    assert found[0] == found[1] > 0


def test_forwards_that_wait_for_their_backward_hold_no_gradients_of_other_layers() -> None:
    few, many = (waiting_bytes(tiny_model(num_hidden_layers=layers)) for layers in (2, 8))
    # Six more layers' inputs, and no more than one layer's gradients at once.
    assert few <= many < 1.1 * few


@pytest.mark.parametrize("schedule", ["deferred", pytest.param("backward", marks=pytest.mark.long)])
def test_a_step_of_parts_moves_what_whole_layers_move_and_waits_less_for_it(schedule: str) -> None:
    found = []
    for count in (1, 4):
        of_count = forecaster(GIB, expert_parts=count, step_schedule=schedule)
        runtime, forecast = of_count.engine.runtime, of_count.forecast(1, 256)
        # What the last layers and parts left in the slots isn't fetched again in backward.
        last = [layer.unit.layout.weight_bytes for layer in runtime.layers][-2:]
        last += [part.unit.layout.weight_bytes for part in runtime.experts[-1].parts[-2:]] if runtime.experts else []
        found.append((forecast.candidate.time, forecast.candidate.time.h2d + sum(last) / MACHINE.h2d_bytes))
    (whole, whole_h2d), (parts, parts_h2d) = found
    assert parts_h2d == pytest.approx(whole_h2d, rel=0.001)
    assert parts.d2h == pytest.approx(whole.d2h, rel=0.001)
    assert parts.host_step == pytest.approx(whole.host_step, rel=0.001)
    # The host bounds both, and the first part is fetched when it alone is stepped.
    assert parts.host_step < parts.seconds < whole.seconds
