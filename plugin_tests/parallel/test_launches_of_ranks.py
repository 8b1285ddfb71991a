"""Processes that a notebook's launcher forks train together: ``notebook_launcher``, on CPUs ``debug_launcher``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fresh_process import run_command

STEPS = 3


def train(folder: str) -> None:
    """What each process does: the cell of the notebook that trains."""
    from plain_torch import tiny_model, token_batches
    from transformers import Trainer, TrainingArguments

    from megatrain_accelerate.engine import engine_of

    data = [{"input_ids": ids[0], "labels": ids[0]} for ids in token_batches(16, batch=1, length=16)]
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=data)
    trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    assert engine.runtime.ranks is not None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (Path(folder) / str(trainer.args.process_index)).write_text(f"{trainer.accelerator.num_processes} {losses}")


def main() -> None:
    """The notebook's cells."""
    from accelerate import debug_launcher

    import megatrain_accelerate

    megatrain_accelerate.enable()
    debug_launcher(train, (sys.argv[1],), num_processes=2)


@pytest.mark.long
def test_processes_that_a_notebook_forks_train_as_ranks_of_one_training(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"}
    output = run_command(sys.executable, __file__, tmp_path, **paths)
    found = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert found[0] == found[1]
    assert found[0].startswith("2 [")
    assert found[0].count(".") == STEPS
    assert "Warning" not in output


if __name__ == "__main__":
    main()
