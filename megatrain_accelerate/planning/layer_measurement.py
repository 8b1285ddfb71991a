"""One call of each kind of layer, run for real on the batch: its times, and its memory where an allocator counts it.

The model's own forward is run without gradients up to its last layer, so that masks, position embeddings and hidden states
are real; layers of a kind that was measured hand on the output of the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from megatrain_accelerate.planning.step_memory import buffers_put_back, without_hooks
from megatrain_accelerate.planning.step_outline import LayerProfile, StepOutline, as_leaves, call_kind
from megatrain_accelerate.streaming.compiled_layer import without_saving
from megatrain_accelerate.streaming.kept_graph import KeptGraph
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.layer_function import bound_weights
from megatrain_accelerate.streaming.micro_batches import BatchSplit
from megatrain_accelerate.streaming.runtime import StreamingRuntime

_SUSTAINED_SECONDS = 0.8
"""A GPU that has just begun to work is faster than one that is at its power limit: rounds are made until it is warm."""
_MOST_ROUNDS = 12


class _AllLayersRan(Exception):
    """Ends the forward: what follows the layers needs no run."""


class _Stopwatch:
    """Seconds on the device, and the most bytes that were alive meanwhile above those at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0
        self.peak_bytes = 0
        self.left_bytes = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        base = torch.cuda.memory_allocated(self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        torch.cuda.synchronize(self._device)
        self.seconds = 1e-3 * start.elapsed_time(end)
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - base
        self.left_bytes = torch.cuda.memory_allocated(self._device) - base


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
        torch.OutOfMemoryError: one layer's own working set doesn't fit.
    """
    remaining = len(outline.forward_calls)
    profiles: dict[Hashable, LayerProfile] = {}
    outputs: dict[Hashable, Any] = {}
    kinds: dict[Hashable, Hashable] = {}

    def runner(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal remaining
        kind = call_kind(layer, args, kwargs)
        if kind not in profiles:
            planned = outline.forward_calls[len(outline.forward_calls) - remaining].kind
            kinds[kind] = planned
            profiles[kind], outputs[kind] = _measure(runtime, layer, args, kwargs, outline.profiles[planned])
        remaining -= 1
        if not remaining:
            raise _AllLayersRan
        return outputs[kind]

    _wake_autograd_thread(runtime.streams.device)
    devices = [runtime.streams.device]
    with (
        torch.random.fork_rng(devices=devices),
        without_hooks(model),
        buffers_put_back(model),
        runtime.layers_run_by(runner),
        torch.no_grad(),
        contextlib.suppress(_AllLayersRan),
    ):
        model.forward(**inputs)
    measured = {planned: profiles[kind] for kind, planned in kinds.items()}
    outputs.clear()
    torch.cuda.empty_cache()
    return dataclasses.replace(outline, profiles={**outline.profiles, **measured})


def _wake_autograd_thread(device: torch.device) -> None:
    """Gives autograd's thread for the device its CUDA context by a small operation: cuBLAS warns where it has none."""
    torch.ones((), device=device, requires_grad=True).mul(2.0).backward()


def _measure(
    runtime: StreamingRuntime, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], dry: LayerProfile
) -> tuple[LayerProfile, Any]:
    device = runtime.streams.device
    split = BatchSplit.of_call(layer.name, args, kwargs, runtime.micro_batch_size)
    args, kwargs = split.first_piece(args, kwargs)
    slot = runtime.prefetcher.acquire(layer, ())
    forward, kept_forward, backward = (_Stopwatch(device) for _ in range(3))
    is_compiled = runtime.compiled.wants(layer)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return runtime.compiled.run(layer, args, kwargs) if is_compiled else layer.forward(*args, **kwargs)

    try:
        spent = 0.0
        for position in range(_MOST_ROUNDS):
            cut_args, cut_kwargs = as_leaves(args, kwargs, dry.inputs_need_grad)
            weights, leaves = bound_weights(layer, slot)
            # As in LayerFunction: a compiled layer runs the graph that can be differentiated, and drops it.
            graph = (torch.enable_grad(), without_saving()) if is_compiled else (contextlib.nullcontext(),) * 2
            with layer.bound(weights), graph[0], graph[1], forward.running():
                output = tree_map_only(torch.Tensor, torch.Tensor.detach, run(cut_args, cut_kwargs))
            output_bytes = sum(t.nbytes for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor))
            kept = KeptGraph(slot)
            with layer.bound(weights), torch.enable_grad():
                with kept.recording(), kept_forward.running():
                    made = run(cut_args, cut_kwargs)
                results = [t for t in tree_flatten(made)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
                del made
                gradients = [torch.ones_like(tensor) for tensor in results]
                wanted = [t for t in tree_flatten((cut_args, cut_kwargs))[0] if isinstance(t, torch.Tensor)]
                wanted = [t for t in [*wanted, *leaves] if t.requires_grad]
                with backward.running():
                    if results and wanted:
                        torch.autograd.grad(results, wanted, gradients, allow_unused=True)
            del results, gradients, wanted, leaves, weights, kept, cut_args, cut_kwargs
            # The first round compiles, and chooses kernels.
            spent += forward.seconds + kept_forward.seconds + backward.seconds if position else 0.0
            if spent > _SUSTAINED_SECONDS:
                break
    finally:
        runtime.prefetcher.release(slot)
    kept_bytes = max(0, kept_forward.left_bytes - output_bytes)
    output = split.whole_output(output)
    whole_bytes = sum(t.nbytes for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor))
    share = sum(split.sizes) / split.sizes[0] if split.sizes else 1.0
    profile = dataclasses.replace(
        dry,
        forward=dry.forward.times(1 / share),
        backward=dry.backward.times(1 / share),
        # A compiled layer saves less than one that runs without data; its large tensors are the same share.
        offloaded_bytes=round(kept_bytes * min(1.0, dry.offloaded_bytes / max(1, dry.kept_bytes))),
        kept_bytes=kept_bytes,
        forward_bytes=forward.peak_bytes,
        kept_forward_bytes=kept_forward.peak_bytes,
        kept_backward_bytes=backward.peak_bytes,
        recomputed_bytes=max(kept_forward.peak_bytes, kept_bytes + output_bytes + backward.peak_bytes),
        forward_seconds=forward.seconds,
        kept_forward_seconds=kept_forward.seconds,
        backward_seconds=backward.seconds,
    ).of_pieces(split, whole_bytes)
    return profile, output
