"""The stock Trainer with and without the plugin, fp32 on the CPU: evaluation, checkpoints, ways of using it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_runs import (
    Record,
    assert_same_run,
    assert_same_weights,
    close,
    examples,
    run_both,
    run_trainer,
    snapshot,
    tiny_llama,
)
from transformers import Trainer, TrainerCallback
from versions import older

from megatrain_accelerate.errors import StateError

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------- evaluation, prediction, checkpoints


def token_accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean())}


def with_evaluation(model: nn.Module) -> Record:
    return {
        "eval_dataset": examples(7, seed=9),
        "compute_metrics": token_accuracy,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_evaluation_between_steps(tmp_path: Path, max_grad_norm: float) -> None:
    stock, _ = run_both(
        tiny_llama,
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        max_grad_norm=max_grad_norm,
        options=with_evaluation,
    )
    assert len(stock.logged("eval_loss")) == 4
    assert len(set(stock.logged("eval_loss"))) == 4
    assert len(stock.logged("eval_accuracy")) == 4


def test_evaluation_before_training_and_prediction_after_it(tmp_path: Path) -> None:
    losses, predictions = [], []

    def script(trainer: Trainer) -> None:
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        predictions.append(trainer.predict(examples(5, seed=11)))
        losses.append(predictions[-1].metrics["test_loss"])
        losses.append(trainer.evaluate()["eval_loss"])

    run_both(tiny_llama, tmp_path, script=script, options=with_evaluation)
    stock, streamed = losses[:3], losses[3:]
    assert len(set(stock)) == 3
    assert all(close(*pair) for pair in zip(streamed, stock, strict=True))
    assert (predictions[0].predictions == predictions[1].predictions).all()


def test_predicted_logits_without_training(tmp_path: Path) -> None:
    logits = []
    for streamed in (False, True):
        run_trainer(
            tiny_llama,
            tmp_path,
            streamed=streamed,
            script=lambda trainer: logits.append(trainer.predict(examples(5)).predictions),
        )
    assert torch.equal(torch.from_numpy(logits[0]), torch.from_numpy(logits[1]))


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    # A rate at which the loss rises: the best checkpoint isn't the last.
    stock, streamed = run_both(
        tiny_llama,
        tmp_path,
        learning_rate=0.1,
        dataset=examples(2),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        options=with_evaluation,
    )
    for run in (stock, streamed):
        best = Path(run.trainer.state.best_model_checkpoint)
        assert best.is_dir()
        assert best.name != "checkpoint-6"
        assert_same_weights(run.weights, snapshot(run.trainer.model.from_pretrained(best)), tolerance=0.0)


@pytest.mark.skipif(older("torch", "2.6"), reason="at this rate torch 2.5's other rounding in AdamW outgrows every tolerance")
def test_training_goes_on_from_the_best_model(tmp_path: Path) -> None:
    # The weights that were loaded must be the masters of the steps that follow, moments and all.
    def script(trainer: Trainer) -> None:
        trainer.train()
        trainer.train()

    run_both(
        tiny_llama,
        tmp_path,
        script=script,
        learning_rate=0.1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        options=with_evaluation,
    )


@pytest.mark.parametrize("save_only_model", [False, True])
def test_checkpoints_hold_the_same_files_and_weights(tmp_path: Path, save_only_model: bool) -> None:
    stock, streamed = run_both(
        tiny_llama, tmp_path, save_strategy="steps", save_steps=3, save_only_model=save_only_model, save_total_limit=1
    )
    folders = [Path(run.trainer.args.output_dir) for run in (stock, streamed)]
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in folders]
    assert names[0] == names[1]
    assert ("checkpoint-6/optimizer.pt" in names[0]) == (not save_only_model)
    saved = [stock.trainer.model.from_pretrained(folder / "checkpoint-6") for folder in folders]
    assert_same_weights(snapshot(saved[1]), snapshot(saved[0]))
    assert_same_weights(snapshot(saved[1]), streamed.weights, tolerance=0.0)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_checkpoint_of_either_run_resumes_in_the_other(tmp_path: Path, first: bool, second: bool) -> None:
    settings: Record = {"save_strategy": "steps", "save_steps": 3}
    whole = run_trainer(tiny_llama, tmp_path / "whole", streamed=False, **settings)
    run_trainer(tiny_llama, tmp_path / "first", streamed=first, **settings)
    resumed = run_trainer(
        tiny_llama,
        tmp_path / "second",
        streamed=second,
        script=lambda trainer: trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3")),
        **settings,
    )
    assert resumed.logged("learning_rate") == whole.logged("learning_rate")
    assert all(close(*pair) for pair in zip(resumed.logged("loss"), whole.logged("loss"), strict=True))
    assert_same_weights(resumed.weights, whole.weights)


# ---------------------------------------------------------------- ways of using a Trainer


def test_two_trainings_of_one_trainer(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> None:
        trainer.train()
        trainer.args.max_steps = 4
        trainer.train()

    stock, _ = run_both(tiny_llama, tmp_path, script=script)
    assert stock.trainer.state.global_step == 4


def test_two_trainings_with_and_without_clipping(tmp_path: Path) -> None:
    # The second one may step in backward, the first may not.
    def script(trainer: Trainer) -> None:
        trainer.train()
        trainer.args.max_grad_norm = 0.0
        trainer.train()
        trainer.args.max_grad_norm = 0.5
        trainer.train()

    run_both(tiny_llama, tmp_path, script=script)


def test_two_trainers_of_one_model(tmp_path: Path) -> None:
    runs = []
    for streamed in (False, True):
        first = run_trainer(tiny_llama, tmp_path, streamed=streamed)
        runs.append(run_trainer(lambda run=first: run.trainer.model, tmp_path, streamed=streamed, dataset=examples(seed=8)))
    assert_same_run(runs[1], runs[0])


def test_model_init(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> None:
        trainer.train()
        trainer.train()

    run_both(tiny_llama, tmp_path, script=script, options=lambda model: {"model": None, "model_init": lambda: tiny_llama()})


def test_frozen_parts_stay(tmp_path: Path) -> None:
    def partly_frozen() -> Any:
        model = tiny_llama()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(False)
        return model

    stock, _ = run_both(partly_frozen, tmp_path, weight_decay=0.1)
    assert not any("embed" in name or "layers.0" in name or "layers.1.mlp" in name for name in stock.moved)
    assert any("layers.1.self_attn" in name for name in stock.moved)


class CustomLoss(Trainer):
    """A Trainer whose loss looks at the logits."""

    def compute_loss(self, model: Any, inputs: Record, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten()) + 1e-3 * logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def test_subclass_with_a_loss_of_its_own(tmp_path: Path) -> None:
    run_both(tiny_llama, tmp_path, trainer_class=CustomLoss, gradient_accumulation_steps=2)


class Meddler(TrainerCallback):
    """Reads gradients before each step and weights after it, and writes both once."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            self.seen.append(float(parameter.grad.abs().sum()))
            if "layers.1" in name and state.global_step == 2:
                parameter.grad.mul_(0.5)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += [float(weight.abs().sum()) for weight in kwargs["model"].state_dict().values()]
        if state.global_step == 4:
            with torch.no_grad():
                for name, parameter in kwargs["model"].named_parameters():
                    if "layers.2.mlp" in name or "lm_head" in name:
                        parameter.mul_(0.9)


@pytest.mark.parametrize("settings", [{}, {"step_schedule": "deferred"}])
def test_callbacks_that_read_and_write_gradients_and_weights(tmp_path: Path, settings: dict[str, str]) -> None:
    meddlers = [Meddler(), Meddler()]
    free = iter(meddlers)
    stock, _ = run_both(
        tiny_llama,
        tmp_path,
        max_grad_norm=0.0,
        settings=settings,
        options=lambda model: {"callbacks": [next(free)]},
    )
    assert len(meddlers[0].seen) == len(meddlers[1].seen) > 0
    assert all(close(ours, theirs, 1e-5) for ours, theirs in zip(meddlers[1].seen, meddlers[0].seen, strict=True))
    alone = run_trainer(tiny_llama, tmp_path, streamed=False, max_grad_norm=0.0)
    assert alone.logged("loss") != stock.logged("loss")


def test_gradients_changed_after_their_step_was_taken_in_backward_are_an_error(tmp_path: Path) -> None:
    changes = {"max_grad_norm": 0.0, "settings": {"step_schedule": "backward"}}
    with pytest.raises(StateError, match="step_schedule to 'deferred'"):
        run_trainer(tiny_llama, tmp_path, streamed=True, options=lambda model: {"callbacks": [Meddler()]}, **changes)
