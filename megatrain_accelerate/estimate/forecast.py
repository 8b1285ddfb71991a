"""The forecast of a training step: the plan's own search on outlines that are run, or extrapolated, without data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import MegatrainError, UnsupportedError
from megatrain_accelerate.estimate.layer_graph import (
    OUTSIDE,
    LayerGraph,
    WithoutAttentionDropout,
    compiled_profile,
    extended,
    trace_layer,
    uncompiled_profile,
)
from megatrain_accelerate.estimate.meta_engine import ForecastPlan, MetaEngine, PositionTable, shortest_table
from megatrain_accelerate.integrations.accelerate_backend import require_steps_in_backward_possible
from megatrain_accelerate.layers.compiled_layer import SMALLEST_LAYER_PARAMETERS
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.micro_batches import BatchSplit
from megatrain_accelerate.layers.output_recorder import Captures
from megatrain_accelerate.layers.token_tiles import AUTO_TILE_TOKENS
from megatrain_accelerate.loss.products import standing_for_a_gpu
from megatrain_accelerate.plan.fake_runs import replaced
from megatrain_accelerate.plan.layer_discovery import active_parameters
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.other_batches import outside_seconds_of
from megatrain_accelerate.plan.placement import require_layers, sent_bytes
from megatrain_accelerate.plan.placement_search import Candidate
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_outline import call_kind, outline_layers, outline_step, what_sees_a_batch
from megatrain_accelerate.plan.step_profile import Event, LayerProfile, StepOutline
from megatrain_accelerate.plan.step_ways import WayChoice, may_cut, way_put_back
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
OUTLINED_TOKENS = 4096
"""What runs outside the layers is outlined on about so many tokens and on twice as many; beyond it grows in proportion, since
the loss goes by tiles."""

_FEW_TOKENS = 8
"""Of a sequence on which the model is run to see what it looks into."""

_TRACED_SEQUENCES, _TRACED_TILES = 2, 8
"""Layers are traced on so many sequences, or as many as fill so many tiles, and on twice as many; on more they take more in
proportion. Of one sequence, tensors may be laid out otherwise; of a few tiles, one tile is most of what is alive."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A predicted training step: a row of an estimate. Bytes are peaks, rates are of one GPU."""

    batch: int
    length: int
    micro_batches: int
    candidate: Candidate
    gpu_bytes: int
    host_bytes: int
    kept_bytes: int
    """Activations that stay on the GPU, and those that go to the host."""
    offloaded_bytes: int
    layers: int
    active_parameters: int
    fits: bool
    """In both memories."""
    joined: bool
    """Whether the micro-batches run as one batch (``join_micro_batches``)."""
    samples: int | None
    """Sequences that a layer computes at once; None for all, or as ``micro_batch_size`` says."""

    @property
    def seconds(self) -> float:
        return self.candidate.time.seconds

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.micro_batches

    @property
    def tokens_per_second(self) -> float:
        """Of the whole step, the optimizer's included."""
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """6 x active parameters x tokens: what is recomputed doesn't count, nor does attention."""
        return 6e-12 * self.active_parameters * self.tokens_per_second


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a layer: what it costs, without times."""

    dry: LayerProfile
    """Of the whole call, run as it is written."""
    graph: LayerGraph | None
    """Of the call, or of the first piece of it."""
    compiles: bool
    split: BatchSplit


_FirstCalls = dict[Hashable, tuple[bool, StreamedLayer, Any, Any]]
"""By kind, the first call of it: whether it runs compiled, the layer and its arguments, on the meta device."""

_Calls = tuple[Sequence[Hashable], dict[Hashable, _Call]]
"""The kinds of the layers' calls in order, and what calls of a kind cost."""


class Forecaster:
    """Predicts steps of one model, on the meta device, under one machine's speeds and memories.

    Args:
        gpu_bytes: that a step may take.
        host_bytes: that the process may take; None for as much as the model's states need.

    Raises:
        UnsupportedError: the model can't stream; the message says why.
        ConfigError: the settings name more layers than the model has.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MegatrainConfig,
        machine: Machine,
        gpu_bytes: int,
        host_bytes: int | None,
        *,
        micro_batches: int = 1,
    ) -> None:
        self.model, self.config, self.machine = model.train(), config, machine
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.active_parameters = active_parameters(model, getattr(model, "config", None))
        self.engine = MetaEngine(model, config, gpu_bytes)
        require_layers(len(self.engine.runtime.layers), config.placement)
        for_states = None if host_bytes is None else host_bytes - CONSTANT_OVERHEAD_BYTES
        self.plan = ForecastPlan(self.engine, config, machine, gpu_bytes, for_states, micro_batches)
        self.engine.device_plan = self.plan
        self.micro_batches = micro_batches
        self.host_store_bytes = self.plan.store_bytes + CONSTANT_OVERHEAD_BYTES
        """Host memory that the training asks for when it starts."""
        self.host_bytes = self.host_store_bytes if host_bytes is None else host_bytes
        self._attention = WithoutAttentionDropout()
        self._graphs: dict[Hashable, LayerGraph | None] = {}
        """By the kind of what runs at once: pieces of batches have the same."""
        self._found: dict[Hashable, Any] = {}

    def settings_that_fit(self) -> tuple[dict[str, Any], int] | None:
        """The settings that change numbers the least of those with which the states fit the host memory, and what they take;
        None if there are none."""
        now, dtypes = self.config, ("fp32", "bf16", "int8")
        for moments in dtypes[dtypes.index(now.moments_dtype) :]:
            for gradients in dict.fromkeys((now.host_gradients, "passing")):
                changes: dict[str, Any] = {"host_gradients": gradients} if gradients != now.host_gradients else {}
                changes |= {"moments_dtype": moments} if moments != now.moments_dtype else {}
                try:
                    changed = dataclasses.replace(now, **changes)
                    require_steps_in_backward_possible(changed, self.micro_batches)
                    needed = self.engine.store_bytes(self.plan.adds_on_host, **changes) + CONSTANT_OVERHEAD_BYTES
                except MegatrainError:  # the settings exclude each other
                    continue
                if needed <= self.host_bytes:
                    return changes, needed
        return None

    @functools.cached_property
    def _may_join(self) -> bool:
        """Whether nothing is seen against joining micro-batches (integrations/joined_batches.py)."""
        if self.micro_batches < 2 or not self.config.join_micro_batches or self.engine.runtime.experts:
            return False
        if not _accepts_loss_kwargs(self.model) or what_sees_a_batch(self.model) is not None:
            return False
        with standing_for_a_gpu(), self._attention:
            return self._run(1, _FEW_TOKENS, num_items_in_batch=torch.tensor(_FEW_TOKENS))[0].sums_loss

    def positions(self) -> PositionTable | None:
        """The shortest table of positions, which bounds a sequence; None if the model has none."""
        with standing_for_a_gpu(), self._attention:
            return shortest_table(self.model, lambda: self._run(1, _FEW_TOKENS))

    def least_gpu_bytes(self, batch: int, length: int) -> int:
        """GPU memory of a step on ``batch`` sequences of ``length`` tokens that takes the least."""
        needed = self._least_bytes(batch, length)
        if self._may_join:
            with contextlib.suppress(UnsupportedError), self.plan.joining(batch):
                joined = self._least_bytes(batch * self.micro_batches, length)
                return joined if self.config.join_micro_batches is True else min(needed, joined)
        return needed

    def _least_bytes(self, batch: int, length: int) -> int:
        """By the leanest of the ways that the plan would try."""
        runtime, setting = self.engine.runtime, self.config.token_tile
        tiles = [0, AUTO_TILE_TOKENS] if batch * length > AUTO_TILE_TOKENS else [0]
        pieces = [None, 1] if batch > 1 and may_cut(runtime, self.config) else [None]
        least = []
        with way_put_back(runtime):
            for way in itertools.product(pieces, tiles if setting == "auto" else [int(setting)]):
                runtime.batch_cut.chosen, runtime.token_tile = way
                least.append(self.plan.least_bytes(self._outline(batch, length)))
        return min(least)

    def forecast(self, batch: int, length: int) -> Forecast:
        """The fastest step on ``batch`` sequences of ``length`` tokens; the leanest where nothing fits. Several micro-batches
        run as one batch where the Trainer's would (``integrations/joined_batches.py``).

        Raises:
            Exception: whatever the model raises when it looks at data, or at a length that it doesn't take.
        """
        outline, apart = self.fastest(batch, length)
        # A batch that can't be cut stays in its micro-batches.
        if self._may_join:
            with contextlib.suppress(UnsupportedError), self.plan.joining(batch):
                whole, together = self.fastest(batch * self.micro_batches, length)
                pays = together is not None and together.is_worth_it(apart)
                if pays or self.config.join_micro_batches is True:
                    return self._forecast_of(batch, length, whole, together, joined=True)
        return self._forecast_of(batch, length, outline, apart)

    def _forecast_of(
        self, batch: int, length: int, outline: StepOutline, found: Candidate | None, joined: bool = False
    ) -> Forecast:
        chosen = found or self.plan.leanest(outline)
        kept = [event.kind for event in outline.forward_calls if event.layer in chosen.placement.kept]
        sent = sum(sent_bytes(outline, chosen.placement))
        # All units are adopted on the host; then some move, and activations take their place.
        moved = self.plan.model_sizes().moved_bytes(chosen.placement)
        return Forecast(
            batch=batch,
            length=length,
            micro_batches=self.micro_batches,
            candidate=chosen,
            gpu_bytes=self.plan.fixed_bytes(outline) + chosen.peak_bytes,
            host_bytes=self.host_store_bytes + max(0, sent - moved),
            kept_bytes=sum(outline.profiles[kind].kept_bytes for kind in kept),
            offloaded_bytes=sent,
            layers=len(self.engine.runtime.layers),
            active_parameters=self.active_parameters,
            fits=found is not None and self.host_store_bytes <= self.host_bytes,
            joined=joined,
            samples=outline.samples,
        )

    def fastest(self, batch: int, length: int) -> tuple[StepOutline, Candidate | None]:
        """The outline of a step, by the way that suits it, with reckoned times, and the best placement; None if none fits."""
        outline = functools.partial(self._outline, batch, length)
        return WayChoice(self.engine.runtime, self.config, batch, outline, self.plan.search).best_with_placement()

    def _outline(self, batch: int, length: int) -> StepOutline:
        """By the way that the runtime has now."""
        with standing_for_a_gpu(), self._attention:
            return self._once("outline", batch, length, make=lambda: self._reckoned(batch, length))

    def _once(self, *what: Hashable, make: Callable[[], Any]) -> Any:
        """What was made before of the same, if layers ran in the same tiles and pieces."""
        cut = self.engine.runtime.batch_cut
        key = (*what, self.engine.runtime.token_tile, cut.asked, cut.chosen)
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def _reckoned(self, batch: int, length: int) -> StepOutline:
        kinds, calls = self._layers(batch, length)
        profiles = {kind: self._profile(call) for kind, call in calls.items()}
        if self._attention.has_dropped:  # then a run doesn't keep its results (layers/attention_results.py)
            none_kept: dict[str, Any] = {"attention": OpCosts(), "attention_bytes": 0, "attention_seconds": 0.0}
            profiles = {kind: dataclasses.replace(profile, **none_kept) for kind, profile in profiles.items()}
        outline = self._outside_of(batch, length)
        return dataclasses.replace(
            outline,
            profiles=profiles,
            samples=self.engine.runtime.batch_cut.chosen,
            events=_with_kinds(outline.events, kinds),
            outside_seconds=outside_seconds_of(outline, self.machine) / OUTSIDE,
        )

    def _layers(self, batch: int, length: int) -> _Calls:
        """The layers' calls: traced if they are few, else extrapolated from two smaller batches."""
        pieces = self.engine.runtime.batch_cut.size
        fewest = max(_TRACED_SEQUENCES, -(-_TRACED_TILES * self.engine.runtime.token_tile // length))
        if batch <= 2 * fewest or (pieces is not None and batch > pieces):
            return self._traced_layers(batch, length)
        (few_kinds, few), (many_kinds, many) = (self._traced_layers(count, length) for count in (fewest, 2 * fewest))
        pairs = dict(zip(many_kinds, few_kinds, strict=True))
        return many_kinds, {kind: extended(few[other], many[kind], batch / fewest) for kind, other in pairs.items()}

    def _traced_layers(self, batch: int, length: int) -> _Calls:
        def trace() -> _Calls:
            if batch * length <= 2 * self._outlined_tokens:  # then the whole step is run for what is outside
                outline, calls = self._run(batch, length)
                kinds, dry = [event.kind for event in outline.forward_calls], outline.profiles
            else:
                calls = {}
                # The decoder's inputs are made of the labels. Elsewhere the loss is left out, since its tiles take long.
                has_decoder = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
                ids = torch.zeros((batch, length), dtype=torch.long)
                inputs = {"input_ids": ids, "labels": ids} if has_decoder else {"input_ids": ids}
                note = functools.partial(self._note_call, calls)
                kinds, dry = outline_layers(self.model, self.engine.runtime, inputs, CPU, note)
            return kinds, {kind: self._call(dry[kind], *calls[kind]) for kind in dry}

        return self._once("layers", batch, length, make=trace)

    @property
    def _outlined_tokens(self) -> int:
        """What fits a tile runs whole, and says nothing of what runs by tiles."""
        return max(OUTLINED_TOKENS, 2 * self.engine.runtime.token_tile)

    def _outside_of(self, batch: int, length: int) -> StepOutline:
        """The outline without the layers' profiles: run if it is small, else extrapolated from two smaller ones."""
        tokens = self._outlined_tokens
        if batch * length <= 2 * tokens:
            return self._run(batch, length)[0]
        few, short = (-(-tokens // length), length) if length <= tokens else (1, tokens)
        twice = (2 * few, short) if length <= tokens else (1, 2 * tokens)
        return extended(self._run(few, short)[0], self._run(*twice)[0], batch * length / (few * short))

    def _run(self, batch: int, length: int, **more: torch.Tensor) -> tuple[StepOutline, _FirstCalls]:
        def run() -> tuple[StepOutline, _FirstCalls]:
            ids = torch.zeros((batch, length), dtype=torch.long)
            calls: _FirstCalls = {}
            note = functools.partial(self._note_call, calls)
            inputs = {"input_ids": ids, "labels": ids, **more}
            return outline_step(self.model, self.engine.runtime, inputs, CPU, note), calls

        return self._once("run", batch, length, *more, make=run)

    def _note_call(self, calls: _FirstCalls, kind: Hashable, layer: StreamedLayer, args: Any, kwargs: Any) -> None:
        # Asked while the model runs: transformers hangs hooks on routers whose logits the loss wants.
        calls[kind] = (self._is_compiled(layer), layer, *_on_meta((args, kwargs)))

    def _call(self, dry: LayerProfile, compiles: bool, layer: StreamedLayer, args: Any, kwargs: Any) -> _Call:
        split = BatchSplit.of_call(layer, args, kwargs, self.engine.runtime.batch_cut)
        return _Call(dry, self._graph(layer, *split.first_piece(args, kwargs)), compiles, split)

    def _profile(self, call: _Call) -> LayerProfile:
        dry, graph, split = call.dry, call.graph, call.split
        share = sum(split.sizes) / split.sizes[0] if split.sizes else 1.0
        by_tiles = self.engine.runtime.token_tile > 0
        if graph is None or by_tiles or not call.compiles:
            return uncompiled_profile(dry, graph, share, by_tiles, self.machine)
        return compiled_profile(dry, graph, self.machine).of_pieces(split, round(share * graph.output_bytes))

    def _is_compiled(self, layer: StreamedLayer) -> bool:
        """As the engine decides on a GPU (``CompiledLayers.wants``)."""
        wanted = self.config.compile_layers
        if layer.experts or Captures.inside(layer.module) is None:
            return False
        return layer.unit.layout.parameter_count >= SMALLEST_LAYER_PARAMETERS if wanted == "auto" else bool(wanted)

    def _graph(self, layer: StreamedLayer, args: Any, kwargs: Any) -> LayerGraph | None:
        if layer.experts:
            return None  # runs as it is, and parts of it run again in backward
        key = call_kind(layer, args, kwargs)
        if key not in self._graphs:
            try:
                with replaced(layer.tiles, "tile_tokens", 0):
                    self._graphs[key] = trace_layer(layer, args, kwargs)
            except Exception as error:  # a layer that looks at its data can't be traced without any
                name = type(layer.module).__name__
                logger.warning("megatrain: %s can't be traced, its costs are those of single operations (%s)", name, error)
                self._graphs[key] = None
        return self._graphs[key]


def _accepts_loss_kwargs(model: nn.Module) -> bool:
    """As the Trainer finds out whether the model takes ``num_items_in_batch`` (transformers/trainer.py)."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _on_meta(tree: Any) -> Any:
    """The structure with tensors of the meta device in the place of its own."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    with _disable_current_modes():  # which count what is made
        return tree_map_only(torch.Tensor, empty, tree)


def _with_kinds(events: Sequence[Event], kinds: Sequence[Hashable]) -> tuple[Event, ...]:
    """The events with the kinds of the calls in order; a backward has the kind of its layer's last call."""
    calls = iter(kinds)
    of_layer: dict[int, list[Hashable]] = {}
    made = []
    for event in events:
        waiting = of_layer.setdefault(event.layer, [])
        if not event.is_backward:
            waiting.append(next(calls))
        made.append(dataclasses.replace(event, kind=waiting.pop() if event.is_backward else waiting[-1]))
    return tuple(made)
