"""The forecast of a training step: the plan's own search on outlines that are run, or extrapolated, without data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import UnsupportedError
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
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.micro_batches import BatchSplit
from megatrain_accelerate.layers.token_tiles import AUTO_TILE_TOKENS
from megatrain_accelerate.loss.products import standing_for_a_gpu
from megatrain_accelerate.plan.fake_runs import replaced
from megatrain_accelerate.plan.layer_discovery import active_parameters
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.other_batches import outside_seconds_of
from megatrain_accelerate.plan.placement import require_layers, sent_bytes
from megatrain_accelerate.plan.placement_search import Candidate
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_outline import call_kind, outline_step, what_sees_a_batch
from megatrain_accelerate.plan.step_profile import LayerProfile, StepOutline
from megatrain_accelerate.plan.step_ways import WayChoice, may_cut, way_put_back
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES, leaner_settings

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
_FEW_TOKENS = 8
"""Of a sequence on which the model is run to see what it looks into."""

_TRACED_SEQUENCES, TRACED_TOKENS, _TRACED_TILES = 2, 4096, 8
"""A step is run on so many sequences, or as many as have so many tokens or fill so many tiles, and on twice as many; more take
more in proportion. Of one sequence, tensors may be laid out otherwise; the loss of few tokens isn't made by tiles; of a few
tiles, one tile is most of what is alive."""


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

_Step = tuple[StepOutline, dict[Hashable, _Call]]
"""A step's outline, and what calls of each kind cost."""


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
        self._steps: dict[Hashable, _Step] = {}

    def settings_that_fit(self) -> tuple[dict[str, Any], int] | None:
        """The settings that change numbers the least of those with which the states fit the host memory, and what they take;
        None if there are none."""
        for changes in leaner_settings(self.config, accumulates=self.micro_batches > 1):
            needed = self.engine.store_bytes(self.plan.adds_on_host, **changes) + CONSTANT_OVERHEAD_BYTES
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
        return WayChoice(self.engine.runtime, self.config, batch, outline, self.plan.search_for).best()

    def _outline(self, batch: int, length: int) -> StepOutline:
        """By the way that the runtime has now, with reckoned times."""
        with standing_for_a_gpu(), self._attention:
            outline, calls = self._step(batch, length)
        profiles = {kind: self._profile(call) for kind, call in calls.items()}
        if self._attention.has_dropped:  # then a run doesn't keep its results (layers/attention_results.py)
            none_kept: dict[str, Any] = {"attention": OpCosts(), "attention_bytes": 0, "attention_seconds": 0.0}
            profiles = {kind: dataclasses.replace(profile, **none_kept) for kind, profile in profiles.items()}
        outside_seconds = outside_seconds_of(outline, self.machine) / OUTSIDE
        return dataclasses.replace(outline, profiles=profiles, outside_seconds=outside_seconds)

    def _step(self, batch: int, length: int) -> _Step:
        """A step without times: run if its sequences are few, else extrapolated from two smaller batches."""
        tokens = max(TRACED_TOKENS, _TRACED_TILES * self.engine.runtime.token_tile)
        fewest = max(_TRACED_SEQUENCES, -(-tokens // length))
        pieces = self.engine.runtime.batch_cut.size
        if batch <= 2 * fewest or (pieces is not None and batch > pieces):
            return self._traced(batch, length)
        (few, of_few), (many, of_many) = self._traced(fewest, length), self._traced(2 * fewest, length)
        outline = extended(few, many, batch / fewest)
        # Kinds are numbers, and each batch has its own.
        events = [dataclasses.replace(at, kind=like.kind) for at, like in zip(outline.events, many.events, strict=True)]
        kinds = {like.kind: at.kind for at, like in zip(few.events, many.events, strict=True)}
        calls = {kind: extended(of_few[other], of_many[kind], batch / fewest) for kind, other in kinds.items()}
        return dataclasses.replace(outline, events=tuple(events)), calls

    def _traced(self, batch: int, length: int) -> _Step:
        """The step, run once for each way."""
        cut = self.engine.runtime.batch_cut
        key = (batch, length, self.engine.runtime.token_tile, cut.asked, cut.chosen)
        if key not in self._steps:
            outline, first_calls = self._run(batch, length)
            self._steps[key] = outline, {kind: self._call(outline.profiles[kind], *call) for kind, call in first_calls.items()}
        return self._steps[key]

    def _run(self, batch: int, length: int, **more: torch.Tensor) -> tuple[StepOutline, _FirstCalls]:
        calls: _FirstCalls = {}

        def note(kind: Hashable, layer: StreamedLayer, args: Any, kwargs: Any) -> None:
            # Asked while the model runs: transformers hangs hooks on routers whose logits the loss wants.
            compiles = self.engine.runtime.compiled.suits(layer) is not None
            calls[kind] = (compiles, layer, *_on_meta((args, kwargs)))

        ids = torch.zeros((batch, length), dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids, **more}
        return outline_step(self.model, self.engine.runtime, inputs, CPU, note), calls

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
