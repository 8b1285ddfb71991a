"""Calls of layers in autograd's graph as the engine makes them: whole, or in pieces of their batch.

The first call of a layer finds out whether something in its graph still refers to the slot.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatrain_accelerate.layers.ambient_state import BufferValues, RandomState
from megatrain_accelerate.layers.call_context import CallContext
from megatrain_accelerate.layers.graph_call import GraphCall
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.micro_batches import BatchSplit, require_same_structure
from megatrain_accelerate.layers.nested_tensors import taken_apart
from megatrain_accelerate.layers.shared_mappings import SharedMappings, no_writes_into, no_writes_to
from megatrain_accelerate.transfer.activation_offload import inputs_offloaded
from megatrain_accelerate.transfer.call_order import Tape
from megatrain_accelerate.transfer.streams import WeightSlot


class GraphCalls:
    """Runs the layers of one engine that are in autograd's graph, and knows which of their calls are at work."""

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._tried: set[int] = set()
        """Indices of layers of which a call has shown whether their graph still refers to the slot."""
        self._whole: set[int] = set()
        """Indices of those whose graph does, and can't be kept: backward runs them again as a whole."""
        self._alive: weakref.WeakSet[GraphCall] = weakref.WeakSet()

    # ------------------------------------------------------------------ forward

    def run(self, layer: StreamedLayer, tape: Tape, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer so that its graph can be differentiated.

        Where the first call finds that the graph still refers to the slot, the layer is run again as a whole in
        backward, and random numbers, buffers and what is recorded are put back before the call is run in that way.
        """
        shared = SharedMappings(args, kwargs)
        if layer.index in self._tried:
            return shared.take_back(self._run(layer, tape, position, args, kwargs, shared)[0])
        random_numbers, buffers = RandomState(self._context.device), list[BufferValues]()
        recorder = self._context.recorder
        with layer.buffers.watched(buffers), recorder.apart() as recorded:
            output, calls = self._run(layer, tape, position, args, kwargs, shared)
        if any(call.holds_weights for call in calls):
            random_numbers.put_back()
            for owner, name, value in buffers[0]:
                owner._buffers[name] = value
            del output, recorded  # with the first run's graph
            self._whole.add(layer.index)
            output, _ = self._run(layer, tape, position, args, kwargs, shared)
        else:
            recorder.enter(recorded)
        self._tried.add(layer.index)
        return shared.take_back(output)

    def _run(
        self,
        layer: StreamedLayer,
        tape: Tape,
        position: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shared: SharedMappings,
    ) -> tuple[Any, list[GraphCall]]:
        """Runs a layer, whole or in pieces. Returns what is for ``shared.take_back``, and the calls that it took."""
        context = self._context
        inputs: Sequence[torch.Tensor] = ()
        leaving: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        inputs_leave = context.policy.offloads_inputs(layer.index)
        if context.batch_cut.size is not None or inputs_leave:
            inputs, _ = taken_apart((args, kwargs))
        if inputs_leave:
            leaving = inputs_offloaded(context.activations, layer.name, inputs, tape, position)
        split = BatchSplit.of_call(layer, shared.args, shared.kwargs, context.batch_cut)
        is_whole = layer.index in self._whole
        calls = [GraphCall(context, layer, tape, position, piece, split.count, is_whole) for piece in range(split.count)]
        self._alive.update(calls)
        slot = context.passes.acquire_forward(layer, tape, position, True)
        try:
            with leaving:
                if split.count == 1:
                    output = calls[0].run(slot, shared.args, shared.kwargs)
                else:
                    with no_writes_to(inputs, layer.name, "a function that returns multiple views"):
                        output = self._run_pieces(calls, slot, split, shared)
        finally:
            context.prefetcher.release(slot)
        return output, calls

    def _run_pieces(self, calls: list[GraphCall], slot: WeightSlot, split: BatchSplit, shared: SharedMappings) -> Any:
        """The output of a call in pieces, with what was recorded meanwhile joined too."""
        layer, recorder = calls[0].layer, self._context.recorder
        pieces: list[list[torch.Tensor]] = []
        first: Any = None
        for call, (args, kwargs) in zip(calls, split.arguments(shared.args, shared.kwargs), strict=True):
            with recorder.apart() as recorded, no_writes_into(args, kwargs, layer.name):
                output = call.run(slot, args, kwargs)
            tensors, put_together = taken_apart((output, recorded))
            rest = put_together([None] * len(tensors))
            first = first or rest
            require_same_structure(layer.name, first, rest)
            pieces.append(tensors)
        outputs, _ = taken_apart(output)
        output, recorded = put_together(split.joined(layer.name, pieces, outputs=len(outputs)))
        recorder.enter(recorded)
        return output

    # ------------------------------------------------------------------ backward

    def finish(self, task: int) -> None:
        """A backward is over: gradients for which no hook was called go too."""
        backwards = self._context.backwards
        if task in backwards:
            for call in backwards[task].calls:
                if call.task == task:
                    call.finish()
            backwards.pop(task).finish()

    def fail(self, task: int) -> None:
        """A backward has failed: what it left counts for nothing."""
        if task in self._context.backwards:
            for call in self._context.backwards.pop(task).calls:
                if call.task == task:
                    call.discard()

    def settle(self) -> None:
        """Before gradients are read as a whole: takes those of which no hook has told."""
        for call in list(self._alive):
            call.settle()
