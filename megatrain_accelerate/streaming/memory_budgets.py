"""What the compiler's partitioner would save of a layer, and compute again, at several memory budgets.

The partitioner parts one graph of forward and backward in two, and decides what is saved in between
(``torch._functorch.config.activation_memory_budget``): at 1.0 all that backward reads, at 0.0 the inputs alone, and between
them it gives up first what costs little to compute again. It is asked here without compiling anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils.flop_counter import flop_registry

CANDIDATES = (0.2, 0.4, 0.6, 0.8)
"""Budgets that are tried between 0.0 and 1.0; several may give one and the same graph."""

_FLOPS_PER_BYTE = 200.0
"""Matrix products that a GPU computes while it moves a byte of its memory: about 100 to 250 on all that compute in bf16."""

_LEAST_DIFFERENCE = 0.03
"""Share of the activations by which two budgets must differ to count as two."""


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """A budget and what it does to a layer, relative to 1.0 (saves everything) and 0.0 (computes everything again)."""

    value: float
    saved_share: float
    """Bytes saved besides the inputs, as a share of those at 1.0."""
    recompute_share: float
    """Time of what backward computes again, as a share of that at 0.0."""


NOTHING = MemoryBudget(0.0, 0.0, 1.0)
EVERYTHING = MemoryBudget(1.0, 1.0, 0.0)


def budgets_of(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> tuple[MemoryBudget, ...]:
    """The distinct budgets of a graph of forward and backward, from 0.0 to 1.0.

    Args:
        graph: with the values of its nodes, as the partitioner takes it; it isn't changed.
        inputs: of the graph.
        options: of the partitioner.
    """
    found = {value: _saved_and_recomputed(graph, inputs, options, value) for value in (0.0, *CANDIDATES, 1.0)}
    (least, most_again), (most, again_in_any_case) = found[0.0], found[1.0]
    if most <= least or most_again <= again_in_any_case:
        return NOTHING, EVERYTHING
    budgets = [NOTHING]
    for value in CANDIDATES:
        saved, again = found[value]
        share = (saved - least) / (most - least)
        again_share = (again - again_in_any_case) / (most_again - again_in_any_case)
        is_other = budgets[-1].saved_share + _LEAST_DIFFERENCE <= share <= 1.0 - _LEAST_DIFFERENCE
        if is_other and 0.0 < again_share < budgets[-1].recompute_share:
            budgets.append(MemoryBudget(value, share, again_share))
    return (*budgets, EVERYTHING)


def _saved_and_recomputed(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], value: float
) -> tuple[int, float]:
    """Bytes that a budget saves besides the inputs, and the costs of what it computes again, in bytes of memory traffic."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    with torch._functorch.config.patch(activation_memory_budget=value):
        forward, backward = min_cut_rematerialization_partition(torch.fx.GraphModule(graph, copied), inputs, **options)
    outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    saved = {node for node in outputs[options["num_fwd_outputs"] :] if node.op != "placeholder"}
    made = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    again = [node for node in backward.graph.nodes if node.op == "call_function" and node.name in made]
    return sum(map(_bytes, saved)), sum(map(_costs, again))


def _bytes(node: torch.fx.Node) -> int:
    value = _concrete(node.meta.get("val"))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _concrete(value: Any) -> Any:
    """A node's value without data, with the sizes of this call in place of sizes that vary: nothing is guarded by them."""
    if isinstance(value, torch.SymInt):
        return value.node.hint or 1
    if not isinstance(value, torch.Tensor):
        return value
    with no_dispatch():
        return torch.empty([_concrete(size) for size in value.shape], dtype=value.dtype, device="meta")


def _costs(node: torch.fx.Node) -> float:
    formula: Callable[..., Any] | None = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if formula is None:
        return float(_bytes(node))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda argument: _concrete(argument.meta.get("val")))
    try:
        return float(formula(*args, **kwargs, out_val=_concrete(node.meta["val"]))) / _FLOPS_PER_BYTE
    except Exception:  # grouped-query attention, which torch's formula refuses
        return float(_bytes(node))
