"""Side outputs of a layer's inner modules, such as router logits, and how a compiled layer returns them.

The hooks of an :class:`OutputRecorder` can't be compiled, since they read its state. So while a
compiled layer is traced and run, simpler hooks replace them, which only append the value to a list.
The traced function returns that list beside the layer's output; its values then go to the recorder,
in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from megatrain_accelerate.streaming.model_hook import HOOKS, has_global_hooks

Hook = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Capture:
    """Which part of a module's output a recorder's hook records, and under which channel."""

    channel: str
    """The name under which it is recorded."""
    index: int
    """Its index, if the module returns a tuple."""
    is_plain: bool = True
    """Whether the hook does nothing but record, so that it can be replaced."""


Recorded = list[tuple[str, Any]]
"""Pairs of channel and value, in order of recording within each channel; most values are tensors."""


class OutputRecorder:
    """Records side outputs of a layer's inner modules; this base class records nothing."""

    def channels(self) -> tuple[str, ...]:
        return ()

    def apart(self, channels: Sequence[str] | None = None) -> contextlib.AbstractContextManager[Recorded]:
        """Diverts what the block records into the list that it yields, which is filled when the block ends.

        In the block ``channels`` are recorded; None for those of now.
        """
        return contextlib.nullcontext([])

    def enter(self, recorded: Recorded) -> None:
        """Records these values in the place of a layer or a hook that isn't run now, as far as their channels are recorded."""

    def capture_of(self, hook: Hook) -> Capture | None:
        """What a forward hook records; None if it isn't one of the recorder's."""
        return None


class Captures:
    """What the recorder's hooks inside a layer record at one call of the layer."""

    def __init__(self, owners: Sequence[tuple[str, nn.Module, tuple[Capture, ...]]]) -> None:
        self._owners = owners
        """Inner modules with such hooks, in order: name in the layer, module, captures of now."""
        self.key = tuple((name, captures) for name, _, captures in owners if captures)
        """Equal for layers that record the same channels from the same modules. Empty if nothing is recorded."""

    @classmethod
    def inside(cls, module: nn.Module, recorder: OutputRecorder) -> Captures | None:
        """The captures inside the module (not on it); None if hooks there can't be replaced."""
        if has_global_hooks():
            return None
        owners = []
        for name, child in module.named_modules():
            if child is module:
                continue
            if any(getattr(child, hooks) for hooks in HOOKS if hooks != "_forward_hooks"):
                return None
            if child._forward_hooks:
                found = [recorder.capture_of(hook) for hook in child._forward_hooks.values()]
                now = tuple(one for one in found if one is not None and one.channel in recorder.channels())
                if None in found or not all(capture.is_plain for capture in now):
                    return None
                owners.append((name, child, now))
        return cls(owners)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Replaces the recorder's hooks by those of :func:`handing_out` in the block."""
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
    """Returns a forward hook that stores what transformers' hook would record, for :func:`take_handed_out`.

    Equal captures have the same hook, since dynamo may guard on its identity.
    """
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
