"""A model on the meta device, made from its configuration, and the real engine on it, whose store allocates nothing."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine
from megatrain_accelerate.errors import ConfigError, UnsupportedError
from megatrain_accelerate.estimate.machine_description import MachineDescription
from megatrain_accelerate.gradients.exchange import Exchange
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.plan.device_plan import DevicePlan
from megatrain_accelerate.plan.layer_discovery import wants_whole_layers
from megatrain_accelerate.plan.placement import Model
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES
from megatrain_accelerate.store.host_memory import DeviceMemory
from megatrain_accelerate.store.unit import HostUnit, ParameterState
from megatrain_accelerate.units import GIB

META = torch.device("meta")
_MOST_SPARE_ROWS = 8
"""Rows by which a table may exceed the stated positions: BART and OPT have two before the first position."""


def load_config(name: str, trust_remote_code: bool = False) -> Any:
    """Loads the configuration of a Hub id, a folder or a ``config.json``, with its code if trusted, or raises ConfigError."""
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # each configuration raises its own kinds of errors
        where = "can't be read" if os.path.exists(name) else "is neither a local folder nor a file, nor found on the Hub"
        raise ConfigError(f"the configuration of {name!r} {where}: {error}") from error


def model_on_meta(config: Any, trust_remote_code: bool = False) -> nn.Module:
    """Makes the model of a configuration in bf16 on the meta device: of the class that it names, else a causal language model.
    Raises an UnsupportedError if transformers knows no such model, or if its code fails on the configuration."""
    # With use_cache, newer models leave out the mask of all pairs of tokens in a fake run, as they do with data.
    for part in (config, getattr(config, "text_config", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = True
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it describes the published weights, and training is in bf16
    kinds = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    kind = next((kind for kind in kinds if kind is not None), None)
    with torch.device("meta"):
        try:
            auto = transformers.AutoModelForCausalLM
            model = kind(config) if kind else auto.from_config(config, trust_remote_code=trust_remote_code)
        except Exception as error:  # each model's code fails in its own way
            raise UnsupportedError(
                f"no model can be made of a {type(config).__name__} ({type(error).__name__}: {error}); mend the configuration "
                "where the message names an entry of it, install what the message asks for, or name another model"
            ) from error
    return model.to(torch.bfloat16)


class PositionTable(NamedTuple):
    """A module or buffer with a row for each position. A fake run doesn't refuse a sequence of more tokens."""

    name: str
    positions: int


def position_table(model: Any, stated: int | None) -> PositionTable | None:
    """Finds the embedding, or the buffer of sines, with a row for each of the ``stated`` positions. None if there is none. The
    embedding of tokens never is one, whatever its size."""
    tables: list[tuple[str, Any, int]] = [
        (name, module, module.num_embeddings) for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    ]
    tables += [(name, None, len(buffer)) for name, buffer in model.named_buffers() if buffer.dim() == 2]
    for name, module, rows in tables:
        if stated and 0 <= rows - stated <= _MOST_SPARE_ROWS and module is not model.get_input_embeddings():
            padding = getattr(module, "padding_idx", None)  # RoBERTa's first position is the one after it
            return PositionTable(name, stated if padding is None else stated - padding - 1)
    return None


class _MetaMemory(DeviceMemory):
    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)


class _MetaUnit(HostUnit):
    def _allocate(self, kind: str, touch: bool = True) -> Any:
        return _MetaMemory(self.sizes[kind], META)

    def write_master(self, state: ParameterState, value: torch.Tensor) -> None:
        pass


class MetaEngine(Engine):
    """The engine of a model on the meta device, in training mode with bf16, for one process of a described machine. Raises as
    the engine does. The placement that the settings ask for is left to :class:`ForecastPlan`."""

    unit_class = _MetaUnit

    def __init__(self, model: nn.Module, config: MegatrainConfig, machine: MachineDescription) -> None:
        self.described = machine
        # Whether experts are cut depends on the placement that the settings ask for, which is reset below.
        parts = 1 if config.expert_parts == "auto" and wants_whole_layers(config) else config.expert_parts
        others: dict[str, Any] = {"host_threads": 1, "gpu_memory_gib": machine.gpu_bytes / GIB}
        placement = dataclasses.replace(config.placement, kept_layers=0, offloaded_layers=0, device_layers=0, device_states=0)
        config = dataclasses.replace(config, placement=placement, expert_parts=parts, **others)
        super().__init__(model, META, config, bf16=True, training=True, show_progress=False, show_plan=False)

    def close(self) -> None:
        """Ends the threads. There are no weights to give back, so the model is useless afterwards."""
        if not self.is_closed:
            self.is_closed = True
            self.runtime.worker.close()
            self.kernels.close()

    def _require_memory(self, *_: Any) -> int:
        return 0

    def store_bytes(self, adds: bool, **changes: Any) -> int:
        """Returns the host memory of a machine's store, with these ``changes`` of the settings, if all units live on the host.
        If it ``adds`` gradients up there, each process's staging buffers for them are included."""
        runtime = self.runtime
        with replaced(self, "config", dataclasses.replace(self.config, **changes)):
            layouts = [unit.layout for unit in runtime.units]
            planned = self._planned_bytes(layouts, fp32_sums=adds and runtime.fp32_sums.is_wanted)
        weights = planned.pop("weights")
        shares = sum(planned.values()) // self.described.machines
        return weights + shares + runtime.offloader.staging_bytes * self.described.gpus * adds


class ForecastPlan(DevicePlan):
    """The plan for a machine that needn't be this one. It finds placements and moves nothing. Host memory besides the store is
    for offloaded activations, in equal parts for the machine's GPUs. There is none if the description states no size."""

    def __init__(self, engine: MetaEngine, config: MegatrainConfig, micro_batches: int = 1) -> None:
        machine = self._described = engine.described
        self._machine = machine.machine
        self.overhead_bytes = machine.gpus * CONSTANT_OVERHEAD_BYTES
        """Host memory of the processes besides the store."""
        # Fake tensors are on the CPU, so that no GPU is needed.
        super().__init__(engine.runtime, config, torch.device("cpu"))
        self.micro_batches, self._rank_count, self._exchange_bytes = micro_batches, machine.all_gpus, machine.exchange_bytes
        self.budget.given_bytes = machine.gpu_bytes
        if machine.all_gpus > 1:
            layouts = [layer.unit.layout for layer in engine.runtime.layers]
            self.budget.exchange_bytes = sum(Exchange.buffer_bytes(layouts, self._rank_count))
        others = 1 - 1 / machine.gpus if self.may_gather else 0.0
        self._fetch_share = min(1.0, 1 - others + others * machine.machine.h2d_bytes / machine.exchange_bytes)
        self.store_bytes = engine.store_bytes(self.adds_on_host)

    def model_sizes(self) -> Model:
        """As :meth:`DevicePlan.model_sizes`, but the settings say when steps happen, since there is no optimizer."""
        return dataclasses.replace(
            super().model_sizes(),
            steps_in_backward=self._config.passes_gradients or self._config.step_schedule == "backward",
            machines=self._described.machines,
            network_bytes=self._described.network_bytes,
        )

    def _host_budget_bytes(self) -> int:
        host_bytes = self._described.host_bytes
        return 0 if host_bytes is None else (host_bytes - self.overhead_bytes - self.store_bytes) // self._described.gpus

    def _place(self, placement: Placement) -> None:
        self._note(placement=placement)
