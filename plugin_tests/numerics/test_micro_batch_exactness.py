"""Batches that run in pieces inside the layers: against the whole batch, and across placements."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_runs import attach, train_streamed
from plain_torch import PlainRun, tiny_model, token_batches
from torch import nn

from megatrain_accelerate.transfer import activation_offload

pytestmark = pytest.mark.usefixtures("profiled_once")

BATCH = 5
STEPS = 20


def trained(*, dropout: float = 0.0, steps: int = STEPS, **settings: object) -> PlainRun:
    model = tiny_model(attention_dropout=dropout).train()
    torch.manual_seed(3)
    return train_streamed(model, token_batches(steps, batch=BATCH, length=16), **settings)  # type: ignore[arg-type]


class Row(nn.Module):
    """Computes each number of the batch by itself, so that its bits can't depend on the others beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden * self.scale + self.shift)


class Rows(nn.Module):
    _no_split_modules = ("Row",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Row() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rowwise_layers_give_the_same_bits_in_pieces(size: int) -> None:
    # Matrix products don't: libraries choose their kernel, and with it the order of sums, by the number of rows.
    model, hidden = Rows(), torch.randn(BATCH, 3, 8)
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, micro_batch_size=size)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    output, expected = model(ours), plain(theirs)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    for mine, their in zip(model.parameters(), plain.parameters(), strict=True):
        # Sums over 15 rows, in another order: a few fp32 roundings of the sum of magnitudes.
        torch.testing.assert_close(mine.grad, their.grad, rtol=1e-5, atol=1e-5)
    engine.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_in_fp32_are_those_of_the_whole_batch(size: int) -> None:
    ids = token_batches(1, batch=BATCH, length=16)[0]
    results = []
    for settings in ({}, {"micro_batch_size": size}):
        model = tiny_model().train()
        engine = attach(model, bf16=False, **settings)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((loss.item(), [parameter.grad.clone() for parameter in model.parameters()]))
        engine.close()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for whole, pieces in zip(results[0][1], results[1][1], strict=True):
        # fp32 sums of 80 tokens in another order: 2**-24 a term, relative to the largest.
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()) + 1e-9)


def test_bf16_gradients_in_pieces_are_rounded_once() -> None:
    """A sum of rounded bf16 gradients would be off by a bf16 rounding for each piece."""
    ids = token_batches(1, batch=8, length=16)[0]
    exact_model = tiny_model().train()
    for parameter in exact_model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    exact_model(input_ids=ids, labels=ids).loss.backward()
    errors = []
    for settings in ({}, {"micro_batch_size": 1}):
        model = tiny_model().train()
        engine = attach(model, **settings)
        model(input_ids=ids, labels=ids).loss.backward()
        weight, exact = model.model.layers[2].mlp.down_proj.weight.grad, exact_model.model.layers[2].mlp.down_proj.weight.grad
        assert weight is not None
        assert exact is not None
        errors.append(float((weight.float() - exact).norm() / exact.norm()))
        engine.close()
    # Both carry bf16 activations' errors; pieces add half a bf16 ulp (2**-9) each before the fp32 sum, uncorrelated.
    assert errors[1] < errors[0] + 2**-9


@pytest.mark.parametrize(
    "shared",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"slots": 3, "schedule": "serial", "accumulation": 2},
        {"max_norm": None, "schedule": "backward"},
    ],
    ids=["deferred", "serial", "backward"],
)
def test_placement_and_schedule_never_change_the_numbers_of_pieces(
    shared: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    loop = {key: value for key, value in shared.items() if key in ("accumulation", "max_norm")}
    reference = trained(dropout=0.2, micro_batch_size=2, **loop)
    for settings in (
        {"kept_layers": 2, "offloaded_layers": 2, "device_layers": 2},
        {"kept_layers": 1, "offloaded_layers": 1, "offloaded_inputs": True},
    ):
        run = trained(dropout=0.2, micro_batch_size=2, **shared, **settings)
        assert run.losses == reference.losses, settings
        assert run.norms == reference.norms, settings
        for name, master in reference.masters.items():
            assert torch.equal(run.masters[name], master), f"{name} differs with {settings}"
