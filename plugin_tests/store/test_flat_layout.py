"""Where parameters lie in a unit's flat buffers, and which runs of them one kernel call steps."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import nn

from megatrain_accelerate.kernels.host import AdamArguments, HostKernels
from megatrain_accelerate.store.layout import ALIGNMENT_ELEMENTS, FlatLayout, ParameterSpec, part_of
from megatrain_accelerate.store.segments import plan_segments
from megatrain_accelerate.store.unit import HostUnit

BF16, FP32 = torch.bfloat16, torch.float32


def spec(name: str, *shape: int, dtype: torch.dtype = BF16, trainable: bool = True) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, trainable)


MIXED = (
    spec("frozen.fp32", 7, dtype=FP32, trainable=False),
    spec("trained.bf16", 3, 100),
    spec("trained.fp32", 129, dtype=FP32),
    spec("frozen.bf16", 128, trainable=False),
    spec("scalar"),
    spec("empty", 0, 5),
    spec("trained.bf16.too", 64, 2),
)


def random_specs(seed: int) -> list[ParameterSpec]:
    randomness = random.Random(seed)
    return [
        spec(
            f"p{i}",
            *(randomness.randint(0, 40) for _ in range(randomness.randint(0, 3))),
            dtype=randomness.choice([BF16, FP32]),
            trainable=randomness.random() < 0.6,
        )
        for i in range(randomness.randint(1, 12))
    ]


def test_regions_are_in_order_and_hold_what_shares_a_fate() -> None:
    layout = FlatLayout(MIXED)
    by_name = {entry.spec.name: entry for entry in layout.entries}
    order = sorted(by_name, key=lambda name: (by_name[name].weight_offset, by_name[name].spec.numel))
    assert order == ["trained.bf16", "scalar", "empty", "trained.bf16.too", "trained.fp32", "frozen.bf16", "frozen.fp32"]
    assert layout.split_elements == 384 + 128 + 0 + 128
    assert layout.state_elements == layout.split_elements + 256
    assert layout.gradient_bytes == 2 * layout.split_elements + 4 * 256
    assert layout.weight_bytes == layout.gradient_bytes + 2 * 128 + 4 * 128
    assert layout.parameter_count == 7 + 300 + 129 + 128 + 1 + 0 + 128


def test_entries_keep_model_order() -> None:
    layout = FlatLayout(MIXED)
    assert [entry.spec for entry in layout.entries] == list(MIXED)
    assert [entry.spec.name for entry in layout.trainable_entries] == [s.name for s in MIXED if s.trainable]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("specs", [MIXED, *(random_specs(seed) for seed in range(20))])
def test_shares_are_blocks_that_follow_each_other_to_the_end(specs: list[ParameterSpec], ranks: int) -> None:
    layout, end, end_byte = FlatLayout(specs), 0, 0
    for rank in range(ranks):
        share = layout.share_of(rank, ranks)
        assert (share.begin, share.begin_byte) == (end, end_byte)
        assert share.begin % ALIGNMENT_ELEMENTS == 0
        end, end_byte = share.end, share.end_byte
        if layout.split_elements in (0, layout.state_elements):  # of one dtype
            assert share.bytes == part_of(layout.gradient_bytes, rank, ranks)
    assert (end, end_byte) == (layout.state_elements, layout.gradient_bytes)


@pytest.mark.parametrize("specs", [MIXED, *(random_specs(seed) for seed in range(20))])
def test_places_are_aligned_and_never_overlap(specs: list[ParameterSpec]) -> None:
    layout = FlatLayout(specs)
    taken = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    states = torch.zeros(layout.state_elements, dtype=torch.uint8)
    for entry in layout.entries:
        size = entry.spec.numel * entry.spec.dtype.itemsize
        assert entry.weight_offset % (2 * ALIGNMENT_ELEMENTS) == 0
        assert entry.weight_offset + size <= (layout.gradient_bytes if entry.spec.trainable else layout.weight_bytes)
        assert entry.spec.trainable or entry.weight_offset >= layout.gradient_bytes
        taken[entry.weight_offset : entry.weight_offset + size] += 1
        assert (entry.state_offset is not None) == entry.spec.trainable
        if entry.state_offset is not None:
            states[entry.state_offset : entry.state_offset + entry.spec.numel] += 1
            assert entry.has_residual == (entry.spec.dtype == BF16)
            assert entry.has_residual == (entry.state_offset < layout.split_elements) or not entry.spec.numel
    assert not len(taken) or int(taken.max()) <= 1
    assert not len(states) or int(states.max()) <= 1


@pytest.mark.parametrize("trainable_only", [True, False])
def test_views_are_the_parameters_and_share_the_buffer(trainable_only: bool) -> None:
    layout = FlatLayout(MIXED)
    buffer = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    specs = [s for s in MIXED if s.trainable or not trainable_only]
    views = layout.views(buffer, trainable_only)
    assert [(tuple(view.shape), view.dtype) for view in views] == [(s.shape, s.dtype) for s in specs]
    for index, view in enumerate(views):
        view.fill_(index + 1)
    for index, view in enumerate(layout.views(buffer, trainable_only)):
        assert bool((view == index + 1).all()), "a view was overwritten by another"


def test_layouts_of_equal_layers_share_their_key_and_others_do_not() -> None:
    assert FlatLayout(MIXED).key == FlatLayout(MIXED).key
    for index in range(len(MIXED)):
        frozen = [dataclasses.replace(s, trainable=not s.trainable) if i == index else s for i, s in enumerate(MIXED)]
        other = [
            dataclasses.replace(s, dtype=FP32 if s.dtype == BF16 else BF16) if i == index else s for i, s in enumerate(MIXED)
        ]
        assert FlatLayout(MIXED).key != FlatLayout(frozen).key
        assert FlatLayout(MIXED).key != FlatLayout(other).key


def test_a_unit_without_trained_parameters_has_no_state() -> None:
    layout = FlatLayout([spec("a", 5, trainable=False), spec("b", 5, dtype=FP32, trainable=False)])
    assert (layout.gradient_bytes, layout.state_elements, layout.split_elements) == (0, 0, 0)
    assert layout.trainable_entries == []


# ---------------------------------------------------------------------------------------- segments of the fused step


@pytest.fixture(scope="module")
def kernels() -> Any:
    made = HostKernels(1)
    yield made
    made.close()


def unit_of(specs: list[ParameterSpec], kernels: HostKernels) -> HostUnit:
    parameters = [(s.name, nn.Parameter(torch.zeros(s.shape), requires_grad=s.trainable)) for s in specs]
    dtypes = {id(parameter): s.dtype for (_, parameter), s in zip(parameters, specs, strict=True)}
    return HostUnit("unit", parameters, dtypes, kernels=kernels, register=False)


def arguments(lr: float = 1e-3, step: int = 1, clip_factor: float = 1.0) -> AdamArguments:
    return AdamArguments(
        lr=lr,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        step=step,
        clip_factor=clip_factor,
        decoupled=True,
        maximize=False,
    )


def trained(unit: HostUnit) -> list[Any]:
    return [state for state in unit.states if state.entry.spec.trainable]


def test_neighbours_with_equal_settings_are_one_segment_for_each_dtype(kernels: HostKernels) -> None:
    unit = unit_of(list(MIXED), kernels)
    segments = plan_segments([(state, arguments()) for state in trained(unit)])
    assert [(s.dtype, unit.layout.byte_of(s.state_offset)) for s in segments] == [(BF16, 0), (FP32, 1280)]
    # From the first element of the first to the last of the last; the padding behind it is left alone.
    assert [s.elements for s in segments] == [640, 129]


@pytest.mark.parametrize("change", [{"lr": 2e-3}, {"step": 2}, {"clip_factor": 0.5}])
def test_neighbours_with_other_settings_are_segments_of_their_own(kernels: HostKernels, change: dict[str, Any]) -> None:
    unit = unit_of([spec("a", 5), spec("b", 300), spec("c", 7)], kernels)
    steps = [(state, arguments(**change) if state.name == "b" else arguments()) for state in trained(unit)]
    segments = plan_segments(steps)
    assert [(s.state_offset, s.elements) for s in segments] == [(0, 5), (128, 300), (512, 7)]
    assert [s.arguments for s in segments] == [arguments(), arguments(**change), arguments()]


def test_a_parameter_without_a_gradient_is_in_no_segment(kernels: HostKernels) -> None:
    unit = unit_of([spec("a", 128), spec("b", 128), spec("c", 128)], kernels)
    segments = plan_segments([(state, arguments()) for state in trained(unit) if state.name != "b"])
    assert [(s.state_offset, s.elements) for s in segments] == [(0, 128), (256, 128)]


@pytest.mark.parametrize("seed", range(20))
def test_segments_cover_each_stepped_element_once_and_no_other_parameter(kernels: HostKernels, seed: int) -> None:
    randomness = random.Random(seed)
    unit = unit_of(random_specs(seed), kernels)
    chosen = [state for state in trained(unit) if randomness.random() < 0.7]
    randomness.shuffle(chosen)
    steps = [(state, arguments(lr=randomness.choice([1e-3, 2e-3]))) for state in chosen]
    covered = torch.zeros(unit.layout.state_elements, dtype=torch.int32)
    for segment in plan_segments(steps):
        covered[segment.state_offset : segment.state_offset + segment.elements] += 1
    wanted = {id(state) for state in chosen}
    for state in trained(unit):
        offset = state.entry.state_offset
        counts = covered[offset : offset + state.entry.spec.numel]
        assert bool((counts == (1 if id(state) in wanted else 0)).all()), state.name
