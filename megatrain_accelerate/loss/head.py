"""The model's output head, whose logits wait until they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.loss.lazy_logits import lazy_linear
from megatrain_accelerate.loss.products import prepare_products
from megatrain_accelerate.loss.tiled_cross_entropy import strip_tokens
from megatrain_accelerate.streaming.proxy import install_proxy, remove_proxy


def find_head(model: nn.Module, layers: Iterable[nn.Module]) -> nn.Linear | None:
    """The module that makes the logits, if it is a plain ``nn.Linear`` outside the layers; else None.

    A head of another class (an adapter's, a quantised one), or with a forward that somebody replaced, is left alone.
    """
    getter = getattr(model, "get_output_embeddings", None)
    try:
        head = getter() if callable(getter) else None
    except (AttributeError, NotImplementedError):
        return None
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return None
    inside = {id(module) for layer in layers for module in layer.modules()}
    is_outside = any(module is head and id(module) not in inside for module in model.modules())
    return head if is_outside else None


class TiledHead:
    """Makes a head return lazy logits in training, until :meth:`remove`.

    The head changes class as streamed layers do, so copies and pickles of the model hold the plain one.

    Args:
        head: on the device, adopted.
        weights_version: changes whenever its weights do.
        before_copy: called before the head is copied or pickled.
    """

    def __init__(self, head: nn.Linear, weights_version: Callable[[], Any], before_copy: Callable[[], None]) -> None:
        self._head = head
        self._weights_version = weights_version
        for dtype in {head.weight.dtype, torch.bfloat16}:
            prepare_products(head.weight.device, dtype)
        self._forward = install_proxy(head, self._run, before_copy)

    def remove(self) -> None:
        """Gives the head its own forward back."""
        remove_proxy(self._head, self._forward)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        head = self._head
        if kwargs or len(args) != 1 or not self._is_worth_waiting(args[0]):
            return self._forward(*args, **kwargs)
        hidden: torch.Tensor = args[0]
        weight: torch.Tensor = head.weight
        bias: torch.Tensor | None = head.bias
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            # As autocast would do it for `linear`.
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None
        if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
            return self._forward(*args)
        return lazy_linear(hidden, weight, bias, self._weights_version)

    def _is_worth_waiting(self, hidden: Any) -> bool:
        head = self._head
        if not (head.training and torch.is_grad_enabled() and isinstance(hidden, torch.Tensor) and hidden.dim() >= 2):
            return False
        # What `linear` would refuse, or autocast leave alone, goes there.
        if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16) or hidden.shape[-1] != head.in_features:
            return False
        if not any(tensor is not None and tensor.requires_grad for tensor in (hidden, head.weight, head.bias)):
            return False
        # As few logits as this take no more memory than tiles do, and the plain way is exact to the bit.
        return hidden.shape[:-1].numel() > strip_tokens(head.out_features)
