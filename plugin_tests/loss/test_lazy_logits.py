"""Lazy logits: a tensor to everybody, made only when read, with PyTorch's own values and gradients then."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import convert_to_fp32
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.loss.lazy_logits import LazyLogits, lazy_linear

BATCH, TOKENS, HIDDEN, VOCABULARY = 2, 17, 16, 128
LABELS = torch.arange(BATCH * TOKENS) % VOCABULARY
pytestmark = pytest.mark.usefixtures("small_tiles")


class Head:
    """Leaves of a head call, lazily and plainly."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(BATCH, TOKENS, HIDDEN, requires_grad=True)
        self.weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
        self.version = 0

    def lazy(self) -> LazyLogits:
        return lazy_linear(self.hidden, self.weight, None, lambda: self.version)

    def plain(self) -> torch.Tensor:
        return functional.linear(self.hidden, self.weight)

    def gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden, self.weight))


@pytest.fixture
def head() -> Head:
    return Head()


def cross_entropy(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, VOCABULARY), LABELS, **options)


def test_it_looks_like_a_tensor_and_nothing_is_made(head: Head) -> None:
    lazy, plain = head.lazy(), head.plain()
    assert isinstance(lazy, torch.Tensor)
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.stride()) == (plain.shape, plain.dtype, plain.device, plain.stride())
    assert lazy.requires_grad
    assert not lazy.is_leaf
    assert lazy.grad_fn is not None
    assert lazy.size(-1) == VOCABULARY
    assert lazy.numel() == plain.numel()
    assert len(lazy) == BATCH
    lazy.detach()
    lazy.float().to(torch.bfloat16).contiguous().view(-1, VOCABULARY)[3:20]
    assert convert_to_fp32({"logits": lazy.bfloat16()})["logits"].dtype == torch.float32
    assert lazy._cell[0] is None


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits + 1,
        lambda logits: logits[0, 3],
        lambda logits: logits[:, -1],
        lambda logits: logits[..., 5:9],
        lambda logits: logits[torch.tensor([1]), torch.tensor([2])],
        lambda logits: logits.argmax(-1),
        lambda logits: logits.float().topk(3).values,
        lambda logits: logits.transpose(0, 1),
        lambda logits: logits[..., :-1, :].contiguous().view(-1, VOCABULARY).log_softmax(-1),
        lambda logits: (torch.tanh(logits / 30.0) * 30.0).exp(),
        lambda logits: logits.view(-1),
        lambda logits: logits.view(-1, 2),
        lambda logits: torch.cat([logits, logits]),
        lambda logits: torch.stack(list(logits)),
        lambda logits: logits * torch.arange(VOCABULARY),
        lambda logits: logits.cpu().double(),
        lambda logits: logits.detach().numpy(),
        lambda logits: logits.detach().clone(),
        lambda logits: logits.sum().item(),
        lambda logits: logits[0, 0].tolist(),
        lambda logits: repr(logits.detach()),
        lambda logits: f"{logits.sum():.3f}",
        lambda logits: copy.deepcopy(logits.detach()),
        lambda logits: torch.where(logits > 0, logits, 0.0),
    ],
)
def test_reads_give_the_values_of_plain_pytorch(head: Head, read: Callable[[torch.Tensor], Any]) -> None:
    ours, theirs = read(head.lazy()), read(head.plain())
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad
    else:
        assert str(ours) == str(theirs)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits: cross_entropy(logits, reduction="none").mean(),
        lambda logits: cross_entropy(logits, weight=torch.linspace(0, 1, VOCABULARY)),
        lambda logits: functional.cross_entropy(logits.transpose(1, 2), LABELS.view(BATCH, TOKENS)),
        lambda logits: functional.cross_entropy(logits[0], logits[1].softmax(-1)),
        lambda logits: -(torch.tanh(logits / 5.0) * 5.0).log_softmax(-1)[..., 3].mean(),
        lambda logits: logits.float()[..., :-1, :].logsumexp(-1).sum(),
        lambda logits: cross_entropy(logits) + logits.square().mean(),
        lambda logits: _OwnLoss.apply(logits.float()),
    ],
    ids=["none", "weighted", "transposed", "soft_labels", "own_soft_cap", "logsumexp", "two_terms", "custom_function"],
)
def test_a_loss_of_one_s_own_has_the_ordinary_gradients(head: Head, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ours, theirs = loss(head.lazy()), loss(head.plain())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for our, their in zip(head.gradients(ours), head.gradients(theirs), strict=True):
        # Tiles, and the head's own products, sum in another order.
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6 * float(their.abs().max()))


class _OwnLoss(torch.autograd.Function):
    """A user's fused loss: autograd hands it the logits without asking the tensor's class."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        assert logits.data_ptr() != 0
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * logits * grad_output


def test_logits_read_after_the_loss_and_after_backward_are_the_same(head: Head) -> None:
    lazy, plain = head.lazy(), head.plain().detach()
    loss = cross_entropy(lazy)
    with torch.no_grad():
        assert torch.equal(lazy + 0, plain)
    loss.backward()
    assert torch.equal(lazy + 0, plain)
    assert torch.equal(lazy[..., :-1, :].contiguous().argmax(-1), plain[..., :-1, :].argmax(-1))


def test_logits_read_before_the_loss_change_nothing(head: Head) -> None:
    expected = head.gradients(cross_entropy(head.lazy()))
    lazy = head.lazy()
    lazy.argmax(-1)
    for our, their in zip(head.gradients(cross_entropy(lazy)), expected, strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize(
    "write",
    [
        lambda logits: logits.mul_(2.0),
        lambda logits: logits.__setitem__((..., 5), -10.0),
        lambda logits: logits.view(-1, VOCABULARY)[4:9].zero_(),
        lambda logits: logits[0].mul_(3.0),
        lambda logits: logits.transpose(0, 1)[2].zero_(),
    ],
    ids=["whole", "entry", "recorded_view", "view", "view_of_view"],
)
def test_writes_in_place_are_seen_by_values_loss_and_gradients(head: Head, write: Callable[[torch.Tensor], Any]) -> None:
    lazy, plain = head.lazy(), head.plain()
    for logits in (lazy, plain):
        write(logits)
    assert torch.equal(lazy + 0, plain)
    ours, theirs = cross_entropy(lazy), cross_entropy(plain)
    assert torch.equal(ours, theirs)
    for our, their in zip(head.gradients(ours), head.gradients(theirs), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6 * float(their.abs().max()))


def test_what_was_derived_before_a_write_is_refused_rather_than_wrong(head: Head) -> None:
    lazy = head.lazy()
    doubled = lazy * 2.0
    lazy.zero_()
    with pytest.raises(StateError, match="written to in place"):
        doubled.sum()


def test_hooks_and_retained_gradients_see_the_gradient_of_the_logits(head: Head) -> None:
    plain = head.plain()
    plain.retain_grad()
    cross_entropy(plain).backward()
    lazy = head.lazy()
    lazy.retain_grad()
    seen: list[torch.Tensor] = []
    lazy.register_hook(seen.append)
    cross_entropy(lazy).backward()
    assert plain.grad is not None
    assert torch.equal(lazy.grad, plain.grad)  # type: ignore[arg-type]
    assert torch.equal(seen[0], plain.grad)


def test_a_graph_that_somebody_cut_stays_cut(head: Head) -> None:
    lazy = head.lazy()
    leaf = lazy.detach().requires_grad_()
    cross_entropy(leaf * 1.0).backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == lazy.shape
    assert head.hidden.grad is None


def test_a_pickle_holds_ordinary_logits(head: Head) -> None:
    buffer = io.BytesIO()
    torch.save(head.lazy().detach(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, head.plain())


def test_logits_that_can_t_be_made_any_more_are_an_error(head: Head) -> None:
    lazy, read = head.lazy(), head.lazy()
    values = read + 0
    head.version += 1
    with pytest.raises(StateError, match="tiled_loss"):
        lazy.sum()
    assert torch.equal(read + 0, values)


def test_a_factor_that_learns_gets_its_gradient(head: Head) -> None:
    factors = [torch.tensor(2.0, requires_grad=True) for _ in range(2)]
    for logits, factor in zip((head.lazy(), head.plain()), factors, strict=True):
        cross_entropy(logits * factor).backward()
    torch.testing.assert_close(factors[0].grad, factors[1].grad)


@pytest.mark.parametrize("is_trained", [False, True])
def test_soft_capped_logits_leave_nothing_behind(is_trained: bool) -> None:
    # Tanh's node saves what tanh made: it mustn't hold itself through it.
    hidden = torch.randn(20, 8, requires_grad=True) * 2
    storage = StorageWeakRef(hidden.untyped_storage())
    logits = 3 * torch.tanh(lazy_linear(hidden, torch.randn(50, 8, requires_grad=True), None, lambda: 0) / 3)
    assert isinstance(logits, LazyLogits)
    loss = functional.cross_entropy(logits, torch.arange(20))
    if is_trained:
        loss.backward()
    del hidden, logits, loss
    gc.collect()
    assert storage.expired()


def test_detached_logits_share_writes_with_the_logits_whoever_is_made_first() -> None:
    for reads_first in (False, True):
        logits = torch.tanh(lazy_linear(torch.randn(4, 8), torch.randn(6, 8), None, lambda: 0))
        detached = logits.detach()
        assert isinstance(detached, LazyLogits)
        if reads_first:
            assert torch.equal(detached.clone() * 1.0, logits.clone() * 1.0)
        with torch.no_grad():
            logits[0, 0] = 7.0
        assert detached[0, 0].item() == 7.0
        with torch.no_grad():
            detached[1, 1] = 5.0
        assert logits[1, 1].item() == 5.0
