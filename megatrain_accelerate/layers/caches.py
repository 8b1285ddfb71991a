"""Key-value caches among a call's arguments. They stay out of training forwards: the recompute in backward would update them a
second time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs

CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def without_caches(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the call's arguments without key-value caches, by transformers' rule (``GradientCheckpointingLayer``,
    modeling_layers.py). An UnsupportedError if a cache holds tokens: without it the layer would compute something else."""
    is_cache = [hasattr(value, "get_seq_length") and hasattr(value, "update") for value in args]
    caches = [value for flag, value in zip(is_cache, args, strict=True) if flag]
    caches += [value for name, value in kwargs.items() if name in CACHE_ARGUMENTS and hasattr(value, "get_seq_length")]
    if any(cache.get_seq_length() > 0 for cache in caches):
        raise UnsupportedError(
            "a layer was called with gradients and a key-value cache that holds tokens already, which its backward couldn't "
            "replay: prefix tuning can't be trained with megatrain (prompt tuning, P-tuning, LoRA and IA3 can). If this isn't "
            "training, run it under torch.no_grad()"
        )
    instead: dict[str, Any] = {name: None for name in CACHE_ARGUMENTS if kwargs.get(name) is not None}
    if kwargs.get("use_cache"):
        instead["use_cache"] = False
    if not instead and True not in is_cache:  # nothing is copied
        return args, kwargs
    return tuple(None if flag else value for flag, value in zip(is_cache, args, strict=True)), {**kwargs, **instead}


def tensors_in_caches(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors in key-value caches (or states) among a forward's arguments, whatever the caches' class."""
    found: dict[int, Any] = {}
    todo: list[Any] = [inputs.get(name) for name in CACHE_ARGUMENTS]
    while todo:
        value = todo.pop()
        if id(value) not in found:
            found[id(value)] = value
            if isinstance(value, (Mapping, list, tuple)):
                todo += value.values() if isinstance(value, Mapping) else value
            elif type(value).__module__.partition(".")[0] == "transformers" and not isinstance(value, type):
                todo.append(getattr(value, "__dict__", {}))
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


def cache_bytes(inputs: Mapping[str, Any]) -> int:
    """Bytes of the tensors in key-value caches (or states) among a forward's arguments."""
    return sum(tensor.nbytes for tensor in tensors_in_caches(inputs))


def has_cached_tokens(inputs: Mapping[str, Any]) -> bool:
    """Whether a key-value cache among a forward's arguments holds tokens. A cache of states alone (Mamba's) counts none."""
    caches: list[Any] = [inputs.get(name) for name in CACHE_ARGUMENTS]
    with contextlib.suppress(ValueError):  # of transformers, where no layer counts tokens
        return any(bool(cache.get_seq_length() > 0) for cache in caches if hasattr(cache, "get_seq_length"))
    return False


def caching_modules(model: nn.Module, layers: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yields the modules outside the layers whose forward takes ``use_cache``: they decide whether a cache is made."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in inside and "use_cache" in inspect.signature(module.forward).parameters:
            yield module


def decide_against_a_cache(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """A forward pre-hook that sets ``use_cache=False`` where gradients are computed, as transformers does under gradient
    checkpointing: a model that expects a cache may look for it among its layers' outputs."""
    if not torch.is_grad_enabled():
        return None
    names = list(inspect.signature(module.forward).parameters)  # a script may have replaced it since
    if "use_cache" not in names or "use_cache" in names[: len(args)]:
        return None
    return args, {**kwargs, "use_cache": False}
