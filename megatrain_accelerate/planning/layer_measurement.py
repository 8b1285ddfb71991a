"""One call of each kind of layer, run for real on the batch: its times, and its memory where an allocator counts it.

The model's own forward runs, so that masks, position embeddings and hidden states are real; layers of a kind that was
measured hand on the output of the first. What follows the layers, the loss above all, is timed in the same way.

Timed calls follow each other without a wait in between, as in a step: the device always has work in its queue, and gets as
warm as it will be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from megatrain_accelerate.planning.device_memory import raise_peak
from megatrain_accelerate.planning.step_memory import buffers_put_back, without_hooks
from megatrain_accelerate.planning.step_outline import as_leaves
from megatrain_accelerate.planning.step_profile import LayerProfile, StepOutline
from megatrain_accelerate.planning.trial_runs import Trial, enter_recorded, run_on_trial
from megatrain_accelerate.streaming.ambient_state import random_numbers_put_back
from megatrain_accelerate.streaming.attention_results import is_attention
from megatrain_accelerate.streaming.call_context import trained_now
from megatrain_accelerate.streaming.compiled_layer import without_saving
from megatrain_accelerate.streaming.device_slots import WeightSlot
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.micro_batches import BatchSplit
from megatrain_accelerate.streaming.runtime import StreamingRuntime
from megatrain_accelerate.streaming.saved_tensors import SavedTensors

logger = logging.getLogger(__name__)

_SUSTAINED_SECONDS = 0.8
"""A GPU that has just begun to work is faster than one that is at its power limit, where its clock goes up and down."""
_ROUNDS = (4, 32)
_LONG_SECONDS = 2.0
"""A round that takes so long (sequences of several 100,000 tokens) is at the power limit itself, and isn't run again."""
_OUTSIDE_ROUNDS = 3


class _Stopwatch:
    """Seconds on the device, and the most bytes that were alive meanwhile above those at the start, of a body that is run
    again and again.

    Args:
        device: a GPU.
        limit_bytes: of the process' tensors; None for what is free.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._rounds: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.counts_bytes = True
        """Whether the last body's bytes are counted, between waits for the device."""
        self.peak_bytes = 0
        self.left_bytes = 0

    @contextlib.contextmanager
    def running(self, chooses_kernels: bool = False) -> Iterator[None]:
        """Takes the body's time. Of one in which Inductor chooses among kernels the bytes aren't those of its tensors."""
        base = 0
        if self.counts_bytes:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            base = torch.cuda.memory_allocated(self._device)
            if chooses_kernels:
                raise_peak(self._device, self._limit_bytes)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._rounds.append((start, end))
        if self.counts_bytes:
            torch.cuda.synchronize(self._device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - base
            self.left_bytes = torch.cuda.memory_allocated(self._device) - base

    def seconds(self) -> float:
        """The mean of the later half of the bodies; waits for the device."""
        self._rounds[-1][1].synchronize()
        later = [1e-3 * start.elapsed_time(end) for start, end in self._rounds[len(self._rounds) // 2 :]]
        return sum(later) / len(later)


def measure_layers(
    model: nn.Module, runtime: StreamingRuntime, inputs: Mapping[str, Any], outline: StepOutline
) -> StepOutline:
    """The outline with measured profiles.

    Args:
        model: the prepared model, on a CUDA device.
        runtime: its engine, between steps.
        inputs: the keyword arguments of the real call.
        outline: of the same call.

    Raises:
        torch.OutOfMemoryError: the working set of one layer doesn't fit.
    """
    device = runtime.streams.device
    layers = _MeasuredLayers(runtime, outline)
    with (
        random_numbers_put_back(device),
        without_hooks(model),
        buffers_put_back(model),
        runtime.layers_run_by(layers),
        torch.enable_grad(),
    ):
        _wake_autograd_thread(device)
        outside_seconds = _measure_outside(model, inputs, layers, runtime)
    measured = dataclasses.replace(outline, profiles={**outline.profiles, **layers.profiles}, outside_seconds=outside_seconds)
    del layers
    torch.cuda.empty_cache()
    return measured


def _wake_autograd_thread(device: torch.device) -> None:
    """Gives autograd's thread for the device its CUDA context by a small operation: cuBLAS warns where it has none."""
    torch.ones((), device=device, requires_grad=True).mul(2.0).backward()


class _MeasuredLayers:
    """Runs in the place of the layers: the first call of each kind is measured, later ones hand on what it returned."""

    def __init__(self, runtime: StreamingRuntime, outline: StepOutline) -> None:
        self.profiles: dict[Hashable, LayerProfile] = {}
        self.leaves: list[torch.Tensor] = []
        """What the last layer returned: the loss's backward ends here."""
        self._runtime = runtime
        self._outline = outline
        self._kinds = [event.kind for event in outline.forward_calls]
        self._outputs: dict[Hashable, Trial] = {}
        self._position = 0

    @property
    def is_over(self) -> bool:
        """Whether every kind was measured."""
        return len(self.profiles) == len(set(self._kinds))

    def begin(self) -> None:
        """The next forward of the model begins."""
        self._position = 0

    def __call__(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = self._kinds[self._position]
        self._position += 1
        if kind not in self._outputs:
            self.profiles[kind], self._outputs[kind] = _measure(
                self._runtime, layer, args, kwargs, self._outline.profiles[kind]
            )
        trial = self._outputs[kind]
        made = (trial.output, trial.recorded)
        needs = [t.is_floating_point() for t in tree_flatten(made)[0] if isinstance(t, torch.Tensor)]
        (output, recorded), _ = as_leaves(made, {}, needs)
        self.leaves = [t for t in tree_flatten((output, recorded))[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        enter_recorded(self._runtime.recorder, trial.channels, recorded)
        return output


def _measure_outside(
    model: nn.Module, inputs: Mapping[str, Any], layers: _MeasuredLayers, runtime: StreamingRuntime
) -> float | None:
    """Measures the layers and, from a model that returns a loss, the seconds of what runs outside them until the loss's
    gradient has come down to the last layer; None for another model."""
    stopwatch = _Stopwatch(runtime.streams.device)
    stopwatch.counts_bytes = False
    # A hook of a parameter, the engine's among them, isn't to see this.
    resident = [state.parameter for group in runtime.groups for state in group.unit.states]
    wanted = [parameter for parameter in resident if parameter.requires_grad and not parameter._backward_hooks]
    try:
        for _ in range(1 + _OUTSIDE_ROUNDS):  # the first one measures the layers
            layers.begin()
            with stopwatch.running():
                output = model.forward(**inputs)
                loss = output.get("loss") if isinstance(output, Mapping) else None
                if loss is None:
                    return None
                torch.autograd.grad(loss, [*layers.leaves, *wanted], allow_unused=True)
            del output, loss
        return stopwatch.seconds()
    except Exception as error:
        if not layers.is_over:
            raise
        logger.info("megatrain: the loss can't be measured, its cost is reckoned (%s)", error)
        return None


def _measure(
    runtime: StreamingRuntime, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], dry: LayerProfile
) -> tuple[LayerProfile, Trial]:
    split = BatchSplit.of_call(layer, args, kwargs, runtime.batch_cut)
    args, kwargs = split.first_piece(args, kwargs)
    slot = runtime.prefetcher.acquire(layer, ())
    try:
        timer = _AttentionTimer() if layer.tiles.tile_tokens and dry.attention_bytes else None
        measurement = _Measurement(runtime, layer, slot, lambda: as_leaves(args, kwargs, dry.inputs_need_grad), timer)
        trial = measurement.run()
    finally:
        runtime.prefetcher.release(slot)
    forward, kept_forward, backward = measurement.forward, measurement.kept_forward, measurement.backward
    kept_bytes = max(0, kept_forward.left_bytes - measurement.given_up_bytes)
    trial = Trial(split.whole_output(trial.output), split.whole_recorded(trial.recorded), trial.channels)
    share = sum(split.sizes) / split.sizes[0] if split.sizes else 1.0
    profile = dataclasses.replace(
        dry,
        forward=dry.forward.times(1 / share),
        backward=dry.backward.times(1 / share),
        attention=dry.attention.times(1 / share),
        attention_bytes=round(dry.attention_bytes / share),
        experts=dry.experts.times(1 / share),
        expert_bytes=round(dry.expert_bytes / share),
        # A compiled layer saves less than one that runs without data; its large tensors are the same share.
        offloaded_bytes=round(kept_bytes * min(1.0, dry.offloaded_bytes / max(1, dry.kept_bytes))),
        kept_bytes=kept_bytes,
        forward_bytes=forward.peak_bytes,
        kept_forward_bytes=kept_forward.peak_bytes,
        kept_backward_bytes=backward.peak_bytes,
        recomputed_bytes=max(kept_forward.peak_bytes, kept_bytes + backward.peak_bytes),
        forward_seconds=forward.seconds(),
        kept_forward_seconds=kept_forward.seconds(),
        recompute_seconds=measurement.recompute_seconds,
        attention_seconds=measurement.attention_seconds,
        backward_seconds=backward.seconds(),
    ).of_pieces(split, _tensor_bytes(trial))
    return profile, trial


def _tensor_bytes(trial: Trial) -> int:
    made = (trial.output, trial.recorded)
    return sum(tensor.nbytes for tensor in tree_flatten(made)[0] if isinstance(tensor, torch.Tensor))


class _AttentionTimer(TorchDispatchMode):
    """Seconds of attention's kernels in the body that it was entered for last."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> _AttentionTimer:
        self._kernels = []
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_attention(func):
            return func(*args, **(kwargs or {}))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = func(*args, **(kwargs or {}))
        end.record()
        self._kernels.append((start, end))
        return result

    def seconds(self) -> float:
        """Their sum; waits for the device."""
        if self._kernels:
            self._kernels[-1][1].synchronize()
        return sum(1e-3 * start.elapsed_time(end) for start, end in self._kernels)


@dataclasses.dataclass(frozen=True)
class _InSlot:
    """A layer that stays in its slot."""

    in_slot: WeightSlot

    def slot(self) -> WeightSlot:
        """See :class:`SlotReader <megatrain_accelerate.streaming.saved_tensors.SlotReader>`."""
        return self.in_slot


class _Measurement:
    """Forward, forward with a graph, backward and, of a compiled layer, recompute, over and over: the phases of a call.

    Args:
        runtime: the engine.
        layer: the layer.
        slot: with its weights.
        inputs: makes its arguments, as leaves.
        timer: for attention's kernels.
    """

    def __init__(
        self,
        runtime: StreamingRuntime,
        layer: StreamedLayer,
        slot: WeightSlot,
        inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
        timer: _AttentionTimer | None = None,
    ) -> None:
        limit_bytes = runtime.config.gpu_memory_bytes
        self.forward, self.kept_forward, self.recompute, self.backward = (
            _Stopwatch(runtime.streams.device, limit_bytes) for _ in range(4)
        )
        self._layer, self._slot, self._inputs = layer, slot, inputs
        self._recorder = runtime.recorder
        self._attention = timer
        self._compiled = runtime.compiled if not layer.experts and runtime.compiled.wants(layer) else None
        self.given_up_bytes = 0
        """Of what the layer returns and its graph doesn't hold."""

    def run(self) -> Trial:
        """Runs rounds until the device is warm; returns what the layer returns and records."""
        to_compile = self._compiled
        trial = self._round(chooses_kernels=to_compile is not None)
        if to_compile is not None and not to_compile.wants(self._layer):
            self._compiled = None  # it can't be compiled, as is known since
        if to_compile is not None or self._seconds() < _LONG_SECONDS:
            trial = self._round()
        for stopwatch in (self.forward, self.kept_forward, self.recompute, self.backward):
            stopwatch.counts_bytes = False
        seconds = self._seconds()
        fewest, most = _ROUNDS
        rounds = min(most, max(fewest, math.ceil(_SUSTAINED_SECONDS / seconds)))
        for _ in range(rounds if seconds < _LONG_SECONDS else 0):
            self._round()
        return trial

    @property
    def attention_seconds(self) -> float | None:
        """Of a forward; None where it isn't measured, since the layer is compiled."""
        return None if self._attention is None else self._attention.seconds()

    @property
    def recompute_seconds(self) -> float | None:
        """None where a recompute is a forward that keeps its graph."""
        return None if self._compiled is None else self.recompute.seconds()

    def _seconds(self) -> float:
        seconds = self.forward.seconds() + self.kept_forward.seconds() + self.backward.seconds()
        return seconds + (self.recompute_seconds or 0.0)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_recompute: bool = False) -> Trial:
        compiled, layer = self._compiled, self._layer
        if compiled is not None:
            return run_on_trial(self._recorder, lambda: compiled.run(layer, args, kwargs, is_recompute))
        return run_on_trial(self._recorder, lambda: layer.run(args, kwargs))

    def _round(self, chooses_kernels: bool = False) -> Trial:
        layer, slot = self._layer, self._slot
        args, kwargs = self._inputs()
        weights = [
            view.data.requires_grad_(flag)
            for view, flag in zip(slot.views(layer.unit.layout), trained_now(layer), strict=True)
        ]
        leaves = [weight for weight in weights if weight.requires_grad]
        # The graph that recompute makes, dropped at once.
        timer = self._attention or contextlib.nullcontext()
        with layer.bound(weights), torch.enable_grad(), without_saving(), self.forward.running(), timer:
            self._call(args, kwargs)
        kept = SavedTensors(lambda address: _InSlot(slot) if address == slot.address else None)
        with layer.bound(weights), torch.enable_grad():
            recording, saved = kept.recording(), set[int]()

            def pack(tensor: torch.Tensor) -> Any:
                saved.add(tensor.untyped_storage().data_ptr())
                return recording.pack_hook(tensor)

            with saved_tensors_hooks(pack, recording.unpack_hook), self.kept_forward.running():
                trial = self._call(args, kwargs)
            made = tree_flatten((trial.output, trial.recorded))[0]
            tensors = [t for t in made if isinstance(t, torch.Tensor)]
            results = [t for t in tensors if t.requires_grad]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            self.given_up_bytes = sum(size for address, size in storages.items() if address not in saved)
            output, recorded = tree_map_only(torch.Tensor, torch.Tensor.detach, (trial.output, trial.recorded))
            returned = Trial(output, recorded, trial.channels)
            del trial, made, tensors, output, recorded
            # Numbers as they come: a GPU takes less power for products of equal ones, and is faster.
            gradients = [torch.randn_like(tensor) for tensor in results]
            wanted = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            wanted = [t for t in [*wanted, *leaves] if t.requires_grad]
            with self.backward.running(chooses_kernels):
                if results and wanted:
                    torch.autograd.grad(results, wanted, gradients, allow_unused=True)
            del results, gradients
            if self._compiled is not None:
                with kept.recording(), self.recompute.running():
                    self._call(args, kwargs, is_recompute=True)
        return returned
