"""Every other argument of the stock Trainer that touches model, data, evaluation or saving: the same run as without us."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_runs import (
    Padding,
    Record,
    assert_same_weights,
    close,
    examples,
    make_arguments,
    plugin,
    ragged_examples,
    run_both,
    run_trainer,
    snapshot,
    tiny_llama,
)
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from versions import OLD_CHECKPOINTING_NAMES

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers import proxy

pytestmark = pytest.mark.usefixtures("profiled_once")


def only(arguments: Record) -> str:
    return "-".join(arguments)


def skip_unknown(*names: str) -> None:
    """Skips a test of arguments that the installed transformers has not."""
    unknown = set(names) - {field.name for field in dataclasses.fields(TrainingArguments)}
    if unknown:
        pytest.skip(f"this transformers has no {', '.join(sorted(unknown))}")


# ---------------------------------------------------------------- what is the same


@pytest.mark.parametrize(
    "arguments",
    [
        {"data_seed": 11},
        {"train_sampling_strategy": "sequential"},
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3, "dataloader_persistent_workers": True},
        {"accelerator_config": {"split_batches": True, "even_batches": False, "use_seedable_sampler": False}},
        {"accelerator_config": {"dispatch_batches": True}},
        {"num_train_epochs": 1.5, "max_steps": -1},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
        {"debug": "underflow_overflow"},
        {"tf32": False},
        pytest.param({"skip_memory_metrics": False}, marks=pytest.mark.long),
        {"logging_nan_inf_filter": False, "logging_steps": 3},
    ],
    ids=only,
)
@pytest.mark.filterwarnings(OLD_CHECKPOINTING_NAMES)
def test_arguments_of_training(tmp_path: Path, arguments: Record) -> None:
    skip_unknown(*arguments)
    run_both(tiny_llama, tmp_path, **arguments)


@pytest.fixture
def no_lasting_determinism(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformers sets the process to deterministic and leaves it so."""
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "ASCEND_LAUNCH_BLOCKING"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("no_lasting_determinism")
def test_full_determinism(tmp_path: Path) -> None:
    run_both(tiny_llama, tmp_path, full_determinism=True)


@pytest.mark.parametrize("length_column_name", ["length", "tokens"])
def test_batches_of_similar_length(tmp_path: Path, length_column_name: str) -> None:
    skip_unknown("train_sampling_strategy")
    records = [{**record, length_column_name: len(record["input_ids"])} for record in ragged_examples(14)]
    run_both(
        tiny_llama,
        tmp_path,
        dataset=records,
        train_sampling_strategy="group_by_length",
        length_column_name=length_column_name,
        options=lambda model: {"data_collator": Padding("right")},
    )


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "galore_adamw", "stable_adamw", "lion_32bit", "adamw_torch_8bit"])
@pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning")
def test_optimizers_of_other_packages_where_installed(tmp_path: Path, optim: str) -> None:
    package = {
        "schedule_free_adamw": "schedulefree",
        "galore_adamw": "galore_torch",
        "stable_adamw": "optimi",
        "lion_32bit": "bitsandbytes",
        "adamw_torch_8bit": "torchao",
    }[optim]
    pytest.importorskip(package, reason=f"{package} isn't installed")
    galore: Record = {"optim_target_modules": ["mlp"], "optim_args": "rank=4,update_proj_gap=2,scale=0.1"}
    run_both(tiny_llama, tmp_path, optim=optim, max_steps=3, **(galore if "galore" in optim else {}))


# ---------------------------------------------------------------- evaluation


def counts(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    inputs = prediction.inputs if prediction.inputs is not None else prediction.predictions
    losses = prediction.losses if prediction.losses is not None else [0.0]
    return {"batches": float(len(prediction.predictions)), "inputs": float(len(inputs)), "loss_sum": float(sum(losses))}


@pytest.mark.parametrize(
    "arguments",
    [
        {"eval_accumulation_steps": 1, "eval_delay": 1, "num_train_epochs": 2, "max_steps": -1, "eval_strategy": "epoch"},
        {"include_for_metrics": ["inputs", "loss"]},
        {"batch_eval_metrics": True},
        {"eval_do_concat_batches": False},
        {"eval_use_gather_object": True, "per_device_eval_batch_size": 3},
    ],
    ids=only,
)
def test_arguments_of_evaluation(tmp_path: Path, arguments: Record) -> None:
    skip_unknown(*arguments)
    settings: Record = {"eval_strategy": "steps", "eval_steps": 3, **arguments}
    stock, _ = run_both(
        tiny_llama,
        tmp_path,
        options=lambda model: {"eval_dataset": examples(5, seed=9), "compute_metrics": counts},
        **settings,
    )
    assert stock.logged("eval_batches")


def test_prediction_of_the_loss_only(tmp_path: Path) -> None:
    stock, _ = run_both(
        tiny_llama,
        tmp_path,
        prediction_loss_only=True,
        eval_strategy="steps",
        eval_steps=3,
        options=lambda model: {"eval_dataset": {"a": examples(4, seed=9), "b": examples(3, seed=10)}},
    )
    assert len(stock.logged("eval_a_loss")) == len(stock.logged("eval_b_loss")) == 2


def test_columns_and_label_names(tmp_path: Path) -> None:
    # With unused columns kept, the collator has to drop what the model doesn't take.
    records = [{**record, "weight": 0.5, "kept": record["labels"]} for record in examples()]

    def collate(rows: list[Record]) -> Record:
        return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}

    for arguments in ({"label_names": ["labels"]}, {"remove_unused_columns": False}):
        run_both(
            tiny_llama,
            tmp_path,
            dataset=records,
            eval_strategy="steps",
            eval_steps=3,
            options=lambda model: {"data_collator": collate, "eval_dataset": records[:4]},
            **arguments,
        )


def test_full_evaluation_in_bf16_spares_the_masters(tmp_path: Path) -> None:
    losses: list[float] = []

    def script(trainer: Trainer) -> None:
        trainer.train()
        trainer.evaluate(examples(4, seed=9))  # also brings the weights up to date
        before, masters = snapshot(trainer.model), masters_of(trainer.model)
        losses.append(trainer.evaluate(examples(4, seed=9))["eval_loss"])
        if masters:
            assert all(torch.equal(after, masters[name]) for name, after in masters_of(trainer.model).items())
            assert_same_weights(snapshot(trainer.model), before, tolerance=0.0)
            assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())

    for streamed in (False, True):
        run_trainer(tiny_llama, tmp_path, streamed=streamed, script=script, bf16=True, bf16_full_eval=True)
    # bf16 has 8 bits of mantissa.
    assert close(losses[1], losses[0], 1e-2)


def masters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """fp32 masters of a streamed model by unit and name; nothing for a plain one."""
    engine = engine_of(model)
    if engine is None:
        return {}
    engine.drain()
    return {f"{unit.name}.{state.name}": unit.read_master(state) for unit in engine.runtime.units for state in unit.states}


def test_casting_a_prepared_model_changes_no_layer_and_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    proxy.warn_once.cache_clear()  # it is said once a process

    def script(trainer: Trainer) -> None:
        trainer.train()
        masters = masters_of(trainer.model)
        places = [parameter.data_ptr() for parameter in trainer.model.model.layers.parameters()]
        trainer.model.to(dtype=torch.bfloat16)
        assert [parameter.data_ptr() for parameter in trainer.model.model.layers.parameters()] == places
        after = masters_of(trainer.model)
        assert all(torch.equal(after[name], master) for name, master in masters.items() if "layers" in name)

    run_trainer(tiny_llama, tmp_path, streamed=True, script=script)
    assert "cast the model before accelerator.prepare()" in caplog.text


# ---------------------------------------------------------------- saving and resuming


def test_metric_for_the_best_model_and_early_stopping(tmp_path: Path) -> None:
    # The loss rises at this rate, so that patience ends the training.
    stock, streamed = run_both(
        tiny_llama,
        tmp_path,
        learning_rate=0.1,
        max_steps=10,
        dataset=examples(2),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        load_best_model_at_end=True,
        metric_for_best_model="eval_negative",
        greater_is_better=True,
        options=lambda model: {
            "eval_dataset": examples(4, seed=9),
            "compute_metrics": lambda prediction: {"negative": float(prediction.predictions.mean())},
            "preprocess_logits_for_metrics": lambda logits, labels: (
                -nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
            ),
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=3)],
        },
    )
    assert stock.trainer.state.global_step < 10
    assert streamed.trainer.state.best_global_step == stock.trainer.state.best_global_step
    assert Path(streamed.trainer.state.best_model_checkpoint).name == Path(stock.trainer.state.best_model_checkpoint).name


@pytest.mark.parametrize(
    "arguments",
    [{"ignore_data_skip": True}, {"restore_callback_states_from_checkpoint": True, "save_on_each_node": True}],
    ids=only,
)
def test_arguments_of_resuming(tmp_path: Path, arguments: Record) -> None:
    skip_unknown(*arguments)

    def script(trainer: Trainer) -> None:
        trainer.train()
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=9))
        trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-3"))

    _, streamed = run_both(
        tiny_llama,
        tmp_path,
        script=script,
        save_strategy="steps",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        metric_for_best_model="eval_loss",
        options=lambda model: {
            "eval_dataset": examples(4, seed=9),
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=9)],
        },
        **arguments,
    )
    # Before those of trackers, as at the begin.
    names = [type(callback).__name__ for callback in streamed.trainer.callback_handler.callbacks]
    assert names.index("MegatrainCallback") == 1


class Preempted(TrainerCallback):
    """The cluster asks for the machine during step 3."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_checkpoint_at_preemption_is_the_stock_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unknown("enable_jit_checkpoint")
    from transformers import trainer_jit_checkpoint

    class Now:
        """A timer that doesn't wait for a kill that might follow."""

        def __init__(self, interval: float, function: Any, *args: Any, **kwargs: Any) -> None:
            self._function = function

        def start(self) -> None:
            self._function()

    monkeypatch.setattr(trainer_jit_checkpoint.threading, "Timer", Now)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        runs = run_both(tiny_llama, tmp_path, enable_jit_checkpoint=True, options=lambda model: {"callbacks": [Preempted()]})
    finally:
        signal.signal(signal.SIGTERM, handler)
    names = [sorted(path.name for path in Path(run.trainer.args.output_dir).glob("checkpoint-*/*")) for run in runs]
    assert names[0] == names[1]
    assert "optimizer.pt" in names[0]


def refuse_large(module: nn.Module, tensors: tuple[torch.Tensor, ...]) -> None:
    if module.training and tensors[0].shape[0] > 6:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")


class RefusingBackward(torch.autograd.Function):
    """Passes a tensor on; its backward needs more memory than there is for a large batch."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.shape[0] > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        return gradient


@pytest.mark.parametrize(("place", "max_grad_norm"), [("forward", 1.0), ("backward", 1.0), ("backward", 0.0)])
def test_running_out_of_memory_finds_a_smaller_batch(tmp_path: Path, place: str, max_grad_norm: float) -> None:
    def tight_llama() -> nn.Module:
        model = tiny_llama()
        if place == "forward":
            model.model.layers[2].mlp.register_forward_pre_hook(refuse_large)
        else:  # when the later layers' backward is over
            model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: RefusingBackward.apply(output))
        return model

    stock, streamed = run_both(
        tight_llama,
        tmp_path,
        auto_find_batch_size=True,
        per_device_train_batch_size=8,
        max_grad_norm=max_grad_norm,
        max_steps=-1,
        num_train_epochs=1,
    )
    assert stock.trainer._train_batch_size == streamed.trainer._train_batch_size < 8


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"torch_compile": True}, r"swaps weights under the model.*compile_layers"),
        ({"torch_compile_backend": "inductor"}, r"torch_compile_backend='inductor'.*compile_layers"),
        ({"torch_compile_mode": "max-autotune"}, r"torch_compile_mode='max-autotune'.*compile_layers"),
        ({"bf16_full_eval": True}, r"without bf16=True.*Use bf16=True"),
        ({"optim": "lomo"}, r"'lomo'.*gradients never pass.*'adamw_torch'"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["mlp"]}, r"_layerwise'.*or 'galore_adamw'"),
        ({"parallelism_config": 2}, r"asks for 2 processes.*remove it"),
    ],
    ids=lambda value: only(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_honoured_are_refused_at_the_start(tmp_path: Path, arguments: Record, message: str) -> None:
    skip_unknown(*arguments)
    if "parallelism_config" in arguments:
        from accelerate.parallelism_config import ParallelismConfig

        arguments = {"parallelism_config": ParallelismConfig(tp_size=arguments["parallelism_config"])}
    with plugin(), pytest.raises(UnsupportedError, match=message):
        make_arguments(tmp_path, **arguments)
