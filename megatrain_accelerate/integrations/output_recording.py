"""Side channels of transformers' layers: tensors that inner modules record while a layer runs (router logits).

transformers 5 collects them with hooks in a context variable (transformers/utils/output_capturing.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatrain_accelerate.streaming.output_recorder import Capture, OutputRecorder, Recorded

_HOOK = ("transformers.utils.output_capturing", "output_capturing_hook")
_HOOK_VARIABLES = frozenset({"key", "index", "capture_initial_hidden_state", "append_hidden_state"})
"""Of them ``append_hidden_state`` is called for hidden states only."""
_HOOK_NAMES = frozenset({"_active_collector", "get", "keys", "len", "append", "isinstance", "tuple"})
_HOOK_TEXTS = frozenset({"hidden_states", "_hidden_states_layers"})


class CapturedOutputs(OutputRecorder):
    """What transformers' capturing hooks record in its ``output_capturing._active_collector``."""

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

    def channels(self) -> tuple[str, ...]:
        return tuple(key for key, values in (self._collector.get() or {}).items() if isinstance(values, list))

    @contextlib.contextmanager
    def apart(self, channels: Sequence[str] | None = None) -> Iterator[Recorded]:
        recorded: Recorded = []
        reset = None if channels is None else self._collector.set({key: [] for key in channels})
        lists = [(key, self._collector.get()[key]) for key in self.channels()]
        lengths = [len(values) for _, values in lists]
        try:
            yield recorded
        finally:
            if reset is not None:
                self._collector.reset(reset)
            for (key, values), length in zip(lists, lengths, strict=True):
                recorded += [(key, value) for value in values[length:]]
                del values[length:]

    def enter(self, recorded: Recorded) -> None:
        collected = self._collector.get() or {}
        for key, value in recorded:
            if key in collected:
                collected[key].append(value)

    def capture_of(self, hook: Callable[..., Any]) -> Capture | None:
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
