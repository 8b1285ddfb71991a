"""An optimizer that wasn't prepared steps the weights that the next forward uses, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, adamw, both, loss_of
from torch import nn
from trainer_runs import plugin, tiny_llama

from megatrain_accelerate.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("profiled_once")


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 128, (2, 16), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("kernel", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_an_optimizer_that_was_not_prepared_trains_as_without_the_plugin(kernel: dict[str, bool]) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = accelerator.prepare(tiny_llama())
        optimizer = adamw(model, **kernel)
        losses: list[Any] = []
        for ids in batches(4):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return model, losses

    both(script, settings={"slots": 2})


def test_an_optimizer_that_would_step_half_of_each_master_is_refused() -> None:
    with plugin(True):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(tiny_llama())
        optimizer = adamw(model)
        accelerator.backward(loss_of(model, batches(1)[0]))
        with pytest.raises(UnsupportedError, match=r"AdamW wasn't given to accelerator.prepare\(\)"):
            optimizer.step()


class Delegating(torch.optim.Optimizer):
    """Steps through another optimizer that it made itself, as SAM and Lookahead do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.inner = torch.optim.SGD(self.param_groups, lr=1e-3)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.filterwarnings("ignore:megatrain")
def test_an_optimizer_that_a_prepared_one_calls_steps_masters() -> None:
    with plugin(True):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        plain = tiny_llama()
        model, optimizer = accelerator.prepare(plain, Delegating(plain.parameters()))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for ids in batches(2):
            accelerator.backward(loss_of(model, ids))
            optimizer.step()
            optimizer.zero_grad()
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
