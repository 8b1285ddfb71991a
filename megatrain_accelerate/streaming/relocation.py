"""Units that move between the host and the device, between steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.optim.device_kernel import device_kernels
from megatrain_accelerate.optim.kernel import HostKernels
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.prefetch import Prefetcher
from megatrain_accelerate.streaming.resident import ResidentGroup

Part = StreamedLayer | ResidentGroup


def relocate(
    targets: Sequence[tuple[Part, bool]],
    resident: Collection[int],
    prefetcher: Prefetcher,
    device: torch.device,
    host_kernels: HostKernels,
    moved: Callable[[HostUnit], None],
) -> None:
    """Moves units to where they are to live. Nothing may be in flight.

    Args:
        targets: each layer and resident group, and whether it is to live on the device.
        resident: indices of layers that get a slot of their own.
        prefetcher: owner of the slots.
        device: where the model computes.
        host_kernels: the host's.
        moved: called with each unit that moved.

    Raises:
        torch.OutOfMemoryError, HostMemoryError: a unit found no room. Those before it have moved, it and those after it not.
    """
    # Slots of single layers hold memory of units that leave.
    prefetcher.drop_own_slots()
    try:
        # First what leaves, so that there is room for what comes.
        for part, stays in targets:
            if part.unit.is_on_device and not stays:
                part.move_to_host()
                moved(part.unit)
        arriving = [part for part, comes in targets if comes and not part.unit.is_on_device]
        kernels = device_kernels(device, host_kernels) if arriving else host_kernels
        for part in arriving:
            part.move_to_device(device, kernels)
            moved(part.unit)
    except BaseException:
        prefetcher.give_own_slots(())  # those that have moved are their own slots
        raise
    prefetcher.give_own_slots(resident)
