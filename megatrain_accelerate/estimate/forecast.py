"""Forecasts of training steps, by the plan's own search on step profiles of fake runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError, MegatrainError, UnsupportedError
from megatrain_accelerate.estimate.layer_costs import OUTSIDE, WithoutAttentionDropout, with_times
from megatrain_accelerate.estimate.machine_description import MachineDescription
from megatrain_accelerate.estimate.meta_engine import ForecastPlan, MetaEngine
from megatrain_accelerate.integrations.accelerate_backend import require_steps_after_backward
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.token_tiles import AUTO_TILE_TOKENS
from megatrain_accelerate.loss.products import standing_for_a_gpu
from megatrain_accelerate.plan.fake_step import profile_step, what_sees_a_batch
from megatrain_accelerate.plan.layer_discovery import active_parameters
from megatrain_accelerate.plan.other_batches import outside_seconds_of
from megatrain_accelerate.plan.placement import require_layers, sent_bytes
from megatrain_accelerate.plan.placement_search import Candidate
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_profile import LayerProfile, SavedInForward, StepProfile
from megatrain_accelerate.plan.step_ways import WayChoice, layers_run, may_cut
from megatrain_accelerate.store.host_limits import leaner_settings

_FEW_TOKENS = 8
"""Tokens of the sequence on which the model is run to see whether its loss is a sum."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A predicted training step, which is a row of an estimate. Bytes are peaks. Tokens per second are those of all GPUs, host
    memory is that of one machine, and the rest is of one GPU. ``fits`` says whether both memories suffice."""

    forecaster: Forecaster = dataclasses.field(compare=False, repr=False)
    batch: int
    length: int
    micro_batches: int
    candidate: Candidate
    gpu_bytes: int
    host_bytes: int
    offloaded_bytes: int
    """Activations that are offloaded to the host."""
    fits: bool
    joined: bool
    """Whether the micro-batches run as one batch (``join_micro_batches``)."""
    samples: int | None
    """Sequences that a layer computes at once. None means all, or as many as ``micro_batch_size`` says."""

    @property
    def seconds(self) -> float:
        return self.candidate.time.seconds

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.micro_batches

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs, over the whole step with the optimizer's."""
        return self.forecaster.machine.all_gpus * self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """6 x active parameters x tokens, of each GPU. Neither recomputes nor attention count."""
        return 6e-12 * self.forecaster.active_parameters * self.tokens_per_second / self.forecaster.machine.all_gpus


class Forecaster:
    """Predicts steps of a model on the meta device. Raises an UnsupportedError if the model can't stream (on several GPUs),
    and a ConfigError if the settings name more layers than the model has, or something that several GPUs can't do."""

    def __init__(self, model: nn.Module, config: MegatrainConfig, machine: MachineDescription, micro_batches: int = 1) -> None:
        if machine.all_gpus > 1:
            require_steps_after_backward(config)
        self.model, self.config, self.machine, self.micro_batches = model.train(), config, machine, micro_batches
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.active_parameters = active_parameters(model)
        self.engine = MetaEngine(model, config, machine)
        require_layers(len(self.engine.runtime.layers), config.placement)
        self.plan = self.engine.device_plan = ForecastPlan(self.engine, config, micro_batches)
        self.host_store_bytes = self.plan.store_bytes + self.plan.overhead_bytes
        """Host memory of one machine that the training asks for when it starts."""
        self.host_bytes = self.host_store_bytes if machine.host_bytes is None else machine.host_bytes
        self._attention = WithoutAttentionDropout()
        self._profiles: dict[Hashable, StepProfile] = {}

    def settings_that_fit(self) -> tuple[dict[str, Any], int] | None:
        """Returns the changes of settings with which the states fit the host memory, and the bytes that they then take. Of all
        such changes it chooses those that alter numbers the least. None if there are none."""
        for changes in leaner_settings(self.config, keeps_gradients=self.micro_batches > 1 or self.machine.all_gpus > 1):
            needed = self.engine.store_bytes(self.plan.adds_on_host, **changes) + self.plan.overhead_bytes
            if needed <= self.host_bytes:
                return changes, needed
        return None

    @functools.cached_property
    def _may_join(self) -> bool:
        """Whether nothing is known that forbids joining micro-batches (integrations/joined_batches.py)."""
        if self.micro_batches < 2 or not self.config.join_micro_batches or self.engine.runtime.experts:
            return False
        # The Trainer decides like this whether the model takes ``num_items_in_batch`` (transformers/trainer.py).
        parameters = inspect.signature(self.model.forward).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        takes_count = bool(getattr(self.model, "accepts_loss_kwargs", takes_any))
        if self.machine.all_gpus > 1 or not takes_count or what_sees_a_batch(self.model) is not None:
            return False
        return self._run(1, _FEW_TOKENS, num_items_in_batch=torch.tensor(_FEW_TOKENS)).sums_loss

    def least_gpu_bytes(self, batch: int, length: int) -> int:
        """Returns the least GPU memory of a step on ``batch`` sequences of ``length`` tokens."""
        needed = self._least_bytes(batch, length)
        if self._may_join:
            with contextlib.suppress(UnsupportedError), self.plan.joining(batch):
                joined = self._least_bytes(batch * self.micro_batches, length)
                return joined if self.config.join_micro_batches is True else min(needed, joined)
        return needed

    def _least_bytes(self, batch: int, length: int) -> int:
        """The least of the ways of running layers that the plan tries: in pieces or whole, with or without tiles of tokens."""
        runtime, setting = self.engine.runtime, self.config.token_tile
        tiles = [0, AUTO_TILE_TOKENS] if batch * length > AUTO_TILE_TOKENS else [0]
        pieces = [None, 1] if batch > 1 and may_cut(runtime, self.config) else [None]
        least = []
        for way in itertools.product(pieces, tiles if setting == "auto" else [int(setting)]):
            with layers_run(runtime, *way):
                step_profile = self._step_profile(batch, length)
                least.append(self.plan.fixed_bytes(step_profile) + self.plan.search_for(step_profile).leanest().peak_bytes)
        return min(least)

    def forecast(self, batch: int, length: int) -> Forecast:
        """Returns the fastest step on ``batch`` sequences of ``length`` tokens, or the leanest if none fits. Micro-batches run
        as one batch where the Trainer's would (``integrations/joined_batches.py``). Raises a ConfigError if the model's code
        depends on data, or doesn't take the length."""
        step_profile, apart = self.fastest(batch, length)
        # A batch that can't be cut into pieces (UnsupportedError) stays in its micro-batches.
        if self._may_join:
            with contextlib.suppress(UnsupportedError), self.plan.joining(batch):
                whole, together = self.fastest(batch * self.micro_batches, length)
                pays = together is not None and together.is_worth_it(apart)
                if pays or self.config.join_micro_batches is True:
                    return self._forecast_of(batch, length, whole, together, joined=True)
        return self._forecast_of(batch, length, step_profile, apart)

    def _forecast_of(
        self, batch: int, length: int, step_profile: StepProfile, found: Candidate | None, joined: bool = False
    ) -> Forecast:
        chosen = found or self.plan.search_for(step_profile).leanest()
        sent = sum(sent_bytes(step_profile, chosen.placement))
        # All units are adopted on the host. Those that move to the device later leave their memory to activations.
        moved = self.plan.model_sizes().moved_bytes(chosen.placement)
        return Forecast(
            forecaster=self,
            batch=batch,
            length=length,
            micro_batches=self.micro_batches,
            candidate=chosen,
            gpu_bytes=self.plan.fixed_bytes(step_profile) + chosen.peak_bytes,
            host_bytes=self.host_store_bytes + self.machine.gpus * max(0, sent - moved),
            offloaded_bytes=sent,
            fits=found is not None and self.host_store_bytes <= self.host_bytes,
            joined=joined,
            samples=step_profile.samples,
        )

    def fastest(self, batch: int, length: int) -> tuple[StepProfile, Candidate | None]:
        """Returns the profile of the step, run in the way that suits it best, and the best placement, or None if none fits."""
        profiled = functools.partial(self._step_profile, batch, length)
        step_profile = WayChoice(self.engine.runtime, self.config, batch, profiled, self.plan.search_for).best()
        return step_profile, self.plan.search_for(step_profile).best()

    def _step_profile(self, batch: int, length: int) -> StepProfile:
        """Returns the profile, with estimated times, of a step as the runtime runs layers at the moment. It is cached."""
        cut = self.engine.runtime.batch_cut
        key = (batch, length, self.engine.runtime.token_tile, cut.asked, cut.chosen)
        if key not in self._profiles:
            step_profile = self._run(batch, length)
            outside_seconds = outside_seconds_of(step_profile, self.machine.machine) / OUTSIDE
            self._profiles[key] = dataclasses.replace(step_profile, outside_seconds=outside_seconds)
        return self._profiles[key]

    def _run(self, batch: int, length: int, **more: torch.Tensor) -> StepProfile:
        ids = torch.zeros((batch, length), dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids, **more}
        try:
            with standing_for_a_gpu(), self._attention:
                return profile_step(self.model, self.engine.runtime, inputs, torch.device("cpu"), self._with_times)
        except MegatrainError:
            raise
        except Exception as error:  # the model's own code, on fake tensors, may raise anything
            raise ConfigError(
                f"{type(self.model).__name__} can't be run without data on token ids of {length:,} tokens and labels of the "
                f"same shape ({type(error).__name__}: {error}); name a language model, or another --length"
            ) from error

    def _with_times(self, layer: StreamedLayer, profile: LayerProfile, saved: SavedInForward) -> LayerProfile:
        runtime = self.engine.runtime
        if self._attention.has_dropped:  # a training doesn't keep its results then (layers/attention_results.py)
            profile = dataclasses.replace(profile, attention=OpCosts(), attention_bytes=0)
        # This must be asked while the model runs: transformers then has hooks on routers whose logits the loss reads.
        compiles = not runtime.token_tile and not layer.experts and runtime.compiled.suits(layer) is not None
        return with_times(profile, saved, compiles, self.machine.machine)
