"""One call of each kind of layer, run for real on the batch: its times, and its memory where an allocator counts it.

The model's own forward runs, so that masks, position embeddings and hidden states are real; layers of a kind that was measured
hand on the output of the first. What follows the layers, the loss above all, is timed in the same way. Timed calls follow each
other without a wait, as in a step, so that the device gets as warm as it will be.
"""

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
from megatrain_accelerate.layers.nested_tensors import tensors_in
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
"""A GPU that has just begun to work is faster than one that is at its power limit, where its clock goes up and down."""
_ROUNDS = (4, 32)
_LONG_SECONDS = 2.0
"""A round that takes so long (sequences of several 100,000 tokens) is at the power limit itself, and needs no warm-up."""
_LOADING_SECONDS = 10.0
"""More than a first round waits for kernels to be loaded: one that takes longer isn't run again."""
_OUTSIDE_ROUNDS = 3
CERTAIN_SHARE = 0.75
"""Of the device: where the activations of all layers are less, none will be recomputed, and no graph is compiled for it. Where
they and all states are estimated to be less, nothing is measured: such peaks were 1 to 2 % high (0.5B and 3B on an H100)."""

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Stopwatch:
    """Seconds on a GPU, and the most bytes that were alive meanwhile above those at the start, of a body that is run again and
    again. ``limit_bytes`` is that of the process' tensors; None for what is free."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None, counts_bytes: bool = True) -> None:
        self._device, self._limit_bytes = device, limit_bytes
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.counts_bytes = counts_bytes
        """Whether the last body's bytes are counted, between waits for the device."""
        self.peak_bytes = self.left_bytes = 0

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
        collects = gc.isenabled()
        gc.disable()  # what it gives back of earlier work would be missing in the bytes
        try:
            start.record()
            yield
            end.record()
        finally:
            if collects:
                gc.enable()
        self._events.append((start, end))
        if self.counts_bytes:
            torch.cuda.synchronize(self._device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - base
            self.left_bytes = torch.cuda.memory_allocated(self._device) - base

    def of_each(self) -> list[float]:
        """The seconds of each body; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in self._events]

    def seconds(self) -> float:
        """The mean of the later half of the bodies; waits for the device."""
        seconds = self.of_each()
        later = seconds[len(seconds) // 2 :]
        return sum(later) / len(later)


def measure_layers(
    model: nn.Module,
    runtime: StreamingRuntime,
    inputs: Mapping[str, Any],
    step_profile: StepProfile,
    budget_bytes: int,
    is_plain: bool = False,
) -> StepProfile:
    """The profile with measured profiles, of a prepared model on a CUDA device, between steps. ``inputs`` are the arguments of
    the real call that the profile is of; a step may take ``budget_bytes``. If the model ``is_plain``, layers will compute with
    their own parameters, and so does what is compiled here. A ``torch.OutOfMemoryError`` if one layer doesn't fit."""
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
    measured = dataclasses.replace(
        step_profile, profiles={**step_profile.profiles, **layers.profiles}, outside_seconds=outside_seconds
    )
    del layers
    torch.cuda.empty_cache()
    return measured


class _MeasuredLayers:
    """Runs in the place of the layers: the first call of each kind is measured, later ones hand on what it returned."""

    def __init__(self, runtime: StreamingRuntime, step_profile: StepProfile, budget_bytes: int, is_plain: bool) -> None:
        self.profiles: dict[Hashable, LayerProfile] = {}
        self.leaves: list[torch.Tensor] = []
        """What the last layer returned: the loss's backward ends here."""
        self.kinds = [event.kind for event in step_profile.forward_calls]
        self.position = 0
        """Of the next call in the model's forward."""
        self.runtime, self._step_profile, self._budget_bytes, self._is_plain = runtime, step_profile, budget_bytes, is_plain
        self._outputs: dict[Hashable, tuple[Any, Recorded]] = {}

    def __call__(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = self.kinds[self.position]
        self.position += 1
        if kind not in self._outputs:
            self.profiles[kind], self._outputs[kind] = self._measured(kind, layer, (args, kwargs))
        made = self._outputs[kind]
        needs = [tensor.is_floating_point() for tensor in tensors_in(made)]
        (output, recorded), _ = as_leaves(made, {}, needs)
        self.leaves = [tensor for tensor in tensors_in((output, recorded)) if tensor.requires_grad]
        output_recorder.enter(recorded)
        return output

    def _measured(self, kind: Hashable, layer: StreamedLayer, given: _Arguments) -> tuple[LayerProfile, tuple[Any, Recorded]]:
        """The profile of a layer's call; what the call returns, and what it records."""
        runtime, fake = self.runtime, self._step_profile.profiles[kind]
        row, args, kwargs = layer.unpadded.in_a_row(runtime.calls.real_in_one_row, *given)
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
            # Unless it is certain that all calls' activations fit the device.
            others = sum(self._step_profile.profiles[other].kept_bytes for other in self.kinds if other != kind)
            if self.kinds.count(kind) * kept_bytes * split.count + others > CERTAIN_SHARE * self._budget_bytes:
                recomputes |= measurement.run_recomputes()
        finally:
            runtime.prefetcher.release(slot)
        made = split.whole(layer.name, made)
        # A compiled layer saves less than one that runs without data.
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
        # Those of the whole call already.
        names = ("forward", "backward", "attention", "attention_bytes", "experts", "expert_bytes")
        estimated: dict[str, Any] = {name: getattr(fake, name) for name in names}
        output, recorded = made
        return dataclasses.replace(profile, **estimated), (batch_of(row, output), recorded)


def _measure_outside(model: nn.Module, inputs: Mapping[str, Any], layers: _MeasuredLayers) -> float | None:
    """Measures the layers and, from a model that returns a loss, the seconds of what runs outside them until the loss's
    gradient has come down to the last layer; None for another model."""
    stopwatch = _Stopwatch(layers.runtime.streams.device, counts_bytes=False)
    # A hook of a parameter, the engine's among them, isn't to see this.
    resident = [state.parameter for group in layers.runtime.groups for state in group.unit.states]
    wanted = [parameter for parameter in resident if parameter.requires_grad and not parameter._backward_hooks]
    try:
        for _ in range(1 + _OUTSIDE_ROUNDS):  # the first one measures the layers
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
    """Forward, forward with a graph and backward, over and over; of a compiled layer that may be recomputed also the backward
    that does it. The layer's weights stay in ``slot``; ``inputs`` makes its arguments, batches or of ``row``, as leaves."""

    def __init__(
        self,
        runtime: StreamingRuntime,
        layer: StreamedLayer,
        slot: WeightSlot,
        row: RealTokens | None,
        inputs: Callable[[], _Arguments],
        times_attention: bool,
        is_plain: bool,
    ) -> None:
        self.forward, self.kept_forward, self._recompute, self.backward = (
            _Stopwatch(runtime.streams.device, runtime.config.gpu_memory_bytes) for _ in range(4)
        )
        self.given_up_bytes = 0
        """Of what the layer returns and its graph doesn't hold."""
        self.attention = _Stopwatch(runtime.streams.device, counts_bytes=False) if times_attention else None
        """Of the last forward; None where it isn't measured, since the layer is compiled."""
        self._layer, self._slot, self._inputs = layer, slot, inputs
        self._weight: Callable[[torch.Tensor, bool], torch.Tensor] = nn.Parameter if is_plain else torch.Tensor.requires_grad_
        self._compiled, self._row = runtime.compiled, row
        self._captures = self._compiled.wants(layer, row)

    def slot(self) -> WeightSlot:
        """See :class:`SlotPlace <megatrain_accelerate.layers.saved_tensors.SlotPlace>`."""
        return self._slot

    def run(self) -> tuple[Any, Recorded]:
        """Runs rounds until the device is warm; returns what the layer returns and records."""
        to_compile = self._captures is not None
        stopwatches = (self.forward, self.kept_forward, self.backward)
        made = self._round(chooses_kernels=to_compile)
        if to_compile:
            self._captures = self._compiled.wants(self._layer, self._row)  # None where compiling has failed
        if to_compile or sum(stopwatch.seconds() for stopwatch in stopwatches) < _LOADING_SECONDS:
            made = self._round()
        self._warm_up(self._round, stopwatches)
        return made

    def run_recomputes(self) -> dict[str, Any]:
        """Runs rounds of a compiled layer whose backward computes the activations again; returns what its profile has of that:
        nothing for another layer, whose recompute is a forward that keeps its graph."""
        for chooses_kernels in (True, False):
            if self._captures is None or not self._compiled.recomputes(self._layer, self._captures, row=self._row):
                torch.cuda.reset_peak_memory_stats()  # a first round has raised it
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
        """Repeats ``work``, of which they take the time, without waits for the device."""
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

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], memory_budget: float = 1.0) -> tuple[Any, Recorded]:
        with output_recorder.apart() as recorded:
            output = self._compiled.run(self._layer, self._captures, args, kwargs, memory_budget, self._row)
        return output, recorded

    @contextlib.contextmanager
    def _bound(self) -> Iterator[tuple[_Arguments, list[torch.Tensor]]]:
        """The layer has its weights in the body. Yields arguments, and what among both gradients are wanted of."""
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
            # The graph that recompute makes, dropped at once.
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
        # Numbers as they come: a GPU takes less power for products of equal ones, and is faster.
        gradients = [torch.randn_like(tensor) for tensor in results]
        with stopwatch.running(chooses_kernels):
            if results and wanted:
                torch.autograd.grad(results, wanted, gradients, allow_unused=True)
