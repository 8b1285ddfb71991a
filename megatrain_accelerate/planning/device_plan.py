"""The plan for the device's memory: what a step will take, and how many layers needn't be recomputed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.planning.kept_layers import choose_kept_layers, last_layers
from megatrain_accelerate.planning.step_memory import predict_step_bytes
from megatrain_accelerate.streaming.runtime import StreamingRuntime
from megatrain_accelerate.units import GIB, MIB

logger = logging.getLogger(__name__)

LIBRARY_WORKSPACE_BYTES = 128 * MIB
"""Device memory for workspaces of cuBLAS (32 MiB a thread that computes) and small tensors outside the step's graph."""

USABLE_SHARE_OF_DEVICE = 0.85
"""Share of the device's free memory that the plan fills: the caching allocator's blocks don't fit without gaps."""

_CLEARLY_LARGER = 1.25


class DevicePlan:
    """Follows the batches: when one is larger than all before, its step is predicted and planned anew.

    Args:
        runtime: the engine at work; the plan sets its kept layers.
        config: the settings.
        device: where the model computes.
    """

    def __init__(self, runtime: StreamingRuntime, config: MegatrainConfig, device: torch.device) -> None:
        self._runtime = runtime
        self._config = config
        self._device = device
        self._planned_elements = 0
        self.predicted_bytes = 0
        """Predicted peak of the device's memory for the largest batch so far; 0 before the first, or if unknown."""
        count = len(runtime.layers)
        if isinstance(config.keep_layers, int):
            runtime.kept_layers = last_layers(count, config.keep_layers)
        whole = config.device_layers if isinstance(config.device_layers, int) else 0
        on_device = count if whole < 0 else whole
        resident = config.resident_layers if isinstance(config.resident_layers, int) else 0
        if on_device or resident:
            runtime.place(range(on_device, on_device + resident), range(on_device), groups_on_device=whole < 0)

    def held_bytes_by_kind(self) -> dict[str, int]:
        """Bytes that the engine holds on the device in any case, by what they hold."""
        return {
            "slots": self._runtime.prefetcher.device_bytes,
            "gradient_slots": self._runtime.offloader.device_bytes,
            "resident": self._runtime.prefetcher.resident_bytes
            + sum(group.device_bytes for group in self._runtime.groups if not group.unit.is_on_device),
            "on_device": sum(
                sum(unit.bytes_by_kind().values()) for unit in self._runtime.units if unit.is_on_device
            ),
        }

    def follow(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Plans for a training forward on ``inputs`` (keyword arguments of the model) if it is the largest so far."""
        elements = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
        if elements <= self._planned_elements:
            return
        budget_bytes = self._budget_bytes()
        chooses = self._config.keep_layers == "auto" and budget_bytes > 0
        # A plan that fills the memory has no room for a batch that is only a little longer; a mere prediction may wait.
        if not chooses and elements <= _CLEARLY_LARGER * self._planned_elements:
            return
        self._planned_elements = elements
        self._runtime.refresh_if_written()
        held = self.held_bytes_by_kind()
        if self._runtime.offloader.is_accumulating:
            # From the second micro-batch on the residents' gradients are there when the forward begins.
            trained = (state.parameter for group in self._runtime.groups for state in group.unit.states)
            held["resident_gradients"] = sum(p.nbytes for p in trained if p.requires_grad)
        fixed_bytes = sum(held.values()) + LIBRARY_WORKSPACE_BYTES
        # A run without data takes a second or two: none is made twice.
        predict = functools.cache(functools.partial(predict_step_bytes, model, self._runtime, inputs, self._device))
        try:
            if chooses:
                count = len(self._runtime.layers)
                self._runtime.kept_layers = choose_kept_layers(count, budget_bytes - fixed_bytes, predict)
            self.predicted_bytes = fixed_bytes + predict(self._runtime.kept_layers)
        except Exception as error:  # a model that looks at its data can't be run without any
            logger.info("megatrain: the step's memory can't be predicted for this model (%s)", error)
            if chooses:
                self._runtime.kept_layers = frozenset()
            return
        if budget_bytes and self.predicted_bytes > budget_bytes:
            logger.warning(
                "megatrain: this batch is predicted to take %.1f GiB of GPU memory (%s) and %.1f GiB are planned with; if it "
                "runs out of memory, lower per_device_train_batch_size or the sequence length",
                self.predicted_bytes / GIB,
                ", ".join(f"{kind} {count / GIB:.1f}" for kind, count in held.items()),
                budget_bytes / GIB,
            )

    def _budget_bytes(self) -> int:
        """Bytes of the device that a step may take, what the engine holds included; 0 without a GPU."""
        if self._config.gpu_memory_gib is not None:
            return int(self._config.gpu_memory_gib * GIB)
        if self._device.type != "cuda":
            return 0
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(USABLE_SHARE_OF_DEVICE * (free + torch.cuda.memory_reserved(self._device)))
