"""The engine against plain PyTorch: bit-equal weights, masters, losses and norms, whatever the placement in time."""

from __future__ import annotations

import functools
import itertools

import plain_torch
import pytest
import torch
from engine_runs import train_streamed
from pairs import long_unless
from plain_torch import PlainRun, tiny_model, token_batches, train_bf16_with_masters, train_fp32

STEPS = 10
pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    pytest.mark.usefixtures("exact_torch_sqrt"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
        reason="torch's baseline CPU kernels have no fused multiply-add and round AdamW differently from its others",
    ),
]


def assert_bit_equal(streamed: PlainRun, plain: PlainRun) -> None:
    assert streamed.losses == plain.losses
    assert streamed.norms == plain.norms
    for name, weight in plain.weights.items():
        assert torch.equal(streamed.weights[name], weight), f"{name}: weights differ"
        assert torch.equal(streamed.masters[name], plain.masters[name]), f"{name}: masters differ"


@pytest.fixture(scope="module")
def plain_clipped() -> PlainRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", plain_torch.ieee_sqrt)
        run = train_bf16_with_masters(tiny_model(), token_batches(STEPS))
    assert max(run.norms) > 1.0, "clipping must be at work for the test to mean something"
    assert run.losses[0] != run.losses[-1]
    return run


@pytest.mark.parametrize(
    ("slots", "schedule"), long_unless([(2, "deferred"), (3, "serial")], itertools.product([2, 3], ["deferred", "serial"]))
)
def test_clipped_bf16_training_is_bit_equal_to_plain_pytorch(plain_clipped: PlainRun, slots: int, schedule: str) -> None:
    streamed = train_streamed(tiny_model(), token_batches(STEPS), schedule=schedule, slots=slots)
    assert_bit_equal(streamed, plain_clipped)


@functools.cache
def plain_unclipped() -> PlainRun:
    return train_bf16_with_masters(tiny_model(), token_batches(STEPS), max_norm=None)


@pytest.mark.parametrize(("schedule", "slots"), [("deferred", 2), ("serial", 3), ("backward", 2), ("backward", 3)])
def test_unclipped_bf16_training_is_bit_equal_in_every_schedule(schedule: str, slots: int) -> None:
    streamed = train_streamed(tiny_model(), token_batches(STEPS), max_norm=None, schedule=schedule, slots=slots)
    assert_bit_equal(streamed, plain_unclipped())


@pytest.mark.parametrize(("schedule", "max_norm"), [("deferred", 1.0), ("serial", 1.0), ("backward", None)])
def test_accumulation_is_bit_equal_to_summing_the_gradients_in_fp32(schedule: str, max_norm: float | None) -> None:
    batches = token_batches(9)
    plain = train_bf16_with_masters(tiny_model(), batches, accumulation=3, max_norm=max_norm)
    streamed = train_streamed(tiny_model(), batches, accumulation=3, schedule=schedule, max_norm=max_norm)
    assert_bit_equal(streamed, plain)


def test_learning_rate_is_read_at_the_step_not_when_the_worker_runs() -> None:
    def schedule(step: int) -> float:
        return 1e-3 / (1 + step)

    plain = train_bf16_with_masters(tiny_model(), token_batches(8), learning_rate=schedule)
    assert_bit_equal(train_streamed(tiny_model(), token_batches(8), learning_rate=schedule), plain)


@functools.cache
def plain_with_dropout(max_norm: float | None) -> PlainRun:
    model, batches = tiny_model(attention_dropout=0.2), token_batches(6)
    torch.manual_seed(3)
    return train_bf16_with_masters(model, batches, accumulation=3, max_norm=max_norm)


@pytest.mark.parametrize(
    ("kept", "schedule", "max_norm"),
    long_unless(
        [(1, "deferred", 1.0), (2, "backward", None), (4, "deferred", 1.0)],
        [(kept, *how) for kept in (1, 2, 4) for how in (("deferred", 1.0), ("backward", None))],
    ),
)
def test_kept_layers_are_bit_equal_to_recomputed_ones(kept: int, schedule: str, max_norm: float | None) -> None:
    plain = plain_with_dropout(max_norm)
    model, batches = tiny_model(attention_dropout=0.2), token_batches(6)
    torch.manual_seed(3)
    streamed = train_streamed(model, batches, accumulation=3, max_norm=max_norm, schedule=schedule, kept_layers=kept, slots=2)
    assert_bit_equal(streamed, plain)


def test_tied_embeddings_are_bit_equal() -> None:
    plain = train_bf16_with_masters(tiny_model(tie_word_embeddings=True), token_batches(8))
    assert_bit_equal(train_streamed(tiny_model(tie_word_embeddings=True), token_batches(8)), plain)


def test_alternating_sliding_windows_are_bit_equal() -> None:
    # Each layer must run with its own attributes: layer 0's window in every layer gives other losses.
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    full = train_bf16_with_masters(tiny_model(), token_batches(4))
    plain = train_bf16_with_masters(tiny_model(**changes), token_batches(4))
    assert plain.losses != full.losses
    assert_bit_equal(train_streamed(tiny_model(**changes), token_batches(4)), plain)


def test_dropout_is_replayed_exactly_in_backward() -> None:
    model, batches = tiny_model(attention_dropout=0.3), token_batches(6)
    torch.manual_seed(3)
    plain = train_bf16_with_masters(model, batches)
    torch.manual_seed(3)
    assert_bit_equal(train_streamed(model, batches), plain)
    assert plain.losses != train_bf16_with_masters(tiny_model(), batches).losses


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1, foreach=False),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True, foreach=False),
    ],
    ids=["sgd", "adagrad", "adam_l2", "amsgrad"],
)
@pytest.mark.filterwarnings("ignore:megatrain")
def test_other_optimizers_step_on_fp32_masters_bit_equal(optimizer: object) -> None:
    plain = train_bf16_with_masters(tiny_model(), token_batches(6), make_optimizer=optimizer)  # type: ignore[arg-type]
    streamed = train_streamed(tiny_model(), token_batches(6), make_optimizer=optimizer)  # type: ignore[arg-type]
    assert_bit_equal(streamed, plain)


def test_fp32_training_is_bit_equal_to_plain_pytorch() -> None:
    model, batches = tiny_model(), token_batches(STEPS)
    streamed = train_streamed(model, batches, bf16=False)
    plain = train_fp32(model, batches)
    assert streamed.losses == plain.losses
    assert streamed.norms == plain.norms
    for name, weight in plain.weights.items():
        assert torch.equal(streamed.weights[name], weight), name
