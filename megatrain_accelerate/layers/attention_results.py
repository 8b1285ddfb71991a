"""What attention computed in forward, kept for the recompute in backward: of a long sequence it is most of a layer's time. The
operations alone are left out when they come again: selective recomputation (Korthikanti et al., arXiv 2205.05198). Torch's
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
    """Whether an operation is attention as one kernel, whose memory is linear in the length."""
    return func.name().partition(".")[0] in _ATTENTION


def attention_flops(name: str, args: Sequence[Any]) -> float | None:
    """Of attention to all tokens: two products of all pairs of them in forward, five in backward (FlashAttention-2, arXiv
    2307.08691). None where the arguments aren't queries, keys and values."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor) and argument.dim() == 4]
    if len(tensors) < 3:
        return None
    is_backward = "backward" in name
    # Backward begins with the gradient, but for flex attention's.
    query, key = tensors[1:3] if is_backward and not name.startswith(FLEX) else tensors[:2]
    return 2.0 * (5 if is_backward else 2) * query.numel() * key.shape[-2]


def named_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments that an operation is given, by name."""
    return {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}


def drop_rate(func: Any, args: Any, kwargs: Any) -> Any:
    """The probability with which an operation drops elements; None if it has no such argument."""
    # One that is left out has its default, which is zero for all that have one.
    rates = dict.fromkeys({"p", "dropout_p"}.intersection(argument.name for argument in func._schema.arguments), 0.0)
    given = {**rates, **named_arguments(func, args, kwargs)}
    return given.get("dropout_p", given.get("p"))


def require_attention_to_keep(model: nn.Module, kept_attention: int | None) -> None:
    """Raises an UnsupportedError for flex attention, a compiled function that can't be compiled while it is watched."""
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind == FLEX and kept_attention:
        raise UnsupportedError(
            f"megatrain_config.placement.kept_attention is {kept_attention}, and the results of flex attention can't be kept; "
            "leave it out, or load the model with attn_implementation='sdpa'"
        )


class AttentionResults:
    """The results of one run's attention operations, in order. Owner: the graph, by way of its checkpoint. Reader: the
    recompute. ``leaving`` takes those that wait in host memory, for whoever sends it after the run; None if all stay."""

    def __init__(self, leaving: Recording | None = None) -> None:
        self.results: list[Any] = []
        self._leaving = leaving

    @property
    def size_bytes(self) -> int:
        """Bytes of those that stay."""
        return sum(tensor.nbytes for tensor in tensors_in(self.results))

    def recording(self) -> TorchDispatchMode:
        """Notes what attention gives in the body. The operations run as they do without."""

        def record(func: Any, args: Any, kwargs: Any) -> Any:
            result, leaving = func(*args, **kwargs), self._leaving
            # One that draws random numbers: left out in a recompute, it would change those of what follows.
            kept = None if drop_rate(func, args, kwargs) else _cut(result)
            if leaving is not None:
                kept = tree_map_only(torch.Tensor, lambda tensor: leaving.place(tensor) or tensor, kept)
            self.results.append(None if kept is None else (func, kept))
            return result

        return AtAttention(record)

    def replaying(self) -> TorchDispatchMode:
        """Attention in the body, which must be the recorded one again, gives what was noted, to the bit, and doesn't run."""
        following = iter(self.results)

        def replay(func: Any, args: Any, kwargs: Any) -> Any:
            found = next(following, None)
            # With ``sdpa_kernel`` around the forward alone another kernel is chosen now, with results of its own.
            if found is None or found[0] is not func:
                return func(*args, **kwargs)
            return _cut(tree_map_only(OffloadedTensor, OffloadedTensor.tensor, found[1]))

        return AtAttention(replay)


class AtAttention(TorchDispatchMode):
    """Calls ``run(operation, args, kwargs)`` in the place of attention's operations in the body."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {}) if is_attention(func) else func(*args, **(kwargs or {}))


def _cut(result: Any) -> Any:
    # Autograd enters tensors that it gets into its graph: what is held here must be others.
    return tree_map_only(torch.Tensor, torch.Tensor.detach, result)
