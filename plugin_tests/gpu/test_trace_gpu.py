"""`megatrain trace` on a GPU: streams told apart and named, all layers on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trace_runs import LAYERS, TRAINER_SCRIPT, spans_by_lane, trace_script

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = Path(__file__).parents[2] / "recipes" / "megatrain.yaml"


def test_streams_and_threads_are_named_and_hold_their_work(tmp_path: Path) -> None:
    printed, trace = trace_script(tmp_path, TRAINER_SCRIPT, 4, CONFIG, CUDA_VISIBLE_DEVICES="0")
    lanes = spans_by_lane(trace)
    # Layers at the model's end are still in their slots when backward begins.
    assert sum("HtoD" in name for name in lanes["h2d"]) >= LAYERS
    assert sum("DtoH" in name for name in lanes["d2h"]) >= LAYERS
    assert len(lanes["compute"]) > 10 * LAYERS
    for layer in range(LAYERS):
        assert f"megatrain::forward (model.layers.{layer})" in lanes["launcher thread"]
        assert f"megatrain::backward (model.layers.{layer})" in lanes["autograd thread"]
        assert f"megatrain::step (model.layers.{layer})" in lanes["megatrain-step-worker"]
    for row in ("compute", "h2d", "d2h", "GPU idle", "h2d under compute", "the step is bound by"):
        assert f"\n{row}" in printed
