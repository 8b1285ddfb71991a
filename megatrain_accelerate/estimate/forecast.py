"""The forecast of a training step: the plan's own search on outlines that are run, or extrapolated, without data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.estimate.attention_dropout import WithoutAttentionDropout
from megatrain_accelerate.estimate.extrapolation import extended_graph, extended_outline, extended_profile, with_kinds
from megatrain_accelerate.estimate.joining import may_join, sums_loss
from megatrain_accelerate.estimate.layer_graph import LayerGraph, TensorShape, trace_layer
from megatrain_accelerate.estimate.meta_engine import ForecastPlan, MetaEngine
from megatrain_accelerate.estimate.positions import PositionTable, shortest_table
from megatrain_accelerate.estimate.predicted_step import Forecast
from megatrain_accelerate.estimate.reckoning import (
    FITTED,
    Shares,
    compiled_profile,
    outside_seconds,
    tiled_profile,
    uncompiled_profile,
)
from megatrain_accelerate.loss.products import standing_for_a_gpu
from megatrain_accelerate.memory.host_limits import CONSTANT_OVERHEAD_BYTES
from megatrain_accelerate.planning.machine import Machine
from megatrain_accelerate.planning.placement import require_layers, sent_bytes
from megatrain_accelerate.planning.placement_search import Candidate
from megatrain_accelerate.planning.step_memory import OpCosts
from megatrain_accelerate.planning.step_outline import outline_layers, outline_step
from megatrain_accelerate.planning.step_profile import LayerProfile, StepOutline
from megatrain_accelerate.planning.tile_choice import outline_with_tiles
from megatrain_accelerate.streaming.compiled_layer import SMALLEST_LAYER_PARAMETERS
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.micro_batches import BatchSplit
from megatrain_accelerate.streaming.output_recorder import Captures, OutputRecorder
from megatrain_accelerate.streaming.token_tiles import AUTO_TILE_TOKENS

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
class _Call:
    """A call of a layer, or the first piece of it: what it costs, without times."""

    dry: LayerProfile
    """Of the whole call, run as it is written."""
    graph: LayerGraph | None
    compiles: bool
    split: BatchSplit


_Calls = tuple[Sequence[Hashable], dict[Hashable, _Call]]


class Forecaster:
    """Predicts steps of one model under one machine's speeds and memories.

    Args:
        model: on the meta device.
        config: the settings.
        machine: speeds.
        gpu_bytes: GPU memory that a step may take.
        host_bytes: host memory that the process may take; None for as much as the model's states need.
        micro_batches: backwards before a step.
        active_parameters: those that a token meets; by default all.
        recorder: what collects side outputs of layers.
        shares: of the speeds that are reached.

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
        active_parameters: int | None = None,
        recorder: OutputRecorder | None = None,
        shares: Shares = FITTED,
    ) -> None:
        self.model = model.train()
        self.config = config
        self.machine = machine
        self.shares = shares
        self.gpu_bytes = gpu_bytes
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.active_parameters = self.parameters if active_parameters is None else active_parameters
        self.engine = MetaEngine(model, config, recorder, gpu_bytes)
        require_layers(len(self.engine.runtime.layers), config.keep_layers, config.offload_layers)
        for_states = None if host_bytes is None else host_bytes - CONSTANT_OVERHEAD_BYTES
        self.plan = ForecastPlan(self.engine, config, machine, gpu_bytes, for_states, micro_batches)
        self.micro_batches = micro_batches
        self.host_bytes = self.host_store_bytes if host_bytes is None else host_bytes
        self._attention = WithoutAttentionDropout()
        self._graphs: dict[Hashable, LayerGraph | None] = {}
        self._outlines: dict[Hashable, StepOutline] = {}
        self._outside: dict[Hashable, StepOutline] = {}
        self._traced: dict[Hashable, _Calls] = {}

    @property
    def host_store_bytes(self) -> int:
        """Host memory that the training asks for when it starts, bytes."""
        return self.plan.store_bytes + CONSTANT_OVERHEAD_BYTES

    @functools.cached_property
    def _may_join(self) -> bool:
        if self.micro_batches < 2 or not may_join(self.model, self.engine.runtime, self.config):
            return False
        with standing_for_a_gpu(), self._attention:
            return sums_loss(self.model, self.engine.runtime, _FEW_TOKENS)

    def positions(self) -> PositionTable | None:
        """The shortest table of positions, which bounds a sequence; None if the model has none."""
        with standing_for_a_gpu(), self._attention:
            return shortest_table(self.model, lambda: self._outlined(1, _FEW_TOKENS))

    def least_gpu_bytes(self, batch: int, length: int) -> int:
        """GPU memory of a step that takes the least of it, bytes (:meth:`ForecastPlan.leanest`).

        Args:
            batch, length: sequences, and tokens of each.
        """
        needed = self._least_bytes(batch, length)
        if self._may_join:
            with contextlib.suppress(UnsupportedError), self._joined(batch):
                joined = self._least_bytes(batch * self.micro_batches, length)
                return joined if self.config.join_micro_batches is True else min(needed, joined)
        return needed

    def _least_bytes(self, batch: int, length: int) -> int:
        tiles = self._tiles(batch * length)
        return min(self.plan.least_bytes(self._outline_by(batch, length, tile)) for tile in tiles)

    def _tiles(self, tokens: int) -> Sequence[int]:
        """Tokens of a tile that the plan would try for a batch of so many in all; 0 for none."""
        if self.config.token_tile != "auto":
            return [int(self.config.token_tile)]
        return [0, AUTO_TILE_TOKENS] if tokens > AUTO_TILE_TOKENS else [0]

    def forecast(self, batch: int, length: int) -> Forecast:
        """The fastest step on ``batch`` sequences of ``length`` tokens; the leanest where nothing fits.

        Several micro-batches run as one batch where the Trainer's would (``integrations/joined_batches.py``).

        Raises:
            Exception: whatever the model raises when it looks at data, or at a length that it doesn't take.
        """
        outline = self.outline(batch, length)
        apart = self.plan.fastest(outline)
        # A batch that can't be cut stays in its micro-batches.
        if self._may_join:
            with contextlib.suppress(UnsupportedError), self._joined(batch):
                whole = self.outline(batch * self.micro_batches, length)
                together = self.plan.fastest(whole)
                pays = together is not None and together.is_worth_it(apart)
                if pays or self.config.join_micro_batches is True:
                    return self._forecast_of(batch, length, whole, together, joined=True)
        return self._forecast_of(batch, length, outline, apart)

    @contextlib.contextmanager
    def _joined(self, samples: int) -> Iterator[None]:
        """Steps run all micro-batches at once, in pieces of at most ``samples``."""
        runtime, plan = self.engine.runtime, self.plan
        size = runtime.micro_batch_size
        runtime.micro_batch_size = samples if size is None else min(size, samples)
        plan.micro_batches = 1
        try:
            yield
        finally:
            runtime.micro_batch_size, plan.micro_batches = size, self.micro_batches

    def _forecast_of(
        self, batch: int, length: int, outline: StepOutline, found: Candidate | None, joined: bool = False
    ) -> Forecast:
        fits_host = self.host_store_bytes <= self.host_bytes
        chosen = found or self.plan.leanest(outline)
        kept = sum(
            outline.profiles[event.kind].kept_bytes for event in outline.forward_calls if event.layer in chosen.placement.kept
        )
        sent = sum(sent_bytes(outline, chosen.placement))
        # All units are adopted on the host; then some move, and activations take their place.
        moved = self.plan.moved_bytes(chosen.placement)
        return Forecast(
            batch=batch,
            length=length,
            micro_batches=self.micro_batches,
            seconds=chosen.time.seconds,
            candidate=chosen,
            gpu_bytes=self.plan.fixed_bytes(outline) + chosen.peak_bytes,
            gpu_budget_bytes=self.gpu_bytes,
            host_bytes=self.host_store_bytes + max(0, sent - moved),
            host_budget_bytes=self.host_bytes,
            kept_bytes=kept,
            offloaded_bytes=sent,
            layers=len(self.engine.runtime.layers),
            active_parameters=self.active_parameters,
            fits=found is not None and fits_host,
            joined=joined,
        )

    # ------------------------------------------------------------------ outlines

    def outline(self, batch: int, length: int) -> StepOutline:
        """The outline of a step with the tiles that suit it, with reckoned times."""
        runtime = self.engine.runtime
        return outline_with_tiles(
            runtime,
            self.config.token_tile,
            lambda: self._outline_by(batch, length, runtime.token_tile),
            self.plan.search,
        )

    def _outline_by(self, batch: int, length: int, token_tile: int) -> StepOutline:
        """The outline with layers that run by tiles of so many tokens."""
        self.engine.runtime.token_tile = token_tile
        key = self._key(batch, length)
        if key not in self._outlines:
            with standing_for_a_gpu(), self._attention:
                self._outlines[key] = self._reckoned(batch, length)
        return self._outlines[key]

    def _key(self, *of: Hashable) -> Hashable:
        """What was found of something holds for the tiles and the pieces in which layers run it."""
        return (*of, self.engine.runtime.token_tile, self.engine.runtime.micro_batch_size)

    def _reckoned(self, batch: int, length: int) -> StepOutline:
        kinds, calls = self._layers(batch, length)
        profiles = {kind: self._profile(call) for kind, call in calls.items()}
        if self._attention.has_dropped:  # then a run doesn't keep its results (streaming/attention_results.py)
            none_kept: dict[str, Any] = {"attention": OpCosts(), "attention_bytes": 0, "attention_seconds": 0.0}
            profiles = {kind: dataclasses.replace(profile, **none_kept) for kind, profile in profiles.items()}
        outline = self._outside_of(batch, length)
        outline = dataclasses.replace(outline, profiles=profiles, events=with_kinds(outline.events, kinds))
        return dataclasses.replace(outline, outside_seconds=outside_seconds(outline, self.machine, self.shares))

    def _layers(self, batch: int, length: int) -> _Calls:
        """The kinds of the layers' calls in order, and what they cost."""
        pieces = self.engine.runtime.micro_batch_size
        fewest = max(_TRACED_SEQUENCES, -(-_TRACED_TILES * self.engine.runtime.token_tile // length))
        if batch <= 2 * fewest or (pieces is not None and batch > pieces):
            return self._traced_layers(batch, length)
        (few_kinds, few), (many_kinds, many) = (self._layers_of(count, length) for count in (fewest, 2 * fewest))
        times = batch / fewest
        pairs = zip(few_kinds, many_kinds, strict=True)
        return many_kinds, {kind: _call_of(few[other], many[kind], times) for other, kind in set(pairs)}

    def _layers_of(self, batch: int, length: int) -> _Calls:
        key = self._key(batch, length)
        if key not in self._traced:
            self._traced[key] = self._traced_layers(batch, length)
        return self._traced[key]

    def _traced_layers(self, batch: int, length: int) -> _Calls:
        calls: dict[Hashable, tuple[bool, StreamedLayer, Any, Any]] = {}

        def note(kind: Hashable, layer: StreamedLayer, args: Any, kwargs: Any) -> None:
            # Asked while the model runs: transformers hangs hooks on routers whose logits the loss wants.
            compiles = self._is_compiled(layer)
            calls[kind] = (compiles, layer, *tree_map_only(torch.Tensor, TensorShape.of, (args, kwargs)))

        ids = {"input_ids": torch.zeros((batch, length), dtype=torch.long)}
        # The decoder's inputs are made of the labels. Elsewhere the loss is left out, since its tiles take long.
        has_decoder = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        inputs = {**ids, "labels": ids["input_ids"]} if has_decoder else ids
        kinds, dry = outline_layers(self.model, self.engine.runtime, inputs, CPU, note)
        return kinds, {kind: self._call(kind, dry[kind], *calls[kind]) for kind in dry}

    def _outside_of(self, batch: int, length: int) -> StepOutline:
        """The outline without the layers' profiles: run if it is small, else extrapolated from two smaller ones."""
        # What fits a tile runs whole, and says nothing of what runs by tiles.
        tokens = max(OUTLINED_TOKENS, 2 * self.engine.runtime.token_tile)
        if batch * length <= 2 * tokens:
            return self._outlined(batch, length)
        if length <= tokens:
            few = -(-tokens // length)
            shapes = (few, length), (2 * few, length)
        else:
            shapes = (1, tokens), (1, 2 * tokens)
        small, large = (self._outlined(*shape) for shape in shapes)
        few_tokens = shapes[0][0] * shapes[0][1]
        return extended_outline(small, large, batch * length / few_tokens)

    def _outlined(self, batch: int, length: int) -> StepOutline:
        key = self._key(batch, length)
        if key not in self._outside:
            ids = torch.zeros((batch, length), dtype=torch.long)
            self._outside[key] = outline_step(self.model, self.engine.runtime, {"input_ids": ids, "labels": ids}, CPU)
        return self._outside[key]

    # ------------------------------------------------------------------ layers

    def _call(self, kind: Hashable, dry: LayerProfile, compiles: bool, layer: StreamedLayer, args: Any, kwargs: Any) -> _Call:
        tensors = tree_map_only(TensorShape, lambda shape: shape.empty("meta"), (args, kwargs))
        split = BatchSplit.of_call(layer, tensors[0], tensors[1], self.engine.runtime.batch_cut)
        args, kwargs = tree_map_only(torch.Tensor, TensorShape.of, split.first_piece(*tensors))
        return _Call(dry, self._graph(kind, layer, args, kwargs), compiles, split)

    def _profile(self, call: _Call) -> LayerProfile:
        dry, graph, split = call.dry, call.graph, call.split
        share = sum(split.sizes) / split.sizes[0] if split.sizes else 1.0
        if graph is not None and self.engine.runtime.token_tile:
            return tiled_profile(dry, graph.times(share), self.machine, self.shares)
        if graph is None or not call.compiles:
            whole = graph.times(share) if graph is not None else None
            return uncompiled_profile(dry, whole, self.machine, self.shares)
        output_bytes = round(share * graph.output_bytes)
        return compiled_profile(dry, graph, self.machine, self.shares).of_pieces(split, output_bytes)

    def _is_compiled(self, layer: StreamedLayer) -> bool:
        """See :meth:`CompiledLayers.wants <megatrain_accelerate.streaming.compiled_layer.CompiledLayers.wants>`."""
        wanted = self.config.compile_layers
        if layer.experts or Captures.inside(layer.module, self.engine.runtime.recorder) is None:
            return False
        return layer.unit.layout.parameter_count >= SMALLEST_LAYER_PARAMETERS if wanted == "auto" else bool(wanted)

    def _graph(self, kind: Hashable, layer: StreamedLayer, args: Any, kwargs: Any) -> LayerGraph | None:
        if layer.experts:
            return None  # runs as it is, and parts of it run again in backward
        key = (kind, self.engine.runtime.micro_batch_size)
        if key not in self._graphs:
            tile, layer.tiles.tile_tokens = layer.tiles.tile_tokens, 0
            try:
                self._graphs[key] = trace_layer(layer, args, kwargs)
            except Exception as error:  # a layer that looks at its data can't be traced without any
                name = type(layer.module).__name__
                logger.warning("megatrain: %s can't be traced, its costs are those of single operations (%s)", name, error)
                self._graphs[key] = None
            finally:
                layer.tiles.tile_tokens = tile
        return self._graphs[key]


def _call_of(once: _Call, twice: _Call, times: float) -> _Call:
    """The call on ``times`` the sequences that ``once`` is of; ``twice`` is of two times as many. Its seconds are reckoned
    from its own costs: of few tokens, products may be bound by their weights' bytes that aren't of many."""
    dry = extended_profile(once.dry, twice.dry, times)
    return dataclasses.replace(twice, dry=dry, graph=extended_graph(once.graph, twice.graph, times))
