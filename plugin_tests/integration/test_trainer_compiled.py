"""The stock Trainer with layers compiled by Inductor, on the CPU: what its generated code computes, and what is kept of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from decoder_models import VOCABULARY
from expert_models import HOOKS_RECORD, KINDS, of_experts
from trainer_runs import Padding, assert_same_run, examples, ragged_examples, run_trainer, tiny_llama

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.layers.compiled_layer import CompiledLayers

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ on the CPU")

TOLERANCE = 2e-5
"""Fused fp32 kernels round otherwise; Adam's first steps divide tiny gradients by their own size and magnify it."""


@pytest.mark.slow
def test_twenty_compiled_steps_agree_with_plain_ones_kept_or_recomputed(tmp_path: Path) -> None:
    changes = {"max_steps": 20, "dataset": examples(8, length=16), "learning_rate": 1e-4}
    eager = run_trainer(tiny_llama, tmp_path / "eager", streamed=True, settings={"compile_layers": False}, **changes)
    # Kept and recomputed layers have a graph each, which rounds in its own way.
    for kept, graphs in ((0, 1), (2, 2)):
        settings = {"compile_layers": True, "kept_layers": kept}
        run = run_trainer(tiny_llama, tmp_path / f"{kept}", streamed=True, settings=settings, **changes)
        engine = engine_of(run.trainer.model)
        assert engine is not None
        assert engine.runtime.compiled.compilations == graphs
        assert_same_run(run, eager, TOLERANCE)


@pytest.fixture
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's guards and AOTAutograd's graphs, without Inductor's code generation."""
    init = CompiledLayers.__init__

    def with_a_quick_backend(self: CompiledLayers, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        self.backend = "aot_eager"

    monkeypatch.setattr(CompiledLayers, "__init__", with_a_quick_backend)


@pytest.mark.skipif(not HOOKS_RECORD, reason="transformers records nothing by hooks")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.usefixtures("quick_backend")
def test_the_trainer_compiles_experts_with_their_auxiliary_loss(tmp_path: Path) -> None:
    changes = {"dataset": examples(8, length=16, vocabulary=VOCABULARY), "max_steps": 6, "bf16": True}
    ours, theirs = (
        run_trainer(
            lambda: of_experts("qwen3_moe"), tmp_path / str(flag), streamed=True, settings={"compile_layers": flag}, **changes
        )
        for flag in (True, False)
    )
    engine = engine_of(ours.trainer.model)
    assert engine is not None
    assert engine.runtime.compiled.compilations == KINDS["qwen3_moe"]
    # bf16 has 8 bits; Adam moves each weight by the learning rate a step, whatever the gradient's error.
    assert_same_run(ours, theirs, tolerance=3e-2)


@pytest.mark.long
@pytest.mark.usefixtures("quick_backend")
def test_ragged_batches_of_the_trainer_compile_few_graphs(tmp_path: Path) -> None:
    runs = [
        run_trainer(
            tiny_llama,
            tmp_path / str(flag),
            streamed=True,
            dataset=ragged_examples(23),
            options=lambda model: {"data_collator": Padding("right")},
            settings={"compile_layers": flag},
            num_train_epochs=2,
            max_steps=-1,
            bf16=True,
        )
        for flag in (True, False)
    ]
    engine = engine_of(runs[0].trainer.model)
    assert engine is not None
    # Two epochs of 12 batches, the last of them of one row: any length; a row; no padding in a batch.
    assert 1 <= engine.runtime.compiled.compilations <= 5
    # bf16 has 8 bits; Adam moves each weight by the learning rate a step, whatever the gradient's error.
    assert_same_run(runs[0], runs[1], tolerance=3e-2)
