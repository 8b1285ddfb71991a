"""Device memory of a unit whose weights and optimizer states live on the device."""

from __future__ import annotations

import torch


class DeviceMemory:
    """One block of device memory with the interface of :class:`~megatrain_accelerate.memory.host_memory.HostMemory`.

    Ownership: the unit that made it. It is zero at first, and given back when the last tensor over it dies.

    Args:
        size_bytes: bytes wanted.
        device: where.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = max(size_bytes, 1)
        self._block = torch.zeros(self.size_bytes, dtype=torch.uint8, device=device)

    def register(self) -> None:
        """Nothing to register."""

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of the block, with a storage of its own, as serialisers like it (see ``HostMemory``)."""
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self._block.device)
        part = self._block[offset_bytes : offset_bytes + count * dtype.itemsize].view(dtype).view(shape)
        # A view would share the block's storage; what comes back through DLPack has one that begins at its own address.
        return torch.from_dlpack(part)

    def close(self) -> None:
        """Nothing to unregister."""
