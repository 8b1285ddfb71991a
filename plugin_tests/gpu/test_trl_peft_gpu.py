"""PEFT and TRL on a GPU: two models share it, models that run before training are placed, steps can be planned."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import plugin

trl = pytest.importorskip("trl", exc_type=ImportError)
peft = pytest.importorskip("peft")

from accelerate import Accelerator  # noqa: E402
from loop_runs import loss_of, prepared  # noqa: E402
from plain_torch import token_batches  # noqa: E402
from trl_runs import TRL_WARNINGS, arguments, preferences, run_trl, texts, tiny_model, tokenizer  # noqa: E402

from megatrain_accelerate.engine import engine_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(pytest.mark.filterwarnings(warning) for warning in TRL_WARNINGS),
]

STREAMED: dict[str, Any] = {"device_layers": 0, "offloaded_layers": 0, "compile_layers": False}
"""The plan would put all of so small a model on the GPU."""
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}


PARAMETERS: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_parameters": ["up_proj.weight", "gate_proj.weight"]}
"""PEFT parametrizes these weights for the time of a call."""


def lora(targets: dict[str, Any] = LORA) -> Any:
    return peft.LoraConfig(**targets, task_type="CAUSAL_LM")


def sft(folder: Path, targets: dict[str, Any] = LORA) -> Any:
    return trl.SFTTrainer(
        model=tiny_model(torch.bfloat16),
        args=arguments(trl.SFTConfig, folder, use_cpu=False, bf16=True, max_length=24),
        train_dataset=texts(),
        processing_class=tokenizer(),
        peft_config=lora(targets),
    )


def dpo(folder: Path, **changes: Any) -> Any:
    return trl.DPOTrainer(
        model=tiny_model(torch.bfloat16),
        ref_model=None if changes.get("precompute_ref_log_probs") else tiny_model(torch.bfloat16),
        args=arguments(trl.DPOConfig, folder, **{"use_cpu": False, "bf16": True, **changes}),
        train_dataset=preferences(),
        processing_class=tokenizer(),
    )


def test_a_step_with_trls_head_is_planned(tmp_path: Path) -> None:
    trainer = run_trl(sft, tmp_path, streamed=True).trainer
    engine = engine_of(trainer.model)
    assert engine is not None
    assert engine.device_plan.current.predicted_bytes > 0


@pytest.mark.parametrize("targets", [LORA, PARAMETERS], ids=["modules", "parameters"])
def test_adapters_have_the_same_bits_wherever_layers_live_and_are_close_to_trl_alone(
    tmp_path: Path, targets: dict[str, Any]
) -> None:
    make = partial(sft, targets=targets)
    stock = run_trl(make, tmp_path / "stock", streamed=False)
    streamed = run_trl(make, tmp_path / "streamed", streamed=True, settings=STREAMED)
    resident = run_trl(make, tmp_path / "resident", streamed=True, settings={**STREAMED, "device_layers": 3})
    for name, weight in streamed.weights.items():
        assert torch.equal(resident.weights[name], weight), name
    # The same kernels in bf16; AdamW rounds in another order in fp32.
    assert streamed.logged("loss") == pytest.approx(stock.logged("loss"), rel=4e-3)


def test_a_reference_that_is_computed_before_training_is_computed_on_the_gpu(tmp_path: Path) -> None:
    def script(trainer: Any) -> None:
        engine = engine_of(trainer.model)
        assert engine is not None
        assert engine.runtime.meter.counters.weight_fetches > 0
        trainer.train()
        assert engine_of(trainer.model) is engine

    make = lambda folder: dpo(folder, precompute_ref_log_probs=True)  # noqa: E731
    streamed = run_trl(make, tmp_path / "ours", streamed=True, script=script, settings=STREAMED)
    stock = run_trl(make, tmp_path / "stock", streamed=False)
    assert streamed.logged("loss") == pytest.approx(stock.logged("loss"), abs=1e-2)


def test_policy_and_reference_share_the_gpu(tmp_path: Path) -> None:
    streamed = run_trl(dpo, tmp_path / "ours", streamed=True)
    stock = run_trl(dpo, tmp_path / "stock", streamed=False)
    assert streamed.logged("loss") == pytest.approx(stock.logged("loss"), abs=1e-2)
    reference = engine_of(streamed.trainer.ref_model)
    assert reference is not None
    assert reference.host_bytes_by_kind()["residuals"] == reference.host_bytes_by_kind()["moments"] == 0


@pytest.mark.parametrize("on_device", [0, 3])
def test_merged_weights_are_computed_with_wherever_layers_live(on_device: int) -> None:
    with plugin(**{**STREAMED, "device_layers": on_device}):
        accelerator = Accelerator()
        model, optimizer = prepared(
            accelerator, lambda: peft.get_peft_model(tiny_model(), peft.LoraConfig(**LORA, init_lora_weights=False))
        )
        ids = (token_batches(1)[0] % 29).to(accelerator.device)
        accelerator.backward(loss_of(model, ids))
        optimizer.step()
        optimizer.zero_grad()

        def logits() -> torch.Tensor:
            with torch.no_grad():
                return model.eval()(input_ids=ids).logits

        apart = logits()
        model.merge_adapter()
        merged = logits()
        with model.disable_adapter():
            base = logits()
        assert not torch.equal(merged, apart), "another order of sums"
        # fp32 products, which TF32 may round to 11 bits.
        torch.testing.assert_close(merged, apart, rtol=1e-2, atol=1e-3)
        assert float((base - apart).abs().max()) > 1e-2
