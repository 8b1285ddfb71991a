"""TRL's SFTTrainer with the plugin: the losses, metrics and weights that it has without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from loop_runs import slow
from peft import LoraConfig
from trainer_runs import assert_same_weights, plugin
from transformers import AutoModelForCausalLM, TrainerCallback
from trl_runs import (
    TRL_WARNINGS,
    arguments,
    conversations,
    prompts_and_completions,
    run_both,
    run_trl,
    texts,
    tiny_model,
    tokenizer,
)

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import UnsupportedError

trl = pytest.importorskip("trl", exc_type=ImportError)

pytestmark = [pytest.mark.usefixtures("profiled_once"), *map(pytest.mark.filterwarnings, TRL_WARNINGS)]

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}


def trainer(
    data: Callable[[int], Dataset] = texts,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Callable[[Path], Any]:
    """Makes an SFTTrainer of a tiny model for an output directory."""

    def make(folder: Path) -> Any:
        return trl.SFTTrainer(
            model=tiny_model(dtype),
            args=arguments(trl.SFTConfig, folder, **{"max_length": 24, **changes}),
            train_dataset=data(12),
            eval_dataset=data(4),
            processing_class=tokenizer(),
            **(options or {}),
        )

    return make


@pytest.mark.skipif(not hasattr(trl, "BEMACallback"), reason="this TRL has no BEMACallback")
def test_the_average_of_the_weights_is_made_of_applied_steps(tmp_path: Path) -> None:
    averages = []

    def train(made: Any) -> None:
        made.add_callback(trl.BEMACallback(update_freq=2))
        made.train()
        averages.append(AutoModelForCausalLM.from_pretrained(tmp_path / Path(made.args.output_dir).name / "bema"))

    class Slowing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            slow(kwargs["model"])

    stock, _ = run_both(trainer(options={"callbacks": [Slowing()]}), tmp_path, script=train)
    ours, theirs = averages[1].state_dict(), averages[0].state_dict()
    assert_same_weights(ours, theirs)
    assert any(not torch.equal(weight, stock.weights[name]) for name, weight in theirs.items())


def supervised_tokens(folder: Path, **case: Any) -> int:
    """Labelled tokens of the training set."""
    with plugin():
        made = trainer(**case)(folder)
        return sum(label != -100 for labels in made.train_dataset["labels"] for label in labels)


CASES: dict[str, dict[str, Any]] = {
    "plain texts": {},
    "completions only": {"data": prompts_and_completions},
    "assistant's turns only": {"data": conversations, "assistant_only_loss": True},
    "packed": {"packing": True},
    "packed and cut": {"packing": True, "packing_strategy": "wrapped"},
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "LoRA": {"options": {"peft_config": LoraConfig(**LORA)}},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2},
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "prompts too": {"data": prompts_and_completions, "completion_only_loss": False},
    "whole conversations": {"data": conversations},
    "dft": {"loss_type": "dft"},
    "padding-free": {"padding_free": True, "max_length": None},
    "packed, LoRA, accumulated": {
        "packing": True,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "options": {"peft_config": LoraConfig(**LORA, use_dora=True)},
    },
    "packed evaluation": {"packing": True, "eval_packing": True, "eval_strategy": "steps", "eval_steps": 2},
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_CASES)])
def test_sft_is_that_of_trl_alone(tmp_path: Path, case: str) -> None:
    stock, _ = run_both(trainer(**{**CASES, **MORE_CASES}[case]), tmp_path)
    for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
        assert len(stock.logged(key)) >= 2, key
    assert all(entropy > 0 for entropy in stock.logged("entropy"))
    if case == "evaluated":
        assert len(stock.logged("eval_mean_token_accuracy")) == len(stock.logged("eval_entropy")) == 2


def test_masks_leave_out_what_is_not_to_be_learned(tmp_path: Path) -> None:
    counts = {
        "turns": supervised_tokens(tmp_path, data=conversations, assistant_only_loss=True),
        "chats": supervised_tokens(tmp_path, data=conversations),
        "completions": supervised_tokens(tmp_path, data=prompts_and_completions),
        "both": supervised_tokens(tmp_path, data=prompts_and_completions, completion_only_loss=False),
    }
    assert 0 < counts["turns"] < counts["chats"]
    assert 0 < counts["completions"] < counts["both"]


def test_lora_on_a_bf16_base_is_that_of_trl_alone_to_the_bit(tmp_path: Path) -> None:
    make = trainer(dtype=torch.bfloat16, bf16=True, options={"peft_config": LoraConfig(**LORA)})
    stock, streamed = run_both(make, tmp_path)
    for name, weight in stock.weights.items():
        assert streamed.weights[name].dtype == weight.dtype
        assert torch.equal(streamed.weights[name], weight), name


def test_full_training_in_bf16_autocast_is_close_to_that_of_trl_alone(tmp_path: Path) -> None:
    stock, streamed = (run_trl(trainer(bf16=True), tmp_path / str(on), streamed=on) for on in (False, True))
    for key in ("loss", "entropy"):
        # bf16 has 8 bits; weights are rounded once a step, by autocast at each use and norms not at all.
        assert streamed.logged(key) == pytest.approx(stock.logged(key), rel=4e-3)
    for name, weight in stock.weights.items():
        # Adam's steps are as large as the learning rate (1e-3, falling, four of them), in whatever direction.
        assert float((streamed.weights[name].float() - weight).abs().max()) < 5e-3 + 2**-8 * float(weight.abs().max())


@pytest.mark.usefixtures("small_tiles")
def test_logits_that_a_loss_of_the_users_reads_are_those_of_the_model(tmp_path: Path) -> None:
    def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1], labels[:, 1:]
        chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        is_learned = targets != -100
        return -(chosen * is_learned).sum() / (is_learned.sum() if num_items_in_batch is None else num_items_in_batch)

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}

    options = {"compute_loss_func": own_loss, "compute_metrics": accuracy}
    stock, _ = run_both(trainer(eval_strategy="steps", eval_steps=2, options=options), tmp_path)
    assert len(stock.logged("eval_accuracy")) == 2


@pytest.mark.usefixtures("small_tiles")
def test_smoothed_labels_go_through_the_tiled_loss(tmp_path: Path) -> None:
    # Tiles add up in another order, and Adam divides by what small gradients are.
    run_both(trainer(label_smoothing_factor=0.2, max_steps=2), tmp_path, tolerance=1e-5)


def test_a_step_can_be_planned_though_trls_head_looks_at_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU the head picks the labelled tokens; the fake run of a step has none to look at.
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)
    stock = run_trl(trainer(prompts_and_completions), tmp_path / "stock", streamed=False)
    streamed = run_trl(trainer(prompts_and_completions), tmp_path / "ours", streamed=True, settings={"gpu_memory_gib": 1.0})
    engine = engine_of(streamed.trainer.model)
    assert engine is not None
    assert engine.device_plan.current.predicted_bytes > 0
    assert len(engine.device_plan.current.placement.kept) == 3
    assert streamed.logged("loss") == pytest.approx(stock.logged("loss"), rel=1e-6)


def test_activation_offloading_of_trl_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"activation_offloading=True.*offloaded_layers"):
        run_trl(trainer(activation_offloading=True), tmp_path, streamed=True)


@pytest.mark.long
def test_checkpoints_resume(tmp_path: Path) -> None:
    whole, _ = run_both(trainer(save_strategy="steps", save_steps=2), tmp_path)
    for origin, streamed in (("stock", True), ("streamed", False), ("streamed", True)):
        resumed = run_trl(
            trainer(),
            tmp_path / f"{origin}-{streamed}",
            streamed=streamed,
            script=lambda made, origin=origin: made.train(resume_from_checkpoint=str(tmp_path / origin / "checkpoint-2")),
        )
        for name, weight in whole.weights.items():
            # fp32: what differs is the rounding inside AdamW.
            torch.testing.assert_close(resumed.weights[name], weight, rtol=0, atol=1e-6)
