"""Attention without dropout, where the CPU's kernels stand for a GPU's.

A GPU's attention kernels drop out as they go, and keep no scores. The CPU's can't: with dropout torch takes products and a
softmax there, with the scores of all pairs of tokens in memory. Without it the kernel is reckoned with that other models have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_PLACE = 4
"""Of ``dropout_p`` among the arguments."""


class WithoutAttentionDropout(TorchFunctionMode):
    """Calls of torch's attention drop nothing out while the body runs."""

    def __init__(self) -> None:
        super().__init__()
        self.has_dropped = False
        """Whether a call would have."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            self.has_dropped |= bool(args[_PLACE] if len(args) > _PLACE else kwargs.get("dropout_p"))
            args = (*args[:_PLACE], 0.0, *args[_PLACE + 1 :]) if len(args) > _PLACE else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
