"""The device memory that the engine holds, by kind, and the budget that a step may take."""

from __future__ import annotations

import torch

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.plan.machine import SEGMENT_BYTES, USABLE_SHARE_OF_DEVICE, free_bytes, whole_free_bytes
from megatrain_accelerate.plan.step_profile import StepProfile


class DeviceBudget:
    """The memory of one device that one engine may take: what ``gpu_memory_gib`` names, or a share of what is free."""

    def __init__(self, runtime: StreamingRuntime, config: MegatrainConfig, device: torch.device) -> None:
        self._runtime, self._config, self._device = runtime, config, device
        self.given_bytes: int | None = None
        """Replaces the budget of settings and free memory: by the smallest rank's while ranks plan together, or by the memory
        of a GPU that is only described (:class:`.ForecastPlan`). None otherwise."""
        self.reserved_share = 0.0
        """Share of the device's memory that stays free for a program that takes turns with the training (TRL's vLLM)."""
        self.exchange_bytes: int | None = None
        """Bytes of buffers for the exchange of gradients on a machine that is only described. None on a real one."""

    @property
    def exists(self) -> bool:
        """Whether the settings or a GPU give a budget. Without one nothing is placed on the device, and no time predicted."""
        # Not from whole_bytes(): asking the driver for free memory takes milliseconds.
        return self._config.gpu_memory_bytes is not None or self._device.type == "cuda"

    def whole_bytes(self) -> int:
        """Bytes that a step may take, including what the engine holds. 0 without a budget."""
        if self.given_bytes is not None:
            return self.given_bytes
        if self._config.gpu_memory_bytes is not None:
            return self._config.gpu_memory_bytes
        if self._device.type != "cuda":
            return 0
        free = free_bytes(self._device) - self._reserved_bytes()
        return int(USABLE_SHARE_OF_DEVICE * (free + self.held_bytes()))

    def left_bytes(self) -> int | None:
        """Bytes of the budget that the engine doesn't hold and that single large tensors can take. None without a budget."""
        if not (whole_bytes := self.whole_bytes()):
            return None
        left = whole_bytes - self.held_bytes()
        if self._device.type == "cuda":
            free = whole_free_bytes(self._device) - self._reserved_bytes()
            left = min(left, int(USABLE_SHARE_OF_DEVICE * free) - SEGMENT_BYTES)
        return left

    def held_bytes(self) -> int:
        return sum(self.held_bytes_by_kind().values())

    def held_bytes_by_kind(self) -> dict[str, int]:
        """Bytes that the engine holds on the device."""
        runtime = self._runtime
        layers = [layer.unit.bytes_by_kind() for layer in runtime.layers if layer.unit.is_on_device]
        units = [unit.bytes_by_kind() for unit in runtime.units if unit.is_on_device]
        # Gradients of resident groups are summed on the device wherever their units live, and so are those of these layers.
        summed = [*(group.unit.bytes_by_kind() for group in runtime.groups), *layers]
        residual_bytes = sum(kinds.get("gradient_residuals", 0) for kinds in summed)
        return {
            "slots": runtime.prefetcher.device_bytes,
            "gradient_slots": runtime.offloader.device_bytes,
            **self.fixed_bytes_by_kind(),
            "held_layers": runtime.prefetcher.held_bytes,
            "states": runtime.states_on_device.size_bytes + sum(kinds["residuals"] + kinds["moments"] for kinds in units),
            "layers": sum(kinds["weights"] for kinds in layers),
            **({"gradient_residuals": residual_bytes} if residual_bytes else {}),
        }

    def fixed_bytes_by_kind(self, step_profile: StepProfile | None = None) -> dict[str, int]:
        """Bytes that are held whatever the placement: at present, or during a step of this profile."""
        runtime, piece_sums = self._runtime, self._runtime.piece_sums
        part_slots, exchange = runtime.expert_streams.prefetcher.device_bytes, runtime.offloader.exchange
        exchange_bytes = self.exchange_bytes if exchange is None else exchange.device_bytes
        in_pieces = step_profile is not None and (step_profile.samples or runtime.batch_cut.asked)
        has_sums = piece_sums.buffer is not None or in_pieces
        return {
            **({"expert_slots": part_slots} if part_slots else {}),
            "resident": sum(group.device_bytes for group in runtime.groups),
            **({"gradient_sums": piece_sums.planned_bytes} if has_sums else {}),
            **({"exchange": exchange_bytes} if exchange_bytes is not None else {}),
        }

    def _reserved_bytes(self) -> int:
        return int(self.reserved_share * torch.cuda.mem_get_info(self._device)[1]) if self.reserved_share else 0
