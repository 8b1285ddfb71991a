"""How many layers keep their activations: as many as fit, from the model's end, where backward needs them first."""

from __future__ import annotations

from collections.abc import Callable

PROBE_LAYERS = 2
"""Layers that the probe keeps, to see what one costs."""


def last_layers(layer_count: int, kept: int) -> frozenset[int]:
    """Indices of the last ``kept`` of ``layer_count`` layers."""
    return frozenset(range(layer_count - kept, layer_count))


def choose_kept_layers(layer_count: int, budget_bytes: int, predict: Callable[[frozenset[int]], int]) -> frozenset[int]:
    """The most layers that can be kept within a budget.

    At the peak, when the loss is computed, the activations of all kept layers are there at once, so the peak grows by the same
    amount for each; the answer is checked by one more prediction.

    Args:
        layer_count: the model's layers.
        budget_bytes: bytes that the step may take.
        predict: the step's bytes for a set of kept layers.
    """
    without = predict(frozenset())
    probe = min(PROBE_LAYERS, layer_count)
    per_layer = max(1, (predict(last_layers(layer_count, probe)) - without) // probe)
    kept = max(0, min(layer_count, (budget_bytes - without) // per_layer))
    while kept and predict(last_layers(layer_count, kept)) > budget_bytes:
        kept -= 1
    return last_layers(layer_count, kept)
