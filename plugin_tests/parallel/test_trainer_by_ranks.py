"""The stock Trainer by several processes beside its own data-parallel training: losses, norms, checkpoints, evaluation."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import run_command, script
from rank_ends import note_cause, require_prompt_end
from rank_runs import end_of_stock_run, require_success, run_ranks
from safetensors.torch import load_file

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
num_processes: {processes}
num_machines: 1
main_process_port: 0
mixed_precision: 'no'
use_cpu: true
"""
STEPS, SAVED = 6, 3


def die_in_the_second_checkpoint(cause: Path, value: object, path: str, save: Any = torch.save) -> None:
    save(value, path)
    if f"checkpoint-{2 * SAVED}" in str(path):
        note_cause(cause)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The script that is launched: it knows nothing of the plugin."""
    from plain_torch import tiny_model, token_batches
    from transformers import Trainer, TrainingArguments

    options: dict[str, Any] = json.loads(sys.argv[1])
    data = [{"input_ids": ids, "labels": ids} for ids in token_batches(48, batch=1, length=16)]
    data = [{name: value[0] for name, value in row.items()} for row in data]
    arguments = TrainingArguments(
        save_steps=SAVED,
        eval_steps=SAVED,
        eval_strategy="steps",
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        seed=3,
        **options["arguments"],
    )
    if os.environ.get("RANK", "0") == options.get("killed"):
        torch.save = functools.partial(die_in_the_second_checkpoint, Path(arguments.output_dir, "cause"))
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train(resume_from_checkpoint=options.get("resume"))
    trainer.save_model()
    trainer.save_state()
    end_of_stock_run()


def options_of(folder: Path, resume: Path | None, killed: int | None, arguments: dict[str, Any]) -> str:
    """The script's argument."""
    arguments = {"output_dir": str(folder), "max_steps": STEPS, **arguments}
    options: dict[str, Any] = {"arguments": arguments, "resume": resume and str(resume)}
    options["killed"] = None if killed is None else str(killed)
    return json.dumps(options)


def launch(
    folder: Path, kind: str, processes: int, resume: Path | None = None, killed: int | None = None, **arguments: Any
) -> str:
    """What a training with its output in ``folder`` prints: MEGATRAIN, or MULTI_CPU for the stock way. The rank ``killed`` is
    so while it saves the second checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(kind=kind, processes=processes))
    options = options_of(folder, resume, killed, arguments)
    paths = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"}
    if kind == "MEGATRAIN":
        launcher = [script("accelerate"), "launch", "--config", config]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
        paths |= {"ACCELERATE_USE_CPU": "true", "MEGATRAIN_DISABLE": "1"}
    return run_command(*launcher, __file__, options, check=killed is None, **paths)


def train(folder: Path, *how: Any, **arguments: Any) -> list[dict[str, float]]:
    """The log of a training that :func:`launch` runs."""
    launch(folder, *how, **arguments)
    return log_of(folder)


def run_in_forks(
    folder: Path, switch: str, resume: Path | None = None, processes: int = 2, killed: int | None = None, **arguments: Any
) -> list[tuple[int, str]]:
    """Exit status and output of processes that train without a launcher, with a switch of the plugin set to 1. ``killed``: as
    in :func:`launch`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", switch: "1"}
    return run_ranks(__file__, processes, options_of(folder, resume, killed, arguments), **env)


def train_in_forks(folder: Path, *how: Any, **arguments: Any) -> list[dict[str, float]]:
    """The log of a training that :func:`run_in_forks` runs."""
    require_success(run_in_forks(folder, *how, **arguments))
    return log_of(folder)


def log_of(folder: Path) -> list[dict[str, float]]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    kept = ("step", "loss", "grad_norm", "eval_loss")
    return [{name: entry[name] for name in kept if name in entry} for entry in history]


def assert_same_training(folder: Path, stock_folder: Path) -> None:
    """Equal logs and weights, up to other orders of fp32 sums."""
    log, stock_log = log_of(folder), log_of(stock_folder)
    assert [entry.keys() for entry in log] == [entry.keys() for entry in stock_log]
    for entry, other in zip(log, stock_log, strict=True):
        assert entry == pytest.approx(other, rel=1e-5)
    weights, stock_weights = (load_file(at / "model.safetensors") for at in (folder, stock_folder))
    for name, weight in stock_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("ours")
    return folder, train(folder, "MEGATRAIN", 2, gradient_accumulation_steps=2)


def test_a_trainer_by_two_processes_trains_as_the_stock_one_does(
    ours: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    folder, _ = ours
    train_in_forks(tmp_path, "MEGATRAIN_DISABLE", gradient_accumulation_steps=2)
    assert_same_training(folder, tmp_path)
    files = {file.name for file in (folder / f"checkpoint-{SAVED}").iterdir()}
    assert files >= {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"}


def test_a_resumed_training_by_two_processes_goes_on_with_the_same_bits(
    ours: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    folder, log = ours
    checkpoint = folder / f"checkpoint-{SAVED}"
    resumed = train_in_forks(tmp_path, "MEGATRAIN_ACTIVE", resume=checkpoint, gradient_accumulation_steps=2)
    assert resumed == log
    weights, other_weights = (load_file(at / "model.safetensors") for at in (folder, tmp_path))
    assert all(torch.equal(weights[name], weight) for name, weight in other_weights.items())


def test_checkpoints_of_states_on_the_devices_are_those_of_states_on_the_host(
    ours: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    folder, log = ours
    how: dict[str, Any] = {"gradient_accumulation_steps": 2, "megatrain_config": {"placement": {"device_states": -1}}}
    assert train_in_forks(tmp_path / "whole", "MEGATRAIN_ACTIVE", **how) == log
    checkpoint = f"checkpoint-{SAVED}"
    states = [torch.load(at / checkpoint / "optimizer.pt")["state"] for at in (folder, tmp_path / "whole")]
    for key, entry in states[0].items():
        assert all(torch.equal(states[1][key][name], value) for name, value in entry.items())
    assert train_in_forks(tmp_path / "resumed", "MEGATRAIN_ACTIVE", resume=tmp_path / "whole" / checkpoint, **how) == log


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_training_goes_on_from_the_checkpoint_before_the_one_that_a_killed_rank_was_saving(
    killed: int, tmp_path: Path
) -> None:
    results = run_in_forks(tmp_path, "MEGATRAIN_ACTIVE", killed=killed)
    require_prompt_end(tmp_path / "cause")
    assert all(status != 0 for status, _ in results)
    output = results[1 - killed][1]
    assert f"rank {killed} (process " in output
    assert "it was killed" in output
    assert [at.name for at in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{SAVED}"]
    log = train_in_forks(tmp_path, "MEGATRAIN_ACTIVE", resume=tmp_path / f"checkpoint-{SAVED}")
    assert log[-1]["step"] == STEPS


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_what_a_launcher_prints_names_the_rank_that_was_killed(killed: int, tmp_path: Path) -> None:
    output = launch(tmp_path, "MEGATRAIN", 2, killed=killed)
    assert f"rank {killed} (process " in output
    assert "it was killed" in output


@pytest.mark.long
def test_checkpoints_are_exchanged_with_the_stock_trainer(ours: tuple[Path, list[dict[str, float]]], tmp_path: Path) -> None:
    checkpoint, how = f"checkpoint-{SAVED}", {"gradient_accumulation_steps": 2}
    train_in_forks(tmp_path / "stock", "MEGATRAIN_DISABLE", **how)
    train_in_forks(tmp_path / "stock, resumed", "MEGATRAIN_DISABLE", resume=ours[0] / checkpoint, **how)
    assert_same_training(ours[0], tmp_path / "stock, resumed")
    train_in_forks(tmp_path / "resumed", "MEGATRAIN_ACTIVE", resume=tmp_path / "stock" / checkpoint, **how)
    assert_same_training(tmp_path / "resumed", tmp_path / "stock")


@pytest.mark.long
def test_checkpoints_are_resumed_by_other_numbers_of_processes_as_the_stock_trainer_resumes_them(tmp_path: Path) -> None:
    checkpoint = None
    for hop, processes in enumerate((1, 2, 4, 1)):
        folder, stock_folder = tmp_path / str(hop), tmp_path / f"{hop} stock"
        how: dict[str, Any] = {"resume": checkpoint, "processes": processes, "max_steps": (hop + 1) * SAVED}
        log = train_in_forks(folder, "MEGATRAIN_ACTIVE", **how)
        assert [entry["step"] for entry in log if "grad_norm" in entry] == list(range(1, how["max_steps"] + 1))
        train_in_forks(stock_folder, "MEGATRAIN_DISABLE", **how)
        assert_same_training(folder, stock_folder)
        checkpoint = folder / f"checkpoint-{how['max_steps']}"


@pytest.mark.long
def test_the_best_checkpoint_is_loaded_by_all_processes(tmp_path: Path) -> None:
    train(tmp_path, "MEGATRAIN", 2, load_best_model_at_end=True, save_total_limit=1, metric_for_best_model="eval_loss")
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    best = Path(state["best_model_checkpoint"])
    weights, best_weights = (load_file(at / "model.safetensors") for at in (tmp_path, best))
    assert all(torch.equal(weights[name], weight) for name, weight in best_weights.items())


if __name__ == "__main__":
    main()
