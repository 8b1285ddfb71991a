"""Options of the Trainer and calls of Accelerate by two processes, beside stock data parallelism. One script has all."""

from __future__ import annotations

import gc
import itertools
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import common_arguments, end_of_stock_run, padded, require_success, run_ranks

RANKS = 2
Found = list[dict[str, float]]

OPTIONS: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing_factor": 0.2},
    "cosine schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "neftune": {"neftune_noise_alpha": 5.0},
    "group by length": {"train_sampling_strategy": "group_by_length"},
    "tokens not averaged": {"average_tokens_across_devices": False},
    "metrics of an uneven evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3},
    "early stopping": {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    | {"load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 0.1},
    "predict": {},
}
"""Of the Trainer."""


def metrics(predicted: Any) -> dict[str, float]:
    return {"rows": float(len(predicted.predictions)), "size": float(abs(predicted.predictions).sum() / 1e3)}


def logged(trainer: Any) -> Found:
    kept = ("loss", "grad_norm", "eval_loss", "eval_rows", "eval_size", "reward", "kl", "completions/mean_length")
    entries = [{name: float(entry[name]) for name in kept if name in entry} for entry in trainer.state.log_history]
    return [entry for entry in entries if entry]


def size_of(accelerator: Any, model: torch.nn.Module) -> dict[str, float]:
    """The sum of all weights that ``get_state_dict`` returns."""
    state = accelerator.get_state_dict(model)
    return {"weights": sum(value.double().abs().sum().item() for value in state.values())}


def train_with(option: str, folder: str) -> Found:
    from plain_torch import tiny_model, token_batches
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    lengths = itertools.cycle([9, 24, 16, 5, 30])
    data = [{"input_ids": ids[0, : next(lengths)].tolist()} for ids in token_batches(64, batch=1)]
    arguments = TrainingArguments(**{**common_arguments(folder), **OPTIONS[option]})
    trainer = Trainer(
        model=tiny_model(),
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:11],
        data_collator=padded,
        compute_metrics=metrics if "metrics" in option or option == "predict" else None,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)] if option == "early stopping" else None,
    )
    trainer.train()
    found = logged(trainer)
    if option == "predict":
        found.append({name: trainer.predict(data[:7]).metrics[f"test_{name}"] for name in ("loss", "rows", "size")})
    return [*found, size_of(trainer.accelerator, trainer.model)]


def reward_modelling(folder: str) -> Found:
    from plain_torch import tiny_config
    from transformers import Qwen2ForSequenceClassification
    from trl import RewardConfig, RewardTrainer
    from trl_runs import preferences, tokenizer

    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(tiny_config(num_labels=1, pad_token_id=0))
    arguments = RewardConfig(**common_arguments(folder), bf16=False)
    trainer = RewardTrainer(model=model, args=arguments, train_dataset=preferences(32), processing_class=tokenizer())
    trainer.train()
    return logged(trainer)


def lengths_of(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


def grpo(folder: str) -> Found:
    from plain_torch import tiny_model
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl_runs import prompts, tokenizer

    if os.environ["RANK"] == "0":
        tiny_model().save_pretrained(f"{folder}/model")  # where the reference's weights are read from
    torch.distributed.barrier()
    few = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": False}
    arguments = GRPOConfig(**{**common_arguments(folder), **few}, num_generations=4, max_completion_length=8, beta=0.1)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    how = {"args": arguments, "train_dataset": prompts(16), "processing_class": tokenizer()}
    trainer = GRPOTrainer(model=model, reward_funcs=lengths_of, **how)
    trainer.train()
    return logged(trainer)


def accelerator_of(**settings: Any) -> Any:
    from accelerate import Accelerator

    import megatrain_accelerate

    if "MEGATRAIN_DISABLE" not in os.environ:
        megatrain_accelerate.enable()
    return Accelerator(cpu=True, **settings)


def two_models(folder: str) -> Found:
    from plain_torch import tiny_model, token_batches

    accelerator, found = accelerator_of(), []
    models = [tiny_model(), tiny_model(seed=5)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for model, lr in zip(models, (1e-2, 3e-3), strict=True)]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    for step, ids in enumerate(token_batches(12)[accelerator.process_index :: RANKS]):
        losses = [model(input_ids=ids, labels=ids).loss for model in (first, second)]
        for loss in losses if step % 2 else [losses[0] + losses[1]]:
            accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(first.parameters(), 0.7))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append({"first": losses[0].item(), "second": losses[1].item(), "norm": norm})
    return [*found, size_of(accelerator, first), size_of(accelerator, second)]


def bare_loop(folder: str) -> Found:
    """It saves its state, goes on, and goes on from there again; frees its memory, and trains another model."""
    from plain_torch import tiny_model, token_batches

    accelerator, found = accelerator_of(gradient_accumulation_steps=2), []
    data = [{"input_ids": ids[0]} for ids in token_batches(22, batch=1)]
    for seed in range(2):
        model = tiny_model(seed)
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
        for again in range(2):
            for step, batch in enumerate(loader):
                ids = batch["input_ids"]
                with accelerator.accumulate(model):
                    loss = model(input_ids=ids, labels=ids).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                gathered = accelerator.gather_for_metrics(loss.detach().expand(len(ids)))
                rows = accelerator.gather_for_metrics(ids)
                found.append({"loss": loss.item(), "of all": float(gathered.sum()), "rows": len(rows), "ids": int(rows.sum())})
                if again == 0 and step == 3:
                    accelerator.save_state(f"{folder}/state{seed}")
            time.sleep(0.3 * accelerator.process_index)  # the first process goes on to load while the second one reads
            found.append(size_of(accelerator, model))
            accelerator.load_state(f"{folder}/state{seed}")
        prepared = weakref.ref(model)
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        del loss
        gc.collect()
        assert prepared() is None
    return found


CASES: dict[str, Callable[[str], Found]] = {
    **{option: lambda folder, option=option: train_with(option, folder) for option in OPTIONS},
    "reward modelling": reward_modelling,
    "grpo": grpo,
    "two models": two_models,
    "a bare loop": bare_loop,
}


def main() -> None:
    """What each process does: goes through all cases."""
    from accelerate.state import AcceleratorState, GradientState

    found = {}
    for place, (name, run) in enumerate(CASES.items()):
        print(name, flush=True)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        torch.manual_seed(0)
        found[name] = run(f"{sys.argv[1]}/{place}")
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    end_of_stock_run()


def runs_with(switch: str, folder: Path) -> list[dict[str, Found]]:
    """What each rank has found, with a switch of the plugin set to 1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", switch: "1"}
    require_success(run_ranks(__file__, RANKS, folder, **env))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return runs_with("MEGATRAIN_ACTIVE", tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return runs_with("MEGATRAIN_DISABLE", tmp_path_factory.mktemp("stock"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_processes_do_what_stock_data_parallelism_does(
    ours: list[dict[str, Found]], stock: list[dict[str, Found]], case: str
) -> None:
    for found, other in zip(ours, stock, strict=True):
        assert [entry.keys() for entry in found[case]] == [entry.keys() for entry in other[case]]
        assert len(found[case]) > 2
        for entry, expected in zip(found[case], other[case], strict=True):
            assert entry == pytest.approx(expected, rel=2e-5)  # fp32: other orders of sums


if __name__ == "__main__":
    main()
