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
from typing import Any, Protocol

import torch
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


class OutputRecorder(Protocol):
    """Collects what a layer's inner modules hand to a side channel (router logits, for one) while it runs.

    Such tensors must become outputs of the layer's node, or their losses lose the layer's gradient.
    """

    def start(self, replay_of: Any) -> Any:
        """Begins to record; in backward with the forward run's token. Returns a token for :meth:`finish`."""

    def finish(self, token: Any) -> list[torch.Tensor]:
        """Ends recording and returns the recorded tensors in order."""

    def publish(self, token: Any, tensors: list[torch.Tensor]) -> None:
        """Puts the node's outputs in the place of the tensors recorded in forward. Must let go of all tensors."""

    def discard(self, token: Any) -> None:
        """Takes back what was recorded in forward since ``token`` was made. Must let go of all tensors."""

    def channels(self, token: Any) -> list[str]:
        """Between ``finish`` and what lets go: for each recorded tensor, under which name it was."""

    def enter(self, channels: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Records tensors under these names in the place of a layer, or of a hook, that isn't run."""

    def capture_of(self, hook: Hook) -> Capture | None:
        """What a forward hook records; None if it isn't one of the recorder's."""

    def is_recording(self, channel: str) -> bool:
        """Whether what is recorded under this name is wanted now; if not, its hooks do nothing."""


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
    def inside(cls, module: nn.Module, recorder: OutputRecorder | None) -> Captures | None:
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


def _captures_on(child: nn.Module, recorder: OutputRecorder | None) -> tuple[Capture, ...] | None:
    """What is taken of the module's output now; None if it has hooks that can't be replaced."""
    if recorder is None or any(getattr(child, hooks) for hooks in HOOKS if hooks != "_forward_hooks"):
        return None
    taken = []
    for hook in child._forward_hooks.values():
        capture = recorder.capture_of(hook)
        if capture is None:
            return None
        if recorder.is_recording(capture.channel):
            if not capture.is_plain:
                return None
            taken.append(capture)
    return tuple(taken)


_handed_out: list[tuple[str, Any]] = []
"""Dynamo follows what is put here and taken again; of what it compiled nothing is ever in it."""


@functools.cache
def handing_out(capture: Capture) -> Hook:
    """A forward hook that leaves its value for :func:`take_handed_out`; the same one for equal captures, since dynamo may
    guard which it is."""
    channel, index = capture.channel, capture.index

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        value = output[index] if isinstance(output, tuple) else output
        if isinstance(value, torch.Tensor):
            _handed_out.append((channel, value))

    return hook


def take_handed_out() -> list[tuple[str, Any]]:
    """What the hooks left since the last call, in order: channels and tensors."""
    taken = list(_handed_out)
    _handed_out.clear()
    return taken
