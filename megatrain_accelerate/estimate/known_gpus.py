"""Public figures of GPUs: what their makers state, which no training reaches.

Sources: NVIDIA's data sheets of H200, H100, A100, L40S, B200 (DGX B200) and GH200, and the architecture white papers of
GeForce RTX 3090 (GA102), 4090 (AD102) and 5090 (GB202). bf16 products are dense, added up in fp32. The memory is what the
driver reports as the device's, which is less than the name says.
"""

from __future__ import annotations

import dataclasses

from megatrain_accelerate.errors import ConfigError

PCIE4, PCIE5, NVLINK_C2C = 31.5e9, 63.0e9, 450e9
"""Bytes a second each way, of 16 lanes, or of GH200's link between its two chips."""

SERVER_DRAM, DESKTOP_DRAM, GRACE_DRAM = 213e9, 60e9, 380e9
"""Bytes a second that a compiled loop gets from the memory of such a host: measured on servers with H200 (8.2 G parameters/s
of 26 bytes); three quarters of the data sheet's for two channels of DDR5-5200 and for GH200's LPDDR5X."""


@dataclasses.dataclass(frozen=True)
class KnownGpu:
    """A GPU by its data sheet, and the host that it usually sits in."""

    name: str
    memory_gib: float
    dense_flops: float
    memory_bytes: float
    """A second."""
    link_bytes: float = PCIE5
    """A second, each way."""
    host_dram_bytes: float = SERVER_DRAM
    host_cores: int = 16
    sustained_flops: float | None = None
    """Of large bf16 products in a training, at the GPU's power limit; None where no training was measured."""


KNOWN_GPUS = {
    gpu.name: gpu
    for gpu in (
        KnownGpu("B200", 178.4, 2250e12, 8.0e12),
        KnownGpu("H200", 139.8, 989.4e12, 4.8e12, sustained_flops=716e12),
        KnownGpu("H100", 79.2, 989.4e12, 3.35e12),
        KnownGpu("GH200", 94.5, 989.4e12, 4.0e12, NVLINK_C2C, GRACE_DRAM, 72),
        KnownGpu("A100-80", 79.2, 312e12, 2.039e12, PCIE4),
        KnownGpu("A100-40", 39.4, 312e12, 1.555e12, PCIE4),
        KnownGpu("L40S", 44.4, 362e12, 0.864e12, PCIE4),
        KnownGpu("RTX5090", 31.4, 209.5e12, 1.792e12, PCIE5, DESKTOP_DRAM),
        KnownGpu("RTX4090", 23.5, 165.2e12, 1.008e12, PCIE4, DESKTOP_DRAM),
        KnownGpu("RTX3090", 23.6, 71.0e12, 0.936e12, PCIE4, DESKTOP_DRAM),
    )
}


def known_gpu(name: str) -> KnownGpu:
    """The GPU of a name, in whatever case, with or without spaces and ``GB``.

    Raises:
        ConfigError: it isn't in the table.
    """
    found = _found(name)
    if found is not None:
        return found
    raise ConfigError(
        f"--gpu {name!r} isn't known; known are {', '.join(KNOWN_GPUS)}. Describe another by --gpu-memory, --dense-tflops, "
        "--memory-gb-per-second and --link-gb-per-second, without --gpu"
    )


def sustained_flops(name: str) -> float | None:
    """What a GPU keeps up in trainings (:attr:`KnownGpu.sustained_flops`), by the name that torch gives it."""
    found = _found(name)
    return None if found is None else found.sustained_flops


def _found(name: str) -> KnownGpu | None:
    wanted = _plain(name)
    return next((known for known in KNOWN_GPUS.values() if _plain(known.name) == wanted), None)


def _plain(name: str) -> str:
    plain = "".join(character for character in name.upper() if character.isalnum())
    for word in ("NVIDIA", "GEFORCE", "GB"):
        plain = plain.replace(word, "")
    return "A10080" if plain == "A100" else plain
