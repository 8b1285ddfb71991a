"""TRL's DPOTrainer and RewardTrainer with the plugin: the numbers that they have without, and two models in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from loop_runs import loss_of
from peft import LoraConfig, get_peft_model
from plain_torch import token_batches
from torch import nn
from trainer_runs import plugin
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl_runs import TRL_WARNINGS, arguments, preferences, run_both, run_trl, tiny_model, tokenizer

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.store.host_limits import available_host_bytes
from megatrain_accelerate.store.layout import ALIGNMENT_ELEMENTS
from megatrain_accelerate.units import round_up

trl = pytest.importorskip("trl", exc_type=ImportError)

pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    *(pytest.mark.filterwarnings(warning) for warning in TRL_WARNINGS),
    # PEFT looks for the base model's config on the hub to see whether the vocabulary grew.
    pytest.mark.filterwarnings("ignore:Could not find a config file in"),
]

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{**LORA, "task_type": "CAUSAL_LM", **changes})


def dpo(
    model: Callable[[], nn.Module] = tiny_model,
    reference: Callable[[], nn.Module] | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Callable[[Path], Any]:
    """Makes a DPOTrainer for an output directory."""

    def make(folder: Path) -> Any:
        return trl.DPOTrainer(
            model=model(),
            ref_model=None if reference is None else reference(),
            args=arguments(trl.DPOConfig, folder, **changes),
            train_dataset=preferences(),
            eval_dataset=preferences(4),
            processing_class=tokenizer(),
            **(options or {}),
        )

    return make


def another_model() -> nn.Module:
    """Not the policy's weights, so that a reference that isn't read would be seen."""
    model = tiny_model()
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def trained_adapter() -> nn.Module:
    torch.manual_seed(2)
    return get_peft_model(tiny_model(), lora(init_lora_weights=False))


DPO_CASES: dict[str, dict[str, Any]] = {
    "a reference model": {"reference": another_model},
    "disabled adapters": {"options": {"peft_config": lora()}},
    "a copy of the adapter": {"model": trained_adapter},
    "precomputed": {"precompute_ref_log_probs": True},
    "a reference that follows": {"reference": another_model, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "evaluated": {"reference": another_model, "eval_strategy": "steps", "eval_steps": 2},
}
MORE_DPO_CASES: dict[str, dict[str, Any]] = {
    "precomputed, adapters": {"precompute_ref_log_probs": True, "options": {"peft_config": lora()}},
    "precomputed by a reference": {"precompute_ref_log_probs": True, "reference": another_model},
    "accumulated": {"reference": another_model, "gradient_accumulation_steps": 2, "max_steps": 2},
    "ipo": {"reference": another_model, "loss_type": ["ipo"]},
    "two losses": {"reference": another_model, "loss_type": ["sigmoid", "sft"]},
    "weighted": {"reference": another_model, "use_weighting": True},
}


@pytest.mark.parametrize("case", [*DPO_CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_DPO_CASES)])
def test_dpo_is_that_of_trl_alone(tmp_path: Path, case: str) -> None:
    stock, streamed = run_both(dpo(**{**DPO_CASES, **MORE_DPO_CASES}[case]), tmp_path)
    for key in ("loss", "rewards/margins", "logps/chosen", "entropy", "mean_token_accuracy"):
        assert len(stock.logged(key)) >= 2, key
    reference = streamed.trainer.ref_model
    assert (reference is not None) == ("reference" in {**DPO_CASES, **MORE_DPO_CASES}[case])
    if reference is not None:
        assert engine_of(reference) is not None, "the reference streams, too"


def test_a_reference_that_trl_loads_itself(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")

    def load() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    _, streamed = run_both(dpo(load), tmp_path)
    assert engine_of(streamed.trainer.ref_model) is not None


def test_adapters_are_adopted_in_full_precision_though_the_reference_is_computed_first(tmp_path: Path) -> None:
    # The adapters are disabled, and so frozen, when the model is run for the first time.
    make = dpo(lambda: tiny_model(torch.bfloat16), precompute_ref_log_probs=True, options={"peft_config": lora()}, bf16=True)
    stock, streamed = run_both(make, tmp_path)
    for name, weight in stock.weights.items():
        assert torch.equal(streamed.weights[name], weight), name


def test_a_model_that_its_trainer_runs_before_training_is_streamed_from_then_on(tmp_path: Path) -> None:
    seen: list[bool] = []

    def script(trainer: Any) -> None:
        engine = engine_of(trainer.model)
        assert engine is not None, "the constructor computed the reference"
        seen.append(engine.training)
        trainer.train()
        assert engine_of(trainer.model) is engine, "adopted once"
        seen.append(engine.training)

    run_trl(dpo(precompute_ref_log_probs=True), tmp_path, streamed=True, script=script)
    assert seen == [False, True]


def padded_numel(model: nn.Module) -> int:
    return sum(round_up(parameter.numel(), ALIGNMENT_ELEMENTS) for parameter in model.parameters())


def test_a_reference_model_takes_two_bytes_a_parameter(tmp_path: Path) -> None:
    def load() -> nn.Module:
        return tiny_model(torch.bfloat16)

    trainer = run_trl(dpo(load, load, bf16=True), tmp_path, streamed=True).trainer
    policy, reference = engine_of(trainer.model), engine_of(trainer.ref_model)
    assert policy is not None
    assert reference is not None
    count = padded_numel(trainer.model)
    assert reference.host_bytes_by_kind() == {"weights": 2 * count, "gradients": 0, "residuals": 0, "moments": 0}
    assert reference.runtime.meter.counters.d2h_bytes == 0
    held = policy.host_bytes_by_kind()
    assert held == {"weights": 2 * count, "gradients": 2 * count, "residuals": 2 * count, "moments": 8 * count}


def test_a_model_that_was_evaluated_first_is_trained_with_whole_masters() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        masters = []
        for evaluates in (True, False):
            with plugin():
                accelerator = Accelerator(cpu=True, mixed_precision="bf16")
                model: Any = tiny_model(dtype)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                if evaluates:
                    accelerator.prepare_model(model, evaluation_mode=True)
                model, optimizer = accelerator.prepare(model, optimizer)
                ids = token_batches(1)[0] % 29
                accelerator.backward(loss_of(model, ids))
                optimizer.step()
                engine = engine_of(model)
                assert engine is not None
                engine.drain()
                masters.append([unit.read_master(state) for unit in engine.runtime.units for state in unit.states])
        assert all(torch.equal(one, other) for one, other in zip(*masters, strict=True))
        assert any(bool((master != master.bfloat16()).any()) for master in masters[0]), "residuals are at work"


def test_two_models_draw_on_one_host_budget() -> None:
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_key_value_heads": 4}
    with plugin(host_memory_gib=64.0):
        accelerator = Accelerator(cpu=True)
        policy = accelerator.prepare_model(tiny_model(**large), evaluation_mode=True)
        gc.collect()
        before = available_host_bytes(64.0)
        reference = accelerator.prepare_model(tiny_model(**large), evaluation_mode=True)
        gc.collect()
        taken = before - available_host_bytes(64.0)
        engine = engine_of(reference)
        assert engine is not None
        # What the reference holds is what the policy's moments can't have.
        assert taken > 0.9 * sum(engine.host_bytes_by_kind().values()) > 60e6
        assert engine_of(policy) is not engine


# ---------------------------------------------------------------- reward models


def reward(folder: Path, options: dict[str, Any] | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_model().config
    config.num_labels = 1
    return trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_config(config),
        args=arguments(trl.RewardConfig, folder, **changes),
        train_dataset=preferences(),
        eval_dataset=preferences(4),
        processing_class=tokenizer(),
        **(options or {}),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_strategy": "steps", "eval_steps": 2},
        {"options": {"peft_config": lora(task_type="SEQ_CLS", modules_to_save=["score"])}},
        pytest.param({"gradient_accumulation_steps": 2, "center_rewards_coefficient": 0.1}, marks=pytest.mark.long),
    ],
    ids=["full", "LoRA", "accumulated"],
)
def test_reward_modelling_is_that_of_trl_alone(tmp_path: Path, changes: dict[str, Any]) -> None:
    stock, _ = run_both(lambda folder: reward(folder, **changes), tmp_path)
    assert len(stock.logged("mean_reward")) >= 2
    assert any("score" in name for name in stock.moved)


# ---------------------------------------------------------------- unpaired preferences


def unpaired() -> Dataset:
    """Single completions, wanted or not."""
    rows = []
    for row in preferences(6):
        rows += [
            {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"} for kind in ("chosen", "rejected")
        ]
    return Dataset.from_list(rows)


@pytest.mark.long
@pytest.mark.parametrize("adapters", [None, lora()], ids=["reference", "LoRA"])
def test_kto_is_that_of_trl_alone(tmp_path: Path, adapters: LoraConfig | None) -> None:
    def make(folder: Path) -> Any:
        return trl.KTOTrainer(
            model=tiny_model(),
            ref_model=another_model() if adapters is None else None,
            args=arguments(trl.KTOConfig, folder),
            train_dataset=unpaired(),
            processing_class=tokenizer(),
            peft_config=adapters,
        )

    stock, _ = run_both(make, tmp_path)
    assert len(stock.logged("rewards/chosen")) >= 2
