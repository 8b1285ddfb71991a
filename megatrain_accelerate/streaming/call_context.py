"""What a call of a layer needs of its engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatrain_accelerate.streaming.activation_offload import ActivationOffloader
from megatrain_accelerate.streaming.call_order import Tape
from megatrain_accelerate.streaming.compiled_layer import CompiledLayers
from megatrain_accelerate.streaming.device_slots import WeightSlot
from megatrain_accelerate.streaming.grad_offload import GradientOffloader
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.micro_batches import BatchCut, GradientSums
from megatrain_accelerate.streaming.output_recorder import OutputRecorder
from megatrain_accelerate.streaming.prefetch import Lease, Prefetcher
from megatrain_accelerate.streaming.watched_parameters import unwatched


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunContext:
    """What a layer's call needs of the engine; one object per engine."""

    device: torch.device
    acquire_forward: Callable[[StreamedLayer, Tape, int, bool], WeightSlot]
    lease_backward: Callable[[StreamedLayer, Tape, int], Lease]
    prefetcher: Prefetcher
    offloader: GradientOffloader
    backward_begins: Callable[[], None]
    keeps: Callable[[StreamedLayer], bool]
    """Whether a layer's activations stay on the device until its backward."""
    offloads: Callable[[StreamedLayer], bool]
    """Whether a layer's activations go to the host until its backward."""
    keeps_attention: Callable[[StreamedLayer], bool]
    """Whether a recomputed layer's attention isn't computed again: its results wait where the layer's inputs do."""
    offloads_inputs: Callable[[StreamedLayer], bool]
    """Whether a recomputed layer's inputs go to the host until its backward."""
    activations: ActivationOffloader
    recorder: OutputRecorder | None
    compiled: CompiledLayers
    cut: BatchCut
    sums: GradientSums
    anchor: torch.Tensor
    """A number that requires grad. It keeps nodes in the graph where no input of theirs requires grad: a frozen embedding
    below trained layers."""


def trained_now(layer: StreamedLayer) -> list[bool]:
    """Which of the layer's weights are trained, in entry order: scripts freeze and unfreeze them at any time."""
    with unwatched():
        trained = [False] * len(layer.unit.states)
        for place, state in zip(layer.trainable_places, layer.trainable, strict=True):
            trained[place] = state.parameter.requires_grad
    return trained
