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

from torch import fx

from megatrain_accelerate.estimate.graph_nodes import (
    is_kernel,
    is_long_reduction,
    is_reduction,
    is_view,
    operation,
    size_bytes,
    source,
    values,
    writes_by_index,
    written_bytes,
)
from megatrain_accelerate.planning.step_memory import workspace_bytes

_MOST_READS = 4
"""``torch._inductor.config.realize_reads_threshold``."""

_Stage = tuple[int, int]
"""A stretch between two products, and how many writes by an index lie before in it."""


class FusedKernels:
    """The nodes of a graph as kernels.

    Args:
        graph: flat, functional operations.
    """

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
            before = [
                stages[used][1] + writes_by_index(used)
                for used in self._sources[node]
                if stages[used][0] == stretch and not is_kernel(used)
            ]
            stages[node] = (stretch, max(before, default=0))
            stretch += is_kernel(node)
        return stages

    def _is_fused(self, node: fx.Node) -> bool:
        return node.op == "call_function" and not is_kernel(node)

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether the value is read outside of its stretch."""
        stretch = self._stage[node][0]
        return any(
            reader.op == "output" or is_kernel(reader) or self._stage[reader][0] != stretch for reader in self._readers[node]
        )

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
            readers = self._readers[node]
            is_shared, is_written = self._is_shared(node), writes_by_index(node)
            is_dear = len(readers) > 1 and len(reads) > _MOST_READS
            if is_shared or is_written or is_dear or is_reduction(node):
                computed_once.add(node)
                is_read_later = any(self._stage[reader] != self._stage[node] for reader in readers)
                if is_shared or (is_written and readers) or is_read_later or (is_dear and node in again):
                    self._in_memory.add(node)

    def _read_again_behind_a_loop(self) -> set[fx.Node]:
        """The values that a long reduction reads, and something that comes after it in the same kernel."""
        bits: dict[fx.Node, int] = {node: 1 << i for i, node in enumerate(filter(is_long_reduction, self._nodes))}
        after: dict[fx.Node, int] = {}
        feeds: dict[fx.Node, int] = {}
        for node in self._nodes:
            after[node] = 0
            for used in self._sources[node]:
                after[node] |= (after[used] | bits.get(used, 0)) * self._share_kernel(used, node)
        for node in reversed(self._nodes):
            feeds[node] = 0
            for reader in self._readers[node]:
                feeds[node] |= (feeds[reader] | bits.get(reader, 0)) * self._share_kernel(node, reader)
        return {
            node
            for node in self._nodes
            if any(feeds[node] & after[reader] for reader in self._readers[node] if self._share_kernel(node, reader))
        }

    def _share_kernel(self, node: fx.Node, reader: fx.Node) -> bool:
        return self._is_fused(node) and self._is_fused(reader) and self._stage[node] == self._stage[reader]

    def traffic_bytes(self) -> float:
        """Bytes that fused kernels read and write: a value once in each that reads it, once where it is made."""
        computed_in: dict[fx.Node, set[_Stage]] = {}
        for node in reversed(self._nodes):
            again = [computed_in[reader] for reader in self._readers[node] if self._is_fused(reader)]
            is_inside = node not in self._in_memory and not is_reduction(node) and again
            computed_in[node] = set().union(*again) if is_inside else {self._stage[node]}
        total = 0
        for node in self._in_memory:
            fused = [computed_in[reader] for reader in self._readers[node] if self._is_fused(reader)]
            total += len(set().union(*fused)) * size_bytes(node)
            if self._is_fused(node):
                total += size_bytes(node) + (written_bytes(node) if writes_by_index(node) else 0)
        return float(total)

    def alive_bytes(self, freed: set[str]) -> tuple[int, ...]:
        """What is alive above what is there when the graph begins, at each operation in order.

        Args:
            freed: names of placeholders whose memory is given back after their last use.
        """
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
