"""Key-value caches among a layer's arguments: in training they are left out, since backward runs the layer again."""

from __future__ import annotations

from typing import Any

from megatrain_accelerate.errors import UnsupportedError

_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments without key-value caches, which the replay in backward would update a second time.

    The same rule as transformers' ``GradientCheckpointingLayer`` (transformers/modeling_layers.py).

    Raises:
        UnsupportedError: a cache holds tokens: without it the layer would compute something else.
    """
    is_cache = [hasattr(value, "get_seq_length") and hasattr(value, "update") for value in args]
    caches = [value for flag, value in zip(is_cache, args, strict=True) if flag]
    caches += [value for name, value in kwargs.items() if name in _CACHE_ARGUMENTS and hasattr(value, "get_seq_length")]
    if any(cache.get_seq_length() > 0 for cache in caches):
        raise UnsupportedError(
            "a layer was called with gradients and a key-value cache that holds tokens already, which its backward couldn't "
            "replay: prefix tuning can't be trained with megatrain (prompt tuning, P-tuning, LoRA and IA3 can). If this isn't "
            "training, run it under torch.no_grad()"
        )
    kwargs = {name: None if name in _CACHE_ARGUMENTS else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if flag else value for flag, value in zip(is_cache, args, strict=True)), kwargs
