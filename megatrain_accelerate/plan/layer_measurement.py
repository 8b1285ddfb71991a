"""Measures one real call of each kind of layer on the batch: its times, and its memory as the caching allocator counts it.
The model's own forward runs, so masks, position embeddings and hidden states are real. Later calls of a kind return the output
of the first. What runs outside the layers, the loss above all, is timed in the same way. Timed calls follow each other without
a wait, as in a step, so that the device gets as warm as in training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from megatrain_accelerate.layers import output_recorder
from megatrain_accelerate.layers.attention_results import AtAttention
from megatrain_accelerate.layers.compiled_layer import without_saving
from megatrain_accelerate.layers.execution_state import rng_state_restored
from megatrain_accelerate.layers.layer import StreamedLayer, bound
from megatrain_accelerate.layers.micro_batches import BatchSplit
from megatrain_accelerate.layers.nested_tensors import Args, Inputs, Kwargs, tensors_in
from megatrain_accelerate.layers.output_recorder import Recorded
from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.layers.saved_tensors import SavedTensors
from megatrain_accelerate.layers.unpadded_layer import batch_of
from megatrain_accelerate.plan.fake_step import as_leaves
from megatrain_accelerate.plan.machine import raise_peak
from megatrain_accelerate.plan.step_memory import buffers_restored, without_hooks
from megatrain_accelerate.plan.step_profile import LayerProfile, StepProfile
from megatrain_accelerate.transfer.streams import WeightSlot

logger = logging.getLogger(__name__)

_SUSTAINED_SECONDS = 0.8
"""How long rounds are repeated. A GPU that just began to work is faster than one at its power limit, whose clock varies."""
_ROUNDS = (4, 32)
_LONG_SECONDS = 2.0
"""A round that takes this long (sequences of several 100,000 tokens) reaches the power limit itself and needs no warm-up."""
_LOADING_SECONDS = 10.0
"""A first round that takes longer isn't repeated, since loading kernels takes less time than this."""
_OUTSIDE_ROUNDS = 3
CERTAIN_SHARE = 0.75
"""Share of the device. If all layers' activations take less, none are recomputed, and no graph is compiled for that. If they
and all states are estimated to take less, nothing is measured: estimates were 1 to 2 % high (0.5B and 3B on an H100)."""


class _Stopwatch:
    """Times a body that runs repeatedly on a GPU, and counts its peak of allocated bytes above those at its start.
    ``limit_bytes`` limits the process' tensors; None stands for the free memory."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None, counts_bytes: bool = True) -> None:
        self.device, self._limit_bytes = device, limit_bytes
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.counts_bytes = counts_bytes
        """Whether bytes are counted, which synchronizes with the device around each body. The last body's are kept."""
        self.peak_bytes = self.left_bytes = 0

    @contextlib.contextmanager
    def running(self, chooses_kernels: bool = False) -> Iterator[None]:
        """Times the body. If Inductor ``chooses_kernels`` in it, the counted bytes aren't those of its tensors."""
        base = 0
        if self.counts_bytes:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            base = torch.cuda.memory_allocated(self.device)
            if chooses_kernels:
                raise_peak(self.device, self._limit_bytes)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        collects = gc.isenabled()
        gc.disable()  # garbage of earlier work that it frees would lower the counted bytes
        try:
            start.record(torch.cuda.current_stream(self.device))
            yield
            end.record(torch.cuda.current_stream(self.device))
        finally:
            if collects:
                gc.enable()
        self._events.append((start, end))
        if self.counts_bytes:
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - base
            self.left_bytes = torch.cuda.memory_allocated(self.device) - base

    def of_each(self) -> list[float]:
        """The seconds of each body. Waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in self._events]

    def seconds(self) -> float:
        """The mean seconds of the later half of the bodies. Waits for the device."""
        seconds = self.of_each()
        later = seconds[len(seconds) // 2 :]
        return sum(later) / len(later)


def measure_layers(
    model: nn.Module,
    runtime: StreamingRuntime,
    inputs: Inputs,
    step_profile: StepProfile,
    budget_bytes: int,
    is_plain: bool = False,
) -> StepProfile:
    """Returns ``step_profile`` with measured costs. Called between steps for a prepared model on a CUDA device. ``inputs`` are
    the arguments of the real call that was profiled. A step may take ``budget_bytes``. If ``is_plain``, layers will compute
    with their own parameters, and are compiled here for these. Raises ``torch.OutOfMemoryError`` if one layer doesn't fit."""
    device = runtime.streams.device
    layers = _MeasuredLayers(runtime, step_profile, budget_bytes, is_plain)
    with (
        rng_state_restored(device),
        without_hooks(model),
        buffers_restored(model),
        runtime.layers_run_by(layers),
        torch.enable_grad(),
    ):
        # Gives autograd's thread for the device its CUDA context: cuBLAS warns where it has none.
        torch.ones((), device=device, requires_grad=True).mul(2.0).backward()
        outside_seconds = _measure_outside(model, inputs, layers)
    profiles = {**step_profile.profiles, **layers.profiles}
    del layers
    torch.cuda.empty_cache()
    return dataclasses.replace(step_profile, profiles=profiles, outside_seconds=outside_seconds)


class _MeasuredLayers:
    """Runs in place of the layers. The first call of each kind is measured, and later calls return what it returned."""

    def __init__(self, runtime: StreamingRuntime, step_profile: StepProfile, budget_bytes: int, is_plain: bool) -> None:
        self.profiles: dict[Hashable, LayerProfile] = {}
        self.leaves: list[torch.Tensor] = []
        """The last layer's outputs, at which the loss's backward ends."""
        self.kinds = [event.kind for event in step_profile.forward_calls]
        self.position = 0
        """Index of the next layer call in the model's forward."""
        self.runtime, self._step_profile, self._budget_bytes, self._is_plain = runtime, step_profile, budget_bytes, is_plain
        self._outputs: dict[Hashable, tuple[Any, Recorded]] = {}

    def __call__(self, layer: StreamedLayer, args: Args, kwargs: Kwargs) -> Any:
        kind = self.kinds[self.position]
        self.position += 1
        if kind not in self._outputs:
            self.profiles[kind], self._outputs[kind] = self._measured(kind, layer, args, kwargs)
        made = self._outputs[kind]
        (output, recorded), _ = as_leaves(made, {}, [tensor.is_floating_point() for tensor in tensors_in(made)])
        self.leaves = [tensor for tensor in tensors_in((output, recorded)) if tensor.requires_grad]
        output_recorder.enter(recorded)
        return output

    def _measured(self, kind: Hashable, layer: StreamedLayer, args: Args, kwargs: Kwargs) -> tuple[LayerProfile, Any]:
        """Measures a layer's call. Returns its profile, and what the call returns and records."""
        runtime, fake = self.runtime, self._step_profile.profiles[kind]
        row, args, kwargs = layer.unpadded.in_a_row(runtime.calls.real_tokens_in_one_row, args, kwargs)
        split = BatchSplit.of_call(layer, args, kwargs, runtime.batch_cut)
        args, kwargs = split.first_piece(args, kwargs)
        slot = runtime.prefetcher.acquire(layer, ())
        try:
            inputs = functools.partial(as_leaves, args, kwargs, fake.inputs_need_grad)
            times_attention = bool(layer.tiles.tile_tokens and fake.attention_bytes)
            measurement = _Measurement(runtime, layer, slot, row, inputs, times_attention, self._is_plain)
            made = measurement.run()
            forward, kept_forward, backward = measurement.forward, measurement.kept_forward, measurement.backward
            kept_bytes = max(0, kept_forward.left_bytes - measurement.given_up_bytes)
            recomputes: dict[str, Any] = {"recomputed_bytes": max(kept_forward.peak_bytes, kept_bytes + backward.peak_bytes)}
            # Recomputing is measured unless the activations of all calls certainly fit the device.
            others = sum(self._step_profile.profiles[other].kept_bytes for other in self.kinds if other != kind)
            if self.kinds.count(kind) * kept_bytes * split.count + others > CERTAIN_SHARE * self._budget_bytes:
                recomputes |= measurement.run_recomputes()
        finally:
            runtime.prefetcher.release(slot)
        made = split.whole(layer.name, made)
        # A compiled layer saves less than one in a fake run, so that less is offloaded, too.
        profile = fake.keeping(
            kept_bytes,
            forward_bytes=forward.peak_bytes,
            kept_forward_bytes=kept_forward.peak_bytes,
            kept_backward_bytes=backward.peak_bytes,
            forward_seconds=forward.seconds(),
            kept_forward_seconds=kept_forward.seconds(),
            attention_seconds=None if measurement.attention is None else sum(measurement.attention.of_each()),
            backward_seconds=backward.seconds(),
            **recomputes,
        ).of_pieces(split, sum(tensor.nbytes for tensor in tensors_in(made)))
        # In the fake run's profile these are those of the whole call already.
        names = ("forward", "backward", "attention", "attention_bytes", "experts", "expert_bytes")
        estimated: dict[str, Any] = {name: getattr(fake, name) for name in names}
        output, recorded = made
        return dataclasses.replace(profile, **estimated), (batch_of(row, output), recorded)


def _measure_outside(model: nn.Module, inputs: Inputs, layers: _MeasuredLayers) -> float | None:
    """Runs the model, which measures the layers. Returns the seconds of what runs outside them until the loss's gradient has
    reached the last layer, or None if the model returns no loss or its loss can't be measured."""
    stopwatch = _Stopwatch(layers.runtime.streams.device, counts_bytes=False)
    # No gradient is taken of parameters with hooks (the engine has some), which mustn't see this trial.
    resident = [state.parameter for group in layers.runtime.groups for state in group.unit.states]
    wanted = [parameter for parameter in resident if parameter.requires_grad and not parameter._backward_hooks]
    try:
        for _ in range(1 + _OUTSIDE_ROUNDS):  # the first round measures the layers
            layers.position = 0
            with stopwatch.running():
                output = model.forward(**inputs)
                loss = output.get("loss") if isinstance(output, Mapping) else None
                if loss is None:
                    return None
                torch.autograd.grad(loss, [*layers.leaves, *wanted], allow_unused=True)
            del output, loss
        return stopwatch.seconds()
    except Exception as error:
        if len(layers.profiles) < len(set(layers.kinds)):
            raise
        logger.info("megatrain: the loss can't be measured, its cost is estimated (%s)", error)
        return None


class _Measurement:
    """Measures a layer's forward, its forward that keeps a graph, its backward and, if it is compiled and may be recomputed, a
    backward that recomputes. ``slot`` holds its weights. ``inputs`` makes its arguments, batches or of ``row``, as leaves."""

    def __init__(
        self,
        runtime: StreamingRuntime,
        layer: StreamedLayer,
        slot: WeightSlot,
        row: RealTokens | None,
        inputs: Callable[[], tuple[Args, Kwargs]],
        times_attention: bool,
        is_plain: bool,
    ) -> None:
        self.forward, self.kept_forward, self._recompute, self.backward = (
            _Stopwatch(runtime.streams.device, runtime.config.gpu_memory_bytes) for _ in range(4)
        )
        self.given_up_bytes = 0
        """Bytes of outputs that the layer's graph doesn't hold."""
        self.attention = _Stopwatch(runtime.streams.device, counts_bytes=False) if times_attention else None
        """Times attention in the last forward. None where it isn't timed: without tiles of tokens, or without attention."""
        self._layer, self._slot, self._inputs = layer, slot, inputs
        self._weight: Callable[[torch.Tensor, bool], torch.Tensor] = nn.Parameter if is_plain else torch.Tensor.requires_grad_
        self._compiled, self._row = runtime.compiled, row
        self._captures = self._compiled.wants(layer, row)

    def slot(self) -> WeightSlot:
        """The slot with the weights, for :class:`SlotPlace <megatrain_accelerate.layers.saved_tensors.SlotPlace>`."""
        return self._slot

    def run(self) -> tuple[Any, Recorded]:
        """Runs rounds until the device is warm. Returns what the layer returns and records."""
        to_compile = self._captures is not None
        stopwatches = (self.forward, self.kept_forward, self.backward)
        made = self._round(chooses_kernels=to_compile)
        if to_compile:
            self._captures = self._compiled.wants(self._layer, self._row)  # None if compiling failed
        if to_compile or sum(stopwatch.seconds() for stopwatch in stopwatches) < _LOADING_SECONDS:
            made = self._round()
        self._warm_up(self._round, stopwatches)
        return made

    def run_recomputes(self) -> dict[str, Any]:
        """Measures a compiled layer whose backward recomputes activations, and returns the fields of its profile for that.
        Another layer's recompute is a forward that keeps its graph, so for it there are none."""
        for chooses_kernels in (True, False):
            if self._captures is None or not self._compiled.recomputes(self._layer, self._captures, row=self._row):
                torch.cuda.reset_peak_memory_stats(self.forward.device)  # the first round raised it
                return {}
            self._recomputing_round(chooses_kernels)
        assert self._captures is not None
        self._warm_up(self._recomputing_round, (self._recompute,))
        return {
            "recompute_seconds": max(0.0, self._recompute.seconds() - self.backward.seconds()),
            "recomputed_bytes": self._recompute.peak_bytes,
            "budgets": self._compiled.budgets(self._layer, self._captures, self._row),
        }

    @staticmethod
    def _warm_up(work: Callable[[], Any], stopwatches: Sequence[_Stopwatch]) -> None:
        """Repeats ``work``, which the stopwatches time, without waits for the device."""
        seconds = sum(stopwatch.seconds() for stopwatch in stopwatches)
        for stopwatch in stopwatches:
            stopwatch.counts_bytes = False
        fewest, most = _ROUNDS
        rounds = min(most, max(fewest, math.ceil(_SUSTAINED_SECONDS / seconds)))
        for _ in range(rounds if seconds < _LONG_SECONDS else 0):
            work()

    def _timing_attention(self) -> contextlib.AbstractContextManager[Any]:
        if self.attention is None:
            return contextlib.nullcontext()
        stopwatch = self.attention = _Stopwatch(self._slot.buffer.device, counts_bytes=False)

        def run(func: Any, args: Any, kwargs: Any) -> Any:
            with stopwatch.running():
                return func(*args, **kwargs)

        return AtAttention(run)

    def _call(self, args: Args, kwargs: Kwargs, memory_budget: float = 1.0) -> tuple[Any, Recorded]:
        with output_recorder.apart() as recorded:
            output = self._compiled.run(self._layer, self._captures, args, kwargs, memory_budget, self._row)
        return output, recorded

    @contextlib.contextmanager
    def _bound(self) -> Iterator[tuple[tuple[Args, Kwargs], list[torch.Tensor]]]:
        """Binds the layer's weights while the body runs. Yields the arguments, and the tensors that need gradients."""
        arguments = self._inputs()
        views = self._slot.views(self._layer.unit.layout)
        weights = [self._weight(view.data, flag) for view, flag in zip(views, self._layer.trained_now(), strict=True)]
        wanted = [tensor for tensor in [*tensors_in(arguments), *weights] if tensor.requires_grad]
        with self._slot.read_by(self), bound(self._layer, weights), torch.enable_grad():
            yield arguments, wanted

    def _saving(self) -> saved_tensors_hooks:
        return SavedTensors({self._slot.address: self._slot}).recording()

    def _recomputing_round(self, chooses_kernels: bool = False) -> None:
        with self._bound() as (arguments, wanted):
            with self._saving():
                made = self._call(*arguments, memory_budget=0.0)
            self._differentiate(made, wanted, self._recompute, chooses_kernels)

    def _round(self, chooses_kernels: bool = False) -> tuple[Any, Recorded]:
        with self._bound() as (arguments, wanted):
            # The graph of a forward that will be recomputed saves nothing.
            with without_saving(), self.forward.running(), self._timing_attention():
                self._call(*arguments)
            saving, storages_saved = self._saving(), set[int]()

            def pack(tensor: torch.Tensor) -> Any:
                storages_saved.add(tensor.untyped_storage().data_ptr())
                return saving.pack_hook(tensor)

            with saved_tensors_hooks(pack, saving.unpack_hook), self.kept_forward.running():
                made = self._call(*arguments)
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(made)}
            self.given_up_bytes = sum(size for address, size in storages.items() if address not in storages_saved)
            returned: tuple[Any, Recorded] = tree_map_only(torch.Tensor, torch.Tensor.detach, made)
            self._differentiate(made, wanted, self.backward, chooses_kernels)
        return returned

    @staticmethod
    def _differentiate(made: Any, wanted: list[torch.Tensor], stopwatch: _Stopwatch, chooses_kernels: bool) -> None:
        results = [tensor for tensor in tensors_in(made) if tensor.requires_grad]
        # Random, since a GPU takes less power for products of equal numbers, and is faster.
        gradients = [torch.randn_like(tensor) for tensor in results]
        with stopwatch.running(chooses_kernels):
            if results and wanted:
                torch.autograd.grad(results, wanted, gradients, allow_unused=True)
