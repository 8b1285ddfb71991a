"""Gradients of several backwards before a step add up as fp32 gradients would, wherever they are and whatever happens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import Training, attach, train_streamed
from pairs import long_unless, pairwise
from plain_torch import PlainRun, round_to_bf16, tiny_model, token_batches, train_bf16_with_masters
from test_exactness import assert_bit_equal
from torch import nn

from megatrain_accelerate.gradients.fp32_sums import joined_sum
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    pytest.mark.usefixtures("exact_torch_sqrt"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
        reason="torch's baseline CPU kernels have no fused multiply-add and round AdamW differently from its others",
    ),
]
PLACEMENTS = [{}, {"device_layers": 2}, {"device_layers": -1, "kept_layers": 4}, {"kept_layers": 2}]


def prepared(**settings: object) -> Training:
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    engine = attach(model, **settings)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


def backward(model: nn.Module, ids: torch.Tensor, scale: float = 1.0) -> None:
    (model(input_ids=ids, labels=ids).loss * scale).backward()


def sums_of(run: Training) -> dict[str, torch.Tensor]:
    """The fp32 sums by name, read as a step would."""
    run.engine.runtime.collect_gradients()
    found = {}
    for name, parameter in run.model.named_parameters():
        state = run.engine.runtime.state_of(parameter)
        assert state is not None
        assert parameter.grad is not None
        found[name] = parameter.grad.float().clone()
        if state.handle.has_fp32_sum:
            assert state.sum_residual is not None
            found[name] = joined_sum(parameter.grad, state.sum_residual, run.engine.kernels)
            assert torch.equal(parameter.grad, round_to_bf16(found[name])), "what is shown is the sum, rounded"
    return found


class PlainSums:
    """A bf16 model whose gradients are summed in fp32 by hand."""

    def __init__(self) -> None:
        self.model = tiny_model().train()
        for parameter in self.model.parameters():
            parameter.data = round_to_bf16(parameter.data)
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, ids: torch.Tensor, scale: float = 1.0) -> None:
        backward(self.model, ids, scale)
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            new = parameter.grad.float()
            self.sums[name] = self.sums[name] + new if name in self.sums else new
            parameter.grad = None


def assert_equal_sums(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), name


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_sums_of_five_backwards_are_those_of_fp32_gradients(placement: dict[str, int]) -> None:
    run, plain = prepared(**placement), PlainSums()
    for ids in token_batches(5):
        backward(run.model, ids)
        plain.add(ids)
        assert_equal_sums(sums_of(run), plain.sums)
    run.engine.runtime.collect_gradients()
    total = float(run.engine.runtime.clipping.total_norm(run.model.parameters()))
    assert total == float(torch.linalg.vector_norm(torch.stack([g.norm(2.0) for g in plain.sums.values()]), 2.0))


TINY = 16
"""Gradients, each below half a unit in the last place of nearly every element of the first."""


@functools.cache
def sums_with_tiny_gradients() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Plain PyTorch's sums after one backward, and after the tiny ones."""
    one, two = token_batches(2)
    plain = PlainSums()
    plain.add(one)
    first = dict(plain.sums)
    for _ in range(TINY):
        plain.add(two, 2.0**-12)
    return first, plain.sums


def lost_share(dtype: str, **placement: int) -> float:
    """Of what the tiny gradients add, the part that is lost."""
    one, two = token_batches(2)
    first, plain = sums_with_tiny_gradients()
    run = prepared(accumulation_dtype=dtype, **placement)
    backward(run.model, one)
    for _ in range(TINY):
        backward(run.model, two, 2.0**-12)
    found = sums_of(run)
    run.engine.close()
    lost = torch.stack([(found[name] - plain[name]).norm() for name in first]).norm()
    added = torch.stack([(plain[name] - first[name]).norm() for name in first]).norm()
    return float(lost / added)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_tiny_gradients_that_bf16_loses_are_kept(placement: dict[str, int]) -> None:
    assert lost_share("fp32", **placement) == 0.0


def test_bf16_loses_most_of_the_tiny_gradients() -> None:
    assert lost_share("bf16") > 0.5, "or the test above shows nothing"


@functools.cache
def plain_run(count: int, tied: bool = False, **how: Any) -> PlainRun:
    """Plain PyTorch's training on so many batches."""
    return train_bf16_with_masters(tiny_model(tie_word_embeddings=tied), token_batches(count), **how)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_bf16_accumulation_is_bit_equal_to_that_of_autograd(placement: dict[str, int]) -> None:
    batches = token_batches(8)
    plain = plain_run(8, accumulation=4, fp32_sums=False)
    assert_bit_equal(train_streamed(tiny_model(), batches, accumulation=4, accumulation_dtype="bf16", **placement), plain)
    assert plain_run(8, accumulation=4).norms != plain.norms, "or no test here tells one from the other"


SEVEN = pairwise(PLACEMENTS, [("deferred", 1.0), ("serial", 0.1), ("backward", None)], [False, True])
"""Each placement, schedule and way of tying is among the first six."""


@pytest.mark.parametrize(
    ("placement", "step", "tied"),
    long_unless(SEVEN[:6], SEVEN),
    ids=str,
)
def test_training_on_seven_micro_batches_is_bit_equal(
    placement: dict[str, int], step: tuple[str, float | None], tied: bool
) -> None:
    schedule, max_norm = step
    model, how = tiny_model(tie_word_embeddings=tied), {"accumulation": 7, "max_norm": max_norm}
    streamed = train_streamed(model, token_batches(14), schedule=schedule, **how, **placement)
    assert_bit_equal(streamed, plain_run(14, tied, **how))


@pytest.mark.filterwarnings("ignore:megatrain")
def test_other_optimizers_step_on_the_fp32_sums() -> None:
    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)

    batches = token_batches(12)
    plain = train_bf16_with_masters(tiny_model(), batches, accumulation=3, make_optimizer=sgd)
    assert_bit_equal(train_streamed(tiny_model(), batches, accumulation=3, make_optimizer=sgd), plain)


def change_in_place(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.75)


def replace(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 0.75


def zero(parameter: nn.Parameter) -> None:
    parameter.grad.zero_()


def drop(parameter: nn.Parameter) -> None:
    parameter.grad = None


CHANGES = [change_in_place, replace, zero, drop]


@pytest.mark.parametrize(
    ("placement", "changes"),
    # All gradients in one way where everything streams; each in another way elsewhere.
    [*(({}, [change]) for change in CHANGES), *((placement, CHANGES) for placement in PLACEMENTS)],
    ids=lambda value: "-".join(change.__name__ for change in value) if isinstance(value, list) else str(value),
)
def test_what_somebody_does_to_a_gradient_goes_on_from_what_they_left(
    placement: dict[str, int], changes: list[Callable[[nn.Parameter], None]]
) -> None:
    run, plain = prepared(**placement), PlainSums()
    batches = token_batches(5)
    for position, ids in enumerate(batches):
        backward(run.model, ids)
        plain.add(ids)
        if position != 2:
            continue
        run.engine.drain()
        for (name, parameter), change in zip(run.model.named_parameters(), itertools.cycle(changes)):
            change(parameter)
            shown = nn.Parameter(torch.zeros(parameter.shape, dtype=torch.bfloat16))
            shown.grad = round_to_bf16(plain.sums[name])
            change(shown)
            if shown.grad is None:
                del plain.sums[name]
            else:
                plain.sums[name] = shown.grad.float()
    assert_equal_sums(sums_of(run), plain.sums)
    # And the step takes the same.
    masters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in tiny_model().named_parameters()}
    reference = torch.optim.AdamW(list(masters.values()), lr=1e-3, weight_decay=0.01, foreach=False, fused=False)
    for name, master in masters.items():
        master.grad = plain.sums[name]
    reference.step()
    run.optimizer.step()
    state = run.state()
    for name, master in masters.items():
        assert torch.equal(state[f"master {name}"], master.detach()), name


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_gradients_written_past_autograd_leave_no_nan(placement: dict[str, int]) -> None:
    run = prepared(**placement)
    for ids in token_batches(3):
        backward(run.model, ids)
    run.engine.drain()
    for parameter in run.model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.zero_()
    for found in sums_of(run).values():
        # The residual of what was there, as the bits of a denormal number.
        assert float(found.abs().max()) < 1e-40
    run.optimizer.step()
    assert all(bool(value.isfinite().all()) for value in run.state().values())


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_clipping_after_every_backward_scales_the_sum_in_fp32(placement: dict[str, int]) -> None:
    run, plain = prepared(**placement), PlainSums()
    for ids in token_batches(4):
        backward(run.model, ids)
        plain.add(ids)
        ours = run.engine.runtime.clip_grad_norm(run.model.parameters(), 0.5)
        holders = [nn.Parameter(torch.zeros_like(total)) for total in plain.sums.values()]
        for holder, total in zip(holders, plain.sums.values(), strict=True):
            holder.grad = total
        theirs = nn.utils.clip_grad_norm_(holders, 0.5, foreach=False)
        assert float(ours) == float(theirs) > 0.5
    masters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in tiny_model().named_parameters()}
    reference = torch.optim.AdamW(list(masters.values()), lr=1e-3, weight_decay=0.01, foreach=False, fused=False)
    for name, master in masters.items():
        master.grad = plain.sums[name]
    reference.step()
    run.optimizer.step()
    state = run.state()
    for name, master in masters.items():
        assert torch.equal(state[f"master {name}"], master.detach()), name


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_two_backwards_through_one_graph_add_up_in_fp32(placement: dict[str, int]) -> None:
    run, plain = prepared(**placement), PlainSums()
    ids, other = token_batches(2)
    for _ in range(2):
        loss = run.model(input_ids=other, labels=other).loss
        loss.backward(retain_graph=True)
        loss.backward()
        plain.add(other)
        plain.add(other)
        backward(run.model, ids)
        plain.add(ids)
    assert_equal_sums(sums_of(run), plain.sums)


def test_units_that_move_in_the_middle_take_their_sums_along() -> None:
    where = [((1, 2), False), ((2, 3), True), ((), True), ((0,), False), ((), False)]
    run, plain = prepared(), PlainSums()
    for ids, place in zip(token_batches(6), [*where, where[0]], strict=True):
        backward(run.model, ids)
        plain.add(ids)
        run.engine.runtime.place(*place)
        assert_equal_sums({name: total.cpu() for name, total in sums_of(run).items()}, plain.sums)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_sums_of_one_step_are_forgotten_in_the_next(placement: dict[str, int], set_to_none: bool) -> None:
    run = prepared(**placement)
    for ids in token_batches(3, seed=1):
        backward(run.model, ids)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none)
    plain = PlainSums()
    run.engine.drain()
    for name, parameter in plain.model.named_parameters():
        parameter.data = dict(run.model.named_parameters())[name].detach().clone()
    for ids in token_batches(3):
        backward(run.model, ids)
        plain.add(ids)
        assert_equal_sums(sums_of(run), plain.sums)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_backward_that_fails_leaves_nothing_behind(placement: dict[str, int]) -> None:
    run = prepared(**placement)
    batches = token_batches(6)
    for ids in batches[:2]:
        backward(run.model, ids)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("in the middle of backward")

    for parameter in (run.model.lm_head.weight, run.model.model.norm.weight):
        handle = parameter.register_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            backward(run.model, batches[2])
        handle.remove()
    run.optimizer.zero_grad()
    plain = PlainSums()
    for ids in batches[3:]:
        backward(run.model, ids)
        plain.add(ids)
    assert_equal_sums(sums_of(run), plain.sums)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_gradients_that_are_only_asked_for_leave_the_sum_of_a_resident_alone(placement: dict[str, int]) -> None:
    run, plain = prepared(**placement), PlainSums()
    weight = run.model.lm_head.weight
    for ids in token_batches(3):
        backward(run.model, ids)
        plain.add(ids)
        shown = weight.grad
        (asked,) = torch.autograd.grad(run.model.lm_head(torch.ones(1, 64, dtype=torch.bfloat16)).sum(), [weight])
        assert bool((asked == 1).all())
        assert weight.grad is shown
    assert_equal_sums(sums_of(run), plain.sums)


def test_hooks_of_users_on_a_resident_see_and_change_what_they_would() -> None:
    run, plain = prepared(), PlainSums()
    weight = run.model.lm_head.weight
    seen: list[torch.Tensor] = []
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for ids in token_batches(3):
        backward(run.model, ids)
        plain.add(ids)
    # Doubling is exact in bf16, and so the sum is twice the plain one.
    assert torch.equal(sums_of(run)["lm_head.weight"], 2 * plain.sums["lm_head.weight"])
    assert len(seen) == 3
    assert torch.equal(seen[-1], round_to_bf16(2 * plain.sums["lm_head.weight"]))
