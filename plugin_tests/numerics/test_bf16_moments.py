"""Moments in bf16: the kernel against a reference in plain torch, the mean of its rounding, and whole runs."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import Training, attach
from moment_runs import CSRC, arguments, assert_same_masters, lines_in_wide_vectors, losses, rounding_bits
from plain_torch import tiny_model, token_batches
from trainer_runs import run_trainer, tiny_llama

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.kernels.host import INSTRUCTION_SETS, HostKernels
from megatrain_accelerate.kernels.moments import FloatMoments
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = pytest.mark.usefixtures("profiled_once")

COUNT = 3 * 128 * 1024 + 77
"""Several chunks for several threads, and a tail."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[HostKernels]:
    made = HostKernels(threads=3)
    yield made
    made.close()


def rounded(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, up with the probability of what is cut off."""
    bits = value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return ((bits + random) >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(COUNT, generator=generator)

    return {
        "weight": normal(0.02),
        "m": normal(1e-3).bfloat16(),
        "v": normal(1e-3).square().bfloat16(),
        "grad": normal(1e-3),
    }


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("kind", ["split", "split sum", "fp32"])
def test_the_step_is_that_of_fp32_moments_and_the_moments_are_rounded_by_the_hash(
    kernels: HostKernels, kind: str, decoupled: bool
) -> None:
    settings, first = arguments(5, decoupled=decoupled), 2**32 - 1000
    given = values(1)
    weight, grad = given["weight"], given["grad"]
    m, v = given["m"].float(), given["v"].float()
    ours_m, ours_v = given["m"].clone(), given["v"].clone()
    if kind == "fp32":
        expected, ours = weight.clone(), weight.clone()
        kernels.adamw(expected, None, FloatMoments(m, v), grad, settings)
        kernels.adamw(ours, None, FloatMoments(ours_m, ours_v), grad, settings, first_element=first)
    else:
        grad_hi, grad_lo = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
        kernels.split(grad, grad_hi, grad_lo)
        of_sum = grad_lo if kind == "split sum" else None
        joined = []
        for moments in (FloatMoments(m, v), FloatMoments(ours_m, ours_v)):
            hi, lo = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
            kernels.split(weight, hi, lo)
            kernels.adamw(hi, lo, moments, grad_hi, settings, of_sum, first)
            joined.append(torch.empty(COUNT))
            kernels.join(hi, lo, joined[-1])
        expected, ours = joined
    assert torch.equal(ours, expected)
    random = torch.from_numpy(rounding_bits(COUNT, first, settings.rounding_seed).astype(np.int64))
    assert torch.equal(ours_m, rounded(m, random & 0xFFFF))
    assert torch.equal(ours_v, rounded(v, random >> 16))


def test_bits_depend_neither_on_threads_nor_on_the_instruction_set_nor_on_pieces() -> None:
    found = []
    best = HostKernels(threads=1)
    sets = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best.instruction_set) + 1]
    best.close()
    for threads, name, pieces in [*((2, name, 1) for name in sets), (1, None, 1), (2, None, 3)]:
        kernels = HostKernels(threads=threads, instruction_set=name)
        given = values(2)
        hi, lo = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
        kernels.split(given["weight"], hi, lo)
        tensors = (hi, lo, given["m"], given["v"], given["grad"].bfloat16())
        edges = [COUNT * piece // pieces for piece in range(pieces + 1)]
        for begin, end in itertools.pairwise(edges):
            hi, lo, m, v, grad = (tensor[begin:end] for tensor in tensors)
            kernels.adamw(hi, lo, FloatMoments(m, v), grad, arguments(3), first_element=begin)
        kernels.close()
        found.append(tensors)
    for tensors in found[1:]:
        for ours, theirs in zip(tensors, found[0], strict=True):
            assert torch.equal(ours, theirs)


def test_every_loop_of_the_step_is_compiled_to_vectors() -> None:
    found = lines_in_wide_vectors("adamw.h")
    lines = (CSRC / "adamw.h").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines, 1) if "struct FloatMoments" in line)
    # Split masters, the same with gradients' residuals and fp32; fp32 or bf16 moments; AdamW or Adam.
    assert sum(begin < line for line in found) >= 3 * 2 * 2


def test_every_loop_over_a_block_of_moments_in_8_bits_is_compiled_to_vectors() -> None:
    lines = lines_in_wide_vectors("adamw_int8_moments.h")
    # Two loops; each of split masters, the same with gradients' residuals and fp32, weight decay apart or in the gradient.
    assert len(set(lines)) == 2
    assert all(lines.count(line) >= 3 * 2 for line in lines)


def test_a_slowly_decaying_second_moment_is_right_in_the_mean_where_nearest_would_stand_still(kernels: HostKernels) -> None:
    steps, start = 500, 2.0**-20
    v = torch.full((COUNT,), start, dtype=torch.bfloat16)
    nearest = v[:1].float()
    m, grad = torch.zeros(COUNT, dtype=torch.bfloat16), torch.zeros(COUNT)
    weight = torch.zeros(COUNT)
    for step in range(1, steps + 1):
        kernels.adamw(weight, None, FloatMoments(m, v), grad, arguments(step))
        nearest = (nearest * 0.999).bfloat16().float()
    expected = start * 0.999**steps
    # The spread of one element is below 2**-8 * sqrt(500); of the mean of 390,000 of them it is less than 1e-3.
    assert float(v.double().mean()) == pytest.approx(expected, rel=2e-3)
    assert float(nearest) == start
    assert torch.equal(m, torch.zeros_like(m))


def test_training_is_close_to_that_with_fp32_moments_but_not_the_same() -> None:
    ours, theirs = losses(45, moments_dtype="bf16"), losses(45)
    assert ours != theirs
    assert theirs[-1] < 0.5 * theirs[0]
    # Each moment is off by up to 2**-7 of itself, in the mean by nothing: a step's loss by about a hundredth.
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.02 * theirs[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"slots": 2}, {"slots": 3, "device_layers": 2}),
        ({"schedule": "serial"}, {"schedule": "backward", "host_gradients": "passing"}),
    ],
    ids=["placement", "schedule"],
)
def test_placement_and_schedule_do_not_change_the_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert_same_masters(first, second, moments_dtype="bf16")


@pytest.mark.parametrize(("bf16", "bytes_each"), [(True, 10), (False, 12)])
def test_a_trained_parameter_takes_4_bytes_less(bf16: bool, bytes_each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[dict[str, int]] = []
    monkeypatch.setattr("megatrain_accelerate.engine.require_host_bytes", lambda parts, *_, **__: planned.append(parts))
    model = tiny_model(hidden_size=128, intermediate_size=352)
    engine = attach(model, bf16=bf16, moments_dtype="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred")).step(token_batches(1)[0])
    held = engine.host_bytes_by_kind()
    assert held == planned[0]
    assert sum(held.values()) == pytest.approx(bytes_each * sum(p.numel() for p in model.parameters()), rel=0.02)
    engine.close()


def test_an_optimizer_without_a_kernel_is_refused() -> None:
    model = tiny_model()
    engine = attach(model, moments_dtype="bf16")
    with pytest.raises(UnsupportedError, match=r"SGD has no fused host kernel.*keeps its own states"):
        adopt_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), engine.runtime, "deferred")
    engine.close()


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    settings = {"moments_dtype": "bf16"}
    whole = run_trainer(tiny_llama, tmp_path / "whole", streamed=True, settings=settings, save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    assert {value["exp_avg_sq"].dtype for value in saved["state"].values()} == {torch.bfloat16}
    resumed = run_trainer(
        tiny_llama,
        tmp_path / "resumed",
        streamed=True,
        settings={**settings, "slots": 3},
        script=lambda trainer: trainer.train(resume_from_checkpoint=str(checkpoint)),
    )
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_moments_of_the_other_dtype_are_taken_over(saved: str, loaded: str) -> None:
    states = []
    for dtype in (saved, loaded):
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = attach(model, moments_dtype=dtype)
        adopt_optimizer(optimizer, engine.runtime, "deferred")
        if not states:
            ids = token_batches(1)[0]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        else:
            optimizer.load_state_dict(states[0])
        states.append(copy.deepcopy(optimizer.state_dict()))
        engine.close()
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for key, value in states[0]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[1]["state"][key][name].bfloat16(), value[name].bfloat16())
            assert math.isfinite(float(value[name].float().sum()))
