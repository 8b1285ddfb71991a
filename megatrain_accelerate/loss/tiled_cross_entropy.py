"""Computes the cross entropy of a linear head and its gradients by tiles of tokens. One tile of logits exists at a time, which
its gradient overwrites. Gradients of hidden states, weight and bias are summed in forward, and backward only scales them.
Liger Kernel (arXiv 2410.10989) and Cut Cross-Entropy (arXiv 2411.09009) fuse loss and head, too. Here one kernel turns
half-precision logits that are only converted to fp32 into their gradient. In all other cases the user's own chain of torch
operations runs. Shapes: N tokens, V vocabulary, D hidden, n tokens of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.profiler import record_function

from megatrain_accelerate.kernels.device import can_step_on, cross_entropy
from megatrain_accelerate.layers import token_tiles
from megatrain_accelerate.loss.products import add_product, parts, runs_on_gpu
from megatrain_accelerate.units import MIB

TILE_BYTES = 512 * MIB
"""Bytes of one tile's logits in the head's dtype: enough tokens that arithmetic bounds the products, not memory."""

MIN_TILE_TOKENS = 512
"""The smallest number of tokens in a tile, however large the vocabulary."""

STRIP_BYTES = 256 * MIB
"""Bytes of a strip's logits in fp32. A chain of operations runs by strips, since it needs three such tensors at once."""

UNTILED_BYTES = 16 * MIB
"""Bytes of a batch's logits in fp32 up to which it is never tiled."""

_TOKENS_MULTIPLE = 128


class Operation(NamedTuple):
    """An operation that was recorded on logits. Its first argument is a tensor, followed by ``args``."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.function(tensor, *self.args, **self.kwargs)


def tile_tokens(vocabulary: int, itemsize: int) -> int:
    """Tokens of one tile for logits of ``itemsize`` bytes."""
    tokens = max(MIN_TILE_TOKENS, TILE_BYTES // (vocabulary * itemsize))
    return tokens - tokens % _TOKENS_MULTIPLE if tokens > _TOKENS_MULTIPLE else tokens


def strip_tokens(vocabulary: int) -> int:
    """Tokens of one strip."""
    return max(1, STRIP_BYTES // (4 * vocabulary))


def untiled_tokens(weight: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> int:
    """The most tokens of a batch that isn't tiled, for a head's ``weight`` (V, D), on the device of ``like`` and for logits of
    this dtype. A larger batch mustn't take less memory than a smaller one, since plans rely on it."""
    vocabulary, hidden_size = weight.shape
    if not _has_kernel(like, dtype):
        return strip_tokens(vocabulary)
    # A chain of operations takes 14 bytes for each logit, the kernel 2. For each element of a trained weight tiles take 6: the
    # sum of its gradient, and the gradient.
    as_large = 3 * hidden_size // 7 if weight.requires_grad else 0
    return min(strip_tokens(vocabulary), max(as_large, UNTILED_BYTES // (4 * vocabulary)))


class TiledCrossEntropy(torch.autograd.Function):
    """``cross_entropy(chain(linear(hidden, weight, bias)), target)`` as one node. ``hidden`` (N, D), ``weight`` (V, D) and
    ``bias`` (V,) or None have the head's dtype, ``target`` (N,) has token ids. ``chain`` has the element-wise operations
    between head and loss, in order, ``options`` has ``ignore_index``, ``reduction`` and ``label_smoothing``. The loss is a
    scalar of the dtype that the untiled one has."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        chain: Sequence[Operation],
        options: dict[str, Any],
    ) -> torch.Tensor:
        ctx.dtype = hidden.dtype
        sum_dtype = torch.float32 if hidden.dtype in (torch.bfloat16, torch.float16) else hidden.dtype
        hidden_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=sum_dtype) if hidden_wanted else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if weight_wanted else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and bias_wanted else None
        wanted = hidden_wanted or weight_wanted or bias_wanted
        count, vocabulary = len(target), len(weight)
        step = max(1, min(count, tile_tokens(vocabulary, hidden.itemsize)))
        buffer = hidden.new_empty(step, vocabulary)
        total = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        loss_dtype = sum_dtype
        if hidden.is_cuda:  # checked without waiting for the device, as torch's own kernel does
            is_valid = (target >= 0) & (target < vocabulary) | (target == options["ignore_index"])
            torch._assert_async(
                is_valid.all(),
                f"a label is outside the vocabulary: labels are 0 to {vocabulary - 1}, or {options['ignore_index']} to "
                "ignore a token; compare the tokenizer's size with the model's vocab_size",
            )
        for begin in token_tiles.tiles(range(0, max(1, count), step)):  # if there are no tokens, one empty tile, for the dtype
            tile = slice(begin, min(begin + step, count))
            logits, tokens = buffer[: tile.stop - begin], hidden[tile]
            with record_function("megatrain::loss_tile"):
                with torch.autocast(hidden.device.type, enabled=False):
                    if bias is None:
                        torch.mm(tokens, weight.t(), out=logits)
                    else:
                        torch.addmm(bias, tokens, weight.t(), out=logits)
                loss_dtype = loss_to_gradient(logits, target[tile], total, chain, options, wanted)
                with torch.autocast(hidden.device.type, enabled=False):
                    sums = grad_weight if grad_hidden is None else grad_hidden
                    for part in () if sums is None else parts(sums, logits.dtype, vocabulary, max(tokens.shape)):
                        if grad_hidden is not None:
                            add_product(grad_hidden[tile], logits[:, part], weight[part])
                        if grad_weight is not None:
                            add_product(grad_weight[part], logits[:, part].t(), tokens)
                    if grad_bias is not None:
                        grad_bias += logits.sum(0, dtype=grad_bias.dtype)
        divisor = None
        if options["reduction"] == "mean":
            # The sums are divided only in backward. Until then a logit's gradient is p - 1 or p, whose rounding to bf16 is
            # small against 1. Divided before, it would be the same wrongly rounded -1 / n at every label.
            divisor = (target != options["ignore_index"]).sum().to(sum_dtype)
            # If all tokens are ignored, the loss is 0 / 0 = nan as in torch, and the gradients are zero.
            total = total / divisor
            divisor = divisor.clamp(min=1)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, divisor)
        return total.to(loss_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        *all_sums, divisor = ctx.saved_tensors
        with torch.autocast(grad_output.device.type, enabled=False):
            factor = grad_output if divisor is None else grad_output / divisor
            # Rounds once. On a GPU this needs no temporary of the sums' dtype.
            scaled = (s if s is None else torch.mul(s, factor, out=torch.empty_like(s, dtype=ctx.dtype)) for s in all_sums)
            return (*scaled, None, None, None)


def loss_to_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    total: torch.Tensor,
    chain: Sequence[Operation],
    options: dict[str, Any],
    wanted: bool,
) -> torch.dtype:
    """Adds the loss to ``total``, and overwrites ``logits`` (n, V) by its gradient if wanted. Returns the loss's dtype."""
    if _is_fused(logits, chain):
        total += _fused(logits, target, options, wanted).sum()
        return torch.float32
    step = strip_tokens(logits.shape[1])
    dtype = logits.dtype
    for begin in token_tiles.tiles(range(0, max(1, len(logits)), step)):
        strip = slice(begin, begin + step)
        leaf = logits[strip].detach().requires_grad_(wanted)
        with torch.set_grad_enabled(wanted):
            values = leaf
            for operation in chain:
                values = operation(values)
            loss = functional.cross_entropy(values, target[strip], **{**options, "reduction": "sum"})
        del values
        dtype = loss.dtype
        total += loss.detach()
        if wanted:
            (gradient,) = torch.autograd.grad(loss, leaf)
            logits[strip] = gradient
    return dtype


def _is_fused(logits: torch.Tensor, chain: Sequence[Operation]) -> bool:
    """Whether one kernel does all: if logits are only converted to fp32, as in Transformers."""
    kinds = [(operation.function, operation.args, operation.kwargs.get("dtype")) for operation in chain]
    return _has_kernel(logits, logits.dtype) and kinds == [(torch.ops.aten._to_copy.default, (), torch.float32)]


def _has_kernel(like: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for logits of this dtype, whose rounding is far larger than what the order of its sums
    changes: on a GPU with Triton, where ``like`` is, or for which it stands as a fake tensor."""
    return runs_on_gpu(like) and can_step_on(like.device) and dtype in (torch.bfloat16, torch.float16)


def _fused(logits: torch.Tensor, target: torch.Tensor, options: dict[str, Any], wanted: bool) -> torch.Tensor:
    """The loss of each token (n, fp32). Overwrites ``logits`` (n, V) by the gradient if wanted."""
    if not isinstance(logits, FakeTensor):
        return cross_entropy(logits, target, options["ignore_index"], options["label_smoothing"], wanted)
    # The kernel's memory traffic: one read of all logits, and, for the gradient, another read and a write.
    return (logits.mul_(1) if wanted else logits).sum(1, dtype=torch.float32)
