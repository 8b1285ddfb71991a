"""Placements: what a simulated step takes in time and memory, and which placement is found the fastest that fits."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from megatrain_accelerate.config import PlacementSettings
from megatrain_accelerate.layers.compiled_layer import MemoryBudget
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.placement import Counts, Model, UnitSizes, fixed_counts, peak_bytes, sent_bytes
from megatrain_accelerate.plan.placement_search import Candidate, PlacementSearch
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_profile import Event, LayerProfile, StepProfile
from megatrain_accelerate.plan.step_simulation import StepTime, simulate_step

LAYERS = 10
MACHINE = Machine(h2d_bytes=100.0, d2h_bytes=100.0, host_step_parameters=100.0, device_bytes=28e6, device_flops=1e3)
PROFILE = LayerProfile(
    forward=OpCosts(),
    backward=OpCosts(),
    kept_bytes=50,
    offloaded_bytes=50,
    input_bytes=5,
    forward_bytes=10,
    kept_forward_bytes=60,
    kept_backward_bytes=40,
    recomputed_bytes=100,
    inputs_need_grad=(True,),
    forward_seconds=1.0,
    kept_forward_seconds=1.0,
    backward_seconds=2.0,
)
SLOTS = 80
LAYER = UnitSizes(weight_bytes=20, gradient_bytes=20, parameters=10, state_bytes=120)
GROUP = UnitSizes(weight_bytes=2, gradient_bytes=2, parameters=1, state_bytes=12)


def step_profile(input_bytes: int = 5, layers: int = LAYERS, **changes: float) -> StepProfile:
    profile = dataclasses.replace(PROFILE, **changes)  # type: ignore[arg-type]
    forward = [Event(False, i, "layer", input_bytes * i, input_bytes * i, OpCosts()) for i in range(layers)]
    backward = [Event(True, i, "layer", input_bytes * i, input_bytes * i, OpCosts()) for i in reversed(range(layers))]
    return StepProfile((*forward, *backward), 0, OpCosts(), {"layer": profile})


def model(**changes: object) -> Model:
    settings: dict[str, object] = {
        "layers": [LAYER] * LAYERS,
        "groups_before": [GROUP],
        "groups_after": [GROUP],
        "slots": 2,
        "slot_bytes": 40,
        "gradient_slot_bytes": 40,
        "steps_in_backward": False,
        "micro_batches": 1,
    }
    return Model(**{**settings, **changes})  # type: ignore[arg-type]


def seconds(machine: Machine = MACHINE, sizes: Model | None = None, **counts: object) -> StepTime:
    placement = Counts(**counts).placement(LAYERS)  # type: ignore[arg-type]
    return simulate_step(step_profile(), sizes or model(), placement, machine)


def test_a_recomputed_step_takes_forward_twice_and_backward_once() -> None:
    assert seconds().compute == pytest.approx(LAYERS * (1 + 1 + 2), rel=0.01)
    assert seconds(kept=4).compute == pytest.approx(LAYERS * 3 + 6, rel=0.01)


def test_a_recompute_that_was_measured_takes_its_own_time_but_for_a_layer_whose_attention_is_kept() -> None:
    step = step_profile(recompute_seconds=0.75, attention_seconds=0.125)

    def compute(**counts: object) -> float:
        return simulate_step(step, model(), Counts(**counts).placement(LAYERS), MACHINE).compute  # type: ignore[arg-type]

    assert compute() == pytest.approx(LAYERS * (1 + 0.75 + 2), rel=0.01)
    assert compute() - compute(kept=4) == pytest.approx(4 * 0.75)
    # Its attention is watched, so that it isn't compiled.
    assert compute(attention_kept=4) - compute() == pytest.approx(4 * (1 - 0.125 - 0.75))


def test_what_was_measured_outside_the_layers_replaces_what_was_estimated_until_backward_begins() -> None:
    events = [dataclasses.replace(event, costs=OpCosts(flops=1e3)) for event in step_profile().events]  # a second each
    estimated = dataclasses.replace(step_profile(), events=tuple(events))
    measured = dataclasses.replace(estimated, outside_seconds=3.5)
    placement = Counts().placement(LAYERS)
    estimated_seconds = simulate_step(estimated, model(), placement, MACHINE).compute
    # Of the 20 events those of forward and the first of backward are among the measured ones.
    assert simulate_step(measured, model(), placement, MACHINE).compute == pytest.approx(estimated_seconds - 11 + 3.5)


def test_the_launchers_own_time_makes_a_step_longer_and_no_resource_busier() -> None:
    fast_host = dataclasses.replace(MACHINE, host_step_parameters=1e9, h2d_bytes=1e9)  # nothing else to wait for
    slow = seconds(dataclasses.replace(fast_host, step_overhead=0.5))
    assert slow.seconds == pytest.approx(seconds(fast_host).seconds + 0.5)
    assert slow.compute == pytest.approx(seconds(fast_host).compute)


def test_a_step_is_never_shorter_than_its_busiest_resource_and_nearly_that_when_the_others_hide() -> None:
    bound_by = {
        "compute": MACHINE,
        "H2D": dataclasses.replace(MACHINE, h2d_bytes=2.0),
        "D2H": dataclasses.replace(MACHINE, d2h_bytes=1.0),
        "host step": dataclasses.replace(MACHINE, host_step_parameters=1.0),
    }
    for name, machine in bound_by.items():
        time = seconds(machine)
        assert time.bound_by == name
        busiest = max(time.compute, time.h2d, time.d2h, time.host_step)
        assert busiest <= time.seconds
    assert seconds().seconds <= 1.05 * seconds().compute


def test_the_link_carries_weights_twice_but_for_the_last_slots_and_gradients_once() -> None:
    time = seconds()
    groups = 2 * 2 / 100
    assert time.h2d == pytest.approx((LAYERS + LAYERS - 2) * 20 / 100 + groups)
    assert time.d2h == pytest.approx(LAYERS * 20 / 100 + groups)
    on_device = seconds(on_device=LAYERS, groups_on_device=True)
    assert (on_device.h2d, on_device.d2h, on_device.host_step) == (0.0, 0.0, 0.0)


def test_ranks_whose_host_step_is_slow_step_on_their_devices_as_far_as_there_is_memory() -> None:
    slow = dataclasses.replace(MACHINE, host_step_parameters=1.0)
    of_four = model(ranks=4, exchange_bytes=1e6)
    least = peak_bytes(step_profile(), of_four, Counts().placement(LAYERS))

    def best(more_bytes: int, sizes: Model = of_four) -> Candidate:
        found = PlacementSearch(step_profile(), sizes, slow, least + more_bytes, {"on_device": 0, "kept": 0}).best()
        assert found is not None
        return found

    enough = best(1000)
    assert len(enough.placement.states_on_device) == LAYERS
    assert enough.time.host_step == 0.0
    assert enough.time.seconds < 0.75 * best(0).time.seconds
    half = best((3 * LAYER.gradient_bytes + 5 * LAYER.stepped_bytes + 2 * GROUP.stepped_bytes) // 4)
    assert len(half.placement.states_on_device) == 5
    assert half.time.seconds < best(0).time.seconds
    assert half.peak_bytes <= least + (60 + 5 * LAYER.stepped_bytes + 2 * GROUP.stepped_bytes) // 4
    assert not best(1000, model()).placement.states_on_device, "of one process a whole layer takes little more"


def test_activations_leave_later_where_steps_on_the_devices_take_the_link() -> None:
    # Activations of a layer take the link 2.5 s, more than its forward; so do the weights of all steps together.
    machine = dataclasses.replace(MACHINE, d2h_bytes=20.0, h2d_bytes=1e6)
    of_four = model(ranks=4, exchange_bytes=1e6)

    def lost(states: int) -> float:
        with_them, without = (seconds(machine, of_four, offloaded=n, states_on_device=states) for n in (LAYERS, 0))
        return with_them.seconds - without.seconds

    assert lost(LAYERS) > lost(0) + 1.0


@pytest.mark.parametrize("more_bytes", [140, 200, 300])
def test_states_and_activations_that_leave_are_chosen_together(more_bytes: int) -> None:
    machine = dataclasses.replace(MACHINE, host_step_parameters=3.0)
    of_four = model(ranks=4, exchange_bytes=1e6)
    budget = peak_bytes(step_profile(), of_four, Counts().placement(LAYERS)) + more_bytes
    search = PlacementSearch(step_profile(), of_four, machine, budget, {"on_device": 0}, 10_000)
    found = search.best()
    assert found is not None
    counts = itertools.product(range(LAYERS + 1), repeat=3)
    every = (Counts(states_on_device=a, offloaded=b, kept=c).placement(LAYERS) for a, b, c in counts if b + c <= LAYERS)
    fastest = min(
        simulate_step(step_profile(), of_four, placement, machine).seconds for placement in every if search.fits(placement)
    )
    assert found.time.seconds <= 1.01 * fastest


def test_weights_of_states_on_the_devices_are_only_gathered() -> None:
    sizes, placement = model(ranks=4, fetch_share=0.5), Counts(states_on_device=2).placement(LAYERS)
    assert [sizes.fetch_bytes(layer, placement) for layer in (0, 2)] == [5, 10]  # a quarter of 20 bytes is there
    assert model(ranks=4).fetch_bytes(0, placement) == 20, "whole layers come from the host"
    assert dataclasses.replace(sizes, ranks=8, machines=2).fetch_bytes(0, placement) == 10


def test_what_is_stepped_on_the_devices_crosses_each_link_as_a_share() -> None:
    sizes = model(ranks=4, exchange_bytes=1e6)
    on_host, stepped = (
        simulate_step(step_profile(), sizes, Counts(states_on_device=n).placement(LAYERS), MACHINE) for n in (0, LAYERS)
    )
    assert stepped.host_step == 0.0 < on_host.host_step
    for link in ("h2d", "d2h"):  # gradients come to the states, as many weights leave; those of groups are half a byte
        assert getattr(stepped, link) - getattr(on_host, link) == pytest.approx(LAYERS * (20 // 4) / MACHINE.h2d_bytes)


def test_a_deferred_step_hides_under_forward_only_and_one_in_backward_under_both() -> None:
    slow = dataclasses.replace(MACHINE, host_step_parameters=5.0)  # 20 s of steps; 10 s of forward, 30 of backward
    deferred = seconds(slow).seconds
    in_backward = seconds(slow, model(steps_in_backward=True)).seconds
    assert deferred == pytest.approx(20 + 30, rel=0.1)
    assert in_backward == pytest.approx(40, rel=0.1)


def test_a_step_takes_as_long_as_the_memory_that_it_moves() -> None:
    bf16_moments = dataclasses.replace(LAYER, step_bytes=18)
    on_host, on_device = {}, {}
    for layer in (LAYER, bf16_moments):
        sizes = model(layers=[layer] * LAYERS, groups_before=[], groups_after=[])
        on_host[layer] = seconds(sizes=sizes).host_step
        on_device[layer] = seconds(dataclasses.replace(MACHINE, device_bytes=1e3), sizes, on_device=LAYERS).compute
    assert on_host[bf16_moments] == pytest.approx(on_host[LAYER] * 18 / 26)
    assert on_device[LAYER] - on_device[bf16_moments] == pytest.approx(LAYERS * LAYER.parameters * 8 / 1e3)


def test_offloaded_activations_use_the_link_instead_of_computing_twice() -> None:
    time = seconds(offloaded=LAYERS)
    assert time.compute == pytest.approx(LAYERS * 3, rel=0.01)
    assert time.d2h == pytest.approx(LAYERS * (20 + 50) / 100 + 4 / 100, rel=0.02)


def test_copies_of_offloaded_layers_hide_behind_those_between_them() -> None:
    # The activations of a layer take the link as long as two layers compute, forward or back.
    machine = dataclasses.replace(MACHINE, d2h_bytes=25.0, h2d_bytes=12.5, host_step_parameters=1e9)
    sizes = model(layers=[dataclasses.replace(LAYER, weight_bytes=0, gradient_bytes=0)] * LAYERS)
    spaced = Counts(offloaded=3).placement(LAYERS)
    side_by_side = Counts(offloaded=3, inputs_offloaded=LAYERS).placement(LAYERS)
    assert (spaced.offloaded, side_by_side.offloaded) == ({9, 6, 3}, {9, 8, 7})
    recomputed = simulate_step(step_profile(), sizes, Placement(), machine).seconds
    seconds_of = [simulate_step(step_profile(), sizes, placement, machine).seconds for placement in (spaced, side_by_side)]
    # What the last layer sent out is still there when backward begins.
    assert seconds_of[0] == pytest.approx(recomputed - 3 * 1.0, rel=0.01)
    assert seconds_of[1] > seconds_of[0] + 2.0


def test_fewer_layers_are_offloaded_where_copies_are_slow_beside_the_host_step() -> None:
    # The host steps as long as the forward takes; alone, the link is done with every second layer's activations in time.
    alone = dataclasses.replace(MACHINE, d2h_bytes=30.0, h2d_bytes=1e3, host_step_parameters=10.0)
    beside = dataclasses.replace(alone, d2h_share_in_step=0.4)
    every_second = [seconds(machine, offloaded=5).seconds for machine in (alone, beside)]
    assert every_second[1] > every_second[0] + 2.0
    # A link that is only slow to the device has no part in it.
    assert seconds(dataclasses.replace(alone, h2d_share_in_step=0.4), offloaded=5).seconds == pytest.approx(
        every_second[0], rel=0.01
    )
    best = [found(SLOTS + 9 * 5 + 200, machine, offloaded=None, on_device=0) for machine in (alone, beside)]
    assert best[0] is not None
    assert best[1] is not None
    assert 0 < len(best[1].placement.offloaded) < len(best[0].placement.offloaded)
    assert best[1].time.seconds < every_second[1] - 2.0


def test_the_host_steps_slower_while_activations_leave() -> None:
    alone = dataclasses.replace(MACHINE, host_step_parameters=10.0)
    beside = dataclasses.replace(alone, step_share_beside_copies=0.5)
    assert seconds(beside, offloaded=0).host_step == seconds(alone, offloaded=0).host_step
    # Activations of ten layers, 50 bytes each, take the link 5 s; the steps of ten layers and a group take 10.2 s.
    all_of_them = seconds(beside, offloaded=LAYERS).host_step / seconds(alone, offloaded=LAYERS).host_step
    assert all_of_them == pytest.approx(1 / (1 - 0.5 * 5.0 / 10.2))
    assert 1.0 < seconds(beside, offloaded=1).host_step / seconds(alone, offloaded=1).host_step < all_of_them
    slow_link = dataclasses.replace(beside, d2h_bytes=10.0)  # all of it
    assert seconds(slow_link, offloaded=LAYERS).host_step == pytest.approx(2 * seconds(alone, offloaded=0).host_step)


@pytest.mark.parametrize(("offloaded", "spacing"), [(0, 1), (1, 8), (2, 5), (3, 3), (5, 2), (6, 1), (99, 1)])
def test_offloaded_layers_are_spread_over_those_that_are_not_kept(offloaded: int, spacing: int) -> None:
    placement = Counts(kept=2, offloaded=offloaded).placement(12)
    assert placement.offload_spacing == spacing
    assert placement.offloaded == {9 - spacing * i for i in range(min(10, offloaded))}
    assert not placement.offloaded & placement.kept


def test_peak_grows_by_what_is_placed_on_the_device() -> None:
    step, sizes = step_profile(), model()

    def peak(**counts: object) -> int:
        return peak_bytes(step, sizes, Counts(**counts).placement(LAYERS))  # type: ignore[arg-type]

    assert peak() == SLOTS + 9 * 5 + 100
    assert peak(groups_on_device=True) == peak() + 2 * 10
    # The layer before it is recomputed while the kept one is gone already.
    assert peak(kept=1) == SLOTS + max(9 * 5 + 50 + 40, 8 * 5 + 100)
    # All kept: the most when the last layer's backward begins.
    assert peak(kept=LAYERS) == SLOTS + 9 * 5 + LAYERS * 50 + 40
    # Gradients of layers on the device pile up towards the end of backward, where activations have gone.
    assert peak(on_device=1) == peak() + 120
    # No slots are needed then.
    assert peak(on_device=LAYERS) == LAYERS * 120 + max(9 * 5 + 100, LAYERS * 20 - 20 + 100)


def test_kept_results_of_attention_are_there_while_the_rest_of_their_layer_runs() -> None:
    def peak(attention_kept: int) -> int:
        step = step_profile(attention_bytes=7, forward_bytes=1000)
        return peak_bytes(step, model(), Counts(attention_kept=attention_kept).placement(LAYERS))

    assert peak(0) == SLOTS + 9 * 5 + 1000
    assert peak(LAYERS) == SLOTS + 9 * 5 + LAYERS * 7 + 1000


def found(budget: int, machine: Machine = MACHINE, sizes: Model | None = None, **choices: int | None) -> Candidate | None:
    settings = {"offloaded": 0, "inputs_offloaded": 0, **choices}
    fixed = {name: count for name, count in settings.items() if count is not None}
    return PlacementSearch(step_profile(), sizes or model(), machine, budget, fixed, 10**9).best()


def test_nothing_fits_a_budget_below_the_smallest_peak() -> None:
    assert found(SLOTS + 100) is None
    smallest = found(SLOTS + 9 * 5 + 100)
    assert smallest is not None
    assert smallest.placement == Counts(kept=1).placement(LAYERS)


def test_a_huge_budget_puts_the_whole_model_on_the_device_where_the_host_bounds() -> None:
    slow_host = dataclasses.replace(MACHINE, host_step_parameters=1.0)
    best = found(10**6, slow_host)
    assert best is not None
    assert best.placement == Counts(kept=LAYERS, on_device=LAYERS, groups_on_device=True).placement(LAYERS)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kept_layers": LAYERS}, {"device_layers": -1}, {"device_layers": LAYERS}, {"offloaded_layers": 0}],
    ids=str,
)
def test_all_of_a_model_that_fits_is_on_the_device_though_the_host_would_step_a_part_of_it_faster(
    settings: dict[str, int],
) -> None:
    fixed = fixed_counts(PlacementSettings(**settings), LAYERS)  # type: ignore[arg-type]
    slow = dataclasses.replace(MACHINE, device_bytes=100.0)
    every = Counts(kept=LAYERS, on_device=LAYERS, groups_on_device=True).placement(LAYERS)
    on_host = simulate_step(step_profile(), model(), Counts(kept=LAYERS).placement(LAYERS), slow)
    assert on_host.seconds < simulate_step(step_profile(), model(), every, slow).seconds
    least = peak_bytes(step_profile(), model(), every)
    for budget, fits in ((least, True), (least - 1, False)):
        found = PlacementSearch(step_profile(), model(), slow, budget, fixed).best()
        assert found is not None
        assert (found.placement == every) == fits


@pytest.mark.parametrize("fixed", [{"kept": 2}, {"on_device": 3}], ids=str)
def test_a_model_that_fits_is_placed_as_the_user_fixed_it(fixed: dict[str, int]) -> None:
    found = PlacementSearch(step_profile(), model(), MACHINE, 10**6, fixed).best()
    assert found is not None
    ((kind, count),) = fixed.items()
    assert len(getattr(found.placement, kind)) == count


def test_activations_are_kept_where_compute_bounds() -> None:
    best = found(SLOTS + 9 * 5 + 500)
    assert best is not None
    assert len(best.placement.kept) == 9
    assert not best.placement.on_device


@pytest.mark.parametrize("budget", [225, 300, 600, 900, 1500, 2500])
@pytest.mark.parametrize("host", [1.0, 5.0, 100.0])
def test_the_search_comes_within_two_percent_of_trying_everything(budget: int, host: float) -> None:
    machine = dataclasses.replace(MACHINE, host_step_parameters=host)
    best = found(budget, machine)
    assert best is not None
    step, sizes = step_profile(), model()
    candidates = [
        Counts(kept=kept, on_device=on_device, groups_on_device=groups).placement(LAYERS)
        for kept in range(LAYERS + 1)
        for on_device in range(LAYERS + 1)
        for groups in (False, True)
    ]
    fitting = [placement for placement in candidates if peak_bytes(step, sizes, placement) <= budget]
    optimum = min(simulate_step(step, sizes, placement, machine).seconds for placement in fitting)
    assert best.time.seconds <= 1.02 * optimum


@pytest.mark.parametrize(("budget", "copies", "seconds"), [(650, 100.0, 0.5), (500, 50.0, 1.0)])
def test_layers_on_the_device_and_offloaded_ones_are_found_where_neither_pays_alone(
    budget: int, copies: float, seconds: float
) -> None:
    machine = dataclasses.replace(MACHINE, host_step_parameters=20.0, h2d_bytes=copies, d2h_bytes=copies)
    step, sizes = step_profile(forward_seconds=seconds, kept_forward_seconds=seconds, backward_seconds=2 * seconds), model()
    best = PlacementSearch(step, sizes, machine, budget, {}, host_budget_bytes=1000).best()
    assert best is not None
    candidates = [
        Counts(kept=kept, offloaded=offloaded, on_device=on_device, groups_on_device=groups).placement(LAYERS)
        for kept in range(LAYERS + 1)
        for offloaded in range(LAYERS + 1)
        for on_device in range(LAYERS + 1)
        for groups in (False, True)
    ]
    fitting = [placement for placement in candidates if peak_bytes(step, sizes, placement) <= budget]
    optimum = min(simulate_step(step, sizes, placement, machine).seconds for placement in fitting)
    assert best.time.seconds <= 1.02 * optimum


def test_what_the_user_fixed_stays() -> None:
    best = found(10**6, kept=3, on_device=1)
    assert best is not None
    assert best.placement == Counts(kept=3, on_device=1).placement(LAYERS)
    everything = found(10**6, on_device=LAYERS, groups_on_device=True)
    assert everything is not None
    assert everything.placement.groups_on_device


@pytest.mark.parametrize("count", [1, 4, LAYERS, LAYERS + 1])
def test_where_all_layers_could_be_kept_as_many_are_offloaded_as_a_setting_says(count: int) -> None:
    best = found(10_000, offloaded=count, inputs_offloaded=None)
    assert best is not None
    assert len(best.placement.offloaded) == min(count, LAYERS)
    assert len(best.placement.kept) == max(0, LAYERS - count)


@pytest.mark.parametrize("budget", [SLOTS + 9 * 5 + 300, 600, 1500, 10**6])
@pytest.mark.parametrize("count", [1, 5, LAYERS])
@pytest.mark.parametrize("name", ["kept", "on_device", "offloaded", "inputs_offloaded"])
def test_one_thing_that_the_user_fixed_stays_where_the_rest_is_chosen(name: str, count: int, budget: int) -> None:
    best = found(budget, **{"offloaded": None, "inputs_offloaded": None, "kept": 0, name: count})
    if best is None:
        assert peak_bytes(step_profile(), model(), Counts(**{name: count}).placement(LAYERS)) > budget  # type: ignore[arg-type]
        return
    assert len(getattr(best.placement, name)) == count


def test_offloading_is_chosen_where_the_link_is_idle_and_host_memory_is_there() -> None:
    fast_link = dataclasses.replace(MACHINE, h2d_bytes=1e4, d2h_bytes=1e4)
    best = found(SLOTS + 9 * 5 + 260, fast_link, offloaded=None)
    assert best is not None
    assert best.placement.offloaded

    def without_host_memory(**fixed: int) -> Candidate | None:
        return PlacementSearch(step_profile(), model(), fast_link, SLOTS + 9 * 5 + 260, fixed, host_budget_bytes=0).best()

    settled = without_host_memory(on_device=0)
    assert settled is not None
    assert not settled.placement.offloaded
    # A layer that moves to the device leaves 140 bytes, the activations of two.
    moved = without_host_memory(on_device=1)
    assert moved is not None
    assert len(moved.placement.offloaded) <= 2


def test_inputs_leave_where_a_step_does_not_fit_with_them_and_no_more_than_must() -> None:
    smallest = SLOTS + 9 * 5 + 100
    with_room = found(smallest, kept=0, on_device=0, inputs_offloaded=None)
    assert with_room is not None
    assert with_room.placement.inputs_offloaded == frozenset()
    tight = found(smallest - 20, kept=0, on_device=0, inputs_offloaded=None)
    assert tight is not None
    # At the peak two of those that leave are there.
    assert 4 <= len(tight.placement.inputs_offloaded) <= 6
    assert tight.peak_bytes <= smallest - 20
    assert found(smallest - 20, inputs_offloaded=0) is None


def test_layers_with_tiles_keep_attention_first_where_room_is_short_and_attention_long() -> None:
    profile = {"attention": OpCosts(), "attention_bytes": 5, "attention_seconds": 0.8}
    budget = SLOTS + 9 * 5 + 100 + 10 * 5
    fixed = {"offloaded": 0, "on_device": 0, "inputs_offloaded": 0}
    for tile in (8192, 0):
        step = dataclasses.replace(step_profile(**profile), token_tile=tile)  # type: ignore[arg-type]
        best = PlacementSearch(step, model(), MACHINE, budget, fixed).best()
        assert best is not None
        assert best.peak_bytes <= budget
        attending = best.placement.attention_kept - best.placement.kept
        assert len(attending | best.placement.kept) >= 9 if tile else not attending
        # 2 s of forward and recompute, less the attention that is left out.
        assert best.time.compute == pytest.approx(40 - 0.8 * len(attending) - len(best.placement.kept), rel=0.01)


def test_inputs_leave_to_make_room_for_attention() -> None:
    profile = {"attention": OpCosts(), "attention_bytes": 5, "attention_seconds": 0.8}
    step = dataclasses.replace(step_profile(**profile), token_tile=8192)  # type: ignore[arg-type]
    fixed = {"kept": 0, "offloaded": 0, "on_device": 0}
    seconds = {}
    for may_leave in (False, True):
        choices = fixed if may_leave else {**fixed, "inputs_offloaded": 0}
        best = PlacementSearch(step, model(), MACHINE, SLOTS + 9 * 5 + 100, choices, 10**9).best()
        assert best is not None
        seconds[may_leave] = best.time.seconds
    assert best.placement.inputs_offloaded
    assert len(best.placement.attention_kept) >= 6
    assert seconds[True] < 0.9 * seconds[False]


@pytest.mark.parametrize("layers", [10, 40])
def test_a_step_that_fits_with_one_number_of_inputs_away_is_found(layers: int) -> None:
    fixed = {"kept": 0, "offloaded": 0, "on_device": 0}
    step, sizes = step_profile(layers=layers), model(layers=[LAYER] * layers)
    for away in range(layers + 1):
        # Neither the device nor the host has room for one more.
        needed = peak_bytes(step, sizes, Counts(inputs_offloaded=away).placement(layers))
        best = PlacementSearch(step, sizes, MACHINE, needed, fixed, 5 * away).best()
        assert best is not None, away
        assert len(best.placement.inputs_offloaded) <= away


def test_results_of_attention_wait_on_the_host_as_far_as_it_has_room() -> None:
    profile = {"attention": OpCosts(), "attention_bytes": 5, "attention_seconds": 0.8}
    step = dataclasses.replace(step_profile(**profile), token_tile=8192)  # type: ignore[arg-type]
    choices = {"kept": 0, "offloaded": 0, "on_device": 0}
    attending = []
    for host in (10**9, 40, 10):
        # Device memory for what is there of two layers at a time, and a few more.
        best = PlacementSearch(step, model(), MACHINE, SLOTS + 40 + 100, choices, host).best()
        assert best is not None
        assert sum(sent_bytes(step, best.placement)) <= host
        attending.append(len(best.placement.attention_kept))
        both = best.placement.attention_kept & best.placement.inputs_offloaded
        assert sum(sent_bytes(step, best.placement)) == 5 * (len(best.placement.inputs_offloaded) + len(both))
    assert attending[0] == LAYERS
    assert attending[0] > attending[1] >= attending[2]


def test_what_fits_in_no_way_takes_the_least_that_it_can() -> None:
    choices = {"kept": 0, "offloaded": 0, "on_device": 0}
    placements = []
    for inputs, host in ((None, 10**6), (None, 20), (None, 0), (0, 10**6)):
        free = choices if inputs is None else {**choices, "inputs_offloaded": inputs}
        search = PlacementSearch(step_profile(), model(), MACHINE, 10, free, host_budget_bytes=host)
        assert search.best() is None
        placements.append(search.leanest())
        assert placements[-1].peak_bytes == peak_bytes(step_profile(), model(), placements[-1].placement)
    all_away, some_away, none, fixed = placements
    assert len(all_away.placement.inputs_offloaded) >= 8
    assert len(some_away.placement.inputs_offloaded) == 4
    assert all_away.peak_bytes < some_away.peak_bytes < none.peak_bytes
    assert none.placement == fixed.placement == Placement()


def test_inputs_stay_where_the_host_has_no_room_for_them() -> None:
    choices = {"kept": 0, "offloaded": 0, "on_device": 0, "attention_kept": 0}
    assert PlacementSearch(step_profile(), model(), MACHINE, SLOTS + 9 * 5 + 80, choices, host_budget_bytes=10).best() is None
    assert (
        PlacementSearch(step_profile(), model(), MACHINE, SLOTS + 9 * 5 + 80, choices, host_budget_bytes=100).best()
        is not None
    )


def test_accumulation_counts_the_gradients_that_wait_for_the_others() -> None:
    one, two = model(), model(micro_batches=2)
    placement = Counts(on_device=4).placement(LAYERS)
    assert peak_bytes(step_profile(), two, placement) > peak_bytes(step_profile(), one, placement)
    assert (
        simulate_step(step_profile(), two, placement, MACHINE).seconds
        > 1.9 * simulate_step(step_profile(), one, placement, MACHINE).compute
    )


def test_fp32_sums_are_counted_on_the_device_and_in_the_hosts_time() -> None:
    with_sums = dataclasses.replace(LAYER, sum_bytes=20)
    group = dataclasses.replace(GROUP, sum_bytes=2)
    changes = {"layers": [with_sums] * LAYERS, "groups_before": [group], "groups_after": [group]}
    placement = Counts(on_device=4).placement(LAYERS)
    plain, sums = model(micro_batches=2), model(micro_batches=2, **changes)
    assert peak_bytes(step_profile(), sums, placement) == peak_bytes(step_profile(), plain, placement) + 4 * 20 + 2 * 2
    assert with_sums.host_bytes == LAYER.host_bytes + 20
    streamed = Counts().placement(LAYERS)
    # 4 bytes of the step's 26 more for each backward.
    more = (
        simulate_step(step_profile(), sums, streamed, MACHINE).host_step
        - simulate_step(step_profile(), plain, streamed, MACHINE).host_step
    )
    assert more == pytest.approx(2 * LAYERS * LAYER.parameters / MACHINE.host_step_parameters * 4 / 26)


def test_a_host_without_room_is_no_reason_against_placements_that_offload_nothing() -> None:
    search = PlacementSearch(step_profile(), model(), MACHINE, 10**6, {}, host_budget_bytes=-(10**9))
    best = search.best()
    assert best is not None
    assert not best.placement.offloaded


BUDGETS = (MemoryBudget(0.0, 0.0, 1.0), MemoryBudget(0.4, 0.3, 0.5), MemoryBudget(0.6, 0.6, 0.2), MemoryBudget(1.0, 1.0, 0.0))


@pytest.mark.parametrize("room", [0, 60, 150, 250, 400, 1000])
def test_layers_are_divided_between_two_neighbouring_memory_budgets_where_that_is_faster(room: int) -> None:
    step = step_profile(recompute_seconds=1.0, budgets=BUDGETS)
    choices = {"offloaded": 0, "inputs_offloaded": 0, "attention_kept": 0, "on_device": 0}
    budget = 200 + SLOTS + room

    def best(step: StepProfile) -> Candidate:
        found = PlacementSearch(step, model(), MACHINE, budget, choices).best()
        assert found is not None
        assert found.peak_bytes <= budget
        return found

    among_all, among_two = (
        best(step),
        best(dataclasses.replace(step, profiles={"layer": step_profile(recompute_seconds=1.0).profiles["layer"]})),
    )
    assert among_two.placement.budgets == (0.0, 1.0)
    assert among_all.placement.budgets in [(0.0, 0.4), (0.4, 0.6), (0.6, 1.0)]
    assert among_all.time.seconds <= among_two.time.seconds
    if room == 250:
        assert among_all.time.compute < among_two.time.compute - 1.0


def test_a_layer_at_a_memory_budget_takes_its_share_of_time_and_memory() -> None:
    step = step_profile(recompute_seconds=1.0, budgets=BUDGETS)

    def placed(budgets: tuple[float, float], kept: int) -> tuple[float, int]:
        placement = Counts(kept=kept, budgets=budgets).placement(LAYERS)
        return simulate_step(step, model(), placement, MACHINE).compute, peak_bytes(step, model(), placement)

    all_recomputed, all_kept = placed((0.0, 1.0), 0), placed((0.0, 1.0), LAYERS)
    assert placed((0.0, 0.4), 0) == all_recomputed
    assert placed((0.6, 1.0), LAYERS) == all_kept
    # One budget is the same whether its layers count as kept or not.
    assert placed((0.4, 0.6), 0)[0] == pytest.approx(placed((0.0, 0.4), LAYERS)[0])
    assert placed((0.4, 0.6), 0)[1] == pytest.approx(placed((0.0, 0.4), LAYERS)[1], abs=20)
    assert all_recomputed[0] - placed((0.4, 0.6), 0)[0] == pytest.approx(0.5 * LAYERS)
    assert all_recomputed[0] - placed((0.4, 0.6), 6)[0] == pytest.approx(0.5 * LAYERS + 6 * 0.3)


def test_what_a_memory_budget_has_recomputed_layers_save_waits_where_their_inputs_do() -> None:
    step = step_profile(recompute_seconds=1.0, budgets=BUDGETS)
    there, away = (Counts(inputs_offloaded=count, budgets=(0.4, 0.6)).placement(LAYERS) for count in (0, LAYERS))
    assert sum(sent_bytes(step, there)) == 0
    assert sum(sent_bytes(step, away)) == LAYERS * (5 + 0.3 * 50)
    # Those of two layers are on the device at a time.
    assert peak_bytes(step, model(), there) - peak_bytes(step, model(), away) == pytest.approx((LAYERS - 2) * 20, abs=20)


def test_settings_that_say_how_many_layers_are_kept_keep_them_whole() -> None:
    step = step_profile(recompute_seconds=1.0, budgets=BUDGETS)
    found = PlacementSearch(step, model(), MACHINE, 10_000, {"kept": 3}).best()
    assert found is not None
    assert found.placement.budgets == (0.0, 1.0)
    assert len(found.placement.kept) == 3


def test_of_several_ranks_each_copies_and_steps_its_share_of_the_gradients_that_all_exchange() -> None:
    group = dataclasses.replace(GROUP, gradient_bytes=4)  # whole bytes for each
    one = model(groups_before=[group], groups_after=[group])
    alone = simulate_step(step_profile(), one, Placement(), MACHINE)
    with_others = dataclasses.replace(one, ranks=4, exchange_bytes=math.inf)
    of_four = simulate_step(step_profile(), with_others, Placement(), MACHINE)
    assert of_four.host_step == pytest.approx(alone.host_step / 4)
    assert of_four.d2h == pytest.approx(alone.d2h / 4)
    assert (of_four.h2d, of_four.compute) == pytest.approx((alone.h2d, alone.compute)), "layers are fetched whole"
    rate = 1e9
    slower = simulate_step(step_profile(), dataclasses.replace(with_others, exchange_bytes=rate), Placement(), MACHINE)
    exchanged = sum(unit.gradient_bytes for unit in [*with_others.layers, *with_others.groups, *with_others.groups])
    assert slower.d2h == pytest.approx(of_four.d2h + exchanged / rate), "those outside the layers come back as means"
    assert slower.compute > of_four.compute, "collectives take some of the device"


def test_gradients_of_layers_that_live_on_the_devices_are_exchanged_and_come_back_as_means() -> None:
    rate, every = 1e9, Counts(on_device=LAYERS, groups_on_device=True).placement(LAYERS)
    ranks = dataclasses.replace(model(), ranks=2, exchange_bytes=rate)
    exchanged = sum(unit.gradient_bytes for unit in [*ranks.layers, *ranks.groups])
    assert simulate_step(step_profile(), model(), every, MACHINE).d2h == 0
    assert simulate_step(step_profile(), ranks, every, MACHINE).d2h == pytest.approx(2 * exchanged / rate)
