"""Profiles a training step: memory and computation outside the layers, call by call, and the costs of each kind of layer call.
One fake run (:mod:`.step_memory`) with an empty node in place of each layer makes the profile. The peak and the time of any
placement follow from it by arithmetic (:mod:`.placement`, :mod:`.step_simulation`), so that hundreds can be compared."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map_only

from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.layers import output_recorder
from megatrain_accelerate.layers.attention_results import AtAttention, drop_rate
from megatrain_accelerate.layers.caches import cache_bytes
from megatrain_accelerate.layers.compiled_layer import without_saving
from megatrain_accelerate.layers.expert_function import ExpertResults
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.micro_batches import BatchSplit
from megatrain_accelerate.layers.nested_tensors import Args, Inputs, Kwargs, taken_apart, tensors_in
from megatrain_accelerate.layers.output_recorder import Recorded
from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.layers.token_tiles import tokens_of
from megatrain_accelerate.layers.unpadded_layer import batch_of
from megatrain_accelerate.plan.step_memory import LiveBytes, OpCosts, fake_model, loss_of
from megatrain_accelerate.plan.step_profile import Event, LayerProfile, SavedInForward, StepProfile
from megatrain_accelerate.transfer import activation_offload

CostEstimate = Callable[[StreamedLayer, LayerProfile, SavedInForward], LayerProfile]

_KNOWN_PACKAGES = ("transformers", "peft")

_kinds: dict[Hashable, int] = {}
"""The number of each kind of call so far. A search looks up profiles some million times, which is fast by a number."""


def call_kind(layer: StreamedLayer, args: Args, kwargs: Kwargs) -> int:
    """A number that is equal for calls of equal cost: of equal layouts, plain attributes of modules and argument shapes."""
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
    key = (type(layer.module).__qualname__, layouts, attributes, shapes, str(spec))
    return _kinds.setdefault(key, len(_kinds))


class _SavedStorages:
    """Counts the storages that autograd saves in one call, and the bytes that :class:`.ActivationOffloader` would offload."""

    def __init__(self, layer: StreamedLayer, args: Args, kwargs: Kwargs, live: LiveBytes) -> None:
        self._live, self.costs = live, live.costs
        """Costs up to the last saved tensor."""
        inputs = tensors_in((args, kwargs))
        sent = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in inputs if t.requires_grad}
        self.input_bytes = sum(count for count in sent.values() if count >= activation_offload.MIN_OFFLOADED_BYTES)
        self.leaving_bytes = 0
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()
        stay = [*inputs, *layer.module.parameters(), *layer.module.buffers()]
        self._others: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in stay)

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pack hook. Counts each saved storage once."""
        self.costs = self._live.costs
        storage = tensor.untyped_storage()
        if storage not in self._others and storage not in self.storages:
            self.storages.add(storage)
            if storage.nbytes() >= activation_offload.MIN_OFFLOADED_BYTES:
                self.leaving_bytes += storage.nbytes()
        # Detached, since a node that saves its own output would hold itself if no backward reaches it (an unused branch).
        return tensor if tensor.grad_fn is None else tensor.detach()


class _EmptyLayer(torch.autograd.Function):
    """Stands for a layer in autograd's graph: saves its inputs, and makes outputs and input gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[], None], shapes: list[tuple[Any, ...]], *tensors: torch.Tensor) -> Any:
        ctx.note_backward = note
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(torch.empty_strided(*shape, dtype=dtype, device=device) for *shape, dtype, device in shapes)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        ctx.note_backward()
        inputs = ctx.saved_tensors
        gradients = [torch.empty_like(t) if need else None for t, need in zip(inputs, ctx.needs_input_grad[2:], strict=True)]
        return (None, None, *gradients)


class _StepProfiler:
    """Runs in place of the layers and records an event for each call and each backward."""

    def __init__(
        self, live: LiveBytes, runtime: StreamingRuntime, device: torch.device, estimate: CostEstimate | None
    ) -> None:
        self.events: list[Event] = []
        self.profiles: dict[Hashable, LayerProfile] = {}
        self._live = live
        self._anchor = torch.empty((), device=device, requires_grad=True)
        self._cut, self._calls = runtime.batch_cut, runtime.calls
        self._row: RealTokens | None = None
        """The tokens that the call in progress runs on, if it doesn't run on a batch."""
        self._estimate = estimate
        self.costs_before = OpCosts()
        self._outputs: dict[Hashable, tuple[Callable[[Sequence[torch.Tensor]], Any], list[tuple[Any, ...]]]] = {}
        """For each kind of call, what reassembles its outputs, and size, stride, dtype and device of each tensor in them."""

    def note(self, is_backward: bool, layer: int, kind: Hashable) -> None:
        live = self._live
        self.events.append(Event(is_backward, layer, kind, live.live_bytes, live.take_peak(), live.costs - self.costs_before))
        self.costs_before = live.costs

    def __call__(self, layer: StreamedLayer, args: Args, kwargs: Kwargs) -> Any:
        _, length = tokens_of(args, kwargs) or (0, 0)
        self._row, args, kwargs = layer.unpadded.in_a_row(self._calls.real_tokens_in_one_row, args, kwargs)
        kind = call_kind(layer, args, kwargs)
        self.note(False, layer.index, kind)
        if kind not in self.profiles:
            self._profile(layer, kind, args, kwargs, length)
        put_together, shapes = self._outputs[kind]
        tensors = tensors_in((args, kwargs))
        # As in the real node: a trained layer is in the graph even above a frozen embedding.
        anchors = [self._anchor] if layer.has_trainable else []
        made = _EmptyLayer.apply(functools.partial(self.note, True, layer.index, kind), shapes, *tensors, *anchors)
        output, recorded = put_together(made)
        # Recorded once a call, as in a real step: an auxiliary loss takes one tensor per layer.
        output_recorder.enter(recorded)
        return batch_of(self._row, output)

    def _run(self, layer: StreamedLayer, args: Args, kwargs: Kwargs) -> tuple[Any, Recorded]:
        with output_recorder.apart() as recorded:
            output = layer.run(args, kwargs, self._row)
        return output, recorded

    def _profile(self, layer: StreamedLayer, kind: Hashable, args: Args, kwargs: Kwargs, length: int) -> None:
        """Profiles a call by a fake run of the layer itself, which doesn't count as run outside the layers."""
        live = self._live
        split = BatchSplit.of_call(layer, args, kwargs, self._cut)
        saved = _SavedStorages(layer, args, kwargs, live)
        needs = tuple(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        args, kwargs = split.first_piece(args, kwargs)
        base, costs = live.live_bytes, live.costs
        with torch.no_grad():
            trial = self._run(layer, args, kwargs)
        forward_bytes = live.take_peak() - base
        made, put_together = taken_apart(split.whole(layer.name, trial))
        self._outputs[kind] = put_together, [(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in made]
        whole_bytes = sum(leaf.untyped_storage().nbytes() for leaf in made)
        del trial, made
        forward = live.costs - costs
        costs = saved.costs = live.costs
        attention, attention_bytes = OpCosts(), 0

        def at_attention(func: Any, args: Any, kwargs: Any) -> Any:
            """Counts what a recompute is spared if results are kept (``layers/attention_results.py``), and their bytes."""
            nonlocal attention, attention_bytes
            before, result = live.costs, func(*args, **kwargs)
            if not drop_rate(func, args, kwargs):
                attention += live.costs - before
                attention_bytes += sum(tensor.nbytes for tensor in tensors_in(result))
            return result

        with torch.enable_grad():
            cut_args, cut_kwargs = as_leaves(args, kwargs, needs)
            with saved_tensors_hooks(saved.count, lambda tensor: tensor), AtAttention(at_attention):
                trial = self._run(layer, cut_args, cut_kwargs)
        kept_forward_bytes = live.take_peak() - base
        in_forward = SavedInForward(
            operand_bytes=sum(kept.nbytes() for kept in saved.storages if kept in live.operands or kept in live.scores),
            score_bytes=sum(kept.nbytes() for kept in saved.storages if kept in live.operands and kept in live.scores),
            output_bytes=sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(trial)),
            costs=saved.costs - costs,
        )
        outputs = [tensor for tensor in tensors_in(trial) if tensor.requires_grad]
        wanted = [tensor for tensor in tensors_in((cut_args, cut_kwargs)) if tensor.requires_grad]
        wanted += [p for p in layer.module.parameters() if p.requires_grad]
        with torch.enable_grad():
            # Edges hold the graph without the outputs' memory. They are those of views, whose nodes are torch's own: in torch
            # 2.5 the edge of a node written in Python doesn't keep it alive.
            edges = [get_gradient_edge(output.view_as(output)) for output in outputs]
        # The outputs' gradients are counted outside the layer already.
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

        experts, expert_bytes = OpCosts(), 0
        if layer.experts:  # costs that a forward is spared if it replays the results of an earlier one, and their bytes
            results = ExpertResults()
            for replays, sign in ((False, 1.0), (True, -1.0)):
                before = live.costs
                with results.at_work(layer, replays), torch.enable_grad(), without_saving():
                    self._run(layer, *as_leaves(args, kwargs, needs))
                experts += (live.costs - before).times(sign)
                expert_bytes = expert_bytes or results.size_bytes
        profile = LayerProfile(
            forward=forward,
            backward=backward,
            kept_bytes=kept_bytes,
            offloaded_bytes=min(kept_bytes, saved.leaving_bytes),
            input_bytes=saved.input_bytes,
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
        )
        if self._estimate is not None:
            profile = self._estimate(layer, profile, in_forward)
        self.profiles[kind] = profile.of_pieces(split, whole_bytes)
        live.take_peak()
        self.costs_before = live.costs


def as_leaves(args: Args, kwargs: Kwargs, needs_grad: Sequence[bool]) -> tuple[Args, Kwargs]:
    """The arguments, detached from their graph. ``needs_grad`` says of each tensor whether it requires grad."""
    needs = iter(needs_grad)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(next(needs)), (args, kwargs))


def profile_step(
    model: nn.Module, runtime: StreamingRuntime, inputs: Inputs, device: torch.device, estimate: CostEstimate | None = None
) -> StepProfile:
    """Profiles a step by one fake run of the model's forward and backward, as they will run on the device. ``inputs`` are the
    keyword arguments of the real call. Without labels the loss is the sum over the output. ``estimate`` adds times to the
    profile of a call or of its first piece. Raises whatever the model raises when it reads data, which a fake run lacks."""
    with fake_model(model, inputs, device) as (fake_inputs, live):
        runtime.batch_cut.begin(dict(inputs))
        profiler = _StepProfiler(live, runtime, device, estimate)
        with runtime.layers_run_by(profiler), live:
            with _sums_divided_by(fake_inputs.get("num_items_in_batch")) as sums:
                loss = loss_of(model.forward(**fake_inputs), device)
            is_sum = any(loss is one for one in sums) and not _has_own_loss_code(model)
            sums.clear()
            loss.backward()
            peak, costs = live.take_peak(), live.costs - profiler.costs_before
    way = (runtime.token_tile, runtime.batch_cut.chosen)
    return StepProfile(tuple(profiler.events), peak, costs, profiler.profiles, *way, sums_loss=is_sum)


def evaluation_bytes(model: nn.Module, runtime: StreamingRuntime, inputs: Inputs, device: torch.device) -> tuple[int, int]:
    """Peak bytes of a forward without gradients, besides the engine's memory and what the forward adds to caches among its
    arguments, and the bytes that these caches hold after it. Raises as :func:`profile_step` does."""
    as_they_are = runtime.layers_run_by(StreamedLayer.run)
    with fake_model(model, inputs, device) as (fake_inputs, live), as_they_are, torch.no_grad(), live:
        bytes_before = cache_bytes(fake_inputs)
        model.forward(**fake_inputs)
        bytes_after = cache_bytes(fake_inputs)
    return max(0, live.peak_bytes - (bytes_after - bytes_before)), bytes_after


def what_sees_a_batch(model: nn.Module) -> str | None:
    """Why a model's loss isn't a sum over the batch's samples, to follow "because" in a message. None if it may be one."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    if any(getattr(config, "output_router_logits", False) for config in configs):
        return "the loss balances experts over the tokens of a micro-batch (output_router_logits)"
    if any(getattr(config, "z_loss_coefficient", 0) for config in configs):
        return "the loss has a term over all tokens of a micro-batch (z_loss_coefficient)"
    norms = (name for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    return next((f"{name} computes statistics over a micro-batch" for name in norms), None)


def _has_own_loss_code(model: nn.Module) -> bool:
    """Whether a function outside transformers and PEFT may contribute to the model's loss, which then may not be a sum. The
    loss's value can't tell: a weight that compares the tokens of a batch may be 1 for all of them in the first step."""
    for module in model.modules():
        if module is model or hasattr(type(module), "loss_function"):
            chosen = getattr(inspect.getattr_static(type(module), "loss_function", None), "fget", None)
            functions = (type(module).forward, chosen, vars(module).get("_loss_function"))
            if any(f is not None and (f.__module__ or "").split(".")[0] not in _KNOWN_PACKAGES for f in functions):
                return True
    return False


@contextlib.contextmanager
def _sums_divided_by(num_items: Any) -> Iterator[list[torch.Tensor]]:
    """Collects the losses that transformers' own functions compute in the body as a sum over tokens, divided by ``num_items``.
    Each such function (``ForCausalLMLoss``, for one) returns what ``fixed_cross_entropy`` returned. The model must get the
    object ``num_items`` itself as ``num_items_in_batch``. None collects nothing."""
    module = sys.modules.get("transformers.loss.loss_utils")
    original = getattr(module, "fixed_cross_entropy", None)
    made: list[torch.Tensor] = []
    if original is None or num_items is None:
        yield made
        return

    def noted(source: Any, target: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any) -> Any:
        loss = original(source, target, num_items_in_batch, *args, **kwargs)
        if num_items_in_batch is num_items:
            made.append(loss)
        return loss

    with replaced(module, "fixed_cross_entropy", noted):
        yield made
