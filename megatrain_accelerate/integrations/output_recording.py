"""Side channels of transformers' layers: tensors that inner modules record while a layer runs (router logits).

transformers 5 collects them with hooks in a context variable (transformers/utils/output_capturing.py). Recorded inside
a streamed layer's graph-less forward they would carry no gradient, and an auxiliary loss on them would train nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatrain_accelerate.streaming.output_recorder import Capture

_HOOK = ("transformers.utils.output_capturing", "output_capturing_hook")
_HOOK_VARIABLES = frozenset({"key", "index", "capture_initial_hidden_state", "append_hidden_state"})
"""Of them ``append_hidden_state`` is called for hidden states only."""
_HOOK_NAMES = frozenset({"_active_collector", "get", "keys", "len", "append", "isinstance", "tuple"})
_HOOK_TEXTS = frozenset({"hidden_states", "_hidden_states_layers"})


@dataclasses.dataclass
class _Token:
    keys: list[str]
    collected: dict[str, Any]
    lengths: dict[str, int]
    reset: Any = None
    places: list[tuple[list[Any], int]] = dataclasses.field(default_factory=list)
    channels: list[str] = dataclasses.field(default_factory=list)


class CapturedOutputs:
    """Makes what transformers' capturing hooks record inside a layer outputs of the layer's autograd node.

    Args:
        collector: transformers' ``output_capturing._active_collector``.
    """

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    @classmethod
    def for_installed_transformers(cls) -> CapturedOutputs | None:
        """The recorder, or None for a version that hands such tensors through the layers' return values."""
        try:
            from transformers.utils import output_capturing
        except ImportError:
            return None
        collector = getattr(output_capturing, "_active_collector", None)
        return cls(collector) if collector is not None else None

    def start(self, replay_of: _Token | None) -> _Token | None:
        """See :class:`~megatrain_accelerate.streaming.output_recorder.OutputRecorder`."""
        if replay_of is not None:
            token = _Token(replay_of.keys, {key: [] for key in replay_of.keys}, {})
            token.reset = self._collector.set(token.collected)
            return token
        collected = self._collector.get()
        if collected is None:
            return None
        # Hidden states are recorded on the layers themselves, outside the node.
        keys = [key for key, value in collected.items() if isinstance(value, list)]
        return _Token(keys, collected, {key: len(collected[key]) for key in keys})

    def finish(self, token: _Token | None) -> list[torch.Tensor]:
        """See :class:`~megatrain_accelerate.streaming.output_recorder.OutputRecorder`."""
        if token is None:
            return []
        if token.reset is not None:
            self._collector.reset(token.reset)
        recorded = []
        for key in token.keys:
            values = token.collected[key]
            for place in range(token.lengths.get(key, 0), len(values)):
                if isinstance(values[place], torch.Tensor):
                    token.places.append((values, place))
                    token.channels.append(key)
                    recorded.append(values[place])
        return recorded

    def publish(self, token: _Token | None, tensors: list[torch.Tensor]) -> None:
        """See :class:`~megatrain_accelerate.streaming.output_recorder.OutputRecorder`."""
        if token is not None:
            for (values, place), tensor in zip(token.places, tensors, strict=True):
                values[place] = tensor
            self._let_go(token)

    def discard(self, token: _Token | None) -> None:
        """See :class:`~megatrain_accelerate.streaming.output_recorder.OutputRecorder`."""
        if token is not None:
            for key in token.keys:
                del token.collected[key][token.lengths[key] :]
            self._let_go(token)

    def channels(self, token: _Token | None) -> list[str]:
        """See :class:`~megatrain_accelerate.streaming.output_recorder.OutputRecorder`."""
        return [] if token is None else list(token.channels)

    def enter(self, channels: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """See :class:`~megatrain_accelerate.streaming.output_recorder.OutputRecorder`."""
        collected = self._collector.get()
        for channel, tensor in zip(channels, tensors, strict=True):
            collected[channel].append(tensor)

    def capture_of(self, hook: Callable[..., Any]) -> Capture | None:
        """See :class:`~megatrain_accelerate.streaming.output_recorder.OutputRecorder`."""
        if (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) != _HOOK:
            return None
        code = hook.__code__
        cells = zip(code.co_freevars, hook.__closure__ or (), strict=True)
        variables = {name: cell.cell_contents for name, cell in cells}
        texts = {constant for constant in code.co_consts[1:] if isinstance(constant, str)}  # the first may be a docstring
        # One that knows or calls more does more than this class was written for.
        if not {"key", "index"} <= variables.keys() <= _HOOK_VARIABLES:
            return None
        if not (set(code.co_names) <= _HOOK_NAMES and texts <= _HOOK_TEXTS):
            return None
        # Of hidden states it may take the module's input as well, or leave some out.
        return Capture(variables["key"], variables["index"], is_plain=variables["key"] != "hidden_states")

    def is_recording(self, channel: str) -> bool:
        """See :class:`~megatrain_accelerate.streaming.output_recorder.OutputRecorder`."""
        collected = self._collector.get()
        return collected is not None and channel in collected

    def _let_go(self, token: _Token) -> None:
        # The node holds the token: its outputs must not hang on it, or activations live until the next collection.
        token.collected, token.places = {}, []
