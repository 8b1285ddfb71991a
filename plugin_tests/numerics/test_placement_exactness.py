"""Where weights and states live never changes a bit: streamed or on the device; moved in the middle of a training."""

from __future__ import annotations

import itertools

import plain_torch
import pytest
import torch
from engine_runs import train_streamed
from pairs import long_unless
from plain_torch import PlainRun, tiny_model, token_batches, train_bf16_with_masters
from test_exactness import assert_bit_equal

STEPS = 10
pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    pytest.mark.usefixtures("exact_torch_sqrt"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
        reason="torch's baseline CPU kernels have no fused multiply-add and round AdamW differently from its others",
    ),
]


@pytest.fixture(scope="module")
def plain_clipped() -> PlainRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", plain_torch.ieee_sqrt)
        return train_bf16_with_masters(tiny_model(), token_batches(STEPS))


PLACEMENTS = [
    {"device_layers": 1},
    {"device_layers": 4},
    {"device_layers": -1},
    {"device_layers": 2, "kept_layers": 3},
    {"device_layers": -1, "kept_layers": 4},
    {"device_states": 2},
    {"device_layers": 1, "device_states": -1, "kept_layers": 2},
]


@pytest.mark.parametrize(
    ("placement", "schedule"),
    long_unless(
        [*itertools.product(PLACEMENTS, ["deferred"]), *itertools.product(PLACEMENTS[3:], ["serial"])],
        itertools.product(PLACEMENTS, ["deferred", "serial"]),
    ),
    ids=str,
)
def test_every_placement_is_bit_equal_to_plain_pytorch(
    plain_clipped: PlainRun, placement: dict[str, int], schedule: str
) -> None:
    assert_bit_equal(train_streamed(tiny_model(), token_batches(STEPS), schedule=schedule, **placement), plain_clipped)


@pytest.mark.parametrize(
    "placement", [{"device_layers": 2}, {"device_layers": -1, "kept_layers": 4}, {"device_states": 3}], ids=str
)
@pytest.mark.parametrize(("schedule", "max_norm"), [("deferred", 1.0), ("backward", None)])
def test_accumulation_under_every_placement(placement: dict[str, int], schedule: str, max_norm: float | None) -> None:
    batches = token_batches(12)
    plain = train_bf16_with_masters(tiny_model(), batches, accumulation=3, max_norm=max_norm)
    streamed = train_streamed(tiny_model(), batches, accumulation=3, schedule=schedule, max_norm=max_norm, **placement)
    assert_bit_equal(streamed, plain)


@pytest.mark.parametrize("tied", [False, True])
def test_fp32_compute_on_the_device_is_bit_equal_to_the_host(tied: bool) -> None:
    model, batches = tiny_model(tie_word_embeddings=tied), token_batches(6)
    places = ({}, {"device_layers": 2}, {"device_layers": -1}, {"device_states": -1})
    runs = [train_streamed(model, batches, bf16=False, **place) for place in places]
    for run in runs[1:]:
        assert_bit_equal(run, runs[0])
