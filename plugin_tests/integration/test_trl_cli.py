"""TRL's command line with the plugin: its scripts are launched with our yaml, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from fresh_process import run_command, script
from safetensors.torch import load_file
from trl_runs import conversations, preferences, prompts_and_completions, tiny_model, tokenizer

pytest.importorskip("trl", exc_type=ImportError)

YAML = Path(__file__).parents[2] / "recipes" / "megatrain_cpu.yaml"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str | Path]:
    """Of TRL's scripts, for a local model and local data for SFT."""
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    write_data(tmp_path, prompts_and_completions())
    settings = {
        "model_name_or_path": tmp_path / "model",
        "dataset_name": tmp_path / "data",
        "max_steps": "2",
        "logging_steps": "1",
        "bf16": "False",
        "report_to": "none",
        "save_strategy": "no",
        "learning_rate": "1e-3",
        "per_device_train_batch_size": "2",
    }
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def write_data(tmp_path: Path, rows: Dataset) -> None:
    """The data set that the command names."""
    (tmp_path / "data").mkdir(exist_ok=True)
    rows.to_json(tmp_path / "data" / "train.jsonl")


def run(tmp_path: Path, output: str, *command: str | Path) -> str:
    home = {"HF_HOME": str(tmp_path / "home"), "PYTHONWARNINGS": "ignore"}
    return run_command(*command, "--output_dir", tmp_path / output, cwd=tmp_path, **home)


def test_trl_sft_streams_with_our_yaml(tmp_path: Path, arguments: list[str | Path]) -> None:
    output = run(tmp_path, "ours", script("trl"), "sft", "--accelerate_config", YAML, *arguments)
    assert "megatrain: adopting 3 layers" in output
    assert "'mean_token_accuracy'" in output
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "ours"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(after[name], weight) for name, weight in before.items() if "proj" in name)


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda: (script("accelerate"), "launch", "--config", YAML, "-m", "trl.scripts.sft"), id="accelerate"),
        pytest.param(lambda: (script("python"), "-m", "trl.scripts.sft", "--use_cpu", "--megatrain"), id="flag"),
    ],
)
def test_other_ways_give_what_trl_alone_gives(tmp_path: Path, arguments: list[str | Path], how: object) -> None:
    stock = run(tmp_path, "stock", script("python"), "-m", "trl.scripts.sft", "--use_cpu", *arguments)
    assert "megatrain: " not in stock
    assert callable(how)
    assert "megatrain: adopting 3 layers" in run(tmp_path, "ours", *how(), *arguments)
    ours, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "stock"))
    for name, weight in expected.items():
        # fp32: what differs is the rounding inside AdamW.
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)


LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "up_proj")


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "metric", "further"),
    [
        ("dpo", "rewards/margins", ()),
        ("dpo", "rewards/margins", LORA),
        ("reward", "mean_reward", ()),
        ("grpo", "completions/mean_length", ("--num_generations", "2", "--max_completion_length", "8")),
    ],
    ids=["dpo", "dpo-lora", "reward", "grpo"],
)
def test_other_trainers_stream_with_our_yaml(
    tmp_path: Path, arguments: list[str | Path], command: str, metric: str, further: tuple[str, ...]
) -> None:
    write_data(tmp_path, preferences())
    if command == "grpo":
        chats = conversations().map(lambda row: {"prompt": row["messages"][:1]}, remove_columns="messages")
        write_data(tmp_path, chats)
        further = (*further, "--reward_funcs", "think_format_reward")
    output = run(tmp_path, "ours", script("trl"), command, "--accelerate_config", YAML, *arguments, *further)
    assert "megatrain: adopting 3 layers" in output
    assert f"'{metric}'" in output
    written = "adapter_model.safetensors" if LORA[0] in further else "model.safetensors"
    assert (tmp_path / "ours" / written).exists()
