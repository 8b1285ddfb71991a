"""Kernels that a model's code launches past torch's dispatcher, in a run without data."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._triton import has_triton_package

from megatrain_accelerate.plan.fake_runs import launches_without_data
from megatrain_accelerate.plan.fake_step import profile_step

needs_triton = pytest.mark.skipif(not has_triton_package(), reason="Triton isn't installed")


def doubling_kernel(launched: list[tuple[Any, ...]]) -> Any:
    """A Triton kernel, run in Python: it doubles its first argument into the second."""
    from triton.runtime.jit import KernelInterface

    class Doubling(KernelInterface[Any]):
        def run(self, x: torch.Tensor, out: torch.Tensor, *, grid: Any, warmup: bool) -> None:
            launched.append((type(x), threading.current_thread().name))
            out.copy_(2 * x)

    return Doubling()


def doubled(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    kernel[(1,)](x, out)
    return out


class Doubled(torch.autograd.Function):
    """As authors of kernels write it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Any) -> torch.Tensor:
        ctx.kernel = kernel
        return doubled(kernel, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return doubled(ctx.kernel, grads[0]), None


def model_with(activation: nn.Module) -> nn.Module:
    model = tiny_model().train()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, activation)
    return model


@needs_triton
def test_kernels_launched_by_a_model_run_in_its_steps_and_not_in_fake_runs() -> None:
    launched: list[tuple[Any, ...]] = []
    kernel = doubling_kernel(launched)

    class Activation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Doubled.apply(x, kernel)

    model = model_with(Activation())
    engine = attach(model)
    ids = token_batches(1)[0]
    step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    assert not launched
    (profile,) = step_profile.profiles.values()
    assert profile.forward.flops > 0
    model(input_ids=ids, labels=ids).loss.backward()  # is planned for first
    layers = len(model.model.layers)
    assert len(launched) >= 3 * layers  # forward, recompute and backward
    assert all(kind is torch.Tensor for kind, _ in launched)
    engine.close()


@needs_triton
def test_other_threads_and_later_calls_launch() -> None:
    launched: list[tuple[Any, ...]] = []
    kernel = doubling_kernel(launched)
    real, results = torch.ones(2), []
    with launches_without_data():
        with FakeTensorMode():
            doubled(kernel, torch.ones(2))
            assert not launched
            other = threading.Thread(target=lambda: results.append(doubled(kernel, real)))
            other.start()
            other.join()
        results.append(doubled(kernel, real))
    results.append(doubled(kernel, real))
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 3
    assert len(launched) == 3
    with FakeTensorMode():
        doubled(kernel, torch.ones(2))
    assert issubclass(launched[-1][0], FakeTensor), "nothing is left behind"


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor is deprecated:UserWarning")
def test_a_tensor_without_data_has_no_address_to_launch_on() -> None:
    with launches_without_data():
        mode = FakeTensorMode()
    with mode, pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.empty(3).data_ptr()
    with FakeTensorMode():
        assert torch.empty(3).data_ptr() == 0, "nothing is left behind"


def test_a_model_that_asks_for_addresses_trains_without_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    addresses: list[int] = []

    class Addressed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            addresses.append(x.data_ptr())
            return x

    model = model_with(Addressed())
    engine = attach(model)
    ids = token_batches(1)[0]
    with caplog.at_level("INFO"):
        model(input_ids=ids, labels=ids).loss.backward()
    assert "a step can't be predicted for this model" in caplog.text
    assert addresses
    assert 0 not in addresses
    assert all(parameter.grad is not None for parameter in model.parameters())
    engine.close()
