"""A call of a layer's experts, part by part: their module's stock forward runs on the tokens of each part's experts.

T tokens, K choices of each, S = T K pairs, n pairs of one part, D hidden. Pair s is choice s % K of token s // K. A part gets
its pairs as tokens with one choice each, so that any implementation that the model uses runs on it as on a module of fewer
experts. Each result is written to its pair's row, and a token's K rows are added up at the end: no sum depends on the number
of parts, and nothing is added by atomics.

In backward each part is fetched and recomputed, like a layer. A recomputed layer doesn't run its experts once more in between:
their results in forward, and the order of the pairs, are kept with its inputs (:class:`ExpertResults`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.layers.compiled_layer import without_autocast_cache, without_saving
from megatrain_accelerate.layers.execution_state import Restored, autocast_restored, put_in
from megatrain_accelerate.layers.layer import ExpertPart, StreamedExperts, StreamedLayer
from megatrain_accelerate.layers.nested_tensors import tensors_in
from megatrain_accelerate.layers.token_tiles import tiles
from megatrain_accelerate.transfer.call_order import CallOrder, Tape
from megatrain_accelerate.transfer.meter import named_range
from megatrain_accelerate.transfer.prefetch import Prefetcher

_FULLEST_PART = 1.25
"""Without data, one part is assumed to get so many times its even share of the pairs: routers are never quite even."""


@dataclasses.dataclass(eq=False)
class ExpertStreams:
    """What the calls of all experts that stream in parts share. A model may have no such experts."""

    prefetcher: Prefetcher
    order: CallOrder
    """The order of the parts, whose passes begin with those of the layers."""
    offloader: GradientOffloader
    anchor: torch.Tensor
    """A number that requires grad, for calls none of whose inputs does (above a frozen embedding, say)."""
    runs_without_data: Callable[[], bool]
    """Whether layers run in a fake run or a measurement of the plan."""

    @contextlib.contextmanager
    def fetched(self, part: ExpertPart, upcoming: Sequence[int], layout_of: ExpertPart) -> Iterator[list[torch.Tensor]]:
        """Yields a part's weights on the device, as those of ``layout_of``, while the body issues its kernels."""
        slot = self.prefetcher.acquire(part, upcoming)
        try:
            yield slot.views(layout_of.unit.layout)
        finally:
            self.prefetcher.release(slot)

    def upcoming(self, place: tuple[Tape, int], in_backward: bool, backward_follows: bool) -> Sequence[int]:
        """Returns the parts that are expected after the call at ``place``."""
        count = self.prefetcher.slot_count
        if in_backward:
            return self.order.after_backward(*place, count, not self.offloader.is_last_backward())
        return self.order.after_forward(*place, count, backward_follows)


def shown_instead(experts: StreamedExperts) -> list[torch.Tensor] | None:
    """Returns what stands in for the parameters (tensors without data, made-up numbers), or None if they are in place. A
    StateError if one isn't the parameter that was adopted."""
    shown: list[Any] = [experts.module._parameters.get(state.name) for state in experts.unit.states]
    if all(tensor is state.parameter for tensor, state in zip(shown, experts.unit.states, strict=True)):
        return None
    if any(tensor is None or isinstance(tensor, nn.Parameter) for tensor in shown):
        raise StateError(
            f"a parameter of the experts {experts.name} was replaced or removed after the model was prepared; change "
            "the model (adapters, heads, tokens) before accelerator.prepare()"
        )
    return shown


class Rows(NamedTuple):
    """The n pairs of one part of the experts."""

    pairs_n: torch.Tensor
    tokens_n: torch.Tensor
    index_n1: torch.Tensor
    """The pairs' experts, counted from the part's first: the ``top_k_index`` of tokens with one choice each."""

    def of(self, hidden_TD: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the pairs' hidden states (n, D) and weights (n, 1)."""
        return hidden_TD[self.tokens_n], weights_TK.reshape(-1)[self.pairs_n].unsqueeze(1)


class Routing(NamedTuple):
    """The pairs of one call, sorted by expert, and those of one expert by token."""

    choices: int
    order_S: torch.Tensor
    experts_S: torch.Tensor
    bounds: tuple[int, ...]
    """Where in the order each part begins, and where the last one ends. Pairs behind that have no expert."""

    @classmethod
    def of(cls, experts: StreamedExperts, index_TK: torch.Tensor) -> Routing:
        """Sorts the pairs. Waits for the device to learn how many each part gets; without data that is assumed. ``index_TK``
        is ``experts.count`` or more for a pair without an expert."""
        sorted_S, order_S = torch.sort(index_TK.reshape(-1), stable=True)
        if isinstance(index_TK, FakeTensor) or index_TK.is_meta:
            # The first part gets more than its share, and the others the rest as evenly as they can.
            pairs, first = order_S.numel(), experts.parts[0].experts.experts
            fuller, others = min(pairs, int(_FULLEST_PART * pairs * first / experts.count)), experts.count - first
            ends = [fuller + (pairs - fuller) * (part.experts.last - first) // others for part in experts.parts[:-1]]
            bounds = [0, *ends, pairs]
        else:
            bounds = torch.searchsorted(sorted_S, experts.begins(index_TK.device).to(sorted_S.dtype)).tolist()
        return cls(index_TK.shape[1], order_S, sorted_S, tuple(bounds))

    def rows(self, part: ExpertPart) -> Rows | None:
        """Returns the pairs of the part, or None if it has none."""
        begin, end = self.bounds[part.place : part.place + 2]
        if begin == end:
            return None
        pairs_n = self.order_S[begin:end]
        index_n1 = (self.experts_S[begin:end] - part.experts.first).unsqueeze(1)
        return Rows(pairs_n, torch.div(pairs_n, self.choices, rounding_mode="floor"), index_n1)

    def pair_buffer(self, like: torch.Tensor, width: int) -> torch.Tensor:
        """Allocates a row of ``width`` for each pair, zero where no part will write."""
        pairs = self.order_S.numel()
        all_have_an_expert = self.bounds[-1] - self.bounds[0] == pairs
        return (like.new_empty if all_have_an_expert else like.new_zeros)((pairs, width))

    def sum_of_choices(self, pairs_SD: torch.Tensor) -> torch.Tensor:
        """Sums over each token's choices, in fp32, rounded once: (T, D)."""
        return pairs_SD.unflatten(0, (-1, self.choices)).sum(dim=1)


_Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Hidden states (T, D) and the weights of the choices (T, K)."""


class ExpertResults:
    """The calls of experts in one run of a layer, with their results if the run ``keeps`` them for a recompute. Owner: the
    graph, by way of the layer's checkpoint, until the first backward. Reader: the recompute. ``is_last``: the backward of this
    run comes last among those of the layer's call."""

    def __init__(self, keeps: bool = True, is_last: bool = True) -> None:
        self._keeps, self._is_last = keeps, is_last
        self._calls = collections.defaultdict[StreamedExperts, list[_Call]](list)
        """Forward's calls, in order."""
        self._to_come: dict[StreamedExperts, Iterator[_Call]] = {}
        """While the layer is recomputed, those of forward's calls that haven't been repeated yet."""

    @contextlib.contextmanager
    def at_work(self, layer: StreamedLayer, replays: bool) -> Iterator[None]:
        """While the body runs the layer, its experts' calls belong to this run. ``replays``: it is the recompute."""
        self._to_come = {experts: iter(self._calls[experts]) for experts in layer.experts if replays}
        _at_work.update(dict.fromkeys(layer.experts, self))
        try:
            yield
        finally:
            for experts in layer.experts:
                _at_work.pop(experts, None)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors_in([call.kept for calls in self._calls.values() for call in calls]))

    def call(self, streams: ExpertStreams, experts: StreamedExperts) -> _Call:
        """Returns the call of these experts that begins, in a recompute the one of forward. A StateError if that had none."""
        calls = self._calls[experts]
        if experts not in self._to_come:
            calls.append(_Call(streams, experts, self._keeps, self._is_last and not calls))
            return calls[-1]
        if (call := next(self._to_come[experts], None)) is None:
            raise StateError(
                f"experts {experts.name} are called {len(calls) + 1} times or more when their layer is computed again, and "
                f"were called {len(calls)} times in its forward; make the layer call its experts equally often in "
                "forward and in recompute, or set megatrain_config.expert_parts to 1"
            )
        return call


_at_work: dict[StreamedExperts, ExpertResults] = {}
"""The results of layers that are running with a graph, by their experts."""


class _Call:
    """One call of the experts, computed in forward and maybe again in backward. Raises what :func:`shown_instead` does.
    ``is_last``: its backward comes last among the calls of these experts in one call of their layer."""

    autocast: Restored
    """Restores forward's autocast settings in backward."""

    def __init__(self, streams: ExpertStreams, experts: StreamedExperts, keeps: bool = False, is_last: bool = True) -> None:
        self.experts, self._streams, self._keeps, self._is_last = experts, streams, keeps, is_last
        self._shown = shown_instead(experts)
        self._streams_parts = self._shown is None and not streams.runs_without_data()
        """Whether the call is one of a step or an evaluation, not of a fake run or a measurement."""
        self.kept: tuple[torch.Tensor, Routing] | None = None
        """The output, and the order of the pairs, since sorting them again would wait for the device."""
        self._version: int | None = None
        """The unit's version in forward; None before."""
        self._places: list[tuple[Tape, int]] = []
        """The tape and the position of each part's call in forward, in order."""

    def forward(self, inputs: _Inputs, routing: Routing, needs: Sequence[bool] | None) -> torch.Tensor:
        """Returns the output (T, D), computed or kept. ``needs``: which inputs get a gradient; None without a graph."""
        if self.kept is not None:
            (output_TD, _), self.kept = self.kept, None
            return output_TD
        if self._version is not None:
            return self._compute(inputs, routing, needs)
        if self._streams_parts:
            self._places = [self._streams.order.record(part.index) for part in self.experts.parts]
        output_TD = self._compute(inputs, routing, needs)
        self._version = self.experts.unit.version  # only here: the first fetch takes over what somebody wrote
        if self._keeps:
            self.kept = output_TD.clone(), routing  # whoever gets the original may write to it
        return output_TD

    def _weights(
        self, part: ExpertPart, in_backward: bool, backward_follows: bool
    ) -> contextlib.AbstractContextManager[list[torch.Tensor]]:
        """Yields a part's weights for the kernels of the body, and prefetches those of the next parts."""
        if self._shown is not None:
            return contextlib.nullcontext([part.experts.of(shown) for shown in self._shown])
        # In a fake run or a measurement all parts run with the weights of the first, the largest: no copy is waited for.
        source = part if self._streams_parts else self.experts.parts[0]
        upcoming = self._streams.upcoming(self._places[part.place], in_backward, backward_follows) if self._places else ()
        return self._streams.fetched(source, upcoming, part)

    def _compute(self, inputs: _Inputs, routing: Routing, needs: Sequence[bool] | None) -> torch.Tensor:
        made_SD: torch.Tensor | None = None
        for part in tiles(self.experts.parts):
            rows = routing.rows(part)
            if rows is None:
                continue
            made_nD = self._compute_part(part, rows, inputs, needs)
            if made_SD is None:
                made_SD = routing.pair_buffer(made_nD, made_nD.shape[1])
            made_SD[rows.pairs_n] = made_nD
        if made_SD is None:
            return torch.zeros_like(inputs[0])
        return routing.sum_of_choices(made_SD).to(inputs[0].dtype)

    def _compute_part(self, part: ExpertPart, rows: Rows, inputs: _Inputs, needs: Sequence[bool] | None) -> torch.Tensor:
        rows_nD, weights_n1 = rows.of(*inputs)
        with self._weights(part, False, needs is not None) as weights, contextlib.ExitStack() as stack:
            if needs is not None:
                # Makes the graph that backward will make, and drops it: under no_grad torch may run other kernels.
                weights = self._leaves(weights)[0]
                rows_nD.requires_grad_(needs[0])
                weights_n1.requires_grad_(needs[1])
                for context in (without_saving(), without_autocast_cache(), torch.enable_grad()):
                    stack.enter_context(context)
            with named_range(f"megatrain::forward ({part.name})"):
                return run_part(part, weights, rows_nD, rows.index_n1, weights_n1).detach()

    def _leaves(self, weights: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns all of a part's weights, and those that are trained, as leaves."""
        cut = [weight.detach() for weight in weights]
        pairs = zip(cut, self.experts.unit.states, strict=True)
        return cut, [w.requires_grad_() for w, s in pairs if s.entry.spec.trainable and s.parameter.requires_grad]

    def backward(
        self, inputs: _Inputs, routing: Routing, gradient_TD: torch.Tensor, needs: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the gradients of both inputs, and offloads those of the parts. A StateError if weights were changed."""
        gradients = None
        if self._streams_parts:
            self.experts.refresh_if_written()
            self.experts.require_version(self._version)
            offloader = self._streams.offloader
            gradients = offloader.begin(self.experts, parts=len(self.experts.parts), is_last=self._is_last)
        if gradients is None and not any(needs):
            return None, None  # all were frozen since the model was prepared
        kinds = zip(inputs, (inputs[0].shape[1], 1), needs, strict=True)
        of_pairs = [routing.pair_buffer(like, width) for like, width, need in kinds if need]
        for part in tiles(self.experts.parts[::-1]):
            rows = routing.rows(part)
            if rows is None:
                if gradients is not None:
                    gradients.take(part, None)
                continue
            of_inputs, of_weights = self._differentiate_part(part, rows, inputs, gradient_TD, needs)
            for place, buffer in enumerate(of_pairs):
                buffer[rows.pairs_n] = of_inputs[place]
            if gradients is not None:
                gradients.take(part, of_weights)
            del of_inputs, of_weights  # before the next part makes its own
        of_hidden_TD = routing.sum_of_choices(of_pairs[0]) if needs[0] else None
        return of_hidden_TD, of_pairs[-1].view(inputs[1].shape) if needs[1] else None

    def _differentiate_part(
        self, part: ExpertPart, rows: Rows, inputs: _Inputs, gradient_TD: torch.Tensor, needs: Sequence[bool]
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
        """Returns the gradients of the part's inputs that need one, and of its trained parameters."""
        rows_nD, weights_n1 = (rows_n.requires_grad_(need) for rows_n, need in zip(rows.of(*inputs), needs, strict=True))
        with self._weights(part, True, False) as weights:
            cut, leaves = self._leaves(weights)
            wanted = [tensor for tensor in (rows_nD, weights_n1) if tensor.requires_grad]
            with self.autocast(), torch.enable_grad(), named_range(f"megatrain::recompute ({part.name})"):
                made_nD = run_part(part, cut, rows_nD, rows.index_n1, weights_n1)
            with named_range(f"megatrain::backward ({part.name})"):
                of_rows_nD = gradient_TD[rows.tokens_n].to(made_nD.dtype)
                found = torch.autograd.grad(made_nD, [*wanted, *leaves], of_rows_nD, allow_unused=True)
        of_wanted = zip(wanted, found, strict=False)
        return [torch.zeros_like(t) if of is None else of for t, of in of_wanted], found[len(wanted) :]


class _ExpertsFunction(torch.autograd.Function):
    """Autograd's node of one call: saves its inputs, and computes part by part."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, routing: Routing, anchor: torch.Tensor, hidden_TD: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        # The pairs' order is saved by autograd, so that a checkpoint around the layer drops it.
        ctx.save_for_backward(hidden_TD, weights_TK, routing.order_S, routing.experts_S)
        ctx.call, ctx.bounds = call, routing.bounds
        call.autocast = autocast_restored(hidden_TD.device.type)
        return call.forward((hidden_TD, weights_TK), routing, ctx.needs_input_grad[3:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: torch.Tensor) -> Any:
        hidden_TD, weights_TK, order_S, experts_S = ctx.saved_tensors
        routing = Routing(weights_TK.shape[1], order_S, experts_S, ctx.bounds)
        needs = ctx.needs_input_grad[3:]
        return (None, None, None, *ctx.call.backward((hidden_TD, weights_TK), routing, gradient_TD, needs))


def run_experts(streams: ExpertStreams, experts: StreamedExperts, _: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of an experts' proxy, which is their module: ``experts(hidden_states, top_k_index, top_k_weights)``. An
    UnsupportedError for other arguments."""
    bound = inspect.signature(experts.forward).bind(*args, **kwargs)
    given = [*bound.args, *bound.kwargs.values()]
    shapes: list[Any] = [tuple(arg.shape) if isinstance(arg, torch.Tensor) else type(arg).__name__ for arg in given]
    are_tables = len(shapes) == 3 and all(isinstance(shape, tuple) and len(shape) == 2 for shape in shapes)
    if not are_tables or shapes[1] != shapes[2] or shapes[0][0] != shapes[1][0]:
        raise UnsupportedError(
            f"experts {experts.name} are called with {', '.join(map(str, shapes))}, where hidden states (tokens, width), "
            "indices and weights (tokens, choices) are expected, and can't stream in parts; set "
            "megatrain_config.expert_parts to 1"
        )
    hidden_TD, index_TK, weights_TK = given
    results = _at_work.get(experts)
    call = _Call(streams, experts) if results is None else results.call(streams, experts)
    with torch.no_grad():
        routing = Routing.of(experts, index_TK) if call.kept is None else call.kept[1]
    if not torch.is_grad_enabled():
        return call.forward((hidden_TD, weights_TK), routing, None)
    anchor = streams.anchor if experts.has_trainable else streams.anchor.detach()
    return _ExpertsFunction.apply(call, routing, anchor, hidden_TD, weights_TK)


def run_part(
    part: ExpertPart, weights: Sequence[torch.Tensor], rows_nD: torch.Tensor, index_n1: torch.Tensor, weights_n1: torch.Tensor
) -> torch.Tensor:
    """Runs the module's own forward as if it had the part's experts alone, times the weights: (n, D), in the wider dtype."""
    experts = part.owner
    own = [(experts.module._parameters, at.name, weight) for at, weight in zip(experts.unit.states, weights, strict=True)]
    with replaced(experts.module, "num_experts", part.experts.experts), put_in(own):
        # Weighted by one here, and by the weights below: the module would round products with fp32 weights before the sum.
        made_nD: torch.Tensor = experts.forward(rows_nD, index_n1, torch.ones_like(weights_n1, dtype=rows_nD.dtype))
    return made_nD * weights_n1
