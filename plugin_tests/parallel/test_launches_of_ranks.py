"""However processes are launched, they train together: by ``accelerate launch``, by torchrun, and as forks of a notebook by
``notebook_launcher`` or, on CPUs, ``debug_launcher``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fresh_process import run_command, script

STEPS = 3
ARGUMENTS = f"--max_steps {STEPS} --per_device_train_batch_size 2 --logging_steps 1 --save_strategy no --report_to none"
ON_A_CPU = "--use_cpu true --disable_tqdm true --dataloader_pin_memory false"
LAUNCHES: dict[str, list[str | Path]] = {
    "accelerate": [script("accelerate"), "launch", "--num_processes", "2", "--megatrain", "--cpu", __file__, "a script"],
    "torchrun": [script("torchrun"), "--nproc_per_node", "2", "--standalone", __file__, "a script", "--megatrain"],
    "notebook_launcher": [sys.executable, __file__, "notebook_launcher"],
    "debug_launcher": [sys.executable, __file__, "debug_launcher"],
}


def train(flags: list[str]) -> None:
    """What each process does: a script with these flags, or the cell of the notebook that trains."""
    from plain_torch import tiny_model, token_batches
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    from megatrain_accelerate.engine import engine_of

    data = [{"input_ids": ids[0], "labels": ids[0]} for ids in token_batches(16, batch=1, length=16)]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(flags)
    trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=data)
    trainer.train()
    engine = engine_of(trainer.model)
    assert engine is not None
    assert engine.runtime.ranks is not None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = Path(arguments.output_dir) / str(trainer.args.process_index)
    found.write_text(f"{trainer.accelerator.num_processes} {losses}")


def main() -> None:
    """The script, or the notebook's cells."""
    how, *flags = sys.argv[1:]
    if how == "a script":
        train(flags)
        return
    import accelerate

    import megatrain_accelerate

    megatrain_accelerate.enable()
    getattr(accelerate, how)(train, (flags,), num_processes=2)


@pytest.mark.long
@pytest.mark.parametrize("launch", LAUNCHES)
def test_processes_that_are_launched_train_as_ranks_of_one_training(launch: str, tmp_path: Path) -> None:
    env = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"}
    if launch == "notebook_launcher":
        env["ACCELERATE_USE_CPU"] = "true"
    flags = f"{ARGUMENTS} {ON_A_CPU} --output_dir {tmp_path}".split()
    output = run_command(*LAUNCHES[launch], *flags, **env)
    found = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert found[0] == found[1]
    assert found[0].startswith("2 [")
    assert found[0].count(".") == STEPS
    if "launcher" in launch:
        assert "Warning" not in output


if __name__ == "__main__":
    main()
