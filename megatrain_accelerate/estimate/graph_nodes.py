"""What the operations of a traced graph are: views of other values, kernels of their own, reductions, writes by an index."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from megatrain_accelerate.planning.step_memory import is_grouped_product
from megatrain_accelerate.streaming.nested_tensors import tensors_in

_VIEWS = frozenset(
    {
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "_unsafe_view",
        "reshape",
    }
)


def operation(node: fx.Node) -> str:
    """The name of what the node calls, without its overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))


def is_view(node: fx.Node) -> bool:
    """Whether the node shows memory of another one."""
    if node.op != "call_function":
        return False
    return operation(node) in _VIEWS or (operation(node) == "getitem" and not _has_several(node.args[0]))


def _has_several(node: Any) -> bool:
    """Whether the node is a kernel that makes several tensors of their own."""
    return not (isinstance(node, fx.Node) and operation(node) in _VIEWS)


def source(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_attention(node: fx.Node) -> bool:
    """Whether the node is attention in one kernel, forward or backward."""
    return node.op == "call_function" and "attention" in operation(node)


@functools.cache
def _has_formula(name: str) -> bool:
    return any(packet.__name__ == name for packet in flop_registry if hasattr(packet, "__name__"))


def is_kernel(node: fx.Node) -> bool:
    """Whether the node runs as a kernel of its own, or is one of the tensors that such a kernel made."""
    if node.op != "call_function":
        return False
    if operation(node) == "getitem" and isinstance(node.args[0], fx.Node):
        return is_kernel(node.args[0])
    return is_attention(node) or _has_formula(operation(node)) or is_grouped_product(operation(node))


def values(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that the node makes, without data."""
    return tensors_in(node.meta.get("val"))


def size_bytes(node: fx.Node) -> int:
    """Of the tensor that a node makes; nothing for a kernel that makes several, whose tensors are nodes of their own."""
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0


_REDUCTIONS = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum", "var", "var_mean"}
)
_BLOCK_OF_ROWS, _BLOCK_ACROSS_ROWS = 1024, 64
"""Elements up to which Inductor reduces in one block instead of a loop (``should_use_persistent_reduction``,
torch/_inductor/choices.py)."""


def is_reduction(node: fx.Node) -> bool:
    """Whether the node reduces along dimensions."""
    return node.op == "call_function" and operation(node) in _REDUCTIONS and len(node.all_input_nodes) == 1


def is_long_reduction(node: fx.Node) -> bool:
    """Whether the node reduces more elements than a block holds."""
    if not is_reduction(node):
        return False
    given, made = node.all_input_nodes[0].meta["val"], values(node)[0]
    named = node.args[1] if len(node.args) > 1 else None
    dims = [named] if isinstance(named, int) else named if isinstance(named, (list, tuple)) else []
    across_rows = dims and all(dim % given.dim() != given.dim() - 1 for dim in dims)
    return given.numel() > made.numel() * (_BLOCK_ACROSS_ROWS if across_rows else _BLOCK_OF_ROWS)


_WRITES_BY_INDEX = {"index_put": 2, "_unsafe_index_put": 2, "scatter": 3, "scatter_add": 3, "scatter_reduce": 3}
"""And which of their arguments holds what is written."""


def writes_by_index(node: fx.Node) -> bool:
    """Whether the node is a target in which something was written by an index."""
    return node.op == "call_function" and operation(node) in _WRITES_BY_INDEX


def written_bytes(node: fx.Node) -> int:
    """Of what such a node writes; nothing for a number."""
    position = _WRITES_BY_INDEX[operation(node)]
    written = node.args[position] if len(node.args) > position else None
    return size_bytes(written) if isinstance(written, fx.Node) else 0
