"""What tests of moments in fewer bits share: the step's constants, the rounding's hash, the compiler's word, whole runs."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import train_streamed
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.kernels.host import AdamArguments

CSRC = Path(__file__).parents[1] / "megatrain_accelerate" / "kernels" / "csrc"


def arguments(step: int = 1, **changes: Any) -> AdamArguments:
    """Of an AdamW step."""
    return AdamArguments(
        **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "step": step, **changes}
    )


def rounding_bits(count: int, first: int, seed: int) -> np.ndarray:
    """MurmurHash3's finaliser of each element's number, uint32."""
    x = np.arange(first, first + count, dtype=np.uint64).astype(np.uint32)
    with np.errstate(over="ignore"):
        x = x * np.uint32(0x9E3779B1) + np.uint32(seed)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        x ^= x >> np.uint32(16)
    return x


def lines_in_wide_vectors(header: str) -> list[int]:
    """The lines of loops in a header of the host kernels that GCC made AVX-512 code of, once for each instantiation."""
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("GCC for x86-64 says which loops it makes vectors of")
    setup = (Path(__file__).parents[1] / "setup.py").read_text()
    flags = re.findall(r'"(-[^"]+)"', setup.split("COMPILE_FLAGS = [")[1].split("]")[0])
    pattern = rf"{re.escape(header)}:(\d+):\d+: optimized: +loop vectorized using 64 byte"
    return [int(line) for line in re.findall(pattern, _optimised_loops(compiler, *flags))]


@functools.cache
def _optimised_loops(*compiler: str) -> str:
    command = [*compiler, "-fopt-info-vec-optimized", "-c", str(CSRC / "kernels.cpp"), "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr


def losses(steps: int, **settings: Any) -> list[float]:
    """Of a tiny model that sees one batch again and again."""
    batch = token_batches(1)[0]
    return train_streamed(tiny_model(), [batch] * steps, **settings).losses


def assert_same_masters(first: dict[str, Any], second: dict[str, Any], **shared: Any) -> None:
    """Two runs under different settings, without clipping, end with the same bits."""
    runs = [
        train_streamed(tiny_model(), token_batches(6), max_norm=None, **shared, **settings) for settings in (first, second)
    ]
    for name, weight in runs[0].masters.items():
        assert torch.equal(runs[1].masters[name], weight), name
