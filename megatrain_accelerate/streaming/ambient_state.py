"""Random numbers and autocast of a forward, to be entered again where something of it is computed anew."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
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


class RandomState:
    """The global generators as they are when this is made: torch's for the CPU and one device, Python's and NumPy's.

    Args:
        device: the device; on the CPU there is no other generator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # whichever generator it is

    def put_back(self) -> None:
        """The next numbers are those that came when this was made."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextlib.contextmanager
def random_numbers_put_back(device: torch.device) -> Iterator[None]:
    """Runs the body, whose random numbers nobody sees who draws later.

    Args:
        device: see :class:`RandomState`.
    """
    before = RandomState(device)
    try:
        yield
    finally:
        before.put_back()


class AmbientState:
    """Random numbers and autocast state of a forward run, to be entered again for its replay.

    Args:
        device: where it runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = RandomState(device)
        self._autocast = AutocastState(device.type)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Runs the body as the forward ran; the caller's random numbers go on as they were."""
        with random_numbers_put_back(self._device), self._autocast.entered():
            self._random.put_back()
            yield
