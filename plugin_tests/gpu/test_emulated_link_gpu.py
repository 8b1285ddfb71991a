"""On a GPU: the benchmarks' emulated link is as slow as it says, each way, and holds up no kernel."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BYTES, GB_PER_SECOND = 2**28, 8.0


def test_copies_take_as_long_as_over_the_emulated_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes" / "benchmarks"))
    monkeypatch.setattr(torch.Tensor, "copy_", torch.Tensor.copy_)
    allowed = os.sched_getaffinity(0)
    try:
        from emulation import emulate

        emulate(1, GB_PER_SECOND)
    finally:
        os.sched_setaffinity(0, allowed)
        sys.modules.pop("emulation", None)
    host = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    for target, source in ((device, host), (host, device)):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        assert torch.cuda.current_stream().query() is False
        torch.cuda.synchronize()
        # Clocks of the calibration and of now may differ.
        assert time.perf_counter() - began == pytest.approx(BYTES / (1e9 * GB_PER_SECOND), rel=0.2)
