"""Holds weights on the device between forwards without gradients, for generation and evaluation. A held layer has its own slot
until a model trains again, and is copied once instead of in every forward. Results have the same bits."""

from __future__ import annotations

import logging
import math

import torch
from torch import nn

from megatrain_accelerate.layers.caches import CACHE_ARGUMENTS, cache_bytes, has_cached_tokens
from megatrain_accelerate.layers.nested_tensors import Inputs
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.plan.device_budget import DeviceBudget
from megatrain_accelerate.plan.fake_step import evaluation_bytes
from megatrain_accelerate.plan.other_batches import BatchExtent
from megatrain_accelerate.units import GIB

logger = logging.getLogger(__name__)


def has_cache(inputs: Inputs) -> bool:
    """Whether a forward is part of a generation: it gets a cache, perhaps an empty one."""
    return any(inputs.get(name) is not None for name in CACHE_ARGUMENTS)


def is_next_token(inputs: Inputs) -> bool:
    """Whether a forward computes one more token of a generation: it gets one token a sample, and a cache."""
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    is_one = isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] == 1
    return is_one and has_cache(inputs)


class EvaluationWeights:
    """Chooses the layers that are held between forwards without gradients: as many as fit beside what a forward needs, with
    its caches counted twice so that they can grow. With ``auto`` it holds layers from a generation's first forward on, and
    from the second of other forwards in a row: a reference model that runs once a training step gains nothing."""

    def __init__(self, runtime: StreamingRuntime, setting: str, budget: DeviceBudget) -> None:
        self._runtime, self._setting, self._budget = runtime, setting, budget
        self._forwards = self._cache_bytes = self._needed_bytes = 0
        self._evaluated: dict[frozenset[str], BatchExtent] = {}
        """Extents that cover all forwards so far, by the names of their inputs: with labels a model makes all logits."""
        self._is_full = self._is_warned = self._is_warned_of_experts = False

    def needed_bytes(self, model: nn.Module, inputs: Inputs) -> int:
        """Predicted device bytes of the largest forward without gradients so far, including this one, with caches as large as
        any so far, besides what its own caches hold already. 0 if unknown."""
        given = frozenset(name for name, value in inputs.items() if value is not None)
        evaluated = self._evaluated.get(given, BatchExtent())
        # What follows a prompt isn't predicted: it needs less than that, and its mask grows from token to token.
        is_begun = is_next_token(inputs) or has_cached_tokens(inputs)
        if not is_begun and not evaluated.covers(extent := BatchExtent.of(inputs)):
            self._evaluated[given] = evaluated.union(extent)
            try:
                needed_bytes, filled_bytes = evaluation_bytes(model, self._runtime, inputs, self._runtime.streams.device)
                self._needed_bytes = max(self._needed_bytes, needed_bytes)
                self._cache_bytes = max(self._cache_bytes, filled_bytes)
            except Exception as error:  # a model whose code reads values can't run on fake tensors
                logger.info("megatrain: an evaluation's memory can't be predicted for this model (%s)", error)
        allocated_bytes = cache_bytes(inputs)
        self._cache_bytes = max(self._cache_bytes, allocated_bytes)
        return self._needed_bytes and self._needed_bytes + self._cache_bytes - allocated_bytes

    def before_forward(self, model: nn.Module, inputs: Inputs) -> None:
        """Called before a forward without gradients. Holds more layers if they fit, or gives some up if memory is short."""
        if self._setting == "stream" or self._runtime.prefetcher.all_on_device:
            return
        self._forwards += 1
        if self._setting == "auto" and self._forwards < 2 and not has_cache(inputs):
            return
        if (left := self._budget.left_bytes()) is None and self._setting != "resident":
            return
        spare: float = math.inf
        if left is not None:
            needed = self.needed_bytes(model, inputs)
            # Caches count twice, as they may be copied to grow: here, and in ``needed`` or, once allocated, in ``left``.
            spare = (left - needed if needed else left // 2) - self._cache_bytes
        if spare < 0:
            self._is_full |= self._runtime.prefetcher.let_go(-int(spare)) > 0
        elif not self._is_full:
            self._hold(spare)
        if self._setting == "resident":
            self._say_what_streams()

    def _hold(self, spare_bytes: float) -> None:
        prefetcher = self._runtime.prefetcher
        try:
            for layer in self._runtime.layers:
                if layer.index not in prefetcher.own_slots:
                    spare_bytes -= layer.unit.layout.weight_bytes
                    if spare_bytes < 0:
                        return
                    prefetcher.hold(layer.index)
        except torch.OutOfMemoryError:
            self._is_full = True

    def _say_what_streams(self) -> None:
        layers, prefetcher, experts = self._runtime.layers, self._runtime.prefetcher, self._runtime.experts
        missing = [layer for layer in layers if layer.index not in prefetcher.own_slots]
        if experts and not self._is_warned_of_experts:
            self._is_warned_of_experts = True
            logger.warning(
                "megatrain: evaluation_weights is 'resident', but the experts of %d layers (%.1f GiB) stream in parts in "
                "every forward; set megatrain_config.expert_parts to 1 to have them held with their layers",
                len({at.index for at in experts}),
                sum(at.unit.layout.weight_bytes for at in experts) / GIB,
            )
        if missing and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "megatrain: evaluation_weights is 'resident', but %d of %d layers (%.1f GiB) don't fit the GPU memory beside "
                "this evaluation and stream; lower its batch or length, raise gpu_memory_gib, or set 'auto'",
                len(missing),
                len(layers),
                sum(layer.unit.layout.weight_bytes for layer in missing) / GIB,
            )

    def give_up(self) -> None:
        """Gives up all held layers. Called when a model trains, or another one computes, which need the memory."""
        self._forwards = 0
        self._is_full = False
        if self._runtime.prefetcher.let_go() and self._runtime.streams.is_cuda:
            # Blocks of other sizes are needed for training.
            torch.cuda.empty_cache()
