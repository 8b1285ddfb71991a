"""What scripts do with several processes, beside stock data parallelism: adapters, tied weights, TRL, bare loops."""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import run_command
from rank_runs import common_arguments, end_of_stock_run, padded

USES = ("lora", "tied weights", "no clipping", "sft", "dpo", "a bare loop")


def trainer_of(use: str, folder: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from plain_torch import tiny_model, token_batches
    from transformers import Trainer, TrainingArguments
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
    from trl_runs import preferences, texts, tokenizer

    common = common_arguments(folder) | ({"max_grad_norm": 0.0} if use == "no clipping" else {})
    model = tiny_model(tie_word_embeddings=use == "tied weights")
    if use == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    if use == "sft":
        arguments = SFTConfig(**common, bf16=False)
        return SFTTrainer(model=model, args=arguments, train_dataset=texts(32), processing_class=tokenizer())
    if use == "dpo":
        pair = {"model": model, "ref_model": copy.deepcopy(model), "processing_class": tokenizer()}
        return DPOTrainer(args=DPOConfig(**common, bf16=False), train_dataset=preferences(32), **pair)
    lengths = itertools.cycle([9, 24, 16, 5, 30])
    data = [{"input_ids": ids[0, : next(lengths)].tolist()} for ids in token_batches(64, batch=1)]
    return Trainer(model=model, args=TrainingArguments(**common), train_dataset=data, data_collator=padded)


def bare_loop() -> list[Any]:
    """With a schedule and groups, and a first process that evaluates, generates and reads weights alone."""
    from accelerate import Accelerator
    from plain_torch import tiny_model, token_batches

    import megatrain_accelerate

    if "MEGATRAIN_DISABLE" not in os.environ:
        megatrain_accelerate.enable()
    accelerator, model = Accelerator(cpu=True), tiny_model()
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model, optimizer, schedule = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)
    )
    found: list[Any] = []
    for step, ids in enumerate(token_batches(10)[accelerator.process_index :: 2]):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        found.append((loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 0.7))))
        optimizer.step()
        schedule.step()
        if accelerator.is_main_process and step % 2 == 0:
            alone = accelerator.unwrap_model(model)
            with torch.no_grad():
                loss = alone(input_ids=ids, labels=ids).loss.item()
            size = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
            found.append((loss, size, float(alone.generate(ids[:1, :4], max_new_tokens=4, do_sample=False).sum())))
    accelerator.wait_for_everyone()
    return found


def main() -> None:
    """What each process does: the first writes down what it has seen."""
    use, folder = sys.argv[1:]
    if use == "a bare loop":
        found = bare_loop()
    else:
        trainer = trainer_of(use, folder)
        trainer.train()
        found = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    if os.environ["RANK"] == "0":
        Path(folder, "found.json").write_text(json.dumps(found))
    end_of_stock_run()


def seen(use: str, folder: Path, **env: str) -> list[list[float]]:
    folder.mkdir()
    tests = Path(__file__).parents[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    run_command(*launch, __file__, use, folder, ACCELERATE_USE_CPU="true", PYTHONPATH=f"{tests}:{tests.parent}", **env)
    found: list[list[float]] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_two_processes_see_what_stock_data_parallelism_shows(use: str, tmp_path: Path) -> None:
    ours = seen(use, tmp_path / "ours", MEGATRAIN_ACTIVE="1")
    stock = seen(use, tmp_path / "stock", MEGATRAIN_DISABLE="1")
    assert len(ours) == len(stock) > 3
    for entry, other in zip(ours, stock, strict=True):
        assert entry == pytest.approx(other, rel=2e-5)  # fp32: other orders of sums


if __name__ == "__main__":
    main()
