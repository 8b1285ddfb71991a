"""fp32 sums of gradients on the GPU: the bits of the host's kernels, in every placement, and nothing lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from engine_runs import attach, train_streamed
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.gradients.fp32_sums import joined_sum
from megatrain_accelerate.kernels.device import DeviceKernels
from megatrain_accelerate.kernels.host import AdamArguments, HostKernels, ParameterStep
from megatrain_accelerate.kernels.moments import FloatMoments
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COUNT = 3_000_017
PLACEMENTS = [{}, {"device_layers": 2}, {"device_layers": -1, "kept_layers": 4}, {"kept_layers": 2}, {"device_states": -1}]


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random_bits(seed: int) -> torch.Tensor:
    """int16 of any pattern; every fourth is zero."""
    bits = torch.randint(-(2**15), 2**15, (COUNT,), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    bits[::4] = 0
    return bits


@pytest.mark.parametrize("has_residual", [True, False])
def test_adding_on_the_gpu_has_the_bits_of_the_host_for_every_pattern(has_residual: bool) -> None:
    host, device = HostKernels(), DeviceKernels()
    hi, lo, new = random_bits(1), random_bits(2), random_bits(3)
    ours = [hi.cuda(), lo.cuda()]
    device.accumulate_split(ours[0].view(torch.bfloat16), ours[1], new.cuda().view(torch.bfloat16), has_residual)
    host.accumulate_split(hi.view(torch.bfloat16), lo, new.view(torch.bfloat16), has_residual)
    assert torch.equal(ours[0].cpu(), hi)
    assert torch.equal(ours[1].cpu(), lo)


@pytest.mark.parametrize("shape", [(COUNT,), (1,), (0,), (1023, 17)])
def test_norms_of_sums_on_the_gpu_are_those_of_the_host(shape: tuple[int, ...]) -> None:
    host, device = HostKernels(), DeviceKernels()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    hi, lo = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.int16)
    host.split(values, hi, lo)
    found = device.norm_split(hi.cuda(), lo.cuda())
    assert found.dtype == torch.float32
    assert found.item() == torch.tensor(math.sqrt(host.square_sum(hi, lo)), dtype=torch.float32).item()


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_from_a_split_gradient_has_the_bits_of_the_host(decoupled: bool) -> None:
    host, device = HostKernels(), DeviceKernels()
    arguments = AdamArguments(
        lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=5, clip_factor=0.37, decoupled=decoupled
    )
    generator = torch.Generator().manual_seed(4)
    halves = []
    for scale in (0.02, 1e-3):  # master, gradient
        hi, lo = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
        host.split(scale * torch.randn(COUNT, generator=generator), hi, lo)
        halves.append((hi, lo))
    theirs = [*halves[0], torch.zeros(COUNT), torch.zeros(COUNT)]
    ours = [tensor.cuda() for tensor in theirs]
    gradient = [tensor.cuda() for tensor in halves[1]]
    for _ in range(3):
        device.adamw_of_many([ParameterStep(*ours[:2], FloatMoments(*ours[2:]), gradient[0], arguments, gradient[1])])
        host.adamw(*theirs[:2], FloatMoments(*theirs[2:]), halves[1][0], arguments, halves[1][1])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.cpu(), b)


def sums_of(engine: Engine, model: nn.Module) -> dict[str, torch.Tensor]:
    engine.runtime.collect_gradients()
    found = {}
    for name, parameter in model.named_parameters():
        state = engine.runtime.state_of(parameter)
        assert state is not None
        assert parameter.grad is not None
        gradient = parameter.grad.cpu()
        found[name] = gradient.float()
        if state.handle.has_fp32_sum:
            assert state.sum_residual is not None
            found[name] = joined_sum(gradient, state.sum_residual.cpu(), engine.kernels)
    return found


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_64_tiny_gradients_are_summed_as_fp32_numbers(placement: dict[str, int]) -> None:
    base, (one, two) = tiny_model(attn_implementation="eager").train(), token_batches(2)
    parts = []
    for ids, scale in ((one, 1.0), (two, 2.0**-12)):  # each alone, without a sum
        model = tiny_model(attn_implementation="eager").train()
        model.load_state_dict(base.state_dict())
        engine = attach(model, device="cuda", **placement)
        (model(input_ids=ids.cuda(), labels=ids.cuda()).loss * scale).backward()
        parts.append(sums_of(engine, model))
        engine.close()
    expected = parts[0]
    for _ in range(64):
        expected = {name: total + parts[1][name] for name, total in expected.items()}
    engine = attach(base, device="cuda", **placement)
    for ids, scale in [(one, 1.0)] + [(two, 2.0**-12)] * 64:
        (base(input_ids=ids.cuda(), labels=ids.cuda()).loss * scale).backward()
    found = sums_of(engine, base)
    for name, total in expected.items():
        assert torch.equal(found[name], total), name
    assert any(not torch.equal(found[name], parts[0][name]) for name in found)
    engine.close()


def test_accumulating_runs_have_the_same_bits_in_every_placement_and_schedule() -> None:
    model, batches = tiny_model(attn_implementation="eager"), token_batches(20)
    first = train_streamed(model, batches, device="cuda", accumulation=5)
    for placement in PLACEMENTS:
        for schedule in ("deferred", "serial"):
            other = train_streamed(model, batches, device="cuda", accumulation=5, schedule=schedule, **placement)
            assert other.losses == first.losses, placement
            assert other.norms == first.norms, placement
            for name, master in first.masters.items():
                assert torch.equal(other.masters[name], master), f"{placement}: {name}"
    rounded = train_streamed(model, batches, device="cuda", accumulation=5, accumulation_dtype="bf16")
    assert rounded.norms != first.norms, "or nothing here tells one from the other"


def test_device_memory_of_accumulating_runs_is_held_as_reported() -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 8192}
    model = tiny_model(**shape, num_attention_heads=8, num_key_value_heads=4).train()
    engine = attach(model, device="cuda", device_layers=-1)
    adopt_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), engine.runtime, "deferred")
    before = torch.cuda.memory_allocated()
    engine.expect_accumulation(2)
    taken = torch.cuda.memory_allocated() - before
    held = engine.device_plan.budget.held_bytes_by_kind()["gradient_residuals"]
    assert held == pytest.approx(2 * sum(parameter.numel() for parameter in model.parameters()), rel=0.01)
    # The allocator's blocks are multiples of 512 bytes, and of 2 MiB for large ones.
    assert held <= taken <= held + 64 * 2**20
    engine.close()
