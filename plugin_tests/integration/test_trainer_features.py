"""What scripts build around the stock Trainer: generation, data of other shapes, attention, kernels; same as without us."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from trainer_runs import (
    Padding,
    Record,
    assert_same_weights,
    close,
    examples,
    ragged_examples,
    run_both,
    run_trainer,
    tiny_llama,
)
from transformers import (
    DataCollatorWithFlattening,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from megatrain_accelerate.engine import engine_of

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------- generation


class Sampler(TrainerCallback):
    """Writes a text every second step, from prompts of two lengths padded on the left; draws random numbers of its own."""

    def __init__(self, texts: list[torch.Tensor], fetches: list[int]) -> None:
        self._texts, self._fetches = texts, fetches

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % 2:
            return
        rows = [{"input_ids": row["input_ids"][:length], "labels": row["labels"][:length]} for row, length in _prompts()]
        batch = Padding("left")(rows)
        engine = engine_of(model)
        before = engine.runtime.meter.counters.weight_fetches if engine is not None else 0
        model.eval()
        self._texts.append(
            model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=8,
                min_new_tokens=8,
                do_sample=state.global_step == 4,
                pad_token_id=0,
            )
        )
        model.train()
        if engine is not None:
            self._fetches.append(engine.runtime.meter.counters.weight_fetches - before)


def _prompts() -> list[tuple[Record, int]]:
    return list(zip(examples(2, seed=4), (5, 9), strict=True))


@pytest.mark.parametrize(("setting", "fetches"), [("stream", 3 * 8), ("resident", 3)])
def test_generation_between_steps_and_training_after_it(tmp_path: Path, setting: str, fetches: int) -> None:
    texts: list[list[torch.Tensor]] = [[], []]
    counted: list[int] = []
    free = iter(texts)
    # One layer lives on the device, and three stream from two slots.
    run_both(
        lambda: tiny_llama(num_hidden_layers=4),
        tmp_path,
        settings={"evaluation_weights": setting, "device_layers": 1},
        options=lambda model: {"callbacks": [Sampler(next(free), counted)]},
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*texts, strict=True))
    assert len(counted) == 3
    # Two slots are filled ahead of time.
    assert all(abs(count - fetches) <= 2 for count in counted)


def tiny_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape: Record = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, dropout_rate=0.0))


def test_evaluation_with_generation_of_an_encoder_decoder(tmp_path: Path) -> None:
    def run(streamed: bool) -> Any:
        found: list[Any] = []

        def script(trainer: Trainer) -> None:
            trainer.train()
            found.append(trainer.predict(examples(3, seed=9)))

        arguments = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path / str(streamed)),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            max_steps=4,
            per_device_train_batch_size=2,
            optim="sgd",  # some true gradients are zero, see tiny_llama()
            learning_rate=0.1,
            predict_with_generate=True,
            generation_max_length=8,
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
        )
        metrics: list[float] = []

        def mean_token(prediction: Any) -> dict[str, float]:
            metrics.append(float(prediction.predictions.mean()))
            return {"mean_token": metrics[-1]}

        made = run_trainer(
            tiny_t5,
            tmp_path,
            streamed=streamed,
            script=script,
            trainer_class=Seq2SeqTrainer,
            options=lambda model: {
                "args": arguments,
                "eval_dataset": examples(4, seed=7),
                "compute_metrics": mean_token,
            },
            settings={"evaluation_weights": "resident"},
        )
        assert len(metrics) == 3
        return found[0].predictions, metrics, made

    theirs, ours = run(False), run(True)
    assert (theirs[0] == ours[0]).all()
    assert theirs[1] == ours[1]
    assert_same_weights(ours[2].weights, theirs[2].weights)


@pytest.mark.parametrize("setting", ["stream", "resident"])
def test_evaluation_holds_weights_for_its_batches_and_training_is_the_same(tmp_path: Path, setting: str) -> None:
    fetches: list[int] = []

    class Counter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self._count(model)

        def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self._count(model)

        def _count(self, model: Any) -> None:
            engine = engine_of(model)
            if engine is not None:
                fetches.append(engine.runtime.meter.counters.weight_fetches)

    run_both(
        lambda: tiny_llama(num_hidden_layers=5),
        tmp_path,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        settings={"evaluation_weights": setting},
        options=lambda model: {"eval_dataset": examples(12, seed=9), "callbacks": [Counter()]},
    )
    batches = 6
    in_evaluation = fetches[2] - fetches[1]
    assert abs(in_evaluation - (5 if setting == "resident" else 5 * batches)) <= 2


# ---------------------------------------------------------------- control


class Conductor(TrainerCallback):
    """Decides itself when to log, evaluate, save and stop."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_log = state.global_step in (1, 3)
        control.should_evaluate = control.should_save = state.global_step == 2
        control.should_training_stop = state.global_step == 4
        return control


def test_a_callback_that_decides_when_to_evaluate_save_and_stop(tmp_path: Path) -> None:
    stock, streamed = run_both(
        tiny_llama,
        tmp_path,
        logging_strategy="no",
        options=lambda model: {"eval_dataset": examples(4, seed=9), "callbacks": [Conductor()]},
    )
    assert stock.trainer.state.global_step == 4
    for run in (stock, streamed):
        assert [path.name for path in Path(run.trainer.args.output_dir).glob("checkpoint-*")] == ["checkpoint-2"]


# ---------------------------------------------------------------- data


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Texts of several lengths without an end that is known."""

    def __iter__(self) -> Iterator[Record]:
        return iter(ragged_examples(30))


def test_a_data_set_that_is_only_iterated_over(tmp_path: Path) -> None:
    run_both(
        tiny_llama,
        tmp_path,
        dataset=Stream(),
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        options=lambda model: {"data_collator": Padding("right"), "eval_dataset": Stream()},
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_packed_texts_that_position_ids_tell_apart(tmp_path: Path, attention: str, accumulation: int) -> None:
    records = [{name: row.tolist() for name, row in record.items()} for record in ragged_examples(24)]
    stock, _ = run_both(
        lambda: tiny_llama(attn_implementation=attention),
        tmp_path,
        dataset=records,
        per_device_train_batch_size=4,
        max_steps=3,
        gradient_accumulation_steps=accumulation,
        options=lambda model: {"data_collator": DataCollatorWithFlattening()},
    )
    # A text must not see the one before it in its row.
    joined = DataCollatorWithFlattening(return_position_ids=False)
    alone = run_trainer(
        lambda: tiny_llama(attn_implementation=attention),
        tmp_path / "joined",
        streamed=False,
        dataset=records,
        per_device_train_batch_size=4,
        max_steps=3,
        gradient_accumulation_steps=accumulation,
        options=lambda model: {"data_collator": joined},
    )
    assert alone.logged("loss") != stock.logged("loss")


# ---------------------------------------------------------------- attention and kernels


@pytest.mark.parametrize("side", ["left", "right"])
def test_eager_attention_with_padding(tmp_path: Path, side: str) -> None:
    run_both(
        lambda: tiny_llama(attn_implementation="eager"),
        tmp_path,
        dataset=ragged_examples(),
        options=lambda model: {"data_collator": Padding(side)},
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch compiles the mask's function, with warnings of its own
def test_flex_attention_evaluates_alike(tmp_path: Path) -> None:
    # Its backward needs a GPU (plugin_tests/gpu/test_trainer_gpu.py).
    found: list[Any] = []
    for streamed in (False, True):
        run_trainer(
            lambda: tiny_llama(attn_implementation="flex_attention"),
            tmp_path,
            streamed=streamed,
            dataset=ragged_examples(),
            script=lambda trainer: found.append(trainer.predict(ragged_examples(6, seed=3))),
            options=lambda model: {"data_collator": Padding("right")},
            eval_do_concat_batches=False,
        )
    assert close(found[1].metrics["test_loss"], found[0].metrics["test_loss"])
    for theirs, ours in zip(found[0].predictions, found[1].predictions, strict=True):
        assert (theirs == ours).all()


def _liger_stand_in(applied: list[nn.Module]) -> types.ModuleType:
    """A package that replaces forwards of a model's modules as Liger does: of norms, of MLPs, and of the whole model."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.variance_epsilon)

    def mlp(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))

    def causal_lm(self: Any, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(
            input_ids=input_ids, **{k: v for k, v in kwargs.items() if k == "attention_mask"}
        ).last_hidden_state
        # The head's weight is read without calling the head.
        logits = hidden[:, :-1].flatten(0, 1) @ self.lm_head.weight.t()
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return {"loss": loss / (num_items_in_batch if num_items_in_batch is not None else labels[:, 1:].numel())}

    def apply(model: Any, rms_norm: bool = True, swiglu: bool = True, fused_linear_cross_entropy: bool = True) -> None:
        applied.append(model)
        for module in model.modules():
            if rms_norm and type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(norm, module)
            elif swiglu and type(module).__name__.endswith("MLP"):
                module.forward = types.MethodType(mlp, module)
        if fused_linear_cross_entropy:
            model.forward = types.MethodType(causal_lm, model)

    package = types.ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    return package


@pytest.mark.parametrize("config", [None, {"fused_linear_cross_entropy": False}], ids=["all", "without the loss"])
def test_forwards_that_liger_replaces_are_those_that_stream(
    tmp_path: Path, config: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import liger

    applied: list[nn.Module] = []
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", _liger_stand_in(applied))
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)
    run_both(
        tiny_llama,
        tmp_path,
        use_liger_kernel=True,
        liger_kernel_config=config,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        prediction_loss_only=True,
        options=lambda model: {"eval_dataset": examples(4, seed=9)},
    )
    assert len(applied) == 2


class _ScaledInBackward(torch.autograd.Function):
    """A sum whose gradients are made in forward, as a fused loss makes them; backward leaves out a product by one."""

    @staticmethod
    def forward(ctx: Any, losses: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(losses))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (gradient,) = ctx.saved_tensors
        return gradient if torch.equal(grad_outputs[0], torch.tensor(1.0)) else gradient * grad_outputs[0]


def with_a_loss_that_looks_at_its_gradient() -> nn.Module:
    model = tiny_llama()

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any, **kwargs: Any) -> Any:
        losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return _ScaledInBackward.apply(losses) / num_items_in_batch

    model.loss_function = loss
    return model


def test_a_loss_that_looks_at_its_gradient_is_planned_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Liger's does. The Trainer of some versions of transformers hands the count of tokens on as a floating-point number.
    with caplog.at_level("INFO", logger="megatrain_accelerate"):
        _, streamed = run_both(with_a_loss_that_looks_at_its_gradient, tmp_path, settings={"gpu_memory_gib": 1.0})
    assert "can't be predicted" not in caplog.text
    engine = engine_of(streamed.trainer.model)
    assert engine is not None
    assert engine.device_plan.current.predicted_bytes > 0
