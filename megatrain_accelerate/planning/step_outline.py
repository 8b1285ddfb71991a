"""The outline of a training step: what lives and what is computed outside the layers, call by call, and what a layer costs.

One run without data (:mod:`.step_memory`) with each layer replaced by an empty node. Any placement's peak of memory and time
follow from it by arithmetic (:mod:`.step_simulation`), so that hundreds of placements can be weighed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only

from megatrain_accelerate.planning.step_memory import LiveBytes, OpCosts, dry_model, loss_of
from megatrain_accelerate.planning.step_profile import Event, LayerProfile, StepOutline
from megatrain_accelerate.planning.summed_loss import own_loss_code, sums_divided_by
from megatrain_accelerate.streaming import activation_offload
from megatrain_accelerate.streaming.attention_results import AttentionResults
from megatrain_accelerate.streaming.compiled_layer import without_saving
from megatrain_accelerate.streaming.expert_function import ExpertResults
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.micro_batches import BatchCut, BatchSplit
from megatrain_accelerate.streaming.nested_tensors import taken_apart, tensors_in
from megatrain_accelerate.streaming.output_recorder import OutputRecorder, Recorded
from megatrain_accelerate.streaming.runtime import StreamingRuntime
from megatrain_accelerate.streaming.token_tiles import tokens_of


class CallKind:
    """Equal for equal ``key``, whose hash is taken once: a search looks profiles up some million times.

    Args:
        key: what two calls must share.
    """

    def __init__(self, key: Hashable) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CallKind) and self._key == other._key)


def call_kind(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKind:
    """What two calls must share to cost the same: layout, simple attributes of the modules, shapes of the arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    shapes = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)[:80]
        for leaf in leaves
    )
    attributes = tuple(
        (name, key, value)
        for name, module in layer.module.named_modules()
        for key, value in sorted(module.__dict__.items())
        if isinstance(value, (bool, int, float, str)) and "idx" not in key and "index" not in key and "layer_id" not in key
    )
    layouts = (layer.unit.layout.key, *((len(experts.parts), experts.unit.layout.key) for experts in layer.experts))
    return CallKind((type(layer.module).__qualname__, layouts, attributes, shapes, str(spec)))


class _LeavingStorages:
    """Counts what :mod:`megatrain_accelerate.streaming.activation_offload` would send to the host of one call.

    Args:
        layer, args, kwargs: the call.
    """

    def __init__(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = tensors_in((args, kwargs))
        sent = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in inputs if t.requires_grad}
        self.input_bytes = sum(count for count in sent.values() if count >= activation_offload.MIN_OFFLOADED_BYTES)
        self.saved_bytes = 0
        stay = [*inputs, *layer.module.parameters(), *layer.module.buffers()]
        self._seen = {tensor.untyped_storage()._cdata for tensor in stay}

    def counted(self) -> saved_tensors_hooks:
        """Adds up what autograd saves in the body, each storage once."""
        return saved_tensors_hooks(self._count, lambda tensor: tensor)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen and storage.nbytes() >= activation_offload.MIN_OFFLOADED_BYTES:
            self._seen.add(storage._cdata)
            self.saved_bytes += storage.nbytes()
        # A node that saves its own output and that no backward reaches (a branch that nothing needs) would hold itself.
        return tensor if tensor.grad_fn is None else tensor.detach()


class _EmptyLayer(torch.autograd.Function):
    """A layer's node without the layer: keeps its inputs, makes outputs and input gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, outline: _Outliner, layer: int, kind: Hashable, *tensors: torch.Tensor) -> Any:
        ctx.outline, ctx.layer, ctx.kind = outline, layer, kind
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype, device in outline.output_shapes(kind)
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        ctx.outline.note(True, ctx.layer, ctx.kind)
        inputs = ctx.saved_tensors
        gradients = [torch.empty_like(t) if need else None for t, need in zip(inputs, ctx.needs_input_grad[3:], strict=True)]
        return (None, None, None, *gradients)


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """What calls of one kind return and record, put together from tensors; and of these size, stride, dtype and device."""

    put_together: Callable[[Sequence[torch.Tensor]], Any]
    shapes: list[tuple[Any, ...]]


class _Outliner:
    """Runs in the place of the layers and notes the events."""

    def __init__(self, live: LiveBytes, anchor: torch.Tensor, cut: BatchCut, recorder: OutputRecorder) -> None:
        self.events: list[Event] = []
        self.profiles: dict[Hashable, LayerProfile] = {}
        self._live = live
        self._anchor = anchor
        self._cut = cut
        self._recorder = recorder
        self._costs_before = OpCosts()
        self._outputs: dict[Hashable, _Outputs] = {}
        self._kinds: dict[CallKind, CallKind] = {}

    def note(self, is_backward: bool, layer: int, kind: Hashable) -> None:
        live = self._live
        self.events.append(Event(is_backward, layer, kind, live.live_bytes, live.take_peak(), live.costs - self._costs_before))
        self._costs_before = live.costs

    def output_shapes(self, kind: Hashable) -> list[tuple[Any, ...]]:
        return self._outputs[kind].shapes

    def rest(self) -> tuple[int, OpCosts]:
        """Peak and costs since the last event."""
        return self._live.take_peak(), self._live.costs - self._costs_before

    def __call__(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = call_kind(layer, args, kwargs)
        kind = self._kinds.setdefault(kind, kind)  # what is the same is found without being compared
        self.note(False, layer.index, kind)
        if kind not in self.profiles:
            self._profile(layer, kind, args, kwargs)
        tensors = tensors_in((args, kwargs))
        outputs = self._outputs[kind]
        # As in the real node: a trained layer is in the graph also above a frozen embedding.
        made = _EmptyLayer.apply(self, layer.index, kind, *tensors, *([self._anchor] if layer.has_trainable else []))
        output, recorded = outputs.put_together(made)
        # Once a call, as in a real step: an auxiliary loss has one tensor a layer.
        self._recorder.enter(recorded)
        return output

    def _run(self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Recorded]:
        """What the layer returns, and what it records on the side."""
        with self._recorder.apart() as recorded:
            output = layer.run(args, kwargs)
        return output, recorded

    def _profile(self, layer: StreamedLayer, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the layer itself, without data, and leaves the counters of the outside as they were."""
        live = self._live
        split = BatchSplit.of_call(layer, args, kwargs, self._cut)
        leaving = _LeavingStorages(layer, args, kwargs)
        needs = tuple(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        _, length = tokens_of(args, kwargs) or (0, 0)
        args, kwargs = split.first_piece(args, kwargs)
        base, costs = live.live_bytes, live.costs
        with torch.no_grad():
            trial = self._run(layer, args, kwargs)
        forward_bytes = live.take_peak() - base
        made, put_together = taken_apart(split.whole(trial))
        shapes = [(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in made]
        self._outputs[kind] = _Outputs(put_together, shapes)
        whole_bytes = sum(leaf.untyped_storage().nbytes() for leaf in made)
        del trial, made
        forward = live.costs - costs
        costs = live.costs
        with torch.enable_grad():
            cut_args, cut_kwargs = as_leaves(args, kwargs, needs)
            with leaving.counted():
                trial = self._run(layer, cut_args, cut_kwargs)
        kept_forward_bytes = live.take_peak() - base
        outputs = [tensor for tensor in tensors_in(trial) if tensor.requires_grad]
        wanted = [tensor for tensor in tensors_in((cut_args, cut_kwargs)) if tensor.requires_grad]
        wanted += [p for p in layer.module.parameters() if p.requires_grad]
        with torch.enable_grad():
            edges = edges_of(outputs)
        # Those that came from above are there already.
        above = live.live_bytes
        of_outputs = [torch.ones_like(tensor) for tensor in outputs]
        above = live.live_bytes - above
        del trial, outputs
        kept_bytes = max(0, live.live_bytes - base - above)
        live.take_peak()
        costs = live.costs
        backward, backward_bytes = OpCosts(), 0
        if edges and wanted:
            gradients = torch.autograd.grad(edges, wanted, of_outputs, allow_unused=True)
            backward, backward_bytes = live.costs - costs, max(0, live.take_peak() - base - above - kept_bytes)
            del gradients
        del edges, of_outputs, wanted, cut_args, cut_kwargs
        attention, attention_bytes = self._attention(layer, args, kwargs, needs)
        experts, expert_bytes = self._experts(layer, args, kwargs, needs)
        self.profiles[kind] = LayerProfile(
            forward=forward,
            backward=backward,
            kept_bytes=kept_bytes,
            offloaded_bytes=min(kept_bytes, leaving.saved_bytes),
            input_bytes=leaving.input_bytes,
            forward_bytes=forward_bytes,
            kept_forward_bytes=kept_forward_bytes,
            kept_backward_bytes=backward_bytes,
            recomputed_bytes=max(kept_forward_bytes, kept_bytes + backward_bytes),
            inputs_need_grad=needs,
            attention=attention,
            attention_bytes=attention_bytes,
            experts=experts,
            expert_bytes=expert_bytes,
            length=length,
        ).of_pieces(split, whole_bytes)
        live.take_peak()
        self._costs_before = live.costs

    def _attention(
        self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], needs: Sequence[bool]
    ) -> tuple[OpCosts, int]:
        """What attention's kernels cost in a forward, and the bytes of their results."""
        results = AttentionResults()
        return self._saved_by(layer, args, kwargs, needs, (results.recording(), results.replaying())), results.size_bytes

    def _experts(
        self, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], needs: Sequence[bool]
    ) -> tuple[OpCosts, int]:
        """What experts that stream in parts cost in a forward, and the bytes of their results."""
        if not layer.experts:
            return OpCosts(), 0
        results, size_bytes = ExpertResults(), 0

        @contextlib.contextmanager
        def recording() -> Iterator[None]:
            nonlocal size_bytes
            with results.at_work(layer, replays=False):
                yield
            size_bytes = results.size_bytes

        modes = (recording(), results.at_work(layer, replays=True))
        return self._saved_by(layer, args, kwargs, needs, modes), size_bytes

    def _saved_by(
        self,
        layer: StreamedLayer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        needs: Sequence[bool],
        modes: Sequence[contextlib.AbstractContextManager[Any]],
    ) -> OpCosts:
        """What a forward in the first mode costs more than one in the second."""
        costs = [self._live.costs]
        for mode in modes:
            cut_args, cut_kwargs = as_leaves(args, kwargs, needs)
            with torch.enable_grad(), without_saving(), mode:
                self._run(layer, cut_args, cut_kwargs)
            costs.append(self._live.costs)
        return (costs[1] - costs[0]) - (costs[2] - costs[1])


def edges_of(outputs: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Where backward enters the graphs of the outputs; whoever holds these instead of the outputs holds none of their memory.

    Call it where gradients are enabled.
    """
    # Of a view, whose node is torch's own and holds the graph: one written in Python doesn't keep itself alive in torch 2.5.
    return [get_gradient_edge(output.view_as(output)) for output in outputs]


def as_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], needs_grad: Sequence[bool]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, cut off from their graph; those tensors that ``needs_grad`` names require grad."""
    needs = iter(needs_grad)
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().requires_grad_(next(needs)), (args, kwargs)
    )
    return made


def outline_step(model: nn.Module, runtime: StreamingRuntime, inputs: Mapping[str, Any], device: torch.device) -> StepOutline:
    """Runs the model's forward and backward once without data.

    Args:
        model: the prepared model.
        runtime: its engine at work.
        inputs: the keyword arguments of the real call; labels among them, or the loss is taken as a sum over the output.
        device: where the step will run.

    Raises:
        Exception: whatever the model raises when it looks at data (``FakeTensorMode`` has none).
    """
    with dry_model(model, inputs, device) as (dry_inputs, live):
        runtime.batch_cut.begin(dict(inputs))
        anchor = torch.empty((), device=device, requires_grad=True)
        outliner = _Outliner(live, anchor, runtime.batch_cut, runtime.recorder)
        runner: Callable[..., Any] = outliner
        with runtime.layers_run_by(runner), live:
            with sums_divided_by(dry_inputs.get("num_items_in_batch")) as sums:
                loss = loss_of(model.forward(**dry_inputs), device)
            is_sum = any(loss is one for one in sums) and own_loss_code(model) is None
            sums.clear()
            loss.backward()
            peak, costs = outliner.rest()
    return StepOutline(tuple(outliner.events), peak, costs, outliner.profiles, runtime.token_tile, sums_loss=is_sum)


def evaluation_bytes(model: nn.Module, runtime: StreamingRuntime, inputs: Mapping[str, Any], device: torch.device) -> int:
    """The most bytes that a forward without gradients has alive besides what the engine holds.

    Args:
        model: the prepared model.
        runtime: its engine at work.
        inputs: the keyword arguments of the real call.
        device: where it will run.

    Raises:
        Exception: whatever the model raises when it looks at data.
    """

    def run(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return layer.run(args, kwargs)

    with dry_model(model, inputs, device) as (dry_inputs, live), runtime.layers_run_by(run), torch.no_grad(), live:
        model.forward(**dry_inputs)
    return live.peak_bytes


FirstCall = Callable[[Hashable, StreamedLayer, tuple[Any, ...], dict[str, Any]], None]
"""Told of the first call of a kind: the kind, the layer and its arguments, which have no data."""


def outline_layers(
    model: nn.Module, runtime: StreamingRuntime, inputs: Mapping[str, Any], device: torch.device, first_call: FirstCall
) -> tuple[list[Hashable], dict[Hashable, LayerProfile]]:
    """Runs the model's forward alone, without data: the kinds of the layers' calls in order, and their profiles.

    Args:
        model: the prepared model.
        runtime: its engine at work.
        inputs: the keyword arguments of the real call, without labels.
        device: where the step will run.
        first_call: called before a call of a new kind is profiled.

    Raises:
        Exception: see :func:`outline_step`.
    """
    with dry_model(model, inputs, device) as (dry_inputs, live):
        runtime.batch_cut.begin(dict(inputs))
        outliner = _Outliner(live, torch.empty((), requires_grad=True), runtime.batch_cut, runtime.recorder)

        def run(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kind = call_kind(layer, args, kwargs)
            if kind not in outliner.profiles:
                first_call(kind, layer, args, kwargs)
            return outliner(layer, args, kwargs)

        with runtime.layers_run_by(run), live:
            model.forward(**dry_inputs)
    return [event.kind for event in outliner.events], outliner.profiles
