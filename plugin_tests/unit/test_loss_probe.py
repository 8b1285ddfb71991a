"""What a trial of the loss tells, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.planning.loss_probe import loss_is_divided

ITEMS = 7


@pytest.fixture(params=[{}, {"micro_batch_size": 1}], ids=["whole", "pieces"])
def prepared(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Engine]]:
    """A model with dropout, prepared."""
    model = tiny_model(attention_dropout=0.5).train()
    engine = attach(model, **request.param)
    yield model, engine
    engine.close()


def tried(prepared: tuple[nn.Module, Engine], loss: Callable[[Any, Any], torch.Tensor], ignored: bool = False) -> bool | None:
    """The verdict on ``loss(model's output, number)``."""
    model, engine = prepared
    ids = token_batches(1, batch=2)[0]
    labels = torch.full_like(ids, -100) if ignored else ids

    def loss_of(number: Any) -> torch.Tensor:
        return loss(model(input_ids=ids, labels=labels, num_items_in_batch=number), number)

    return loss_is_divided(loss_of, ITEMS, model, engine.runtime)


def test_a_sum_over_tokens_is_divided(prepared: tuple[nn.Module, Engine]) -> None:
    assert tried(prepared, lambda output, number: output.loss) is True


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, number: output.logits.square().mean(),
        lambda output, number: output.loss + 1e-4,
        lambda output, number: output.loss / number,
    ],
    ids=["mean", "own term", "twice"],
)
def test_any_other_loss_is_not(prepared: tuple[nn.Module, Engine], loss: Callable[[Any, Any], torch.Tensor]) -> None:
    assert tried(prepared, loss) is False


@pytest.mark.parametrize(("ignored", "factor"), [(True, 1.0), (False, float("nan")), (False, float("inf"))])
def test_a_loss_of_nothing_tells_nothing(prepared: tuple[nn.Module, Engine], ignored: bool, factor: float) -> None:
    assert tried(prepared, lambda output, number: factor * output.loss, ignored) is None


def test_a_trial_leaves_no_trace(prepared: tuple[nn.Module, Engine]) -> None:
    model, engine = prepared
    calls: list[nn.Module] = []
    model.register_forward_hook(lambda module, args, output: calls.append(module))
    state = torch.get_rng_state()
    assert tried(prepared, lambda output, number: output.loss) is True
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert all(parameter.grad is None for parameter in model.parameters())
    assert engine.predicted_device_bytes == 0
