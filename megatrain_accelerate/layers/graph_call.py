"""Streamed layers in autograd's graph: each layer's own forward runs with views of a slot as its weights.

The scheme is FSDP2's (``torch/distributed/fsdp/_fully_shard``), but layers share the slots. Autograd saves positions in a slot
instead of weights (:mod:`.saved_tensors`). In backward, the first saved tensor that is read has the layer fetched into a slot
again, and a hook on the layer's inputs tells when all of its backward has been issued. Whether activations are kept, offloaded
or recomputed (``torch.utils.checkpoint``) decides what is saved, not how the layer runs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.gradients.call_gradients import Backward, GradientSums
from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.layers import output_recorder
from megatrain_accelerate.layers.attention_results import AttentionResults
from megatrain_accelerate.layers.compiled_layer import CompiledLayers, without_autocast_cache
from megatrain_accelerate.layers.execution_state import BufferValues, forward_state_restored, put_in
from megatrain_accelerate.layers.expert_function import ExpertResults
from megatrain_accelerate.layers.layer import StreamedLayer, bound
from megatrain_accelerate.layers.micro_batches import BatchCut, BatchSplit
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs, map_tensors, taken_apart
from megatrain_accelerate.layers.output_recorder import Captures
from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.layers.passes import Passes
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.layers.saved_tensors import SavedTensors
from megatrain_accelerate.layers.shared_mappings import has_mappings, no_writes_into, no_writes_to
from megatrain_accelerate.layers.unpadded_layer import batch_of
from megatrain_accelerate.transfer.activation_offload import ActivationOffloader, Recording
from megatrain_accelerate.transfer.call_order import Tape
from megatrain_accelerate.transfer.meter import named_range
from megatrain_accelerate.transfer.prefetch import Prefetcher
from megatrain_accelerate.transfer.streams import WeightSlot

_HELD_ONCE = torch.empty(0)
_HELD_ONCE_COUNT = sys.getrefcount(weakref.ref(_HELD_ONCE)())
"""What ``sys.getrefcount`` says of a leaf that only the graph holds: the count of a tensor with one holder."""
_NOTHING = contextlib.nullcontext()
_current_task = torch._C._current_graph_task_id


class GraphCall:
    """One call of a layer, or of a piece of its batch, from its forward to the last backward through it.

    Its *leaves* are tensors without history, in the slot's memory. The layer computes with them as its weights, and autograd
    gives them gradients. Owner: the graph, whose leaves, saved tensors and hooks on the layer's outputs refer to the call. The
    call holds none of them, so that it is freed with the graph. ``position`` on ``tape`` (the layer calls of a pass) tells
    which call it is. It is number ``piece`` of ``pieces``, in forward order: 0 of 1 if the batch is whole.
    """

    def __init__(self, calls: GraphCalls, layer: StreamedLayer, tape: Tape, position: int, piece: int, pieces: int) -> None:
        self.calls, self.layer = calls, layer
        self.tape, self.position, self.piece, self.pieces = tape, position, piece, pieces
        self.open_forward = tape.forward_mark()
        """The mark of its pass, which counts as open while a call lives."""
        self.running_slot: WeightSlot | None = None
        """The slot with its weights while its forward is being issued; else None."""
        self.task = -1
        """Number of the backward (autograd's graph task) that has reached this call; -1 if none has."""
        self.is_done = False
        """Whether that backward has delivered all of the call's gradients."""
        self.unit_version = -1
        """The version of the layer's unit in forward, which a step or a write to its weights changes."""
        self._leaves: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        """For each weight that was trained in forward: its index among the unit's trainable ones, and the leaf."""
        self._address: int | None = None
        """The address at which backward needs the weights, if forward left a *hidden weight* in its slot: a reference that
        autograd doesn't see, such as ``ctx.weight = weight`` in a user's function. None if any slot will do."""
        self.row: RealTokens | None = None
        """The real tokens if it runs on them as one row; None if its arguments are batches."""
        self._captures: Captures | None = None
        """What hooks inside the layer record if it runs compiled; None if it runs its own code."""
        self._trained = layer.trained_now()

    # ------------------------------------------------------------------ forward

    def run(self, slot: WeightSlot, args: Args, kwargs: Kwargs) -> Any:
        """Runs the layer with the weights in ``slot`` as the leaves of this call."""
        calls, layer = self.calls, self.layer
        self.running_slot = slot
        try:
            uses_before = slot.tensor_count(layer.unit.layout)
            hooked: dict[int, torch.Tensor] = {}
            args, kwargs = map_tensors(functools.partial(self._hooked_input, hooked=hooked), (args, kwargs))
            self.unit_version = layer.unit.version
            first_node = torch._C._autograd._get_sequence_nr()
            weights = self._leaves_in(slot)
            self._note_leaves(weights, hooks_leaves=not hooked)
            with named_range(f"megatrain::forward ({layer.name})"), slot.read_by(self), without_autocast_cache():
                if layer.index not in calls.policy.attention_kept:  # a compiled graph hides the attention to keep
                    self._captures = calls.compiled.wants(layer, self.row)
                output = self._run_by_policy(weights, args, kwargs)
                output = map_tensors(functools.partial(self._hooked_output, hooked=hooked), output)
            # After ``del``, only the graph should hold the leaves, and only leaves lie in the slot's memory. Else something
            # hides a weight from autograd, and backward needs the slot's address. So do all later calls of such a layer.
            del weights
            holders = [sys.getrefcount(leaf()) for _, leaf in self._leaves if leaf() is not None]
            uses = slot.tensor_count(layer.unit.layout) - uses_before
            if max(holders, default=0) > _HELD_ONCE_COUNT or uses > len(holders) or layer.index in calls.hiding_layers:
                calls.hiding_layers.add(layer.index)
                self._address = slot.address
                self._hook_nodes(first_node, output)
            return output
        finally:
            self.running_slot = None

    def _hooked_input(self, tensor: torch.Tensor, hooked: dict[int, torch.Tensor]) -> torch.Tensor:
        """Hooks an input and returns it, or a view of it: :meth:`all_issued` is called when its gradient is known. All of the
        layer's backward that leads to this input has been issued then. :meth:`end_backward` handles what may be left."""
        if not tensor.requires_grad or tensor.device != self.calls.device:
            return tensor
        if id(tensor) not in hooked:
            # A view has a node of its own. Hooks on a leaf would stay and pile up. Pieces are outputs of one node, and hooks
            # on them would all run when the last piece has its gradient.
            through = tensor.view_as(tensor) if tensor.is_leaf or self.pieces > 1 else tensor
            # Weakly, since the graph below the layer may live longer than the layer's own.
            through.register_hook(functools.partial(_all_issued, weakref.ref(self)))
            hooked[id(tensor)] = hooked[id(through)] = through
        return hooked[id(tensor)]

    def _note_leaves(self, weights: list[torch.Tensor], hooks_leaves: bool) -> None:
        """Notes the leaves that await gradients. ``hooks_leaves`` if no input is hooked, to tell when the backward is over."""
        for index, place in enumerate(self.layer.trainable_places):
            if self._trained[place]:
                weight = weights[place]
                self._leaves.append((index, weakref.ref(weight)))
                weight._megatrain_call = self  # type: ignore[attr-defined]
                if hooks_leaves:
                    weight.register_post_accumulate_grad_hook(self.leaf_arrived)

    def _leaves_in(self, slot: WeightSlot) -> list[torch.Tensor]:
        """Returns the layer's weights in the slot, in entry order, as new leaves. ``data`` gives each a version counter (that
        with which autograd notices writes) of its own."""
        views = slot.views(self.layer.unit.layout)
        pairs = zip(views, self._trained, strict=True)
        return [view.data.requires_grad_() if is_trained else view.data for view, is_trained in pairs]

    def _run_by_policy(self, weights: list[torch.Tensor], args: Args, kwargs: Kwargs) -> Any:
        calls, layer, policy = self.calls, self.layer, self.calls.policy
        calls.activations.run_begins()
        is_recomputed = policy.is_recomputed(layer.index)
        # Where inputs are offloaded to free memory, results of the same size mustn't take it.
        keeps_results = is_recomputed and not policy.offloads_inputs(layer.index)
        self._expert_results = ExpertResults(keeps_results, is_last=self.piece == 0) if layer.experts else None
        recompute_budget, kept_budget = policy.budgets
        budget = recompute_budget if is_recomputed else kept_budget
        captures = self._captures
        if is_recomputed and (captures is None or not calls.compiled.recomputes(layer, captures, budget, self.row)):
            return self._run_to_recompute(weights, args, kwargs)
        offloaded = None
        if layer.index in policy.offloaded:
            inputs, _ = taken_apart((args, kwargs))
            offloaded = Recording(calls.activations, layer.name, [*layer.module.buffers(), *inputs])
        with bound(layer, weights), SavedTensors(calls.prefetcher.at_address, offloaded).recording():
            output = self._run_layer(args, kwargs, memory_budget=budget)
        if offloaded is not None:
            calls.activations.send(offloaded, self.tape, self.position, self.piece)
        return output

    def _run_layer(self, args: Args, kwargs: Kwargs, is_recompute: bool = False, memory_budget: float = 1.0) -> Any:
        layer, results = self.layer, self._expert_results
        if self._captures is not None:
            return self.calls.compiled.run(layer, self._captures, args, kwargs, memory_budget, self.row)
        if results is None and self.row is None and not (layer.tiles.tile_tokens or has_mappings(args, kwargs)):
            return layer.forward(*args, **kwargs)  # all that run() would do
        with _NOTHING if results is None else results.at_work(layer, replays=is_recompute):
            return layer.run(args, kwargs, self.row)

    def _run_to_recompute(self, weights: list[torch.Tensor], args: Args, kwargs: Kwargs) -> Any:
        calls, layer, policy = self.calls, self.layer, self.calls.policy
        as_in_forward = forward_state_restored(calls.device, layer.module)
        # The checkpoint must get each tensor as an argument of its own.
        tensors, arguments = taken_apart((args, kwargs))
        before: BufferValues = []
        # The first run binds these weights, and pops them, so that only the graph holds them afterwards.
        of_first_run: list[list[torch.Tensor]] = [weights]
        keeps_attention = layer.index in policy.attention_kept
        offloads_attention = keeps_attention and policy.offloads_inputs(layer.index)
        offloaded = Recording(calls.activations, layer.name) if offloads_attention else None
        attention = AttentionResults(offloaded) if keeps_attention else None

        def body(*given: torch.Tensor) -> Any:
            nonlocal before
            args, kwargs = arguments(given)
            if of_first_run:
                recording = _NOTHING if attention is None else attention.recording()
                saving = SavedTensors(calls.prefetcher.at_address).recording()
                with bound(layer, of_first_run.pop()), saving, layer.buffers.watched() as before, recording:
                    return self._run_layer(args, kwargs, memory_budget=0.0)
            with (
                self.pinned() as slot,
                slot.read_by(self),
                bound(layer, self._leaves_in(slot)),
                as_in_forward(),
                SavedTensors(calls.prefetcher.at_address).recording(),
                # Copies of the values with which forward began.
                put_in([(owner._buffers, name, value.clone()) for owner, name, value in before]),
                named_range(f"megatrain::recompute ({layer.name})"),
                _NOTHING if attention is None else attention.replaying(),
                output_recorder.apart(),
            ):
                return self._run_layer(args, kwargs, is_recompute=True, memory_budget=0.0)

        with no_writes_into(args, kwargs, layer.name), no_writes_to(tensors, layer.name):
            # The body restores RNG states (Python's and NumPy's too), autocast and modes.
            output = checkpoint(body, *tensors, use_reentrant=False, preserve_rng_state=False)
        if offloaded is not None:
            calls.activations.send(offloaded, self.tape, self.position, self.piece)
        return output

    def _hooked_output(self, tensor: torch.Tensor, hooked: dict[int, torch.Tensor]) -> torch.Tensor:
        """Hooks an output, so that its backward fetches the layer, and returns it. One that lies in the slot is copied."""
        slots = self.calls.prefetcher.at_address
        if tensor.layout is torch.strided and (slot := slots.get(tensor.untyped_storage().data_ptr())) is not None:
            slot.require_current_call()
            tensor = tensor.clone()
        if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in hooked:
            tensor.register_hook(self._fetch_hook)
        return tensor

    def _hook_nodes(self, first_number: int, output: Any) -> None:
        """Has each of the layer's nodes fetch it before the node runs, which may read a hidden weight. These are the nodes of
        the output's graph that autograd numbered from ``first_number`` on."""
        found = set[torch.autograd.graph.Node]()
        to_see = [tensor.grad_fn for tensor in taken_apart(output)[0]]
        end = torch._C._autograd._get_sequence_nr()
        for node in to_see:
            # Nodes of leaves have the largest number that there is, and are left out.
            if node is not None and node not in found and first_number <= node._sequence_nr() < end:
                found.add(node)
                node.register_prehook(self._fetch_hook)
                to_see += [below for below, _ in node.next_functions]
        for _, leaf in self._leaves:
            if (weight := leaf()) is not None:
                weight.register_hook(self._require_entered)

    # ------------------------------------------------------------------ backward

    def _require_entered(self, _: torch.Tensor) -> None:
        """Hook on the leaves of a layer that hides weights from autograd: refuses a backward that didn't pass its outputs."""
        if self.running_slot is None and self.task != _current_task():
            raise UnsupportedError(
                f"backward reached layer {self.layer.name} without passing through its outputs. A custom autograd function in "
                "it keeps a weight as an attribute of ctx, and that memory may hold another layer's weights now. Use "
                "ctx.save_for_backward(), or return what the loss needs"
            )

    def _fetch_hook(self, _: Any) -> None:
        self.slot()  # enters the backward, and fetches the layer

    def _enter_backward(self) -> None:
        """Notes that a backward has reached this call. Does nothing if that is known."""
        task = _current_task()
        if self.task == task:
            return
        if self.task != -1:
            # A second backward: it runs within the first one, or that one has failed.
            found, backward = self.take_gradients(), self.calls.backwards.get(self.task)
            if found and backward is not None:
                backward.take(self, found, is_complete=False)
            self._leave_backward()
        self.task = task
        self.calls.passes.note_backward()
        self.calls.backwards[task].calls.append(self)
        # Also those of the layers that follow in backward.
        self.calls.activations.bring_back(self.tape, self.position, self.piece)

    def slot(self) -> WeightSlot:
        """Returns the slot with the layer's weights, for kernels issued now. In backward that is by a lease, which
        :meth:`all_issued` ends. Raises a StateError if the weights aren't those of forward."""
        if self.running_slot is not None:  # a backward within the layer's own forward
            return self.running_slot
        if self.task != _current_task():
            self._enter_backward()
        layer, prefetcher = self.layer, self.calls.prefetcher
        slot = prefetcher.leased(layer, self._address)
        # Also checked with a lease, which may be another call's, of another version. Closing the engine changes the version.
        if layer.unit.version != self.unit_version:
            layer.require_version(self.unit_version)
        if slot is None:
            upcoming = self.calls.passes.begin_backward_of(self.tape, self.position)
            together = self.tape.order.together
            slot = prefetcher.acquire(layer, upcoming, together, None if together else self._address)
            if self._address is not None and slot.address != self._address:
                # Where all ranks gather, they must choose the same slot, so that this rank can't ask for its hidden weight's
                # address. It takes part, and then copies the weights to that address by itself.
                prefetcher.release(slot)
                slot = prefetcher.acquire(layer, (), address=self._address)
            prefetcher.leases[layer.index] = slot
            try:
                layer.require_version(self.unit_version)  # again, since acquire() takes over weights that somebody wrote
                # A checkpoint inside the layer reads the module's weights when it recomputes.
                slot.leaves = self._leaves_in(slot)
                for context in (named_range(f"megatrain::backward ({layer.name})"), bound(layer, slot.leaves)):
                    context.__enter__()
                    slot.until_lease_ends.append(context)
            except BaseException:
                prefetcher.end_lease(layer.index)
                raise
        return slot

    @contextlib.contextmanager
    def pinned(self) -> Iterator[WeightSlot]:
        """Yields the slot, which no other layer can take while the body runs."""
        slot = self.slot()
        slot.user_count += 1
        try:
            yield slot
        finally:
            self.calls.prefetcher.release(slot)

    def _has_all_gradients(self) -> bool:
        """Whether all leaves that the graph still holds have gradients. Autograd gives a leaf its whole gradient at once."""
        return not [leaf for _, found in self._leaves if (leaf := found()) is not None and leaf.grad is None]

    def all_issued(self) -> None:
        """Called when all of the layer's backward has been issued, as far as a hook can tell."""
        if self.running_slot is not None:
            return
        self._enter_backward()
        is_complete = self._has_all_gradients()
        # A piece's gradients are delivered even if more are to come: each takes memory until it is added to the pieces' sum.
        if not self.is_done and (is_complete or self.pieces > 1):
            self._deliver_gradients(is_complete)
            self.is_done = is_complete
        if self.piece == 0:  # the last piece in backward
            self.calls.prefetcher.end_lease(self.layer.index)

    def leaf_arrived(self, _: torch.Tensor) -> None:
        """Called when a leaf has its gradient, in a call none of whose inputs gets one."""
        if self.running_slot is None:
            self._enter_backward()
            if self._has_all_gradients():
                self.all_issued()

    def end_backward(self, succeeded: bool) -> None:
        """Called when the backward is over: delivers gradients that no input told of, or drops them if it failed."""
        if not succeeded:
            self.take_gradients()
        elif not self.is_done:
            self._deliver_gradients(is_complete=False)
        self._leave_backward(succeeded)

    def _leave_backward(self, succeeded: bool = True) -> None:
        """Ends the lease, and notes that no backward is in this call. A failed one fetches no more: its end may be reported
        late, by another thread than that of the next forward."""
        self.calls.prefetcher.end_lease(self.layer.index, prefetches=succeeded)
        self.task, self.is_done = -1, False

    def take_gradients(self) -> dict[int, torch.Tensor]:
        """Takes the gradients from the leaves that have some, and returns them by index among the unit's trainable weights."""
        taken: dict[int, torch.Tensor] = {}
        leaves = [(index, found()) for index, found in self._leaves]
        slot = self.calls.prefetcher.leases.get(self.layer.index)
        if slot is not None:
            # A checkpoint inside the layer that runs a backward of its own accumulates in the lease's leaves.
            leaves += enumerate([slot.leaves[place] for place in self.layer.trainable_places])
        for index, leaf in leaves:
            if leaf is not None and leaf.grad is not None:
                gradient, leaf.grad = leaf.grad, None
                taken[index] = taken[index] + gradient if index in taken else gradient
        return taken

    def _deliver_gradients(self, is_complete: bool) -> None:
        """Hands over the gradients that have come. ``is_complete``: no more will come in this backward."""
        taken = self.take_gradients()
        if True in [gradient.requires_grad for gradient in taken.values()]:
            raise UnsupportedError(
                f"layer {self.layer.name}: a backward with create_graph=True gives its parameters gradients that "
                "require grad, which can't be offloaded; use torch.autograd.grad(..., create_graph=True) on inputs "
                "or outputs of layers instead"
            )
        self.calls.backwards[self.task].take(self, taken, is_complete)


def _all_issued(call: weakref.ref[GraphCall], _: torch.Tensor) -> None:
    if (found := call()) is not None:
        found.all_issued()


@dataclasses.dataclass(eq=False)
class GraphCalls:
    """Runs the layers of one engine that are in autograd's graph, and knows which of their calls are in a backward."""

    passes: Passes
    prefetcher: Prefetcher
    offloader: GradientOffloader
    piece_sums: GradientSums
    activations: ActivationOffloader
    batch_cut: BatchCut
    compiled: CompiledLayers

    def __post_init__(self) -> None:
        self.device = self.offloader.streams.device
        self.policy = Placement()
        """Says what becomes of the layers' activations: they are kept, offloaded or recomputed. Set by the plan."""
        self.real_tokens: RealTokens | None = None
        """The tokens to compute of the current forward's batch (:mod:`.padding`); None for all."""
        self.backwards = collections.defaultdict[int, Backward](lambda: Backward(self.offloader, self.piece_sums))
        """The backwards that are under way, by autograd's number."""
        self.hiding_layers: set[int] = set()
        """Indices of layers of which a call has left a hidden weight in its slot."""
        self._alive: weakref.WeakSet[GraphCall] = weakref.WeakSet()

    @property
    def real_tokens_in_one_row(self) -> RealTokens | None:
        """:attr:`real_tokens` where a plan may treat them as one row; None for a batch in pieces, of which each is one row."""
        return self.real_tokens if self.batch_cut.size is None else None

    def run(self, layer: StreamedLayer, tape: Tape, position: int, args: Args, kwargs: Kwargs) -> Any:
        """Runs a layer, whole or in pieces, so that its graph can be differentiated."""
        offloads_inputs = self.policy.offloads_inputs(layer.index)
        split = BatchSplit.of_call(layer, args, kwargs, self.batch_cut)
        row, count = None, split.count
        if count == 1 and self.real_tokens is not None:
            row, args, kwargs = layer.unpadded.in_a_row(self.real_tokens, args, kwargs)
        inputs = taken_apart((args, kwargs))[0] if count > 1 or offloads_inputs else []
        calls = [GraphCall(self, layer, tape, position, piece, count) for piece in range(count)]
        self._alive.update(calls)
        calls[0].row = row
        upcoming = tape.order.after_forward(tape, position, self.prefetcher.look_ahead, backward_follows=True)
        slot = self.prefetcher.acquire(layer, upcoming, tape.order.together)
        try:
            self.passes.wait_for_head(layer)
            with self._offloading(layer, inputs, tape, position) if offloads_inputs else _NOTHING:
                if count == 1:
                    return batch_of(row, calls[0].run(slot, args, kwargs))
                with no_writes_to(inputs, layer.name, "a function that returns multiple views"):
                    return self._run_pieces(calls, slot, split, args, kwargs)
        finally:
            self.prefetcher.release(slot)

    @contextlib.contextmanager
    def _offloading(self, layer: StreamedLayer, inputs: Sequence[torch.Tensor], tape: Tape, position: int) -> Iterator[None]:
        """Offloads what autograd saves of a call's inputs while the body runs, if gradients flow to it. Other inputs (masks,
        position embeddings) are the same tensors for all layers, and stay on the device."""
        recording = Recording(self.activations, layer.name, [tensor for tensor in inputs if not tensor.requires_grad])
        with SavedTensors(self.prefetcher.at_address, recording).recording():
            yield
        self.activations.send(recording, tape, position)

    def _run_pieces(self, calls: list[GraphCall], slot: WeightSlot, split: BatchSplit, args: Args, kwargs: Kwargs) -> Any:
        """Runs a call in pieces, and joins their outputs, and what was recorded meanwhile."""
        name = calls[0].layer.name
        pieces: list[list[torch.Tensor]] = []
        first_structure: Any = None
        rows = [None] * split.count if self.real_tokens is None else self.real_tokens.of_pieces(split.sizes)
        for call, real_tokens, of_piece in zip(calls, rows, split.arguments(args, kwargs), strict=True):
            with output_recorder.apart() as recorded, no_writes_into(*of_piece, name):
                call.row, own_args, own_kwargs = call.layer.unpadded.in_a_row(real_tokens, *of_piece)
                output = batch_of(call.row, call.run(slot, own_args, own_kwargs))
            tensors, put_together = taken_apart((output, recorded))
            structure = put_together([None] * len(tensors))
            first_structure = first_structure or structure
            if first_structure != structure:
                raise UnsupportedError(
                    f"layer {name} returns other things for other pieces of a batch, which can't be joined; leave "
                    "megatrain_config.micro_batch_size unset"
                )
            pieces.append(tensors)
        outputs, _ = taken_apart(output)
        output, recorded = put_together(split.joined(name, pieces, outputs=len(outputs)))
        output_recorder.enter(recorded)
        return output

    def end_backward(self, task: int, succeeded: bool) -> None:
        """Ends a backward: delivers gradients for which no hook was called, or drops those that a failed one left."""
        if task in self.backwards:
            for call in self.backwards[task].calls:
                if call.task == task:
                    call.end_backward(succeeded)
            backward = self.backwards.pop(task)
            if succeeded:
                backward.finish()

    def settle(self) -> None:
        """Offloads gradients that no hook has told of, before gradients are read as a whole. A tensor that depends on weights
        alone and wasn't returned leaves such gradients, for example."""
        for call in list(self._alive):
            if call.running_slot is None and call.task == -1 and (found := call.take_gradients()):
                self.offloader.offload(call.layer, found)
