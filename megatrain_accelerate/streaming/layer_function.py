"""The autograd node of a streamed layer: run without a graph, run again with one in backward.

The scheme is that of activation checkpointing (Chen et al., arXiv 1604.06174; torch/utils/checkpoint.py), with weights
that are bound from a device slot for each of the two runs and gradients that leave for the host instead of
accumulating on leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.profiler import record_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.streaming.activation_offload import ActivationOffloader
from megatrain_accelerate.streaming.ambient_state import AmbientState
from megatrain_accelerate.streaming.attention_results import AttentionResults
from megatrain_accelerate.streaming.call_order import Tape
from megatrain_accelerate.streaming.compiled_layer import CompiledLayers, without_autocast_cache, without_saving
from megatrain_accelerate.streaming.device_slots import WeightSlot
from megatrain_accelerate.streaming.expert_function import ExpertResults
from megatrain_accelerate.streaming.grad_offload import GradientOffloader
from megatrain_accelerate.streaming.kept_graph import KeptGraph, edges_of
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.micro_batches import (
    BatchCut,
    BatchSplit,
    GradientSums,
    JoinedOutputs,
    require_same_structure,
)
from megatrain_accelerate.streaming.output_recorder import OutputRecorder
from megatrain_accelerate.streaming.prefetch import Lease, Prefetcher
from megatrain_accelerate.streaming.shared_mappings import WatchedArguments, no_writes_to
from megatrain_accelerate.streaming.watched_parameters import unwatched
from megatrain_accelerate.streaming.written_buffers import BufferValues, buffers_as_before


class RunContext:
    """What a layer call needs of the engine; one object per engine."""

    def __init__(
        self,
        device: torch.device,
        acquire_forward: Callable[[StreamedLayer, Tape, int, bool], WeightSlot],
        acquire_backward: Callable[[StreamedLayer, Tape, int], WeightSlot],
        release: Callable[[WeightSlot], None],
        prefetcher: Prefetcher,
        lease_backward: Callable[[StreamedLayer, Tape, int], Lease],
        offloader: GradientOffloader,
        backward_begins: Callable[[], None],
        keeps: Callable[[StreamedLayer], bool],
        offloads: Callable[[StreamedLayer], bool],
        keeps_attention: Callable[[StreamedLayer], bool],
        offloads_inputs: Callable[[StreamedLayer], bool],
        activations: ActivationOffloader,
        recorder: OutputRecorder | None,
        compiled: CompiledLayers,
        cut: BatchCut,
        sums: GradientSums,
    ) -> None:
        self.device = device
        self.compiled = compiled
        self.cut = cut
        self.sums = sums
        self.acquire_forward = acquire_forward
        self.acquire_backward = acquire_backward
        self.release = release
        self.prefetcher = prefetcher
        self.lease_backward = lease_backward
        """As ``acquire_backward``, for a layer in autograd's graph."""
        self.offloader = offloader
        self.backward_begins = backward_begins
        self.keeps = keeps
        """Whether a layer's activations stay on the device until its backward."""
        self.offloads = offloads
        """Whether a layer's activations go to the host until its backward."""
        self.keeps_attention = keeps_attention
        """Whether a recomputed layer's attention isn't computed again: its results wait where the layer's inputs do."""
        self.offloads_inputs = offloads_inputs
        """Whether a recomputed layer's inputs go to the host until its backward."""
        self.activations = activations
        self.recorder = recorder
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """Keeps the node in the graph when no input requires grad (a frozen embedding below trained layers)."""


def refuse_hidden_tensors(layer: StreamedLayer, leaves: Sequence[Any]) -> None:
    """Tensors inside a dataclass that pytree doesn't know would be cut off from the graph without a word.

    Raises:
        UnsupportedError: there are such.
    """
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and any(isinstance(value, torch.Tensor) for value in vars(leaf).values()):
            raise UnsupportedError(
                f"layer {layer.name} takes or returns a {type(leaf).__name__} with tensors in it, which gradients can't pass; "
                "register it with torch.utils._pytree.register_dataclass, or name other layers in "
                "megatrain_config.layer_classes"
            )


class LayerCall:
    """One call of a layer: its arguments, taken apart into tensors and the rest."""

    def __init__(self, context: RunContext, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.context = context
        self.layer = layer
        leaves, self._spec = tree_flatten((args, kwargs))
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        refuse_hidden_tensors(layer, leaves)
        self._rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.output_spec: TreeSpec | None = None
        self.output_rest: list[Any] = []
        self.output_is_tensor: list[bool] = []
        self.needs_grad: set[int] = set()
        """Places of the node's outputs that depend on something with a gradient."""
        self.tokens: list[Any] = []
        """The recorder's, one for each piece of the batch."""
        self.expert_results: list[ExpertResults] = []
        """Likewise."""
        self.buffers: list[BufferValues] = []
        """What the layer writes of its buffers, as each piece found it."""
        self.split = BatchSplit.of_call(layer, args, kwargs, context.cut)
        self.is_compiled = False
        """Whether the layer should run compiled; decided once for forward and recompute."""

    def take_tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, once: kept here they would live as long as the loss."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def run(self, tensors: list[torch.Tensor], replay: bool, piece: int = 0) -> list[torch.Tensor]:
        """Runs the layer's own forward on a piece of the batch; returns its output tensors, then the recorded ones."""
        source = iter(tensors)
        leaves = [next(source) if flag else rest for flag, rest in zip(self._is_tensor, self._rest, strict=True)]
        args, kwargs = tree_unflatten(leaves, self._spec)
        watched = WatchedArguments(self.layer.name, args, kwargs, self._rest)
        recorder = self.context.recorder
        token = recorder.start(self.tokens[piece] if replay else None) if recorder is not None else None
        recorded: list[torch.Tensor] = []
        if not replay:
            context = self.context
            # Where inputs make room, results as large mustn't take it.
            keeps = not any(of(self.layer) for of in (context.keeps, context.offloads, context.offloads_inputs))
            self.expert_results.append(ExpertResults(keeps, is_last=piece == 0))
        try:
            buffers = buffers_as_before(self.buffers[piece]) if replay else self.layer.buffers.watched(self.buffers)
            with self.expert_results[piece].at_work(self.layer, replay), buffers:
                if self.is_compiled:
                    output = self.context.compiled.run(self.layer, args, kwargs, is_recompute=replay)
                else:
                    output = self.layer.run(args, kwargs)
        finally:
            if recorder is not None:
                recorded = recorder.finish(token)
        watched.refuse_written()
        leaves, spec = tree_flatten(output)
        refuse_hidden_tensors(self.layer, leaves)
        if not replay:
            rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            if piece:
                require_same_structure(self.layer.name, (self.output_spec, self.output_rest), (spec, rest))
            self.tokens.append(token)
            self.output_spec, self.output_rest = spec, rest
            self.output_is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] + recorded

    def cut_outputs(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A run's outputs, cut off from its graph; notes which of them had one."""
        self.needs_grad.update(place for place, output in enumerate(outputs) if output.requires_grad)
        return [output.detach() for output in outputs]

    def rebuild(self, tensors: list[torch.Tensor]) -> Any:
        """The layer's output, with the node's tensors in it; publishes the recorded ones."""
        assert self.output_spec is not None
        source = iter(tensors)
        leaves = [next(source) if flag else rest for flag, rest in zip(self.output_is_tensor, self.output_rest, strict=True)]
        if self.context.recorder is not None:
            for token in reversed(self.tokens[1:]):
                self.context.recorder.discard(token)
            self.context.recorder.publish(self.tokens[0], list(source))
        return tree_unflatten(leaves, self.output_spec)


def _cut_off(tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor]:
    """The layer's inputs as leaves of an inner graph."""
    return [
        tensor.detach().requires_grad_() if need else tensor.detach() for tensor, need in zip(tensors, needed, strict=True)
    ]


def trained_now(layer: StreamedLayer) -> list[bool]:
    """Which of the layer's weights are trained, in entry order: scripts freeze and unfreeze them at any time."""
    with unwatched():
        return [state.entry.spec.trainable and state.parameter.requires_grad for state in layer.unit.states]


def bound_weights(
    layer: StreamedLayer, slot: WeightSlot, trained: Sequence[bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All weights in the slot, in entry order, and those of them that are ``trained``, as leaves."""
    views = slot.views(layer.unit.layout)
    # What torch parametrizes counts as written, and with it all of the slot, unless it has a version of its own (`data`).
    weights = [view.data if place in layer.parametrized else view.detach() for place, view in enumerate(views)]
    return weights, [weight.requires_grad_() for weight, flag in zip(weights, trained, strict=True) if flag]


@dataclasses.dataclass
class _Run:
    """What backward needs of one run of a layer, on the whole batch or a piece of it, besides the inputs."""

    ambient: AmbientState
    kept: KeptGraph | None
    """Taken by the first backward; a second one recomputes."""
    attention: AttentionResults | None = None
    """Taken likewise."""


class LayerFunction(torch.autograd.Function):
    """Forward without a graph; backward fetches the layer again, recomputes, and offloads the gradients.

    For a layer that is kept or offloaded the inner graph is made in forward instead, and used in backward. A batch that is
    cut runs piece by piece, forward in order and backward in the reverse, while the layer stays in its slot.
    """

    @staticmethod
    def forward(ctx: Any, call: LayerCall, tape: Tape, position: int, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        context, layer = call.context, call.layer
        ctx.call, ctx.tape, ctx.position = call, tape, position
        ctx.open_forward = tape.open_forward()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        slot = context.acquire_forward(layer, tape, position, True)
        ctx.weights_version, ctx.trained = layer.unit.version, trained_now(layer)
        # Attention inside a compiled graph isn't seen.
        call.is_compiled = not layer.experts and context.compiled.wants(layer) and not context.keeps_attention(layer)
        ctx.runs, made = [], []
        try:
            with record_function(f"megatrain::forward ({layer.name})"), no_writes_to(tensors, layer.name):
                for piece in call.split.pieces(tensors):
                    made.append(LayerFunction._forward_piece(ctx, slot, piece))
        finally:
            context.release(slot)
        joined = JoinedOutputs.of_pieces(layer.name, call.split, made, sum(call.output_is_tensor))
        ctx.joined = joined.without_tensors()
        # A tensor that wouldn't require grad in a plain run mustn't here: attention picks its kernel by that of its mask.
        ctx.mark_non_differentiable(*(t for place, t in enumerate(joined.tensors) if place not in call.needs_grad))
        return tuple(joined.tensors)

    @staticmethod
    def _forward_piece(ctx: Any, slot: WeightSlot, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        call: LayerCall = ctx.call
        context, layer = call.context, call.layer
        piece = len(ctx.runs)
        ctx.runs.append(_Run(AmbientState(context.device, layer.module), None))
        context.activations.run_begins()
        offloaded = None
        if context.offloads(layer):
            offloaded = context.activations.record(layer.name, [*tensors, *layer.module.buffers()])
        if offloaded is None and not context.keeps(layer):
            attention = leaving = None
            if context.keeps_attention(layer):
                leaving = context.activations.record(layer.name) if context.offloads_inputs(layer) else None
                attention = ctx.runs[piece].attention = AttentionResults(leaving)
            with attention.recording() if attention is not None else contextlib.nullcontext():
                outputs = LayerFunction._run_unkept(ctx, slot, _cut_off(tensors, ctx.needs_input_grad[4:]), piece)
            if leaving is not None:
                context.activations.send(leaving, ctx.tape, ctx.position, piece)
            return outputs
        kept = ctx.runs[piece].kept = KeptGraph(slot, offloaded)
        weights, kept.weight_leaves = bound_weights(layer, slot, ctx.trained)
        kept.inputs = _cut_off(tensors, ctx.needs_input_grad[4:])
        with layer.bound(weights), kept.recording(), torch.enable_grad():
            outputs = call.run(kept.inputs, replay=False, piece=piece)
            kept.edges = edges_of(outputs)
        kept.leave_slot()
        if offloaded is not None:
            context.activations.send(offloaded, ctx.tape, ctx.position, piece)
        return call.cut_outputs(outputs)

    @staticmethod
    def _run_unkept(ctx: Any, slot: WeightSlot, inputs: list[torch.Tensor], piece: int) -> list[torch.Tensor]:
        """The graph that recompute will make, dropped at once: under no_grad torch and compilers run other kernels."""
        call: LayerCall = ctx.call
        weights, _ = bound_weights(call.layer, slot, ctx.trained)
        with call.layer.bound(weights), without_saving(), without_autocast_cache(), torch.enable_grad():
            return call.cut_outputs(call.run(inputs, replay=False, piece=piece))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        call: LayerCall = ctx.call
        context, layer, split = call.context, call.layer, call.split
        if layer.has_trainable and not torch.autograd._is_checkpoint_valid():
            raise UnsupportedError(
                "torch.autograd.grad() and backward(inputs=...) can't be used through streamed layers that train: their "
                "gradients go to parameter.grad, whatever is asked for. Use loss.backward(), or freeze the layers before "
                "accelerator.prepare()"
            )
        context.backward_begins()
        layer.require_version(ctx.weights_version)  # a closed engine has no slots left
        slot = context.acquire_backward(layer, ctx.tape, ctx.position)
        weight_gradients: list[torch.Tensor | None] = []
        input_gradients: list[list[torch.Tensor | None]] = [[]] * split.count
        try:
            layer.require_version(ctx.weights_version)  # of weights that were written since, which are taken over by now
            sums = context.sums.begin(layer.unit.layout) if split.count > 1 else None
            grads_of = ctx.joined.gradients_of_pieces(grad_outputs, split)
            for piece in reversed(range(split.count)):
                context.activations.bring_back(ctx.tape, ctx.position, piece)
                input_gradients[piece], weight_gradients = LayerFunction._backward_piece(ctx, slot, piece, grads_of[piece])
                grads_of[piece] = []
                if sums is not None:
                    sums.add(weight_gradients)
                    weight_gradients = []  # gone before the next piece makes its own
            if sums is not None:
                weight_gradients = sums.take(to_stay=layer.unit.is_on_device)
        finally:
            context.release(slot)
        joined = split.join_gradients(input_gradients)
        if weight_gradients:
            context.offloader.offload(layer, weight_gradients, [*grad_outputs, *joined])
        return (None, None, None, None, *joined)

    @staticmethod
    def _backward_piece(
        ctx: Any, slot: WeightSlot, piece: int, grad_outputs: list[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """The gradients of a piece's inputs, and one for each trainable weight."""
        call, run = ctx.call, ctx.runs[piece]
        kept, run.kept = run.kept, None
        attention, run.attention = run.attention, None
        if kept is not None:
            tensors = kept.inputs
        else:
            tensors = _cut_off(call.split.pieces(ctx.saved_tensors)[piece], ctx.needs_input_grad[4:])
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        weights, leaves = bound_weights(call.layer, slot, ctx.trained)
        # Gradients of experts in parts are no results of this graph: their nodes must run all the same.
        anchors = [call.context.anchor] if any(experts.has_trainable for experts in call.layer.experts) else []
        with call.layer.bound(weights):
            if kept is not None:
                edges, leaves = kept.edges, kept.weight_leaves
                kept.use_slot(slot)
            else:
                with (
                    run.ambient.entered(),
                    torch.enable_grad(),
                    record_function(f"megatrain::recompute ({call.layer.name})"),
                    attention.replaying() if attention is not None else contextlib.nullcontext(),
                ):
                    edges = edges_of(call.run(tensors, replay=True, piece=piece))
            pairs = [
                (edge, gradient)
                for edge, gradient in zip(edges, grad_outputs, strict=True)
                if edge is not None and gradient is not None
            ]
            gradients: tuple[torch.Tensor | None, ...] = (None,) * (len(wanted) + len(leaves))
            if pairs and (wanted or leaves or anchors):
                with record_function(f"megatrain::backward ({call.layer.name})"):
                    gradients = torch.autograd.grad(
                        [edge for edge, _ in pairs],
                        [*wanted, *leaves, *anchors],
                        [gradient for _, gradient in pairs],
                        allow_unused=True,
                    )
        of_inputs, of_weights = iter(gradients[: len(wanted)]), iter(gradients[len(wanted) :])
        # One frozen before forward has no leaf, and one frozen since takes no gradient: so it is in autograd's own graphs.
        of_all = [next(of_weights) if was_trained else None for was_trained in ctx.trained]
        return (
            [next(of_inputs) if tensor.requires_grad else None for tensor in tensors],
            [
                gradient if state.parameter.requires_grad else None
                for gradient, state in zip(of_all, call.layer.unit.states, strict=True)
                if state.entry.spec.trainable
            ],
        )
