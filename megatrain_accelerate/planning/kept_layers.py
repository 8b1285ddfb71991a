"""Which layers keep their activations: as many as fit, from the model's end, where backward needs them first.

Offloaded ones come directly before them: their activations come back while the kept layers' backward runs.
"""

from __future__ import annotations

from collections.abc import Callable

from megatrain_accelerate.errors import ConfigError

PROBE_LAYERS = 2
"""Layers that the probe keeps, to see what one costs."""


def last_layers(layer_count: int, kept: int) -> frozenset[int]:
    """Indices of the last ``kept`` of ``layer_count`` layers."""
    return frozenset(range(layer_count - kept, layer_count))


def layers_before(layer_count: int, kept: frozenset[int], offloaded: int) -> frozenset[int]:
    """Indices of the ``offloaded`` layers directly before the kept last ones; fewer if there aren't as many."""
    end = layer_count - len(kept)
    return frozenset(range(max(0, end - offloaded), end))


def require_layers(layer_count: int, keep_layers: int | str, offload_layers: int) -> None:
    """Refuses settings that name more layers than the model has.

    Raises:
        ConfigError: with the numbers.
    """
    if isinstance(keep_layers, int) and keep_layers > layer_count:
        raise ConfigError(f"megatrain_config.keep_layers is {keep_layers}, but the model has {layer_count} layers")
    left = layer_count - (keep_layers if isinstance(keep_layers, int) else 0)
    if offload_layers > left:
        raise ConfigError(
            f"megatrain_config.offload_layers is {offload_layers}, but {left} of the model's {layer_count} layers aren't kept "
            f"(megatrain_config.keep_layers is {keep_layers}); lower one of the two"
        )


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
