"""Modules that are prepared beside a model that streams and don't stream themselves: heads, critics, losses with weights.

They are left to Accelerate, which moves them to the device.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine
from megatrain_accelerate.planning.layer_discovery import find_layers


def is_beside(model: nn.Module, others: Iterable[nn.Module], engines: Iterable[Engine], config: MegatrainConfig) -> bool:
    """Whether a module is to be placed on the device as a whole, because another one streams.

    It has no repeated layers, or all of it is smaller than one layer of the other. A part of a model that streams isn't
    beside it.

    Args:
        model: the module.
        others: modules that are prepared together with it.
        engines: those of the models that the Accelerator has prepared.
        config: the settings.
    """
    engines, parameters = list(engines), list(model.parameters())
    if any(engine.runtime.state_of(parameter) is not None for engine in engines for parameter in parameters):
        return False
    sizes = [layer.parameter_count for engine in engines for layer in engine.runtime.layers]
    sizes += [_size(layer) for other in others if other is not model for _, layer in find_layers(other, config.layer_classes)]
    has_layers = bool(find_layers(model, config.layer_classes) or find_layers(model))
    return bool(sizes) and (not has_layers or _size(model) < max(sizes))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
