"""An engine without memory: the real one, on a model of the meta device, whose store is as large and holds nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine
from megatrain_accelerate.memory.host_store import PASSING_BUFFERS, HostUnit, ParameterState
from megatrain_accelerate.planning.adoption import Adoption
from megatrain_accelerate.planning.device_plan import DevicePlan
from megatrain_accelerate.planning.layer_discovery import Discovery, wants_whole_layers
from megatrain_accelerate.planning.machine import Machine
from megatrain_accelerate.planning.placement import Model, Placement
from megatrain_accelerate.planning.placement_search import Candidate, PlacementSearch
from megatrain_accelerate.planning.step_profile import StepOutline
from megatrain_accelerate.streaming.output_recorder import OutputRecorder
from megatrain_accelerate.units import GIB

META = torch.device("meta")
_STAGING_BUFFERS = 2
"""Of one layer's gradients each, where gradients are accumulated (streaming/grad_offload.py)."""


class _MetaMemory:
    """A block with the interface of :class:`~megatrain_accelerate.memory.host_memory.HostMemory`, without memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def register(self) -> None:
        """Nothing to register."""

    def close(self) -> None:
        """Nothing to unregister."""

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without data."""
        return torch.empty(shape, dtype=dtype, device=META)


class _MetaUnit(HostUnit):
    def _allocate(self, kind: str, touch: bool = True) -> Any:
        return _MetaMemory(self._size_of(kind))

    def write_master(self, state: ParameterState, value: torch.Tensor) -> None:
        """There is nothing to write."""


class _MetaAdoption(Adoption):
    """Makes the units; there are no values to take over."""

    def __init__(self, model: nn.Module, discovery: Discovery, make_unit: Callable[..., HostUnit], **_: Any) -> None:
        self._make_unit = make_unit

    def unit(self, name: str, parameters: Sequence[tuple[str, nn.Parameter]], dtypes: Sequence[torch.dtype]) -> HostUnit:
        """The next unit."""
        return self._make_unit(name, parameters, dtypes)

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Nothing to finish."""


class MetaEngine(Engine):
    """The engine of a model on the meta device, for one process with bf16 mixed precision.

    Args:
        model: on the meta device, in training mode.
        config: the settings; what they place is left to :class:`ForecastPlan`.
        recorder: see :class:`OutputRecorder`.
        gpu_bytes: device memory that a step may take, by which experts are cut into parts; None leaves them whole.

    Raises:
        UnsupportedError: the model can't stream; the message says why.
    """

    unit_class = _MetaUnit
    adoption_class = _MetaAdoption

    def __init__(
        self,
        model: nn.Module,
        config: MegatrainConfig,
        recorder: OutputRecorder | None = None,
        gpu_bytes: int | None = None,
    ) -> None:
        # What the settings place says whether experts are cut.
        whole = config.expert_parts == "auto" and wants_whole_layers(config)
        nothing_placed = dataclasses.replace(
            config,
            expert_parts=1 if whole else config.expert_parts,
            keep_layers=0,
            offload_layers=0,
            resident_layers=0,
            device_layers=0,
            host_threads=1,
            gpu_memory_gib=None if gpu_bytes is None else gpu_bytes / GIB,
        )
        super().__init__(
            model, META, nothing_placed, bf16=True, training=True, show_progress=False, show_plan=False, recorder=recorder
        )

    def close(self) -> None:
        """Ends the threads. There are no weights to give back: the model is of no use afterwards."""
        if not self.is_closed:
            self.is_closed = True
            self.runtime.worker.close()
            self.kernels.close()

    def _require_memory(self, discovery: Discovery, training: bool, fp32_sums: bool) -> int:
        self.parameter_count = 0  # of the progress bar, which isn't drawn
        return 0


class ForecastPlan(DevicePlan):
    """The plan for a machine that needn't be here: it finds placements and moves nothing.

    Args:
        engine: whose model is planned for.
        config: the settings.
        machine: the speeds.
        gpu_bytes: device memory that a step may take.
        host_bytes: host memory for the store and offloaded activations; None for the store alone.
        micro_batches: backwards before a step.
    """

    def __init__(
        self,
        engine: MetaEngine,
        config: MegatrainConfig,
        machine: Machine,
        gpu_bytes: int,
        host_bytes: int | None,
        micro_batches: int = 1,
    ) -> None:
        self._speeds, self._gpu_bytes = machine, gpu_bytes
        # Tensors without data say that they are the CPU's: no GPU has to be here.
        super().__init__(engine.runtime, config, torch.device("cpu"))
        self.micro_batches = micro_batches
        sizes = self.model_sizes()
        every = [self._unit_sizes(unit) for unit in engine.runtime.units]
        self.store_bytes = sum(unit.host_bytes for unit in every)
        """Host memory of the store if all units live on the host, bytes; with it the buffers in which gradients wait that are
        to be added to others, or pass through."""
        self.store_bytes += PASSING_BUFFERS * max(unit.gradient_bytes * unit.gradients_pass for unit in every)
        parts = [part for parts in sizes.parts.values() for part in parts]
        largest = max(unit.gradient_bytes for unit in [*sizes.layers, *parts])
        self.store_bytes += _STAGING_BUFFERS * largest * self._adds_on_host
        self._host_bytes = self.store_bytes if host_bytes is None else host_bytes

    @property
    def _machine(self) -> Machine:
        return self._speeds

    def model_sizes(self) -> Model:
        """See :meth:`DevicePlan.model_sizes`; here no optimizer says when it steps."""
        in_backward = self._config.passes_gradients or self._config.step_schedule == "backward"
        return dataclasses.replace(super().model_sizes(), steps_in_backward=in_backward)

    def _budget_bytes(self) -> int:
        return self._gpu_bytes

    def _host_budget_bytes(self) -> int:
        return self._host_bytes - self.store_bytes

    def _place(self, placement: Placement) -> None:
        self.placement = placement

    def moved_bytes(self, placement: Placement) -> int:
        """Host memory that units give up which the placement moves to the device, bytes."""
        sizes = self.model_sizes()
        groups = [*sizes.groups_before, *sizes.groups_after] if placement.groups_on_device else []
        return sum(unit.host_bytes for unit in [*(sizes.layers[i] for i in placement.on_device), *groups])

    def fixed_bytes(self, outline: StepOutline) -> int:
        """Device memory that such a step takes under any placement, bytes."""
        return self._fixed_bytes(outline)

    def leanest(self, outline: StepOutline) -> Candidate:
        """The placement that takes the least device memory, whether it fits or not: what the settings ask for and nothing
        more, and as many inputs on the host as it has room for if they may leave."""
        return self._search_for(outline).leanest(self._asked)

    def least_bytes(self, outline: StepOutline) -> int:
        """Device memory of the step under :meth:`leanest`, bytes."""
        return self._fixed_bytes(outline) + self.leanest(outline).peak_bytes

    def fastest(self, outline: StepOutline) -> Candidate | None:
        """The fastest placement that fits both memories; None if none does."""
        return self._search_for(outline).best()

    def search(self, outline: StepOutline) -> PlacementSearch:
        """The search for placements of a step."""
        return self._search_for(outline)
