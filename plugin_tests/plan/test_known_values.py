"""In a run without data integers keep their values, so that a model may decide by them; everything else has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from process_memory import PeakMemory
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatrain_accelerate.plan.fake_runs import KnownValues
from megatrain_accelerate.units import MIB

Decision = Callable[[torch.Tensor], object]


def decided(decision: Decision, batch: torch.Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, KnownValues() as values:
        fake = mode.from_tensor(batch)
        values.learn(fake, batch)
        return decision(fake)


def overwritten(batch: torch.Tensor) -> int:
    copy = batch.clone()
    copy[0] = 40
    copy[1:].fill_(50)
    return int(copy.sum())


@pytest.mark.parametrize(
    "decision",
    [
        lambda batch: int(batch.max()) + 1,
        lambda batch: bool((batch > 2).all()),
        lambda batch: int(torch.arange(7).cumsum(0)[-1] + batch[0]),
        lambda batch: batch.tolist(),
        lambda batch: tuple((batch > 3).nonzero().shape),
        lambda batch: int(batch.float().mean(0, keepdim=True) > 1),
        overwritten,
    ],
    ids=["longest", "all", "made", "list", "places", "through_a_float", "overwritten"],
)
def test_what_a_model_decides_is_what_it_decides_with_data(decision: Decision) -> None:
    batch = torch.tensor([3, 1, 4, 1, 5])
    assert decided(decision, batch) == decision(batch)


@pytest.mark.parametrize("as_keyword", [True, False])
def test_counts_of_unknown_numbers_are_as_many_as_are_named(as_keyword: bool) -> None:
    """Experts, by transformers' loss that balances their load."""

    def counted(batch: torch.Tensor) -> tuple[object, ...]:
        chosen = torch.rand(batch.shape[0], 8).topk(2).indices.reshape(-1)
        counts = torch.bincount(chosen, minlength=8) if as_keyword else torch.bincount(chosen, None, 8)
        weighted = torch.bincount(chosen, weights=chosen.float(), minlength=8)
        return tuple(counts.shape), counts.dtype, tuple(weighted.shape), weighted.dtype

    assert decided(counted, torch.zeros(3)) == ((8,), torch.int64, (8,), torch.float32)


def test_a_value_that_was_overwritten_by_something_unknown_is_not_answered() -> None:
    def decision(batch: torch.Tensor) -> int:
        view = batch[:2]
        batch[1] = torch.empty(3).argmax()
        return int(view[0])

    with pytest.raises(DataDependentOutputException):
        decided(decision, torch.tensor([3, 1, 4]))


def test_floating_point_batches_have_no_values() -> None:
    with pytest.raises(DataDependentOutputException):
        decided(lambda batch: bool(batch.sum() > 1), torch.ones(3))


def test_a_single_number_beside_the_batch_has_its_value() -> None:
    # A count of tokens that was divided by a number of devices, say.
    assert decided(lambda number: float(2 / number), torch.tensor(5.0)) == pytest.approx(0.4)


def test_the_gradient_of_a_loss_is_one_though_nothing_is_known_of_the_loss() -> None:
    def gradients(divisor: torch.Tensor) -> tuple[bool, float]:
        seen = []
        mean = torch.rand(3, requires_grad=True).sum()
        mean.register_hook(seen.append)
        loss = mean / divisor
        loss.register_hook(seen.append)
        loss.backward()
        whole, divided = seen
        return torch.equal(whole, torch.tensor(1.0)), float(divided)

    assert decided(gradients, torch.tensor(4.0)) == (True, 0.25)


def test_no_layer_is_left_out_by_a_random_number() -> None:
    assert not decided(lambda _: any(bool(torch.rand([]) < 0.99) for _ in range(20)), torch.ones(1))


def test_no_mask_of_all_pairs_of_many_tokens_is_made_and_a_small_one_is_known() -> None:
    def looked_at(positions: torch.Tensor) -> torch.Tensor:
        mask = positions[:, None] >= positions[None, :]
        assert mask.shape == (len(positions), len(positions))
        return mask

    with PeakMemory() as peak:
        decided(looked_at, torch.arange(1 << 14))
    assert peak.growth < 64 * MIB  # the mask has 256
    assert decided(lambda positions: int(looked_at(positions).sum()), torch.arange(64)) == 64 * 65 // 2


def test_the_batch_is_not_written_to() -> None:
    batch = torch.tensor([3, 1, 4])
    decided(lambda fake: fake.fill_(7), batch)
    assert batch.tolist() == [3, 1, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_have_a_shape_in_every_dtype(dtype: torch.dtype) -> None:
    with FakeTensorMode(), KnownValues():
        tokens, weights = torch.empty(24, 16, dtype=dtype), torch.empty(3, 16, 8, dtype=dtype)
        made = torch._grouped_mm(tokens, weights, offs=torch.empty(3, dtype=torch.int32))
    assert (tuple(made.shape), made.dtype) == ((24, 8), dtype)
