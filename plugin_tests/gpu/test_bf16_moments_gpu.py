"""Moments in bf16 on the GPU: stepped and rounded there with the bits of the host."""

from __future__ import annotations

import pytest
import torch
from engine_runs import train_streamed
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.kernels.device import DeviceKernels
from megatrain_accelerate.kernels.host import AdamArguments, HostKernels, ParameterStep
from megatrain_accelerate.kernels.moments import FloatMoments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

COUNT = 3_000_017


def random_values(scale: float, seed: int) -> torch.Tensor:
    return scale * torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("first_element", [0, 1, 2**31 - 128, 2**32 - 128])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("is_sum", [False, True])
def test_a_step_with_bf16_moments_has_the_bits_of_one_on_the_host(is_sum: bool, decoupled: bool, first_element: int) -> None:
    host, device = HostKernels(), DeviceKernels()
    master, gradient = random_values(0.02, 0), random_values(1e-3, 1)
    hi, lo = torch.empty(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.int16)
    grad_hi, grad_lo = torch.empty_like(hi), torch.empty_like(lo)
    host.split(master, hi, lo)
    host.split(gradient, grad_hi, grad_lo)
    moments = [random_values(1e-3, 2).bfloat16(), random_values(1e-3, 3).square().bfloat16()]
    theirs = [hi, lo, *(moment.clone() for moment in moments)]
    ours = [tensor.cuda() for tensor in theirs]
    plain_theirs = [master, *(moment.clone() for moment in moments)]
    plain_ours = [tensor.cuda() for tensor in plain_theirs]
    residual = grad_lo if is_sum else None
    for step in (1, 2, 1000):
        arguments = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.02, step=step, decoupled=decoupled)
        split = grad_hi, arguments, residual, first_element
        host.adamw(*theirs[:2], FloatMoments(*theirs[2:]), *split)
        split = grad_hi.cuda(), arguments, grad_lo.cuda() if is_sum else None, first_element
        device.adamw_of_many([ParameterStep(*ours[:2], FloatMoments(*ours[2:]), *split)])
        host.adamw(plain_theirs[0], None, FloatMoments(*plain_theirs[1:]), gradient, arguments, None, first_element)
        plain = gradient.cuda(), arguments, None, first_element
        device.adamw_of_many([ParameterStep(plain_ours[0], None, FloatMoments(*plain_ours[1:]), *plain)])
    for name, a, b in zip(("hi", "lo", "exp_avg", "exp_avg_sq"), ours, theirs, strict=True):
        assert torch.equal(a.cpu(), b), f"{name}: {int((a.cpu() != b).sum())} of {COUNT} differ"
    for name, a, b in zip(("weight", "exp_avg", "exp_avg_sq"), plain_ours, plain_theirs, strict=True):
        assert torch.equal(a.cpu(), b), f"fp32 {name}: {int((a.cpu() != b).sum())} of {COUNT} differ"


@pytest.mark.parametrize("settings", [{"moments_dtype": "bf16"}, {"host_gradients": "passing"}], ids=["moments", "gradients"])
def test_placement_does_not_change_the_bits_on_the_gpu(settings: dict[str, str]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            train_streamed(
                tiny_model(num_hidden_layers=6),
                token_batches(8),
                device="cuda",
                max_norm=None,
                schedule="backward",
                device_layers=on_device,
                **settings,
            )
            for on_device in (0, 3)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for name, master in runs[0].masters.items():
        assert torch.equal(runs[1].masters[name], master), name
