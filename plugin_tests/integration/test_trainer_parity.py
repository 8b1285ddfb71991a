"""The stock Trainer with and without the plugin, fp32 on the CPU: same losses, norms, rates, metrics and weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairwise
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from trainer_runs import Padding, Record, TrainerRun, close, examples, ragged_examples, run_both, run_trainer, tiny_llama
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaMLP
from versions import OLD_CHECKPOINTING_NAMES, older, require_arguments

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    "arguments",
    [
        {"optim": "adamw_torch"},
        {"optim": "adamw_torch_fused"},
        {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-4},
        {"optim": "adafactor"},
        {"optim": "sgd", "learning_rate": 1e-2},
        {"optim": "sgd", "optim_args": None, "max_grad_norm": 0.0},
        {"optim": "adagrad"},
        {"optim": "rmsprop"},
    ],
    ids=lambda arguments: "-".join(map(str, arguments.values())),
)
def test_optimizers(tmp_path: Path, arguments: Record) -> None:
    run_both(tiny_llama, tmp_path, weight_decay=0.1, **arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.Adam(groups, lr=1e-3, weight_decay=0.1),
        lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
        lambda groups: torch.optim.AdamW(groups, lr=1e-3, maximize=True),
        lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-3), foreach=False),
        lambda groups: torch.optim.NAdam(groups, lr=1e-3),
        lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
        lambda groups: torch.optim.Adadelta(groups, lr=1.0),
    ],
    ids=["adam_l2", "amsgrad", "maximize", "tensor_lr", "nadam", "nesterov", "adadelta"],
)
def test_optimizers_that_the_script_makes(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def options(model: nn.Module) -> Record:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        groups = [{"params": decayed}, {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 3e-3}]
        return {"optimizers": (make(groups), None)}

    run_both(tiny_llama, tmp_path, options=options)


def test_weight_decay_spares_norms_and_biases(tmp_path: Path) -> None:
    decayed, _ = run_both(tiny_llama, tmp_path, weight_decay=0.5)
    plain = run_trainer(tiny_llama, tmp_path, streamed=False)
    groups = decayed.trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert not torch.equal(decayed.weights["lm_head.weight"], plain.weights["lm_head.weight"])


# ---------------------------------------------------------------- schedulers


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
        {"lr_scheduler_type": "polynomial"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    ],
    ids=lambda arguments: arguments["lr_scheduler_type"],
)
def test_schedulers(tmp_path: Path, arguments: Record) -> None:
    stock, _ = run_both(tiny_llama, tmp_path, **arguments)
    assert len(set(stock.logged("learning_rate"))) > 1 or arguments["lr_scheduler_type"] == "constant"


def test_reduce_lr_on_plateau(tmp_path: Path) -> None:
    stock, _ = run_both(
        tiny_llama,
        tmp_path,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 10.0},
        eval_strategy="steps",
        eval_steps=1,
        options=lambda model: {"eval_dataset": examples(4, seed=9)},
    )
    assert stock.logged("learning_rate")[-1] < stock.logged("learning_rate")[0]


# ---------------------------------------------------------------- accumulation and clipping


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0, 1e-3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_clipping_and_accumulation(tmp_path: Path, max_grad_norm: float, accumulation: int) -> None:
    settings: Record = {
        "gradient_accumulation_steps": accumulation,
        "optim": "sgd",
        "learning_rate": 0.1 if max_grad_norm != 1e-3 else 100.0,
        "num_train_epochs": 2,
        "max_steps": -1,
    }
    stock, _ = run_both(tiny_llama, tmp_path, max_grad_norm=max_grad_norm, **settings)
    if max_grad_norm or not older("transformers", "5.0"):  # transformers 4 logs no norm without clipping
        assert max(stock.logged("grad_norm")) > 1.0
    if max_grad_norm:
        unclipped = run_trainer(tiny_llama, tmp_path, streamed=False, max_grad_norm=0.0, **settings)
        assert unclipped.logged("loss") != stock.logged("loss"), "clipping must be at work"


@pytest.mark.parametrize(
    ("placement", "max_grad_norm", "accumulation"),
    pairwise([{"device_layers": 1}, {"device_layers": -1}], [1.0, 0.0], [1, 4]),
    ids=str,
)
def test_adamw_with_states_on_the_device(tmp_path: Path, placement: Record, max_grad_norm: float, accumulation: int) -> None:
    run_both(
        tiny_llama,
        tmp_path,
        dataset=examples(14),
        settings=placement,
        max_grad_norm=max_grad_norm,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        max_steps=-1,
    )


@pytest.mark.parametrize(
    ("schedule", "max_grad_norm", "accumulation"), pairwise(["auto", "deferred", "serial"], [1.0, 0.0], [1, 4])
)
def test_adamw_in_every_schedule(tmp_path: Path, schedule: str, max_grad_norm: float, accumulation: int) -> None:
    # 7 micro-batches an epoch: with 4 to a step the last step of each epoch accumulates 3.
    stock, _ = run_both(
        tiny_llama,
        tmp_path,
        dataset=examples(14),
        settings={"step_schedule": schedule},
        max_grad_norm=max_grad_norm,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        max_steps=-1,
    )
    # Transformers 4.46 counts an epoch's whole steps only.
    steps_of_four = 2 if older("transformers", "4.48") else 4
    assert stock.trainer.state.global_step == (14 if accumulation == 1 else steps_of_four)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_padded_batches_and_their_token_counts(tmp_path: Path, side: str, accumulation: int) -> None:
    stock, _ = run_both(
        tiny_llama,
        tmp_path,
        dataset=ragged_examples(14),
        options=lambda model: {"data_collator": Padding(side)},
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        max_steps=-1,
    )
    assert stock.trainer.model_accepts_loss_kwargs, "the loss must be averaged over num_items_in_batch"


# ---------------------------------------------------------------- models


def tiny_gpt2(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def tiny_bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            num_labels=3,
        )
    )


def test_tied_embeddings(tmp_path: Path) -> None:
    stock, streamed = run_both(lambda: tiny_llama(tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in stock.weights
    model = streamed.trainer.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_attention_dropout_is_the_same_in_both(tmp_path: Path) -> None:
    stock, _ = run_both(lambda: tiny_llama(attention_dropout=0.3), tmp_path)
    assert stock.logged("loss") != run_trainer(tiny_llama, tmp_path, streamed=False).logged("loss")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gpt2_with_all_its_dropouts(tmp_path: Path, accumulation: int) -> None:
    # SGD: the key biases' true gradient is zero, see tiny_llama().
    settings: Record = {"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": accumulation}
    stock, _ = run_both(tiny_gpt2, tmp_path, **settings)
    plain = run_trainer(lambda: tiny_gpt2(0.0), tmp_path, streamed=False, **settings)
    assert stock.logged("loss") != plain.logged("loss")


def test_sequence_classification_with_an_encoder(tmp_path: Path) -> None:
    def classification(count: int, seed: int) -> list[Record]:
        return [{**record, "labels": int(record["input_ids"][0]) % 3} for record in examples(count, seed=seed)]

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    stock, _ = run_both(
        tiny_bert,
        tmp_path,
        dataset=classification(12, 5),
        optim="sgd",
        learning_rate=0.1,
        eval_strategy="epoch",
        options=lambda model: {"eval_dataset": classification(7, 6), "compute_metrics": accuracy},
    )
    assert len(stock.logged("eval_accuracy")) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"label_smoothing_factor": 0.2},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"neftune_noise_alpha": 5.0},
        {"average_tokens_across_devices": False},
        {"logging_steps": 2, "logging_first_step": True},
        {"dataloader_drop_last": True, "num_train_epochs": 2, "max_steps": -1},
        {"torch_empty_cache_steps": 1},
        {"include_num_input_tokens_seen": True},
        {"auto_find_batch_size": True},
    ],
    ids=lambda arguments: "-".join(arguments),
)
@pytest.mark.filterwarnings(OLD_CHECKPOINTING_NAMES)
def test_training_arguments(tmp_path: Path, arguments: Record) -> None:
    require_arguments(arguments)
    run_both(tiny_llama, tmp_path, **arguments)


@pytest.mark.filterwarnings(OLD_CHECKPOINTING_NAMES)
@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointing_under_either_name_runs_no_layer_more_often(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_arguments([name])
    runs, own = [], LlamaMLP.forward

    def counted(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        runs.append("fake" if isinstance(x, FakeTensor) else x.device.type)
        return own(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    run_trainer(tiny_llama, tmp_path / "without", streamed=True)
    without = runs.count("cpu")
    runs.clear()
    stock, _ = run_both(tiny_llama, tmp_path, **{name: True})
    assert stock.trainer.args.gradient_checkpointing
    assert any(getattr(module, "gradient_checkpointing", False) for module in stock.trainer.model.modules())
    assert runs.count("cpu") - 2 * 3 * 6 == without, "stock runs each of 3 layers twice in each of 6 steps"


@pytest.mark.parametrize("use_cache", [True, False])
def test_use_cache(tmp_path: Path, use_cache: bool) -> None:
    require_arguments(["use_cache"])
    _, streamed = run_both(
        tiny_llama,
        tmp_path,
        use_cache=use_cache,
        eval_strategy="steps",
        eval_steps=2,
        options=lambda model: {"eval_dataset": examples(4, seed=9)},
    )
    assert streamed.trainer.model.config.use_cache == use_cache


def test_label_smoothing_and_neftune_change_the_loss(tmp_path: Path) -> None:
    plain = run_trainer(tiny_llama, tmp_path, streamed=False).logged("loss")
    for arguments in ({"label_smoothing_factor": 0.2}, {"neftune_noise_alpha": 5.0}):
        assert run_trainer(tiny_llama, tmp_path, streamed=False, **arguments).logged("loss") != plain


# ---------------------------------------------------------------- bf16


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_bf16_losses_are_close(tmp_path: Path, accumulation: int, max_grad_norm: float) -> None:
    settings: Record = {"bf16": True, "gradient_accumulation_steps": accumulation, "max_grad_norm": max_grad_norm}
    stock: TrainerRun = run_trainer(tiny_llama, tmp_path, streamed=False, **settings)
    streamed = run_trainer(tiny_llama, tmp_path, streamed=True, **settings)
    # Autocast keeps fp32 weights for norms and embeddings, the engine rounds them: 8 bits of mantissa.
    losses = zip(streamed.logged("loss"), stock.logged("loss"), strict=True)
    assert all(close(ours, theirs, 1e-2) for ours, theirs in losses)
    norms = zip(streamed.logged("grad_norm"), stock.logged("grad_norm"), strict=True)
    assert all(close(ours, theirs, 5e-2) for ours, theirs in norms)
    assert streamed.moved == stock.moved
