"""Layers run on trial, or not at all, while a model's forward collects what they record on the side (router logits).

A trial leaves nothing behind in the collection; for each call the plan enters there, once, what the layer would have recorded,
so that an auxiliary loss has one tensor a layer, as in a real step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatrain_accelerate.streaming.output_recorder import OutputRecorder


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a layer returned on trial, and what it recorded: tensors, and for each the channel's name."""

    output: Any
    recorded: list[torch.Tensor]
    channels: tuple[str, ...]


def run_on_trial(recorder: OutputRecorder | None, call: Callable[[], Any]) -> Trial:
    """Calls a layer and takes back what it recorded.

    Args:
        recorder: the engine's.
        call: runs the layer's own forward.
    """
    if recorder is None:
        return Trial(call(), [], ())
    token = recorder.start(None)
    try:
        output = call()
        recorded = recorder.finish(token)
        channels = recorder.channels(token)
    finally:
        recorder.discard(token)
    return Trial(output, recorded, tuple(channels))


def enter_recorded(recorder: OutputRecorder | None, channels: tuple[str, ...], tensors: list[torch.Tensor]) -> None:
    """Records tensors in the place of a layer that isn't run."""
    if recorder is not None and channels:
        recorder.enter(channels, tensors)
