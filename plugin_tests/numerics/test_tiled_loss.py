"""Loss and gradients by tiles against ``linear`` and ``cross_entropy`` of plain PyTorch, element by element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from megatrain_accelerate.loss import products
from megatrain_accelerate.loss.lazy_logits import LazyLogits, lazy_linear

VOCABULARY, HIDDEN = 128, 32
pytestmark = pytest.mark.usefixtures("small_tiles")

Chain = Callable[[torch.Tensor], torch.Tensor]

CHAINS: dict[str, Chain] = {
    "as_it_is": lambda logits: logits,
    "float": lambda logits: logits.float(),
    "soft_cap": lambda logits: (torch.tanh(logits / 3.0) * 3.0).float(),
    "scaled_up": lambda logits: (logits * 0.25).float(),
    "scaled_down": lambda logits: logits.float() / torch.tensor(7.0),
    "negated": lambda logits: -logits.to(torch.float32),
}


class Inputs:
    """Leaves of one head call; (3, 13) tokens, so that neither tiles nor strips divide them."""

    def __init__(self, dtype: torch.dtype, bias: bool = True, ignored: float = 0.3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def leaf(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

        self.hidden, self.weight = leaf(3, 13, HIDDEN), leaf(VOCABULARY, HIDDEN)
        self.bias = leaf(VOCABULARY) if bias else None
        self.labels = torch.randint(0, VOCABULARY, (3, 13), generator=generator)
        self.labels[torch.rand(3, 13, generator=generator) < ignored] = -100

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]

    def lazy(self) -> LazyLogits:
        return lazy_linear(self.hidden, self.weight, self.bias, lambda: 0)

    def plain(self) -> torch.Tensor:
        return functional.linear(self.hidden, self.weight, self.bias)

    def loss(self, logits: torch.Tensor, chain: Chain, **options: object) -> torch.Tensor:
        flat = chain(logits[..., :-1, :].contiguous()).view(-1, VOCABULARY)
        return functional.cross_entropy(flat, self.labels[..., 1:].reshape(-1), **options)  # type: ignore[arg-type]


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3}], ids=str)
def test_fp32_loss_and_gradients_equal_the_plain_ones(chain: Chain, bias: bool, options: dict[str, object]) -> None:
    inputs = Inputs(torch.float32, bias, ignored=0.0 if "ignore_index" in options else 0.3)
    if "ignore_index" in options:
        inputs.labels[:, ::3] = 3
    lazy = inputs.lazy()
    ours, theirs = inputs.loss(lazy, chain, **options), inputs.loss(inputs.plain(), chain, **options)
    assert lazy._cell[0] is None, "the logits were made"
    assert ours.dtype == theirs.dtype
    # Sums over tokens in another order: a few units in the last place of fp32.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for our, their in zip(gradients(ours, inputs.leaves), gradients(theirs, inputs.leaves), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6 * float(their.abs().max()))


@pytest.mark.parametrize("form", ["converted", "rounded"])
@pytest.mark.parametrize("chain", ["float", "soft_cap", "scaled_up"])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
def test_bf16_gradients_are_as_near_to_exact_ones_as_plain_ones(
    chain: str, options: dict[str, object], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "product_form", lambda device_type, dtype: form)
    squares = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(8):
        inputs = Inputs(torch.bfloat16, seed=seed)
        exact = [leaf.detach().double().requires_grad_() for leaf in inputs.leaves]
        in_double = Inputs(torch.float64, seed=seed)
        in_double.hidden, in_double.weight, in_double.bias = exact
        truth_loss = in_double.loss(in_double.plain(), lambda logits: CHAINS[chain](logits).double(), **options)
        truth = gradients(truth_loss, exact)
        ours, theirs = (inputs.loss(logits, CHAINS[chain], **options) for logits in (inputs.lazy(), inputs.plain()))
        # Logits are rounded to 8 bits in both.
        torch.testing.assert_close(ours.double(), truth_loss, rtol=2**-8, atol=0)
        for row, loss in enumerate((ours, theirs)):
            # As num_items_in_batch divides.
            for column, gradient in enumerate(gradients(loss / 7, inputs.leaves)):
                squares[row, column] += ((gradient.double() - truth[column] / 7) / truth[column].abs().max()).square().sum()
    ours_rms, theirs_rms = squares.sqrt()
    # The products of single tiles are rounded to 8 bits once more where torch has no other way.
    slack = 1.02 if form == "converted" else 1.5
    assert (ours_rms <= slack * theirs_rms).all(), f"{ours_rms / theirs_rms}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
def test_with_all_tokens_ignored_loss_and_gradients_are_torch_s(dtype: torch.dtype, options: dict[str, object]) -> None:
    inputs = Inputs(dtype, ignored=1.1)
    ours, theirs = (inputs.loss(logits, CHAINS["float"], **options) for logits in (inputs.lazy(), inputs.plain()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for our, their in zip(gradients(ours, inputs.leaves), gradients(theirs, inputs.leaves), strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("chain", ["as_it_is", "float"])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}], ids=str)
def test_a_loss_of_no_tokens_is_torch_s(chain: str, options: dict[str, object]) -> None:
    inputs = Inputs(torch.bfloat16)
    inputs.labels = inputs.labels[:, :1]
    ours, theirs = (inputs.loss(logits[:, :1], CHAINS[chain], **options) for logits in (inputs.lazy(), inputs.plain()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for our, their in zip(gradients(ours, inputs.leaves), gradients(theirs, inputs.leaves), strict=True):
        assert torch.equal(our, their)


def test_an_incoming_gradient_of_one_changes_nothing_and_others_scale() -> None:
    inputs = Inputs(torch.bfloat16)
    loss = inputs.loss(inputs.lazy(), CHAINS["float"])
    once = gradients_of(loss, inputs, 1.0)
    for factor in (0.5, 4.0):
        for scaled, plain in zip(gradients_of(loss, inputs, factor), once, strict=True):
            assert torch.equal(scaled, plain * factor), "a power of two is exact"


def gradients_of(loss: torch.Tensor, inputs: Inputs, factor: float) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, inputs.leaves, torch.tensor(factor), retain_graph=True))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen: str) -> None:
    inputs = Inputs(torch.float32)
    everything = dict(
        zip(("hidden", "weight", "bias"), gradients(inputs.loss(inputs.lazy(), CHAINS["float"]), inputs.leaves), strict=True)
    )
    getattr(inputs, frozen).requires_grad_(False)
    inputs.loss(inputs.lazy(), CHAINS["float"]).backward()
    for name, gradient in everything.items():
        leaf = getattr(inputs, name)
        assert leaf.grad is None if name == frozen else torch.equal(leaf.grad, gradient)


def test_the_weight_gradient_of_many_tiles_is_rounded_once() -> None:
    # All tokens alike: each tile's part is the same, and a sum in bf16 would stop growing after 256 of them.
    hidden = torch.ones(1, 12 * 600, HIDDEN, dtype=torch.bfloat16)
    weight = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    logits = lazy_linear(hidden, weight, None, lambda: 0)
    labels = torch.zeros(12 * 600, dtype=torch.long)
    functional.cross_entropy(logits.view(-1, VOCABULARY).float(), labels, reduction="sum").backward()
    assert weight.grad is not None
    # Gradient of a logit: (1/128 - 1 for the label) a token, exact in bf16; the sum is rounded to 8 bits.
    expected = torch.full((VOCABULARY, HIDDEN), 7200 / 128)
    expected[0] -= 7200
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2**-8, atol=0)


def test_a_loss_without_gradients_is_tiled_too() -> None:
    inputs = Inputs(torch.float32)
    lazy = inputs.lazy()
    with torch.no_grad():
        loss = inputs.loss(lazy, CHAINS["soft_cap"])
    detached = inputs.loss(lazy.detach(), CHAINS["soft_cap"])
    expected = inputs.loss(inputs.plain(), CHAINS["soft_cap"]).detach()
    for ours in (loss, detached):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert lazy._cell[0] is None


def test_labels_out_of_range_raise_as_in_torch() -> None:
    inputs = Inputs(torch.float32)
    inputs.labels[0, 5] = VOCABULARY
    with pytest.raises(IndexError, match="out of bounds"):
        inputs.loss(inputs.lazy(), CHAINS["float"])
