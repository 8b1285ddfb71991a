"""Side outputs of a layer's inner modules, such as router logits, and how a compiled layer returns them.

transformers 5 collects them with hooks in a context variable (transformers/utils/output_capturing.py), which can't be
compiled. So while a compiled layer is traced and run, simpler hooks only append the value to a list. The traced function
returns that list beside the layer's output; its values are then recorded, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from megatrain_accelerate.hooks import HOOKS, has_global_hooks, has_hooks_inside

_MODULE = "transformers.utils.output_capturing"
_HOOK_VARIABLES = frozenset({"key", "index", "capture_initial_hidden_state", "append_hidden_state"})
"""Of them ``append_hidden_state`` is called for hidden states only."""
_HOOK_NAMES = frozenset({"_active_collector", "get", "keys", "len", "append", "isinstance", "tuple"})
_HOOK_TEXTS = frozenset({"hidden_states", "_hidden_states_layers"})

Hook = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Capture:
    """Which part of a module's output one of transformers' hooks records, and under which channel."""

    channel: str
    """The name under which it is recorded."""
    index: int
    """Its index, if the module returns a tuple."""
    is_plain: bool = True
    """Whether the hook does nothing but record, so that it can be replaced."""


Recorded = list[tuple[str, Any]]
"""Pairs of channel and value, in order of recording within each channel; most values are tensors."""


def channels() -> dict[str, list[Any]]:
    """What transformers' capturing hooks have recorded in the forward that is under way, by channel."""
    # Whoever has such hooks has loaded it. Older versions hand such tensors through the layers' return values.
    collector = getattr(sys.modules.get(_MODULE), "_active_collector", None)
    collected = (None if collector is None else collector.get()) or {}
    return {key: values for key, values in collected.items() if isinstance(values, list)}


@contextlib.contextmanager
def apart() -> Iterator[Recorded]:
    """Diverts what the block records into the list that it yields, which is filled when the block ends."""
    recorded: Recorded = []
    lists = [(key, values, len(values)) for key, values in channels().items()]
    try:
        yield recorded
    finally:
        for key, values, length in lists:
            recorded += [(key, value) for value in values[length:]]
            del values[length:]


def enter(recorded: Recorded) -> None:
    """Records these values in the place of a layer or a hook that isn't run now, as far as their channels are recorded."""
    now = channels()
    for key, value in recorded:
        if key in now:
            now[key].append(value)


def capture_of(hook: Hook) -> Capture | None:
    """What a forward hook records; None if it isn't one of transformers'."""
    if (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) != (_MODULE, "output_capturing_hook"):
        return None
    code = hook.__code__
    cells = zip(code.co_freevars, hook.__closure__ or (), strict=True)
    variables = {name: cell.cell_contents for name, cell in cells}
    texts = {constant for constant in code.co_consts[1:] if isinstance(constant, str)}  # the first may be a docstring
    # One that knows or calls more does more than this file was written for.
    if not {"key", "index"} <= variables.keys() <= _HOOK_VARIABLES:
        return None
    if not (set(code.co_names) <= _HOOK_NAMES and texts <= _HOOK_TEXTS):
        return None
    # Of hidden states it may take the module's input as well, or leave some out.
    return Capture(variables["key"], variables["index"], is_plain=variables["key"] != "hidden_states")


class Captures:
    """What transformers' hooks inside a layer record at one call of the layer."""

    def __init__(self, owners: Sequence[tuple[str, nn.Module, tuple[Capture, ...]]]) -> None:
        self._owners = owners
        """Inner modules with such hooks, in order: name in the layer, module, captures of now."""
        self.key = tuple((name, captures) for name, _, captures in owners if captures)
        """Equal for layers that record the same channels from the same modules. Empty if nothing is recorded."""

    @classmethod
    def inside(cls, module: nn.Module) -> Captures | None:
        """The captures inside the module (not on it); None if hooks there can't be replaced."""
        if has_global_hooks():
            return None
        if not has_hooks_inside(module):
            return cls(())
        owners = []
        for name, child in module.named_modules():
            if child is module:
                continue
            if any(getattr(child, hooks) for hooks in HOOKS if hooks != "_forward_hooks"):
                return None
            if child._forward_hooks:
                found = [capture_of(hook) for hook in child._forward_hooks.values()]
                now = tuple(one for one in found if one is not None and one.channel in channels())
                if None in found or not all(capture.is_plain for capture in now):
                    return None
                owners.append((name, child, now))
        return cls(owners)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Replaces transformers' hooks by those of :func:`handing_out` in the block."""
        before = [(child, child._forward_hooks) for _, child, _ in self._owners]
        try:
            for _, child, captures in self._owners:
                child._forward_hooks = OrderedDict(enumerate(map(handing_out, captures)))
            yield
        finally:
            for child, hooks in before:
                child._forward_hooks = hooks
            # Something is left only if torch.compile is switched off and the layer raised.
            _handed_out.clear()


_handed_out: list[tuple[str, Any]] = []
"""Filled by the hooks and emptied within one traced call. Dynamo resolves both while it traces, so compiled code has none."""


@functools.cache
def handing_out(capture: Capture) -> Hook:
    """A forward hook that stores what transformers' hook would record, for :func:`take_handed_out`."""
    # Equal captures have the same hook, since dynamo may guard on its identity.
    channel, index = capture.channel, capture.index

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, tuple):
            _handed_out.append((channel, output))
        elif output[index] is not None:
            _handed_out.append((channel, output[index]))

    return hook


def take_handed_out() -> Recorded:
    """Returns and removes what the hooks have stored, in order."""
    taken = list(_handed_out)
    _handed_out.clear()
    return taken
