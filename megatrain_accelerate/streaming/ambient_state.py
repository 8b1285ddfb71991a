"""RNG and autocast of a forward, to be entered again where something of it is computed anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class AutocastState:
    """Autocast as it is when this is made, for kernels of one device and of the CPU.

    Args:
        device_type: the device's.
    """

    def __init__(self, device_type: str) -> None:
        self._settings = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {device_type, "cpu"}
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the body under it."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._settings:
                # No cache: a cast weight must not outlive its slot.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class AmbientState:
    """RNG and autocast state of a forward run, to be entered again for its replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu_rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._autocast = AutocastState(device.type)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the body as the forward ran; the caller's RNG state is put back."""
        devices = [self._device] if self._cuda_rng is not None else []
        with torch.random.fork_rng(devices=devices), self._autocast.entered():
            torch.set_rng_state(self._cpu_rng)
            if self._cuda_rng is not None:
                torch.cuda.set_rng_state(self._cuda_rng, self._device)
            yield
