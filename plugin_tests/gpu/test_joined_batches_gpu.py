"""A step's micro-batches as one batch on a GPU: less traffic, the losses of accumulation, the memory that was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import TrainerRun, close, examples, run_trainer, tiny_llama
from transformers import LlamaForCausalLM, Trainer

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.units import GIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STREAMED: dict[str, Any] = {"device_layers": 0, "offloaded_layers": 0, "compile_layers": False}
"""The plan would put all of so small a model on the GPU."""


def make() -> LlamaForCausalLM:
    return tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=6, max_position_embeddings=512)


def trained(folder: Path, **settings: Any) -> tuple[TrainerRun, int, int]:
    """A run of five steps of four micro-batches of 2 x 512 tokens, its peak of device memory, and the predicted one."""
    peaks: list[int] = []

    def script(trainer: Trainer) -> None:
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        engine = engine_of(trainer.model)
        assert engine is not None
        peaks.extend([torch.cuda.max_memory_allocated() - base, engine.device_plan.current.predicted_bytes])

    run = run_trainer(
        make,
        folder,
        streamed=True,
        settings={**STREAMED, **settings},
        dataset=examples(40, length=512),
        script=script,
        use_cpu=False,
        bf16=True,
        gradient_accumulation_steps=4,
        max_steps=5,
    )
    return run, peaks[0], peaks[1]


def traffic(run: TrainerRun, key: str) -> float:
    """Of the last step, in GB."""
    return float([entry for entry in run.trainer.state.log_history if "loss" in entry][-1][f"megatrain/{key}"])


@pytest.mark.parametrize("kept", [0, 3])
def test_joined_micro_batches_move_less_and_lose_the_same(tmp_path: Path, kept: int) -> None:
    apart, _, _ = trained(tmp_path / "apart", kept_layers=kept, join_micro_batches=False)
    together, peak, predicted = trained(tmp_path / "together", kept_layers=kept, join_micro_batches=True)
    # bf16 has 8 bits of mantissa, and accumulated gradients are rounded once a micro-batch.
    pairs = zip(together.logged("loss"), apart.logged("loss"), strict=True)
    assert all(close(ours, theirs, 1e-2) for ours, theirs in pairs)
    assert traffic(together, "d2h_gb") < 0.3 * traffic(apart, "d2h_gb")
    assert traffic(together, "h2d_gb") < 0.4 * traffic(apart, "h2d_gb")
    assert peak <= predicted


def test_auto_decides_by_the_plan_and_stays_within_the_budget(tmp_path: Path) -> None:
    _, _, predicted = trained(tmp_path / "together", kept_layers=0, join_micro_batches=True)
    for budget in (1.2 * predicted, 8 * predicted):
        run, peak, planned = trained(tmp_path / str(int(budget)), gpu_memory_gib=budget / GIB)
        assert peak <= planned <= budget
        assert all(torch.isfinite(torch.tensor(run.logged("loss"))))
