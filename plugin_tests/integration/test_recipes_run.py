"""Every recipe trains or measures a small model on the CPU, as its first lines say, and does so streamed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from fresh_process import run_command, script
from recipe_files import SENTENCES, question, write_decoder, write_encoder, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
CPU = RECIPES / "megatrain_cpu.yaml"
STEPS = 2


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("models") / "decoder")


def launch(recipe: str, *args: object) -> str:
    """`accelerate launch` of a recipe's script."""
    command = [script("accelerate"), "launch", "--config", CPU, RECIPES / recipe, "--report_to", "none"]
    return run_command(*command, "--disable_tqdm", "true", *map(str, args), cwd=RECIPES.parent)


def trl(command: str, yaml: str, model: Path, data: Path, output: Path, *args: object) -> list[dict[str, float]]:
    """A TRL command with a recipe's yaml, made small; returns the log of the run."""
    small = ("--max_steps", STEPS, "--logging_steps", 1, "--save_strategy", "steps", "--save_steps", STEPS)
    on_cpu = ("--use_cpu", "--bf16", "false", "--dtype", "float32", "--learning_rate", "1e-2", "--warmup_steps", 0)
    config = ("--config", RECIPES / yaml, "--accelerate_config", CPU)
    files = ("--model_name_or_path", model, "--dataset_name", data, "--output_dir", output)
    run_command(script("trl"), command, *map(str, (*config, *files, *small, *on_cpu, *args)), cwd=RECIPES.parent)
    log = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in log if "loss" in entry]
    assert len(steps) == STEPS
    assert all(entry["megatrain/h2d_gb"] > 0 for entry in steps), "layers must have been streamed"
    return steps


def weights(path: Path) -> dict[str, list[float]]:
    """All tensors of a safetensors file."""
    return {name: tensor.tolist() for name, tensor in load_file(path).items()}


def changed(before: Path, after: Path) -> set[str]:
    """Names of the weights that differ between two saved models."""
    old, new = weights(before / "model.safetensors"), weights(after / "model.safetensors")
    assert old.keys() == new.keys()
    return {name for name in old if old[name] != new[name]}


def conversations() -> list[dict[str, object]]:
    return [
        {"messages": [{"role": "user", "content": question(n)}, {"role": "assistant", "content": f"{n + 3}."}]}
        for n in range(16)
    ]


@pytest.mark.long
def test_classification_trains_and_measures_accuracy(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder")
    rows = [{"text": text, "label": "even" if number % 2 == 0 else "odd"} for number, text in enumerate(SENTENCES)]
    data = write_rows(tmp_path / "data", train=rows[:32], test=rows[32:40])
    batch = ("--per_device_train_batch_size", 4, "--max_steps", 3, "--learning_rate", "1e-2", "--logging_steps", 1)
    files = ("--model_name_or_path", encoder, "--dataset_name", data, "--output_dir", tmp_path / "out")
    launch("classify.py", *files, *batch, "--save_strategy", "no", "--use_cpu")
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert sum("loss" in entry for entry in log) == 3
    assert all(entry["megatrain/h2d_gb"] > 0 for entry in log if "loss" in entry)
    assert 0 <= json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_accuracy"] <= 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": "even", "1": "odd"}
    assert len(changed(encoder, tmp_path / "out")) > 40


@pytest.mark.slow
def test_evaluation_measures_the_perplexity_of_a_token(decoder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", test=[{"text": text} for text in SENTENCES])
    files = ("--model_name_or_path", decoder, "--dataset_name", data, "--output_dir", tmp_path / "out")
    printed = launch("evaluate.py", *files, "--block_size", 32, "--use_cpu")
    found = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    tokenizer, model = AutoTokenizer.from_pretrained(decoder), AutoModelForCausalLM.from_pretrained(decoder)
    tokens = [token for text in SENTENCES for token in tokenizer(text)["input_ids"]]
    blocks = torch.tensor(tokens[: len(tokens) // 32 * 32]).view(-1, 32)
    with torch.no_grad():
        loss = float(model(input_ids=blocks, labels=blocks).loss)
    # fp32 in other batches: 1e-6 of the loss.
    assert found["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert "megatrain: adopting 3 layers" in printed


@pytest.mark.long
def test_full_sft_trains_every_weight(decoder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", train=conversations())
    small = ("--per_device_train_batch_size", 2, "--max_length", 64)
    trl("sft", "full_sft.yaml", decoder, data, tmp_path / "out", *small)
    assert changed(decoder, tmp_path / "out") == set(weights(decoder / "model.safetensors"))


@pytest.mark.long
def test_lora_trains_and_saves_the_adapter_alone(decoder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", train=conversations())
    small = ("--per_device_train_batch_size", 2, "--max_length", 64)
    trl("sft", "lora_sft.yaml", decoder, data, tmp_path / "out", *small)
    adapter = weights(tmp_path / "out" / "adapter_model.safetensors")
    assert len(adapter) == 3 * 7 * 2, "three layers of seven linear modules"
    assert all(any(map(any, value)) for value in adapter.values()), "lora_B is zero before the first step"
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.long
def test_dpo_trains_against_its_reference(decoder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": question(n), "chosen": f"{n + 3}.", "rejected": f"{n + 4}."} for n in range(16)]
    data = write_rows(tmp_path / "data", train=rows)
    steps = trl("dpo", "dpo.yaml", decoder, data, tmp_path / "out", "--per_device_train_batch_size", 2, "--max_length", 64)
    # Policy and reference are equal before the first step: log 2.
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-4)
    assert steps[1]["loss"] != steps[0]["loss"]
    assert changed(decoder, tmp_path / "out")


@pytest.mark.long
def test_grpo_generates_scores_and_trains(decoder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} and 3 make", "answer": n + 3} for n in range(16)]
    data = write_rows(tmp_path / "data", train=rows)
    small = ("--per_device_train_batch_size", 4, "--num_generations", 4, "--max_completion_length", 6)
    steps = trl("grpo", "grpo.yaml", decoder, data, tmp_path / "out", *small)
    assert all("rewards/last_number_is_right/mean" in step for step in steps)


@pytest.mark.long
def test_continued_pretraining_goes_on_from_a_saved_model(decoder: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("\n".join(SENTENCES * 3))
    files = ("--model_name_or_path", decoder, "--train_file", file, "--output_dir", tmp_path / "out")
    small = ("--block_size", 32, "--max_steps", STEPS, "--per_device_train_batch_size", 2, "--learning_rate", "1e-2")
    launch("train_causal_lm.py", *files, *small, "--save_strategy", "no", "--use_cpu", "--max_eval_blocks", 2)
    assert changed(decoder, tmp_path / "out") == set(weights(decoder / "model.safetensors"))
