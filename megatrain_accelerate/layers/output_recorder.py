"""Side outputs of a layer's inner modules, such as router logits. transformers 5 collects them with hooks in a context
variable, by channel (transformers/utils/output_capturing.py)."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from megatrain_accelerate.hooks import HOOKS, has_global_hooks, has_hooks_inside

_MODULE = "transformers.utils.output_capturing"

Captures = tuple[tuple[str, str, int], ...]
"""What transformers' hooks inside a layer record in one call: the inner module's name, the channel, and the index of the
output if the module returns a tuple. Empty if nothing is recorded."""

Recorded = list[tuple[str, Any]]
"""Pairs of channel and value, in order of recording within each channel. Most values are tensors."""


def collector() -> Any:
    """Returns transformers' context variable; None in versions that pass such tensors on as layers' return values."""
    return getattr(sys.modules.get(_MODULE), "_active_collector", None)  # who has such hooks has loaded the module


def channels() -> dict[str, list[Any]]:
    """Returns what transformers' hooks have recorded in the forward that is under way, by channel."""
    found = collector()
    collected = (None if found is None else found.get()) or {}
    return {key: values for key, values in collected.items() if isinstance(values, list)}


@contextlib.contextmanager
def apart() -> Iterator[Recorded]:
    """Yields a list that gets what the block records, instead of the channels. It is filled when the block ends."""
    recorded: Recorded = []
    lists = [(key, values, len(values)) for key, values in channels().items()]
    try:
        yield recorded
    finally:
        for key, values, length in lists:
            recorded += [(key, value) for value in values[length:]]
            del values[length:]


def enter(recorded: Recorded) -> None:
    """Records the values of a layer or a hook that isn't run, as far as their channels are being recorded."""
    now = channels()
    for key, value in recorded:
        if key in now:
            now[key].append(value)


def captures_inside(module: nn.Module) -> Captures | None:
    """Returns the captures inside the module (not on it), or None if hooks there do anything else."""
    if has_global_hooks():
        return None
    if not has_hooks_inside(module):
        return ()
    captures, now = [], channels()
    for name, child in module.named_modules():
        if child is module:
            continue
        if any(getattr(child, hooks) for hooks in HOOKS if hooks != "_forward_hooks"):
            return None
        for hook in child._forward_hooks.values():
            if (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) != (_MODULE, "output_capturing_hook"):
                return None
            known = inspect.getclosurevars(hook).nonlocals
            if known["key"] in now:
                captures.append((name, known["key"], known["index"]))
    # A hook for hidden states also takes the first module's input, or leaves some states out, depending on their number.
    return None if any(channel == "hidden_states" for _, channel, _ in captures) else tuple(captures)
