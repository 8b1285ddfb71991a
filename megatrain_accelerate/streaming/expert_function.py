"""A call of a layer's experts, part by part: the stock forward of their module on the tokens of each part's experts.

T tokens, K choices of each, S = T K pairs, D hidden. A part's rows are its pairs, as tokens with one choice each, so that
whatever implementation the model uses runs on the part as on a module of fewer experts. Each row's result goes to its pair's
place, and a token's K rows are added up at the end: no sum depends on how many parts there are, and nothing is added by
atomics.

In backward each part is fetched again and computed again, like a layer. A recomputed layer doesn't run its experts twice in
between: what they gave in forward, as large as the hidden states, waits with the layer's inputs, and so does the order of the
pairs (:class:`ExpertResults`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.streaming.ambient_state import Again, autocast_again
from megatrain_accelerate.streaming.compiled_layer import without_autocast_cache, without_saving
from megatrain_accelerate.streaming.expert_parts import ExpertPart, StreamedExperts
from megatrain_accelerate.streaming.expert_routing import Routing, Rows, require_flat
from megatrain_accelerate.streaming.expert_streams import ExpertStreams, Places, shown_instead
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.meter import named_range
from megatrain_accelerate.streaming.token_tiles import tiles

_Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Hidden states (T, D) and the weights of the choices (T, K)."""


@dataclasses.dataclass
class _Result:
    """What a call of experts gave, and what its backward has to know of it."""

    output_TD: torch.Tensor | None
    routing: Routing | None
    """Of the output: None where that isn't kept."""
    places: Places
    version: int


class ExpertResults:
    """The results of the experts in one run of a layer.

    Owner: the graph, by way of the layer's checkpoint, from forward to the first backward. Reader: the recompute.

    Args:
        keeps: whether the layer will be recomputed.
        is_last: whether the backward of this run comes last among those of the layer's call.
    """

    def __init__(self, keeps: bool = True, is_last: bool = True) -> None:
        self.keeps = keeps
        self.is_last = is_last
        self.replays = False
        self._results: dict[tuple[int, int], _Result] = {}
        self._calls: dict[int, int] = {}

    @contextlib.contextmanager
    def at_work(self, layer: StreamedLayer, replays: bool) -> Iterator[None]:
        """The layer runs in the body: for the first time, or, with ``replays``, again."""
        self.replays, self._calls = replays, {}
        for experts in layer.experts:
            experts.results = self
        try:
            yield
        finally:
            for experts in layer.experts:
                experts.results = None

    @property
    def size_bytes(self) -> int:
        """Bytes of what waits."""
        results = self._results.values()
        of_outputs = sum(result.output_TD.nbytes for result in results if result.output_TD is not None)
        return of_outputs + sum(result.routing.size_bytes for result in results if result.routing is not None)

    def number(self, experts: StreamedExperts) -> int:
        """A call of these experts begins: how many there were before it in this run."""
        self._calls[id(experts)] = self._calls.get(id(experts), -1) + 1
        return self._calls[id(experts)]

    def note(
        self, experts: StreamedExperts, number: int, output_TD: torch.Tensor, routing: Routing, places: Places, version: int
    ) -> None:
        """A call in forward gave this; whoever gets the original may write to it."""
        kept = output_TD.clone() if self.keeps else None
        self._results[id(experts), number] = _Result(kept, routing if self.keeps else None, places, version)

    def of(self, experts: StreamedExperts, number: int) -> _Result:
        """The result of the call in forward; its output is given away to the first that asks.

        Raises:
            StateError: forward had no such call.
        """
        found = self._results.get((id(experts), number))
        if found is None:
            in_forward = sum(1 for key, _ in self._results if key == id(experts))
            raise StateError(
                f"experts {experts.name} are called {number + 1} times or more when their layer is computed again, and were "
                f"called {in_forward} times in its forward; make the layer call them alike in both, or set "
                "megatrain_config.expert_parts to 1"
            )
        output_TD, routing = found.output_TD, found.routing
        found.output_TD = found.routing = None
        return _Result(output_TD, routing, found.places, found.version)


class _Call:
    """One call of the experts.

    Args:
        streams: the engine's.
        experts: whose call it is.
        index_TK: the expert of each pair; where the result waits, its order does.
        results: of the layer's run, if it has a graph.

    Raises:
        StateError: see :meth:`ExpertResults.of`, :func:`shown_instead`.
    """

    def __init__(
        self, streams: ExpertStreams, experts: StreamedExperts, index_TK: torch.Tensor, results: ExpertResults | None
    ) -> None:
        self.experts = experts
        self._shown = shown_instead(experts)
        self._streams_parts = self._shown is None and not streams.runs_dry()
        """Whether the call is one of a step or an evaluation, and not a trial."""
        self._number = results.number(experts) if results is not None else 0
        self._found = results.of(experts, self._number) if results is not None and results.replays else None
        routing = None if self._found is None else self._found.routing
        # Sorted once: it waits for the device.
        self.routing = routing or Routing.of(experts, index_TK, lambda: streams.begins(experts, index_TK.device))
        self.version: int | None = None
        self.is_last = self._number == 0 and (results is None or results.is_last)
        self.places: Places | None = None
        self._results = results
        self._streams = streams
        self.autocast: Again
        """That of forward, for backward."""

    def forward(self, inputs: _Inputs, needs: Sequence[bool] | None) -> torch.Tensor:
        """The experts' output (T, D), computed or remembered; ``needs``: which inputs get a gradient, None without a graph."""
        found, self._found = self._found, None
        if found is not None:
            self.places, self.version = found.places, found.version
            if found.output_TD is not None:
                return found.output_TD
        elif self._streams_parts:
            self.places = self._streams.record(self.experts)
        output_TD = self._compute(inputs, needs)
        if found is None:
            # Not before: the first fetch takes over what somebody wrote.
            self.version = self.experts.unit.version
            if self._results is not None:
                self._results.note(self.experts, self._number, output_TD, self.routing, self.places or [], self.version)
        return output_TD

    def _weights(
        self, place: int, part: ExpertPart, in_backward: bool, backward_follows: bool
    ) -> contextlib.AbstractContextManager[list[torch.Tensor]]:
        """A part's weights, in entry order, while the body issues its kernels; those of the next parts are on their way."""
        if self._shown is not None:
            return contextlib.nullcontext([part.experts.of(shown) for shown in self._shown])
        if not self._streams_parts:
            # On trial all compute with those of the first, which is as large as any: no copy is waited for.
            return self._streams.fetched(self.experts.parts[0], (), part)
        upcoming = self._streams.upcoming(self.places[place], in_backward, backward_follows) if self.places else ()
        return self._streams.fetched(part, upcoming, part)

    def _compute(self, inputs: _Inputs, needs: Sequence[bool] | None) -> torch.Tensor:
        made_SD: torch.Tensor | None = None
        for place, part in tiles(list(enumerate(self.experts.parts))):
            rows = self.routing.rows(place, part)
            if rows is None:
                continue
            made_nD = self._compute_part(place, part, rows, inputs, needs)
            if made_SD is None:
                made_SD = self.routing.pair_buffer(made_nD, made_nD.shape[1])
            made_SD[rows.pairs_n] = made_nD
        if made_SD is None:
            return torch.zeros_like(inputs[0])
        return self.routing.sum_of_choices(made_SD).to(inputs[0].dtype)

    def _compute_part(
        self, place: int, part: ExpertPart, rows: Rows, inputs: _Inputs, needs: Sequence[bool] | None
    ) -> torch.Tensor:
        rows_nD, weights_n1 = rows.of(*inputs)
        with self._weights(place, part, False, needs is not None) as weights, contextlib.ExitStack() as stack:
            if needs is not None:
                # The graph that backward will make, dropped at once: under no_grad torch may run other kernels.
                weights = self._leaves(weights)[0]
                rows_nD.requires_grad_(needs[0])
                weights_n1.requires_grad_(needs[1])
                for context in (without_saving(), without_autocast_cache(), torch.enable_grad()):
                    stack.enter_context(context)
            with named_range(f"megatrain::forward ({part.name})"):
                return _run_part(part, weights, rows_nD, rows.index_n1, weights_n1).detach()

    def _leaves(self, weights: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All of a part's weights, and those that are trained, as leaves."""
        cut = [weight.detach() for weight in weights]
        pairs = zip(cut, self.experts.unit.states, strict=True)
        return cut, [w.requires_grad_() for w, s in pairs if s.entry.spec.trainable and s.parameter.requires_grad]

    def backward(
        self, inputs: _Inputs, routing: Routing, gradient_TD: torch.Tensor, needs: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of hidden states and weights; those of the parts leave.

        Raises:
            StateError: the weights aren't those of the forward.
        """
        gradients = None
        if self._streams_parts:
            self.experts.require_version(self.version)
            gradients = self._streams.gradients(self.experts, self.is_last)
        if gradients is None and not any(needs):
            return None, None  # all were frozen since the model was prepared
        hidden_SD = routing.pair_buffer(inputs[0], inputs[0].shape[1]) if needs[0] else None
        weights_S = routing.pair_buffer(inputs[1]) if needs[1] else None
        for place, part in tiles(list(enumerate(self.experts.parts))[::-1]):
            rows = routing.rows(place, part)
            if rows is None:
                if gradients is not None:
                    gradients.take(part, None)
                continue
            of_inputs, of_weights = self._differentiate_part(place, part, rows, inputs, gradient_TD, needs)
            if hidden_SD is not None:
                hidden_SD[rows.pairs_n] = of_inputs[0]
            if weights_S is not None:
                weights_S[rows.pairs_n] = of_inputs[-1].squeeze(1)
            if gradients is not None:
                gradients.take(part, of_weights)
            del of_inputs, of_weights  # before the next part makes its own
        return (
            None if hidden_SD is None else routing.sum_of_choices(hidden_SD),
            None if weights_S is None else weights_S.view(inputs[1].shape),
        )

    def _differentiate_part(
        self, place: int, part: ExpertPart, rows: Rows, inputs: _Inputs, gradient_TD: torch.Tensor, needs: Sequence[bool]
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
        """Computes a part again; returns the gradients of its inputs that need one, and of its trained parameters."""
        rows_nD, weights_n1 = (rows_n.requires_grad_(need) for rows_n, need in zip(rows.of(*inputs), needs, strict=True))
        with self._weights(place, part, True, False) as weights:
            cut, leaves = self._leaves(weights)
            wanted = [tensor for tensor in (rows_nD, weights_n1) if tensor.requires_grad]
            with self.autocast(), torch.enable_grad(), named_range(f"megatrain::recompute ({part.name})"):
                made_nD = _run_part(part, cut, rows_nD, rows.index_n1, weights_n1)
            with named_range(f"megatrain::backward ({part.name})"):
                of_rows_nD = gradient_TD[rows.tokens_n].to(made_nD.dtype)
                found = torch.autograd.grad(made_nD, [*wanted, *leaves], of_rows_nD, allow_unused=True)
        of_wanted = zip(wanted, found, strict=False)
        return [torch.zeros_like(t) if of is None else of for t, of in of_wanted], found[len(wanted) :]


class _ExpertsFunction(torch.autograd.Function):
    """The node of one call: keeps its inputs, and computes part by part."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, anchor: torch.Tensor, hidden_TD: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        call.autocast = autocast_again(hidden_TD.device.type)
        output_TD = call.forward((hidden_TD, weights_TK), ctx.needs_input_grad[2:])
        routing = call.routing
        del call.routing  # autograd holds it from now on: what isn't kept of a layer is to go
        ctx.save_for_backward(hidden_TD, weights_TK, routing.order_S, routing.experts_S)
        ctx.call, ctx.bounds = call, routing.bounds
        return output_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: torch.Tensor) -> Any:
        hidden_TD, weights_TK, order_S, experts_S = ctx.saved_tensors
        tokens, choices = weights_TK.shape
        routing = Routing(tokens, choices, order_S, experts_S, ctx.bounds)
        return (None, None, *ctx.call.backward((hidden_TD, weights_TK), routing, gradient_TD, ctx.needs_input_grad[2:]))


def run_experts(streams: ExpertStreams, experts: StreamedExperts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the proxy of an experts' module does: ``experts(hidden_states, top_k_index, top_k_weights)``.

    Raises:
        UnsupportedError: the call can't be cut into parts.
    """
    bound = inspect.signature(experts.forward).bind(*args, **kwargs)
    hidden_TD, index_TK, weights_TK = require_flat(experts, [*bound.args, *bound.kwargs.values()])
    with torch.no_grad():
        call = _Call(streams, experts, index_TK, experts.results)
    if not torch.is_grad_enabled():
        return call.forward((hidden_TD, weights_TK), None)
    anchor = streams.anchor if experts.has_trainable else streams.anchor.detach()
    return _ExpertsFunction.apply(call, anchor, hidden_TD, weights_TK)


def _run_part(
    part: ExpertPart, weights: Sequence[torch.Tensor], rows_nD: torch.Tensor, index_n1: torch.Tensor, weights_n1: torch.Tensor
) -> torch.Tensor:
    """The module's own forward, as if it had the part's experts alone, times the weights: (n, D), in the wider dtype."""
    experts = part.owner
    module, names = experts.module, [state.name for state in experts.unit.states]
    before = experts.shown
    try:
        module.__dict__["num_experts"] = part.experts.experts
        for name, weight in zip(names, weights, strict=True):
            module._parameters[name] = weight  # type: ignore[assignment]
        # Weights of one, and the product here: with those of fp32 the implementation would round each choice before their sum.
        made_nD: torch.Tensor = experts.forward(rows_nD, index_n1, torch.ones_like(weights_n1, dtype=rows_nD.dtype))
        return made_nD * weights_n1
    finally:
        module.__dict__["num_experts"] = experts.count
        for name, parameter in zip(names, before, strict=True):
            module._parameters[name] = parameter  # type: ignore[assignment]
