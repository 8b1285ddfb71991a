"""What many sequences cost, from what some and twice as many of them cost: bytes and operations lie on a line.

Seconds needn't: they are reckoned afterwards, since a product of few tokens may be bound by its weights' bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from megatrain_accelerate.estimate.layer_graph import GraphCosts, LayerGraph, Product
from megatrain_accelerate.planning.step_memory import OpCosts
from megatrain_accelerate.planning.step_profile import Event, LayerProfile, StepOutline


def _extended(once: float, twice: float, times: float) -> float:
    """The line through what is taken by some tokens and by twice as many, at ``times`` of them."""
    return once + (twice - once) * (times - 1)


def _extended_costs(once: OpCosts, twice: OpCosts, times: float) -> OpCosts:
    flops = _extended(once.flops, twice.flops, times)
    return OpCosts(flops, _extended(once.traffic_bytes, twice.traffic_bytes, times))


def extended_profile(once: LayerProfile, twice: LayerProfile, times: float) -> LayerProfile:
    """The profile, without times, of ``times`` the sequences that ``once`` is of; ``twice`` is of two times as many."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(LayerProfile):
        first, second = getattr(once, field.name), getattr(twice, field.name)
        if isinstance(first, OpCosts):
            changes[field.name] = _extended_costs(first, second, times)
        elif field.name.endswith("_bytes"):
            changes[field.name] = round(_extended(first, second, times))
    return dataclasses.replace(twice, **changes)


def _extended_alive(once: Sequence[int], twice: Sequence[int], times: float) -> tuple[int, ...]:
    """Each operation's by itself: where the most is alive may be elsewhere with few sequences than with many.

    If the partitioner cut the two otherwise, only their peaks are on a line.
    """
    if len(once) != len(twice):
        return (round(_extended(max(once, default=0), max(twice, default=0), times)),)
    return tuple(round(_extended(first, second, times)) for first, second in zip(once, twice, strict=True))


def _extended_graph_costs(once: GraphCosts, twice: GraphCosts, times: float) -> GraphCosts:
    products = [
        Product(
            _extended(first.flops, second.flops, times),
            # The weights are among the operands: twice the tokens don't move twice the bytes.
            _extended(first.moved_bytes, second.moved_bytes, times),
            second.is_grouped,
        )
        for first, second in zip(once.products, twice.products, strict=True)
    ]
    return GraphCosts(
        tuple(products),
        _extended(once.attention_flops, twice.attention_flops, times),
        _extended(once.traffic_bytes, twice.traffic_bytes, times),
        _extended_alive(once.alive_bytes, twice.alive_bytes, times),
    )


def extended_graph(once: LayerGraph | None, twice: LayerGraph | None, times: float) -> LayerGraph | None:
    """The graph of ``times`` the sequences that ``once`` is of; ``twice`` is of two times as many. None if either can't be
    traced."""
    if once is None or twice is None:
        return None
    return LayerGraph(
        _extended_graph_costs(once.forward, twice.forward, times),
        _extended_graph_costs(once.recompute, twice.recompute, times),
        _extended_graph_costs(once.backward, twice.backward, times),
        round(_extended(once.kept_bytes, twice.kept_bytes, times)),
        round(_extended(once.output_bytes, twice.output_bytes, times)),
    )


def extended_outline(small: StepOutline, large: StepOutline, times: float) -> StepOutline:
    """The outline of ``times`` the tokens of ``small``; ``large`` has twice as many. All outside the layers is linear."""

    def at(first: float, second: float) -> float:
        return _extended(first, second, times)

    events = tuple(
        dataclasses.replace(
            one,
            live_bytes=round(at(one.live_bytes, two.live_bytes)),
            peak_bytes=round(at(one.peak_bytes, two.peak_bytes)),
            costs=_extended_costs(one.costs, two.costs, times),
        )
        for one, two in zip(small.events, large.events, strict=True)
    )
    tail = _extended_costs(small.tail_costs, large.tail_costs, times)
    tail_peak_bytes = round(at(small.tail_peak_bytes, large.tail_peak_bytes))
    return StepOutline(events, tail_peak_bytes, tail, large.profiles, large.token_tile)


def with_kinds(events: Sequence[Event], kinds: Sequence[Hashable]) -> tuple[Event, ...]:
    """The events with the kinds of the calls in order; a backward has the kind of its layer's last call."""
    calls = iter(kinds)
    of_layer: dict[int, list[Hashable]] = {}
    made = []
    for event in events:
        if event.is_backward:
            kind = of_layer[event.layer].pop()
        else:
            kind = next(calls)
            of_layer.setdefault(event.layer, []).append(kind)
        made.append(dataclasses.replace(event, kind=kind))
    return tuple(made)
