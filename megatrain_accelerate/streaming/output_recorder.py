"""What inner modules of a layer hand to a side channel while it runs (router logits), and how a compiled layer hands it out.

The recorder's hooks inside a layer can't be compiled: they look at the state of the recorder. While a compiled layer is
traced and runs, hooks of ours stand in their place. These only put the value on a list, which the traced function returns
beside the layer's output; what was returned is entered into the recorder afterwards, in the same order.
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
    """What a recorder's hook takes of the output of the module on which it hangs."""

    channel: str
    """Under which name it is recorded."""
    index: int
    """Its place, where the module returns a tuple."""
    is_plain: bool = True
    """Whether the hook does nothing else, so that it can be replaced."""


Recorded = list[tuple[str, Any]]
"""What was recorded, in order for each name: under which name, and the value, a tensor as a rule."""


class OutputRecorder:
    """Collects what a layer's inner modules hand to a side channel (router logits, for one) while it runs.

    This one is for models of which nothing is collected.
    """

    def channels(self) -> tuple[str, ...]:
        """The names under which something is collected now."""
        return ()

    def apart(self, channels: Sequence[str] | None = None) -> contextlib.AbstractContextManager[Recorded]:
        """What is recorded in the body isn't collected, but is in the list that this gives, when the body has ended.

        Args:
            channels: the names under which the body is to record; None for those of now.
        """
        return contextlib.nullcontext([])

    def enter(self, recorded: Recorded) -> None:
        """Records this now, under the names that are collected, in the place of a layer, or of a hook, that isn't run."""

    def capture_of(self, hook: Hook) -> Capture | None:
        """What a forward hook records; None if it isn't one of the recorder's."""
        return None


class Captures:
    """The recorder's hooks inside a layer, at one call of it.

    Args:
        owners: the modules with such hooks, in the order in which they are found, each with its name within the layer and
            what its hooks take now, in their order.
    """

    def __init__(self, owners: Sequence[tuple[str, nn.Module, tuple[Capture, ...]]]) -> None:
        self._owners = owners
        self.key = tuple((name, captures) for name, _, captures in owners if captures)
        """Equal for layers that are to hand out the same. Empty if nothing is recorded."""

    @classmethod
    def inside(cls, module: nn.Module, recorder: OutputRecorder) -> Captures | None:
        """What is captured inside the module; None if other hooks run there as well, or ones that can't be replaced.

        Hooks on the module itself run outside of its forward, and don't count.
        """
        if has_global_hooks():
            return None
        owners = []
        for name, child in module.named_modules():
            if child is module or not any(getattr(child, hooks) for hooks in HOOKS):
                continue
            captures = _captures_on(child, recorder)
            if captures is None:
                return None
            owners.append((name, child, captures))
        return cls(owners)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """The modules have hooks that hand out in the place of the recorder's while the body runs."""
        before = [(child, child._forward_hooks) for _, child, _ in self._owners]
        try:
            for _, child, captures in self._owners:
                child._forward_hooks = OrderedDict(enumerate(map(handing_out, captures)))
            yield
        finally:
            for child, hooks in before:
                child._forward_hooks = hooks
            # Only where torch.compile is switched off, and the layer raised.
            _handed_out.clear()


def _captures_on(child: nn.Module, recorder: OutputRecorder) -> tuple[Capture, ...] | None:
    """What is taken of the module's output now; None if it has hooks that can't be replaced."""
    if any(getattr(child, hooks) for hooks in HOOKS if hooks != "_forward_hooks"):
        return None
    taken = []
    for hook in child._forward_hooks.values():
        capture = recorder.capture_of(hook)
        if capture is None:
            return None
        if capture.channel in recorder.channels():
            if not capture.is_plain:
                return None
            taken.append(capture)
    return tuple(taken)


_handed_out: list[tuple[str, Any]] = []
"""Dynamo follows what is put here and taken again; of what it compiled nothing is ever in it."""


@functools.cache
def handing_out(capture: Capture) -> Hook:
    """A forward hook that leaves what transformers' would record for :func:`take_handed_out`; the same one for equal captures,
    since dynamo may guard which it is."""
    channel, index = capture.channel, capture.index

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, tuple):
            _handed_out.append((channel, output))
        elif output[index] is not None:
            _handed_out.append((channel, output[index]))

    return hook


def take_handed_out() -> Recorded:
    """What the hooks left since the last call, in order: channels and tensors."""
    taken = list(_handed_out)
    _handed_out.clear()
    return taken
