"""Keeps the results of attention in forward, so that the recompute in backward doesn't run it again. For long sequences it is
most of a layer's time. This is selective recomputation (Korthikanti et al., arXiv 2205.05198). Torch's own
``create_selective_checkpoint_contexts`` refuses a second backward, other kernels in the recompute, and results on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers.nested_tensors import tensors_in
from megatrain_accelerate.transfer.activation_offload import OffloadedTensor, Recording

FLEX = "flex_attention"
FLASH = "_flash_attention", "_flash_attn"
"""How names of FlashAttention's own functions begin, torch's and the package's."""
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
}


def is_attention(func: Any) -> bool:
    """Whether an operation is a fused attention kernel, whose memory is linear in the sequence length."""
    return func.name().partition(".")[0] in _ATTENTION


def attention_flops(name: str, args: Sequence[Any]) -> float | None:
    """FLOPs of attention of all tokens to all tokens: two products in forward, five in backward (FlashAttention-2, arXiv
    2307.08691). None if the arguments aren't queries, keys and values."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor) and argument.dim() == 4]
    if len(tensors) < 3:
        return None
    is_backward = "backward" in name
    # The first argument of backward is the gradient, except for flex attention.
    query, key = tensors[1:3] if is_backward and not name.startswith(FLEX) else tensors[:2]
    # (B, T, heads, head size) for FlashAttention's own functions, (B, heads, T, head size) for all others.
    keys = key.shape[-3 if name.startswith(FLASH) else -2]
    return 2.0 * (5 if is_backward else 2) * query.numel() * keys


def named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of a call of an operation, by name."""
    return {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}


def drop_rate(func: Any, args: Any, kwargs: Any) -> Any:
    """The dropout probability of a call of an operation, or None if it has no such argument."""
    # The default is zero for all operations that have one.
    rates = dict.fromkeys({"p", "dropout_p"}.intersection(argument.name for argument in func._schema.arguments), 0.0)
    given = {**rates, **named_arguments(func, args, kwargs)}
    return given.get("dropout_p", given.get("p"))


def require_attention_to_keep(model: nn.Module, kept_attention: int | None) -> None:
    """Raises an UnsupportedError if flex attention's results are to be kept: it can't be compiled under a dispatch mode."""
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind == FLEX and kept_attention:
        raise UnsupportedError(
            f"megatrain_config.placement.kept_attention is {kept_attention}, and the results of flex attention can't be kept; "
            "leave it out, or load the model with attn_implementation='sdpa'"
        )


class AttentionResults:
    """The results of the attention operations of one run, in order. Owner: the graph, through its checkpoint. Reader: the
    recompute. ``leaving`` records those to offload, which the caller sends after the run. None if all stay on the device."""

    def __init__(self, leaving: Recording | None = None) -> None:
        self.results: list[Any] = []
        self._leaving = leaving

    @property
    def size_bytes(self) -> int:
        """Bytes of the results that stay on the device."""
        return sum(tensor.nbytes for tensor in tensors_in(self.results))

    def recording(self) -> TorchDispatchMode:
        """Records the results of attention in the body, which runs as usual."""

        def record(func: Any, args: Any, kwargs: Any) -> Any:
            result, leaving = func(*args, **kwargs), self._leaving
            # Without the draws of attention with dropout a recompute would go on with other random numbers.
            kept = None if drop_rate(func, args, kwargs) else _cut(result)
            if leaving is not None:
                kept = tree_map_only(torch.Tensor, lambda tensor: leaving.place(tensor) or tensor, kept)
            self.results.append(None if kept is None else (func, kept))
            return result

        return AtAttention(record)

    def replaying(self) -> TorchDispatchMode:
        """Attention in the body doesn't run, but returns the recorded results. The body must be the recorded one again."""
        following = iter(self.results)

        def replay(func: Any, args: Any, kwargs: Any) -> Any:
            found = next(following, None)
            # If ``sdpa_kernel`` was around the forward alone, the recompute chooses another kernel with results of its own.
            if found is None or found[0] is not func:
                return func(*args, **kwargs)
            return _cut(tree_map_only(OffloadedTensor, OffloadedTensor.tensor, found[1]))

        return AtAttention(replay)


class AtAttention(TorchDispatchMode):
    """Calls ``run(operation, args, kwargs)`` instead of each attention operation in the body."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {}) if is_attention(func) else func(*args, **(kwargs or {}))


def _cut(result: Any) -> Any:
    # Autograd makes the tensors that it gets part of its graph, so that the recorded ones must be others.
    return tree_map_only(torch.Tensor, torch.Tensor.detach, result)
