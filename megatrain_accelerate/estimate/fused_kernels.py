"""What Inductor makes of a traced graph: which values are in memory, which kernels read and write them, what is alive.

Products and attention are kernels of their own; what lies between two of them is one fused kernel, but for three of Inductor's
rules, seen in the code that it generates for GPUs (torch/_inductor/ir.py and choices.py):

- A value that is cheap is computed again by each that reads it; one that several read and that is made of more than
  ``realize_reads_threshold`` others is computed once.
- What is written by an index (a scatter) is in memory whole, and is read by a later kernel.
- A reduction over more elements than a block holds is a loop. What is computed once and read by the reduction and again
  behind it, as a softmax's backward reads the product of gradient and result, is in memory in its own dtype.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from megatrain_accelerate.layers.nested_tensors import tensors_in
from megatrain_accelerate.plan.step_memory import is_grouped_product, workspace_bytes

_MOST_READS = 4
"""``torch._inductor.config.realize_reads_threshold``."""
_BLOCK_OF_ROWS, _BLOCK_ACROSS_ROWS = 1024, 64
"""Elements up to which Inductor reduces in one block instead of a loop (``should_use_persistent_reduction``,
torch/_inductor/choices.py)."""
_REDUCTIONS = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum", "var", "var_mean"}
)
_WRITES_BY_INDEX = {"index_put": 2, "_unsafe_index_put": 2, "scatter": 3, "scatter_add": 3, "scatter_reduce": 3}
"""Operations that write to places of their target, and the argument that holds what is written."""

_Stage = tuple[int, int]
"""A stretch between two products, and how many writes by an index lie before in it."""


def operation(node: fx.Node) -> str:
    """The name of what the node calls, without its overload; empty if it calls nothing."""
    called = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(called, "__name__", called)) if node.op == "call_function" else ""


def is_view(node: fx.Node) -> bool:
    """Whether the node shows memory of another one."""
    if operation(node) == "getitem":
        return is_view(node.all_input_nodes[0])
    return getattr(node.target, "is_view", False) or operation(node) == "_unsafe_view"


def source(node: fx.Node) -> fx.Node:
    """The node whose memory this one shows."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_attention(node: fx.Node) -> bool:
    """Whether the node is attention in one kernel, forward or backward."""
    return "attention" in operation(node)


def is_kernel(node: fx.Node) -> bool:
    """Whether the node runs as a kernel of its own, or is one of the tensors that such a kernel made."""
    if operation(node) == "getitem":
        return is_kernel(node.all_input_nodes[0])
    has_formula = getattr(node.target, "overloadpacket", None) in flop_registry
    return has_formula or is_attention(node) or is_grouped_product(operation(node))


def values(node: fx.Node) -> list[torch.Tensor]:
    return tensors_in(node.meta.get("val"))


def size_bytes(node: fx.Node) -> int:
    """Of the tensor that a node makes; nothing for a kernel that makes several, whose tensors are nodes of their own."""
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _is_reduction(node: fx.Node) -> bool:
    return operation(node) in _REDUCTIONS and len(node.all_input_nodes) == 1


def _is_long_reduction(node: fx.Node) -> bool:
    """Whether the node reduces more elements than a block holds."""
    if not _is_reduction(node):
        return False
    given, made = node.all_input_nodes[0].meta["val"], values(node)[0]
    named = node.args[1] if len(node.args) > 1 else None
    dims = [named] if isinstance(named, int) else named if isinstance(named, (list, tuple)) else []
    across_rows = dims and all(dim % given.dim() != given.dim() - 1 for dim in dims)
    return given.numel() > made.numel() * (_BLOCK_ACROSS_ROWS if across_rows else _BLOCK_OF_ROWS)


def _writes_by_index(node: fx.Node) -> bool:
    """Whether the node is a target in which something was written by an index."""
    return operation(node) in _WRITES_BY_INDEX


def _written_bytes(node: fx.Node) -> int:
    """Of what a node writes by an index; nothing for a number, and for other nodes."""
    position = _WRITES_BY_INDEX.get(operation(node), len(node.args))
    written = node.args[position] if len(node.args) > position else None
    return size_bytes(written) if isinstance(written, fx.Node) else 0


class FusedKernels:
    """The nodes of a graph of flat, functional operations as kernels."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = [node for node in graph.nodes if not is_view(node)]
        self._index = {node: index for index, node in enumerate(self._nodes)}
        self._sources = {node: list(dict.fromkeys(source(used) for used in node.all_input_nodes)) for node in self._nodes}
        self._readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in self._nodes}
        for node, used in self._sources.items():
            for other in used:
                self._readers[other].append(node)
        self._stage = self._stages()
        self._in_memory: set[fx.Node] = set()
        self._reads: dict[fx.Node, set[fx.Node]] = {}
        """What a fused value is computed of by the kernel that computes it."""
        self._materialize()

    def _stages(self) -> dict[fx.Node, _Stage]:
        stages: dict[fx.Node, _Stage] = {}
        stretch = 0
        for node in self._nodes:
            stretch += is_kernel(node)
            here = (used for used in self._sources[node] if stages[used][0] == stretch)
            before = [stages[used][1] + _writes_by_index(used) for used in here]
            stages[node] = (stretch, max(before, default=0))
            stretch += is_kernel(node)
        return stages

    def _is_fused(self, node: fx.Node) -> bool:
        return node.op == "call_function" and not is_kernel(node)

    def _materialize(self) -> None:
        again = self._read_again_behind_a_loop()
        computed_once: set[fx.Node] = set()
        for node in self._nodes:
            if not self._is_fused(node):
                computed_once.add(node)
                if node.op != "output":
                    self._in_memory.add(node)
                continue
            self._reads[node] = reads = set()
            for used in self._sources[node]:
                reads |= {used} if used in computed_once else self._reads[used]
            readers, is_written = self._readers[node], _writes_by_index(node)
            stretch = self._stage[node][0]
            is_shared = any(reader.op == "output" or self._stage[reader][0] != stretch for reader in readers)
            is_dear = len(readers) > 1 and len(reads) > _MOST_READS
            if is_shared or is_written or is_dear or _is_reduction(node):
                computed_once.add(node)
                is_read_later = any(self._stage[reader] != self._stage[node] for reader in readers)
                if is_shared or (is_written and readers) or is_read_later or (is_dear and node in again):
                    self._in_memory.add(node)

    def _read_again_behind_a_loop(self) -> set[fx.Node]:
        """The values that a long reduction reads, and something that comes after it in the same kernel."""
        bits = {node: 1 << i for i, node in enumerate(filter(_is_long_reduction, self._nodes))}
        together = {
            node: [at for at in self._readers[node] if self._is_fused(at) and self._stage[at] == self._stage[node]]
            for node in self._nodes
            if self._is_fused(node)
        }
        after, feeds = dict.fromkeys(self._nodes, 0), dict.fromkeys(self._nodes, 0)
        for node in together:
            for reader in together[node]:
                after[reader] |= after[node] | bits.get(node, 0)
        for node in reversed(together):
            for reader in together[node]:
                feeds[node] |= feeds[reader] | bits.get(reader, 0)
        return {node for node in together if any(feeds[node] & after[reader] for reader in together[node])}

    def traffic_bytes(self) -> float:
        """Bytes that fused kernels read and write: a value once in each that reads it, once where it is made."""
        computed_in: dict[fx.Node, set[_Stage]] = {}
        for node in reversed(self._nodes):
            again = [computed_in[reader] for reader in self._readers[node] if self._is_fused(reader)]
            is_inside = node not in self._in_memory and not _is_reduction(node) and again
            computed_in[node] = set().union(*again) if is_inside else {self._stage[node]}
        total = 0.0
        for node in self._in_memory:
            fused = [computed_in[reader] for reader in self._readers[node] if self._is_fused(reader)]
            total += len(set().union(*fused)) * size_bytes(node)
            if self._is_fused(node):
                total += size_bytes(node) + _written_bytes(node)
        return total

    def alive_bytes(self, freed: Collection[str]) -> tuple[int, ...]:
        """What is alive above what is there when the graph begins, at each operation in order. The memory of placeholders
        of the names ``freed`` is given back after their last use."""
        ends, last = self._lifetimes()
        dying: dict[int, set[fx.Node]] = {}
        for node, index in last.items():
            if node.op != "placeholder" or node.name in freed:
                dying.setdefault(index, set()).add(node)
        live = 0
        alive = []
        for index, node in enumerate(self._nodes):
            if node.op == "call_function":
                if node in self._in_memory:
                    live += size_bytes(node) - self._taken_over(node, dying.get(ends[node], set()))
                alive.append(live + (_bytes_while_it_runs(node) if node in self._in_memory else 0))
            live -= sum(size_bytes(dead) for dead in dying.get(index, ()))
        return tuple(alive)

    def _lifetimes(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """Where the kernel ends that computes each node, and the last kernel that reads it: indices of nodes."""
        ends: dict[fx.Node, int] = {}
        last: dict[fx.Node, int] = {}
        for node in reversed(self._nodes):
            readers = [reader for reader in self._readers[node] if reader in ends]
            within = [
                ends[reader]
                for reader in readers
                if self._is_fused(reader) and (node not in self._in_memory or self._stage[reader] == self._stage[node])
            ]
            ends[node] = max([self._index[node], *within]) if self._is_fused(node) else self._index[node]
            if node in self._in_memory and readers:
                last[node] = max(ends[reader] for reader in readers)
        return ends, last

    def _taken_over(self, node: fx.Node, dying: set[fx.Node]) -> int:
        """Bytes of what the node's kernel reads last, and writes the node's value in the place of."""
        for used in self._reads.get(node, ()):
            if used in dying and size_bytes(used) == size_bytes(node):
                dying.remove(used)
                return size_bytes(used)
        return 0


def _bytes_while_it_runs(node: fx.Node) -> int:
    """Of a kernel's workspace, and of its results where they are nodes of their own, later in the graph."""
    made = values(node)
    later = sum(tensor.nbytes for tensor in made) - size_bytes(node)
    return later + workspace_bytes(operation(node), made) if made else 0
