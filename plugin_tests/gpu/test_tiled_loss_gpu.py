"""The tiled loss on a GPU: real peak memory, gradients, no wait for the device."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model
from torch.nn import functional

from megatrain_accelerate.kernels.device import cross_entropy
from megatrain_accelerate.loss import products
from megatrain_accelerate.loss.lazy_logits import LazyLogits, lazy_linear
from megatrain_accelerate.loss.tiled_cross_entropy import TILE_BYTES
from megatrain_accelerate.units import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCABULARY, HIDDEN = 65_536, 512


def leaves(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(VOCABULARY, HIDDEN, generator=generator, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator, device="cuda")
    labels[::5] = -100
    return hidden, weight, labels


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), labels)


def peak_of_loss(tokens: int) -> int:
    """Bytes above what was there, for loss and backward of one head call by tiles."""
    hidden, weight, labels = leaves(tokens)
    products.product_form("cuda", hidden.dtype)
    loss_of(lazy_linear(hidden, weight, None, lambda: 0), labels).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of(lazy_linear(hidden, weight, None, lambda: 0), labels).backward()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_the_loss_doesn_t_grow_with_tokens_beyond_hidden_states() -> None:
    few, many = peak_of_loss(8_192), peak_of_loss(32_768)
    # The sum in fp32 and the gradient in bf16 of each hidden state, labels and masks; all logits would be 10 GiB more.
    assert many - few <= (32_768 - 8_192) * (HIDDEN * 6 + 64) + 32 * MIB
    sums = VOCABULARY * HIDDEN * 6 + 32_768 * HIDDEN * 6
    # No logits in fp32: one kernel overwrites the tile.
    assert many <= TILE_BYTES + sums + 64 * MIB


@pytest.mark.parametrize("vocabulary", [4, 1_000, 65_536, 151_937], ids="V={}".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_kernel_gives_torchs_losses_and_gradients(vocabulary: int, dtype: torch.dtype, smoothing: float) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (4 * torch.randn(37, vocabulary, generator=generator, device="cuda")).to(dtype)
    labels = torch.randint(0, vocabulary, (37,), generator=generator, device="cuda")
    labels[::5] = -100
    logits[1, labels[1]] = 60.0  # a token that is certain: its loss is tiny
    if not smoothing:
        logits[2, (labels[2] + 1) % vocabulary] = -torch.inf  # a token that can't come
    leaf = logits.float().requires_grad_()
    expected = functional.cross_entropy(leaf, labels, reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    assert leaf.grad is not None
    untouched = logits.clone()
    losses = cross_entropy(untouched, labels, -100, smoothing, wanted=False)
    # Sums in fp32 of up to 150,000 terms, in another order.
    torch.testing.assert_close(losses, expected.detach(), rtol=3e-6, atol=3e-6)
    assert torch.equal(untouched, logits)
    assert torch.equal(cross_entropy(logits, labels, -100, smoothing, wanted=True), losses)
    # Rounded once, to 8 or 11 bits; values at the border of two roundings may fall to either side.
    torch.testing.assert_close(logits, leaf.grad.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=2**-24)
    assert not logits[::5].any()


def test_losses_and_gradients_are_the_same_in_every_run() -> None:
    hidden, weight, labels = leaves(8_192)
    runs = []
    for _ in range(2):
        loss = loss_of(lazy_linear(hidden, weight, None, lambda: 0), labels)
        runs.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert all(map(torch.equal, *runs))


def test_a_label_outside_the_vocabulary_is_an_error_as_in_torch() -> None:
    script = """
import torch
from megatrain_accelerate.loss.lazy_logits import lazy_linear
hidden, weight = (torch.ones(count, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True) for count in (4096, 70000))
labels = torch.full((4096,), 70000, device="cuda")
torch.nn.functional.cross_entropy(lazy_linear(hidden, weight, None, lambda: 0).float(), labels).item()
"""
    # In a process of its own, since the GPU's context is lost.
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert process.returncode != 0
    assert "a label is outside the vocabulary" in process.stderr


@pytest.mark.parametrize("form", ["of_this_torch", "mm", "rounded"])
def test_loss_and_gradients_are_as_near_to_exact_ones_as_plain_ones(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = leaves(8_192)
    if form != "of_this_torch":
        if form == "mm" and products.product_form("cuda", torch.bfloat16) == "rounded":
            pytest.skip("this torch has no product of bf16 in fp32")
        monkeypatch.setattr(products, "product_form", lambda device_type, dtype: form)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    truth = torch.zeros((), dtype=torch.float64, device="cuda")
    count = (labels != -100).sum()
    for part in range(0, len(labels), 1024):
        tile = slice(part, part + 1024)
        loss = functional.cross_entropy(functional.linear(exact[0][tile], exact[1]), labels[tile], reduction="sum") / count
        loss.backward()
        truth += loss.detach()
    errors = []
    for logits in (lazy_linear(hidden, weight, None, lambda: 0), functional.linear(hidden, weight)):
        loss = loss_of(logits, labels)
        # Logits are rounded to 8 bits.
        torch.testing.assert_close(loss.double(), truth, rtol=2**-8, atol=0)
        found = torch.autograd.grad(loss, (hidden, weight))
        errors.append([float((got.double() - leaf.grad).norm()) for got, leaf in zip(found, exact, strict=True)])
    # A product of one tile is rounded once more where torch has no fp32 result.
    slack = 1.5 if form == "rounded" else 1.02
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= slack * theirs, f"{errors}"


def test_a_step_doesn_t_wait_for_the_device() -> None:
    hidden, weight, labels = leaves(4_096)
    products.product_form("cuda", hidden.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        logits = lazy_linear(hidden, weight, None, lambda: 0)
        functional.cross_entropy((torch.tanh(logits / 30.0) * 30.0).float(), labels, label_smoothing=0.1).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert weight.grad is not None


def test_the_predicted_peak_of_a_step_with_a_large_vocabulary_is_the_real_one() -> None:
    model = tiny_model(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, attn_implementation="sdpa").train()
    base = torch.cuda.memory_allocated()
    engine = attach(model, device="cuda", kept_layers=0)
    ids = torch.randint(0, VOCABULARY, (8, 256), device="cuda").repeat(1, 8)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        outputs = model(input_ids=ids, labels=ids)
        assert isinstance(outputs.logits, LazyLogits)
        loss = outputs.loss
        del outputs
        loss.backward()
        model.zero_grad()
    torch.cuda.synchronize()
    workspace = 128 * MIB
    peak = torch.cuda.max_memory_allocated() - base
    assert engine.device_plan.current.predicted_bytes - workspace == pytest.approx(peak, rel=0.05)
    assert peak < 4 * ids.numel() * VOCABULARY, "less than the logits in fp32"
    engine.close()
