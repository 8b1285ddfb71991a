"""Seconds of layers that nobody has measured: from their operations, the machine's speeds, and shares of them.

The shares were fitted to a few measured trainings on one H200 (docs/estimate.md lists them, and those left out of the fit).
They say how far a training stays behind the speeds that ``planning/machine.py`` measures with one large product and one copy.
"""

from __future__ import annotations

import dataclasses

from megatrain_accelerate.estimate.layer_graph import GraphCosts, LayerGraph, Product
from megatrain_accelerate.planning.machine import Machine
from megatrain_accelerate.planning.step_memory import OpCosts
from megatrain_accelerate.planning.step_profile import LayerProfile, StepOutline


@dataclasses.dataclass(frozen=True)
class Shares:
    """What share of the machine's speed each sort of work reaches."""

    products: float = 0.98
    """Matrix products of layers, of the speed of a large product that the GPU keeps up."""
    grouped: float = 0.79
    """Products with the matrices of many experts in one kernel, of the same: tiles that groups fill in part, and no kernel
    chosen for each."""
    attention: float = 0.74
    """Attention kernels, of the same; counted without the half that a causal one skips."""
    single: float = 0.70
    """What isn't compiled, but for products and attention: of the speed of a copy within device memory. Kernels of one
    operation each reduce, broadcast, or read slices and rows that aren't aligned."""
    outside: float = 0.955
    """All that runs outside the layers, the loss above all: of that speed, and of a copy's within device memory."""


FITTED = Shares()


def graph_seconds(costs: GraphCosts, machine: Machine, shares: Shares) -> float:
    """Seconds of a compiled layer's forward or backward."""
    return (
        sum(_product_seconds(product, machine, shares) for product in costs.products)
        + costs.attention_flops / (shares.attention * machine.device_flops)
        + costs.traffic_bytes / machine.device_bytes
    )


def _product_seconds(product: Product, machine: Machine, shares: Shares) -> float:
    """A product of short rows (a head's queries with its keys) is bound by what it reads and writes."""
    share = shares.grouped if product.is_grouped else shares.products
    return max(product.flops / (share * machine.device_flops), product.moved_bytes / machine.device_bytes)


def compiled_profile(dry: LayerProfile, graph: LayerGraph, machine: Machine, shares: Shares) -> LayerProfile:
    """The profile of a call that runs compiled.

    Args:
        dry: of the same call, or of the first piece of it, run without a compiler.
        graph: of that call or piece.
        machine, shares: for the times.
    """
    forward = graph_seconds(graph.forward, machine, shares)
    return dataclasses.replace(
        dry,
        # As layer_measurement.py takes it: the large tensors are the same share.
        offloaded_bytes=round(graph.kept_bytes * min(1.0, dry.offloaded_bytes / max(1, dry.kept_bytes))),
        kept_bytes=graph.kept_bytes,
        forward_bytes=graph.forward.peak_bytes,
        kept_forward_bytes=graph.forward.peak_bytes,
        kept_backward_bytes=graph.backward.peak_bytes,
        recomputed_bytes=max(graph.forward.peak_bytes, graph.kept_bytes + graph.backward.peak_bytes),
        forward_seconds=forward,
        kept_forward_seconds=forward,
        recompute_seconds=graph_seconds(graph.recompute, machine, shares),
        backward_seconds=graph_seconds(graph.backward, machine, shares),
    )


def uncompiled_profile(dry: LayerProfile, graph: LayerGraph | None, machine: Machine, shares: Shares) -> LayerProfile:
    """The profile of a call that runs as it is written: each operation reads and writes memory.

    Args:
        dry: of the call.
        graph: for its products and attention; None where the layer can't be traced, and attention isn't counted.
        machine, shares: for the times.
    """

    def seconds(costs: OpCosts, compiled: GraphCosts | None) -> float:
        if compiled is None:
            compiled = GraphCosts((Product(costs.flops),), 0.0, 0.0, ())
        return graph_seconds(_uncompiled(compiled, costs, shares), machine, shares)

    forward = seconds(dry.forward, graph.forward if graph else None)
    return dataclasses.replace(
        dry,
        forward_seconds=forward,
        kept_forward_seconds=forward,
        backward_seconds=seconds(dry.backward, graph.backward if graph else None),
    )


def _uncompiled(graph: GraphCosts, costs: OpCosts, shares: Shares) -> GraphCosts:
    """The graph's costs where each operation reads and writes memory, at its share of a copy's speed."""
    return dataclasses.replace(graph, traffic_bytes=costs.traffic_bytes / shares.single)


def tiled_profile(dry: LayerProfile, graph: LayerGraph, machine: Machine, shares: Shares) -> LayerProfile:
    """The profile of a call that runs by tiles of tokens: uncompiled, and its parts once more in backward.

    Args:
        dry: of the call by tiles; its products are those that run.
        graph: of the whole layer, for its attention.
        machine, shares: for the times.
    """
    attention = graph.forward.attention_flops / (shares.attention * machine.device_flops)

    def run(costs: OpCosts, whole: GraphCosts) -> float:
        # The parts' products are the layer's, some of them more than once.
        times = costs.flops / max(1.0, whole.product_flops)
        by_tiles = dataclasses.replace(whole.times(times), attention_flops=whole.attention_flops)
        return graph_seconds(_uncompiled(by_tiles, costs, shares), machine, shares)

    seconds = run(dry.forward, graph.forward)
    return dataclasses.replace(
        dry,
        forward_seconds=seconds,
        kept_forward_seconds=seconds,
        attention_seconds=attention,
        backward_seconds=run(dry.backward, graph.backward),
    )


def outside_seconds(outline: StepOutline, machine: Machine, shares: Shares) -> float:
    """Seconds of what runs outside the layers until the first layer's backward."""
    last_forward = max((i for i, event in enumerate(outline.events) if not event.is_backward), default=-1)
    costs = [event.costs for event in outline.events[: last_forward + 2]]
    flops, traffic = sum(cost.flops for cost in costs), sum(cost.traffic_bytes for cost in costs)
    return (flops / machine.device_flops + traffic / machine.device_bytes) / shares.outside
