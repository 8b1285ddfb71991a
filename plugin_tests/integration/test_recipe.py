"""The recipe's scripts, each in a process of its own, under the stock Trainer."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from forked_process import run_forked
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from megatrain_accelerate.config import MegatrainConfig

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 3


def run_script(name: str, *args: str | Path, **env: str) -> str:
    """What a recipe prints without the plugin."""
    command = [sys.executable, str(RECIPES / name), *map(str, args)]
    result = subprocess.run(
        command,
        env={**os.environ, "MEGATRAIN_DISABLE": "1", "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{name} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def train(output_dir: Path, *args: str | Path, **env: str) -> None:
    """A few steps of training."""
    run_script(
        "train_causal_lm.py",
        *(
            "--output_dir",
            output_dir,
            "--use_cpu",
            "--model_size",
            "tiny",
            "--block_size",
            "32",
            "--max_text_mib",
            "0.5",
        ),
        *("--max_steps", str(STEPS), "--per_device_train_batch_size", "2", "--max_eval_blocks", "2"),
        *("--learning_rate", "3e-3", "--logging_steps", "1", "--save_strategy", "no", "--disable_tqdm", "true", *args),
        **env,
    )


def logged(output_dir: Path, key: str) -> list[float]:
    """The values of one key in the run's log."""
    log = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in log if key in entry]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that logs to W&B without a key."""
    path = tmp_path_factory.mktemp("run")
    environment = {"PYTHONHASHSEED": "1", "WANDB_DIR": str(path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        train(path, "--report_to", "wandb", **environment)
    return path


def test_run_logs_and_saves(run_dir: Path) -> None:
    assert json.loads((run_dir / "train_results.json").read_text())["parameters"] == 6_232_640
    assert len(logged(run_dir, "loss")) == STEPS
    assert len(logged(run_dir, "eval_loss")) == 1
    assert (run_dir / "model.safetensors").is_file()


def test_wandb_without_a_key_is_offline(run_dir: Path) -> None:
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.long
def test_second_run_has_the_same_tokenizer_and_losses(run_dir: Path, tmp_path: Path) -> None:
    train(tmp_path, PYTHONHASHSEED="2")
    assert (tmp_path / "tokenizer.json").read_bytes() == (run_dir / "tokenizer.json").read_bytes()
    assert logged(tmp_path, "loss") == logged(run_dir, "loss")
    assert logged(tmp_path, "eval_loss") == logged(run_dir, "eval_loss")


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # twice\n", "naïve 漢字 🚀 \x00", "  leading, trailing  "])
def test_saved_tokenizer_gives_every_text_back(run_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run_dir)
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_sample_continues_the_prompt(run_dir: Path) -> None:
    printed = run_forked(
        RECIPES / "sample.py", "--model", run_dir, "--prompt", "def read", "--max_new_tokens", "20", MEGATRAIN_DISABLE="1"
    )
    sample = printed[printed.rindex("def read") :]  # behind what transformers says of the model's files
    assert len(sample) > len("def read\n")


@pytest.mark.long
def test_saved_model_is_trained_on_from_a_local_file(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text("".join(json.dumps({"note": f"{i} times {i} is {i * i}. " * 20}) + "\n" for i in range(100)))
    output_dir = tmp_path / "out"
    train(
        output_dir,
        *("--model_name_or_path", run_dir, "--train_file", file, "--text_column", "note", "--eval_fraction", "0.2"),
        HF_HOME=str(tmp_path / "hf"),
    )
    assert (output_dir / "tokenizer.json").read_bytes() == (run_dir / "tokenizer.json").read_bytes()
    assert len(logged(output_dir, "loss")) == STEPS


def write_log(output_dir: Path, log: list[dict[str, float]]) -> None:
    (output_dir / "trainer_state.json").write_text(json.dumps({"log_history": log}))


def report(monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> None:
    """Runs the script in this process: it imports nothing of the plugin."""
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, args)])
    runpy.run_path(str(RECIPES / "report.py"), run_name="__main__")


def test_report_shows_the_newest_figures_and_draws_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = [{"step": step, "loss": 5.0 - step, "megatrain/host_moments_gib": 40.0 + step} for step in range(4)]
    write_log(tmp_path, [*log, {"step": 4, "eval_loss": 2.0, "megatrain/gpu_slots_gib": 0.5, "megatrain/brand_new": 7.0}])
    report(monkeypatch, tmp_path, "--require-falling-loss")
    printed = capsys.readouterr().out
    assert "43.000 GiB" in printed
    assert "40.000" not in printed
    assert "512.000 MiB" in printed
    assert "brand_new" in printed
    assert str(tmp_path / "loss.png") in printed
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_report_leaves_out_what_is_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(
        tmp_path, [{"step": 1, "loss": 5.0, "megatrain/h2d_gb": 0.0002, "megatrain/kept_layers": 0, "megatrain/d2h_gb": 2.0}]
    )
    report(monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert "GPU to host" in printed
    assert "host to GPU" not in printed
    assert "The plan" not in printed


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"gpu_slots_gib": 0.25, "gpu_resident_gib": 0.5, "gpu_peak_gib": 0.0}, "768.0 MiB for weights and gradients"),
        ({"gpu_slots_gib": 0.25, "gpu_peak_gib": 5.5}, "GPU memory of this training: 5.5 GiB at the peak"),
    ],
)
def test_report_says_what_device_memory_was_taken_and_what_plain_training_takes(
    figures: dict[str, float],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_log(tmp_path, [{"step": 1, "loss": 5.0, **{f"megatrain/{key}": value for key, value in figures.items()}}])
    (tmp_path / "train_results.json").write_text(json.dumps({"parameters": 2**30}))
    report(monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert said in printed
    assert "Plain training: 16.0 GiB" in printed


def two_runs(tmp_path: Path, distance: float) -> tuple[Path, Path]:
    """A run of four steps, and another of the first two whose losses differ."""
    folders = (tmp_path / "ours", tmp_path / "stock")
    for folder, losses in zip(folders, ([7.0, 6.5, 6.0, 5.5], [7.0, 6.5 + distance]), strict=True):
        folder.mkdir()
        write_log(folder, [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    return folders


@pytest.mark.parametrize(("distance", "said"), [(0.0, "0, every bit is the same"), (2e-6, "2e-06")])
def test_report_says_how_far_the_stock_runs_losses_are_apart(
    distance: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, stock = two_runs(tmp_path, distance)
    report(monkeypatch, ours, "--losses", ours, stock, "--title", "6M parameters")
    printed = capsys.readouterr().out
    assert f"with the same seed: largest difference of 2 losses: {said}\n" in printed
    assert (ours / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("distance", [0.1, float("nan")])
def test_report_fails_where_the_stock_runs_losses_are_others(
    distance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, stock = two_runs(tmp_path, distance)
    with pytest.raises(SystemExit, match="not the stock Trainer's"):
        report(monkeypatch, ours, "--losses", ours, stock)


@pytest.mark.parametrize(
    ("gpu_gib", "host_gib", "size"),
    [(0, 512, "tiny"), (12, 128, "1b"), (24, 128, "3b"), (24, 24, "1b"), (80, 125, "7b"), (140, 125, "7b"), (140, 500, "14b")],
)
def test_the_automatic_model_is_too_large_for_plain_training_where_the_host_has_room(
    gpu_gib: int, host_gib: int, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import train_causal_lm

    assert train_causal_lm.automatic_size(gpu_gib * 2**30, host_gib * 2**30) == size
    assert train_causal_lm.free_host_bytes() > 0


def test_a_new_models_values_are_drawn_one_module_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import train_causal_lm

    config = Qwen2Config(**train_causal_lm.MODEL_PRESETS["tiny"])
    left: set[nn.Module] = set()
    most_there: list[int] = []
    initialise, to_host = Qwen2ForCausalLM._init_weights, nn.Module.cpu

    def noting(model: nn.Module, module: nn.Module) -> None:
        there = (p for one in model.modules() if one not in left for p in one.parameters(recurse=False) if not p.is_meta)
        most_there.append(sum(p.numel() for p in there))
        initialise(model, module)

    monkeypatch.setattr(Qwen2ForCausalLM, "_init_weights", noting)
    monkeypatch.setattr(nn.Module, "cpu", lambda module: left.add(module) or to_host(module))
    model = train_causal_lm.random_model(config, "cpu")  # which stands in for a GPU
    most = max(most_there)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert most == config.vocab_size * config.hidden_size == max(p.numel() for p in stock.parameters())
    assert left == set(model.modules())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for ours, theirs in ((model.named_buffers(), stock.named_buffers()), (model.named_parameters(), stock.named_parameters())):
        for (name, value), (stock_name, stock_value) in zip(ours, theirs, strict=True):
            assert (name, value.dtype, value.shape) == (stock_name, stock_value.dtype, stock_value.shape)
            if value.dim() == 1:  # biases, norms, and the buffers, which are the same in each model
                assert torch.equal(value, stock_value)
            else:
                assert value.std().item() == pytest.approx(config.initializer_range, rel=0.02)


def test_report_says_that_the_plugin_was_off(run_dir: Path) -> None:
    assert "the plugin was off" in run_script("report.py", run_dir)


@pytest.mark.parametrize("losses", [[5.0, 5.0, 4.9, 4.9], [5.0, float("nan")], [5.0]], ids=["flat", "nan", "single"])
def test_report_fails_where_a_falling_loss_is_required_and_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float]
) -> None:
    write_log(tmp_path, [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    # With a text for its status Python ends with 1 and prints it to stderr.
    with pytest.raises(SystemExit, match="the loss did not fall"):
        report(monkeypatch, tmp_path, "--require-falling-loss")


@pytest.mark.parametrize("name", ["megatrain.yaml", "megatrain_cpu.yaml"])
def test_yaml_holds_the_defaults(name: str) -> None:
    settings = yaml.safe_load((RECIPES / name).read_text())
    assert settings["distributed_type"] == "MEGATRAIN"
    assert settings.get("use_cpu", False) == (name == "megatrain_cpu.yaml")
    assert MegatrainConfig.from_mapping(settings["megatrain_config"]) == MegatrainConfig()
