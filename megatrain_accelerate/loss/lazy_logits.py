"""Logits that are computed only if somebody reads them, and the head that returns them in training. :class:`LazyLogits` is a
tensor with shape, dtype, device and a node in autograd's graph, but no memory. It records views that keep the vocabulary axis
whole and element-wise operations with numbers. Its ``cross_entropy`` runs by tiles. Any other operation computes the values as
plain PyTorch does. Recording happens below autograd, so that the graph has PyTorch's own nodes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.layers.proxy import install_proxy, remove_proxy
from megatrain_accelerate.loss.products import product_form
from megatrain_accelerate.loss.tiled_cross_entropy import Operation, TiledCrossEntropy, untiled_tokens

_aten = torch.ops.aten

_ELEMENTWISE = {_aten._to_copy.default, _aten.mul.Tensor, _aten.div.Tensor, _aten.tanh.default, _aten.neg.default}

_VIEWS = {_aten.view.default, _aten.slice.Tensor, _aten.alias.default}
"""Recorded operations whose result shares memory with their argument."""

_RECORDED = _ELEMENTWISE | _VIEWS | {_aten._unsafe_view.default, _aten.clone.default, _aten.detach.default}

_READERS = {
    *(getattr(torch.Tensor, f"__{name}__") for name in ("array", "deepcopy", "dlpack", "format", "reduce_ex", "repr")),
    *(getattr(torch.Tensor, name) for name in ("data_ptr", "numpy", "storage", "tolist", "untyped_storage")),
}
"""Methods that read memory without calling the dispatcher."""


class HeadCall(NamedTuple):
    """One call of the head. See :func:`lazy_linear`."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_current: Callable[[], bool]
    real: RealTokens | None
    """The real tokens of the batch, or None if padding isn't left out."""

    def logits(self) -> torch.Tensor:
        """All logits (..., V), without a graph. Raises a StateError if the head's weights have changed since the call."""
        if not self.is_current():
            raise StateError(
                "logits were read after the head's weights had changed (by optimizer.step() or a write). They are made when "
                "they are first read: read them before the step, or set megatrain_config.tiled_loss to false"
            )
        # The operands already have the dtype of the head's computation, with autocast or without.
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            return functional.linear(self.hidden, self.weight, self.bias)


class LazyLogits(torch.Tensor):
    """Logits without memory, as the module describes. :func:`lazy_linear` and recorded operations return them."""

    _call: HeadCall
    _parent: LazyLogits | None
    _operation: Operation | None
    _cell: list[torch.Tensor | None]
    """The values, or None until they are computed. Shared with detached logits."""

    @staticmethod
    def _make(call: HeadCall, like: torch.Tensor, parent: LazyLogits | None, operation: Operation | None) -> LazyLogits:
        """New logits in the shape, strides and dtype of ``like``: of ``operation`` on ``parent``, or the head's own output."""
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits, like.shape, strides=like.stride(), dtype=like.dtype, device=call.hidden.device, storage_size=0
        )
        made._call, made._parent, made._operation, made._cell = call, parent, operation, [None]
        return made

    def _materialised(self) -> torch.Tensor:
        """The values without a graph, computed once so that all see writes. Raises a StateError if they can't be any more."""
        if (value := self._cell[0]) is None:
            if self._parent is None or self._operation is None:
                value = self._call.logits()
            elif self._parent._version and self._operation.function not in _VIEWS:
                raise StateError(
                    "logits were written to in place after others had been derived from them and before these were read; "
                    "write to a copy, or set megatrain_config.tiled_loss to false"
                )
            else:
                with torch.no_grad():
                    value = self._operation(self._parent._materialised())
            self._cell[0] = value
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            if (loss := _tiled(*args, **kwargs)) is not None:
                return loss
        elif func in _READERS:
            args = (args[0].unsqueeze(0).squeeze(0), *args[1:])  # not recorded, so that this is an ordinary tensor
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod  # in torch.Tensor it is a marker that says there is none
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if (recorded := _record(func, args, kwargs)) is not None:
            return recorded
        lazy: dict[int, LazyLogits] = {}

        def value(logits: LazyLogits) -> torch.Tensor:
            made = logits._materialised()
            lazy[id(made)] = logits
            return made

        args, kwargs = tree_map_only(LazyLogits, value, (args, kwargs))
        # An operation that returns its argument wrote to it in place. The caller must get its own tensor back.
        return tree_map_only(torch.Tensor, lambda tensor: lazy.get(id(tensor), tensor), func(*args, **kwargs))


class _LazyLinear(torch.autograd.Function):
    """The head's node in the graph, with the gradients of ``linear``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: HeadCall
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        with no_dispatch():
            like = torch.empty(*hidden.shape[:-1], len(weight), dtype=hidden.dtype, device="meta")
        return LazyLogits._make(call, like, None, None)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        hidden_wanted, weight_wanted, bias_wanted, _ = ctx.needs_input_grad
        flat = grad_output.reshape(-1, len(weight))
        return (
            (flat @ weight).view_as(hidden) if hidden_wanted else None,
            flat.t() @ hidden.reshape(len(flat), -1) if weight_wanted else None,
            flat.sum(0) if bias_wanted else None,
            None,
        )


def lazy_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weights_version: Callable[[], Any],
    real: RealTokens | None = None,
) -> LazyLogits:
    """``torch.nn.functional.linear`` of (..., D), (V, D), and (V,) or None, of one dtype, computed later. ``weights_version``
    changes whenever the weights do. After that logits can't be computed any more. With ``real`` tokens a loss is computed of
    those with a label alone, and waits for the device to find them."""
    version = weights_version()
    call = HeadCall(hidden, weight, bias, lambda: weights_version() == version, real)
    return _LazyLinear.apply(hidden, weight, bias, call)


def _record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """The lazy result of an operation that can be recorded, else None."""
    logits = args[0] if args else None
    if func not in _RECORDED or not isinstance(logits, LazyLogits) or logits._version:
        return None
    others = [value for value in args[1:] if isinstance(value, torch.Tensor)]
    # The gradient of a trained factor needs the logits.
    if any(type(other) is not torch.Tensor or other.dim() or other.requires_grad for other in others):
        return None
    if any(key not in ("dtype", "memory_format") and value is not None for key, value in kwargs.items()):
        return None
    with no_dispatch():
        like = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
        rest = [torch.empty_like(v, device="meta") if isinstance(v, torch.Tensor) else v for v in args[1:]]
        try:
            result = func(like, *rest, **kwargs)
        except RuntimeError:
            # The real operation raises the better message.
            return None
    if not result.shape or result.shape[-1] != logits.shape[-1] or not result.is_floating_point():
        return None
    if func is _aten.detach.default:
        # Autograd saves tanh's detached result in tanh's node. As a child of that result it would hold the node: a cycle.
        twin = LazyLogits._make(logits._call, result, logits._parent, logits._operation)
        twin._cell = logits._cell
        return twin
    return LazyLogits._make(logits._call, result, logits, Operation(func, args[1:], kwargs))


def _tiled(input: torch.Tensor, target: torch.Tensor, *others: Any, **given: Any) -> torch.Tensor | None:
    """``cross_entropy`` by tiles, or None if it has to be computed from the logits."""
    options: dict[str, Any] = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    options |= {name: value for name, value in given.items() if value is not None}
    if others or len(options) > 3 or options["reduction"] not in ("mean", "sum"):
        return None
    if not isinstance(input, LazyLogits) or input.dim() != 2 or isinstance(target, LazyLogits):
        return None
    if target.dim() != 1 or target.is_floating_point() or target.shape[0] != input.shape[0] or target.device != input.device:
        return None
    nodes, call = [input], input._call
    while (parent := nodes[0]._parent) is not None:
        nodes.insert(0, parent)
    # Hooks expect the gradient of all logits, which tiles don't make.
    if any(node._version or node._backward_hooks or node.retains_grad for node in nodes):
        return None
    hidden, head_weight, bias = call.hidden, call.weight, call.bias
    if not input.requires_grad or not torch.is_grad_enabled():
        hidden, head_weight, bias = hidden.detach(), head_weight.detach(), bias.detach() if bias is not None else None
    elif any(node.is_leaf or not node.requires_grad for node in nodes):
        # Somebody detached logits in between and began a new graph.
        return None
    chain = []
    for node in nodes:
        if (operation := node._operation) is None:
            continue
        # Operations on the token axes apply to the hidden states instead.
        if operation.function in (_aten.view.default, _aten._unsafe_view.default):
            hidden = hidden.reshape(*node.shape[:-1], hidden.shape[-1])
        elif operation.function in _ELEMENTWISE:
            chain.append(operation)
        elif operation.function is _aten.slice.Tensor:
            dim = operation.args[0] if operation.args else 0
            hidden = hidden if dim % hidden.dim() == hidden.dim() - 1 else operation(hidden)
    if call.real is not None:
        hidden, target = call.real.labelled(hidden, target, options["ignore_index"])
    return TiledCrossEntropy.apply(hidden, head_weight, bias, target, chain, options)


def find_head(model: Any, layers: Iterable[nn.Module]) -> nn.Linear | None:
    """The module that computes the logits, if it is a plain ``nn.Linear`` outside the layers, else None. A head of another
    class (an adapter's, a quantised one) or with a replaced forward is left alone."""
    head = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        head = model.get_output_embeddings() if callable(model.get_output_embeddings) else None
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return None
    outside = set(model.modules()).difference(*(layer.modules() for layer in layers))
    return head if head in outside else None


def tile_head(
    head: nn.Linear,
    weights_version: Callable[[], Any],
    before_copy: Callable[[], None],
    real: Callable[[], RealTokens | None],
) -> Callable[[], None]:
    """Makes a head return lazy logits in training. Returns a function that undoes it. The head becomes a proxy like streamed
    layers, so that copies and pickles of the model hold the plain head. ``weights_version`` changes whenever the weights do,
    ``before_copy`` is called before the head is copied or pickled, and ``real`` returns the real tokens of the batch."""

    def run(head: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs or len(args) != 1 or not _is_worth_waiting(head, args[0]):
            return forward(*args, **kwargs)
        hidden, weight, bias = args[0], head.weight, head.bias
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):  # casts as autocast does for `linear`
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight, bias = (None if operand is None else operand.to(dtype) for operand in (hidden, weight, bias))
        if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
            return forward(*args)
        return lazy_linear(hidden, weight, bias, weights_version, real())

    for dtype in {head.weight.dtype, torch.bfloat16} - {torch.float32}:
        product_form(head.weight.device.type, dtype)  # tried out here, so that no step waits for the device
    forward = install_proxy(head, run, before_copy)
    return functools.partial(remove_proxy, head, forward)


def _is_worth_waiting(head: nn.Linear, hidden: Any) -> bool:
    if not (head.training and torch.is_grad_enabled() and isinstance(hidden, torch.Tensor) and hidden.dim() >= 2):
        return False
    # What `linear` would refuse, or autocast wouldn't cast, is left to `linear`.
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16) or hidden.shape[-1] != head.in_features:
        return False
    if not any(tensor is not None and tensor.requires_grad for tensor in (hidden, head.weight, head.bias)):
        return False
    # So few logits take no more memory than tiles, and `linear` gives the bits of plain PyTorch.
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return hidden.shape[:-1].numel() > untiled_tokens(head.weight, hidden, dtype)
