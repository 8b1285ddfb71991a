"""The tiled loss under models that change their logits, adapters, autocast and the stock Trainer."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import attach
from peft import LoraConfig, get_peft_model
from plain_torch import tiny_model, token_batches
from torch import nn
from trainer_runs import Padding, TrainerRun, assert_same_run, ragged_examples, run_trainer, tiny_llama
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from megatrain_accelerate.loss import tiled_cross_entropy
from megatrain_accelerate.loss.lazy_logits import LazyLogits

pytestmark = pytest.mark.usefixtures("small_tiles", "profiled_once")
without_predictions = pytest.mark.usefixtures("without_predictions")

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def gemma2() -> nn.Module:
    # Weights wide enough for the cap to bend the logits.
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0, initializer_range=0.3))


def granite() -> nn.Module:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=6.0, tie_word_embeddings=False))


def cohere() -> nn.Module:
    return CohereForCausalLM(CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logit_scale=0.25))


def tied_gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def tied_t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


MODELS = {"gemma2": gemma2, "granite": granite, "cohere": cohere, "gpt2": tied_gpt2, "t5": tied_t5}


@dataclasses.dataclass
class OneStep:
    """A forward and backward through the engine."""

    loss: torch.Tensor
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def one_step(make: Callable[[], nn.Module], *, bf16: bool = False, tiled: bool = True, **inputs: Any) -> OneStep:
    torch.manual_seed(0)
    model = make().train()
    engine = attach(model, bf16=bf16, tiled_loss=tiled)
    ids = token_batches(1, batch=2, length=19)[0]
    labels = ids.clone()
    labels[:, :4] = -100
    outputs = model(input_ids=ids, labels=labels, **inputs)
    assert isinstance(outputs.logits, LazyLogits) == tiled
    outputs.loss.backward()
    if tiled:
        assert outputs.logits._cell[0] is None, "the logits were made"
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    step = OneStep(outputs.loss.detach(), (outputs.logits + 0).detach(), gradients)
    engine.close()
    return step


def assert_same_step(ours: OneStep, theirs: OneStep, tolerance: float) -> None:
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
    assert torch.equal(ours.logits, theirs.logits)
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=tolerance, atol=tolerance * largest, msg=name)


@without_predictions
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_that_change_their_logits_train_alike_in_fp32(make: Callable[[], nn.Module]) -> None:
    # Sums in another order, through two layers: some units in the last place.
    assert_same_step(one_step(make), one_step(make, tiled=False), 1e-5)


@without_predictions
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_that_change_their_logits_train_alike_in_bf16(make: Callable[[], nn.Module]) -> None:
    # Gradients of the logits are rounded to 8 bits before the division here, and after it there; on the way through two
    # layers each product is rounded likewise: a few such roundings (2**-9 each) in the mean of a parameter's entries.
    ours, theirs = one_step(make, bf16=True), one_step(make, bf16=True, tiled=False)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=2**-8, atol=0)
    for name, gradient in theirs.gradients.items():
        error = (ours.gradients[name].float() - gradient.float()).norm() / gradient.float().norm()
        assert error <= 2**-5, f"{name}: {error}"


def test_num_items_in_batch_divides_as_in_plain_pytorch() -> None:
    count = torch.tensor(50)
    ours, theirs = (one_step(granite, tiled=tiled, num_items_in_batch=count) for tiled in (True, False))
    assert_same_step(ours, theirs, 1e-5)
    assert not torch.isclose(ours.loss, one_step(granite).loss)


def test_logits_to_keep_makes_fewer() -> None:
    torch.manual_seed(0)
    model = granite().train()
    engine = attach(model, bf16=False)
    ids = token_batches(1, length=32)[0]
    logits = model(input_ids=ids, logits_to_keep=7).logits
    assert isinstance(logits, LazyLogits)
    assert logits.shape == (2, 7, 128)
    with torch.no_grad():
        torch.testing.assert_close(logits + 0, model(input_ids=ids).logits[:, -7:])
    engine.close()


def test_evaluation_and_few_tokens_take_the_ordinary_path() -> None:
    model = tiny_model().train()
    engine = attach(model)
    ids = token_batches(1)[0]
    assert isinstance(model(input_ids=ids).logits, LazyLogits)
    assert type(model(input_ids=ids[:1, :4]).logits) is torch.Tensor
    with torch.no_grad():
        assert type(model(input_ids=ids).logits) is torch.Tensor
    model.eval()
    assert type(model(input_ids=ids).logits) is torch.Tensor
    engine.close()


def test_copies_pickles_and_closed_models_hold_a_plain_head() -> None:
    model = tiny_model().train()
    before = vars(model.lm_head).keys() - {"forward"}
    engine = attach(model)
    assert isinstance(model.lm_head, nn.Linear)
    ids = token_batches(1)[0]
    for other in (copy.deepcopy(model), _pickled(model)):
        assert type(other.lm_head) is nn.Linear
        assert type(other.train()(input_ids=ids).logits) is torch.Tensor
        assert vars(other.lm_head).keys() == before
    engine.close()
    assert type(model.lm_head) is nn.Linear
    assert type(model(input_ids=ids).logits) is torch.Tensor


def _pickled(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_logits_read_after_the_step_are_refused_rather_than_wrong() -> None:
    from engine_runs import Training

    from megatrain_accelerate.errors import StateError
    from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model)
    training = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    ids = token_batches(1)[0]
    logits = model(input_ids=ids).logits
    training.step(ids)
    with pytest.raises(StateError, match="before the step"):
        logits.argmax(-1)
    engine.close()


@without_predictions
@pytest.mark.parametrize("adapted", [["q_proj", "lm_head"], ["q_proj"]], ids=["head_adapted", "head_frozen"])
def test_adapters_train_alike(adapted: list[str]) -> None:
    def make() -> nn.Module:
        # Both of LoRA's matrices at work from the first step.
        return get_peft_model(granite(), LoraConfig(r=4, target_modules=adapted, init_lora_weights=False))

    steps = []
    for tiled in (True, False):
        torch.manual_seed(0)
        model = make().train()
        engine = attach(model, bf16=False, tiled_loss=tiled)
        ids = token_batches(1, length=19)[0]
        outputs = model(input_ids=ids, labels=ids)
        assert isinstance(outputs.logits, LazyLogits) == (tiled and "lm_head" not in adapted)
        outputs.loss.backward()
        gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        steps.append(OneStep(outputs.loss.detach(), (outputs.logits + 0).detach(), gradients))
        engine.close()
    assert any("lora" in name for name in steps[0].gradients)
    assert_same_step(*steps, 1e-5)


@without_predictions
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_a_head_under_autocast_computes_as_autocast_would(head_dtype: torch.dtype) -> None:
    # Autocast's own cast of an fp32 head is a node of the graph in both cases, its gradient in fp32.
    steps = []
    for tiled in (True, False):
        torch.manual_seed(0)
        model = granite().train()
        model._keep_in_fp32_modules_strict = {"lm_head"} if head_dtype == torch.float32 else set()
        engine = attach(model, tiled_loss=tiled)
        assert model.lm_head.weight.dtype == head_dtype
        ids = token_batches(1, length=19)[0]
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        assert outputs.logits.dtype == torch.bfloat16
        grad = model.lm_head.weight.grad
        assert grad.dtype == head_dtype
        steps.append((outputs.loss.detach(), (outputs.logits + 0).detach(), grad.detach().clone()))
        engine.close()
    torch.testing.assert_close(steps[0][0], steps[1][0], rtol=1e-5, atol=0)
    assert torch.equal(steps[0][1], steps[1][1])
    # Each entry's gradient rounded to 8 bits at another point.
    assert (steps[0][2] - steps[1][2]).norm() <= 2**-6 * steps[1][2].norm()


# ---------------------------------------------------------------- the stock Trainer

TRAINED = 5e-5
"""Gradients differ in their last places, and AdamW makes steps of the learning rate's size (1e-3) of the smallest ones too:
5% of a step."""


@pytest.fixture
def tiles_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts of tokens of all tiles that were computed."""
    counts: list[int] = []
    inner = tiled_cross_entropy.loss_to_gradient

    def counted(logits: torch.Tensor, *args: Any) -> Any:
        counts.append(len(logits))
        return inner(logits, *args)

    monkeypatch.setattr(tiled_cross_entropy, "loss_to_gradient", counted)
    return counts


def run(folder: Path, *, streamed: bool = True, tiled: bool = True, **changes: Any) -> TrainerRun:
    options = {"dataset": ragged_examples(), "options": lambda model: {"data_collator": Padding("right")}}
    settings = {"tiled_loss": tiled} if streamed else None
    return run_trainer(tiny_llama, folder, streamed=streamed, settings=settings, **{**options, **changes})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"label_smoothing_factor": 0.1},
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2},
        {"average_tokens_across_devices": False, "max_grad_norm": 0.0},
    ],
    ids=["plain", "smoothing", "accumulation", "smoothing_accumulation", "unclipped"],
)
def test_the_stock_trainer_trains_alike(tmp_path: Path, tiles_run: list[int], arguments: dict[str, Any]) -> None:
    stock = run(tmp_path / "stock", streamed=False, **arguments)
    assert not tiles_run
    tiled = run(tmp_path / "tiled", **arguments)
    assert max(tiles_run) == 12, "several tiles"
    assert_same_run(tiled, stock, TRAINED)


def test_bf16_mixed_precision_trains_alike(tmp_path: Path, tiles_run: list[int]) -> None:
    tiled, untiled = (run(tmp_path / str(on), tiled=on, bf16=True) for on in (True, False))
    assert tiles_run
    for ours, theirs in zip(tiled.logged("loss"), untiled.logged("loss"), strict=True):
        # Losses of about 5, of logits rounded to 8 bits.
        assert abs(ours - theirs) <= 2e-3


def test_a_trainer_that_reads_logits_in_its_loss_trains_alike(tmp_path: Path, tiles_run: list[int]) -> None:
    class Reading(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            with torch.no_grad():
                predicted = outputs.logits[..., :-1, :].contiguous().argmax(-1)
                correct = (predicted == inputs["labels"][..., 1:]).float().mean()
            self.log({"accuracy": correct.item(), "entropy": outputs.logits.log_softmax(-1).mean().item()})
            return (loss, outputs) if return_outputs else loss

    stock = run(tmp_path / "stock", streamed=False, trainer_class=Reading)
    tiled = run(tmp_path / "tiled", trainer_class=Reading)
    assert tiles_run
    assert_same_run(tiled, stock, TRAINED)
    assert len(tiled.logged("accuracy")) == 6


def test_a_loss_function_of_one_s_own_gets_ordinary_logits(tmp_path: Path, tiles_run: list[int]) -> None:
    def own(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"][..., :-1, :].log_softmax(-1)
        chosen = labels[..., 1:].clamp(min=0).unsqueeze(-1)
        return -logits.gather(-1, chosen).mean()

    def options(model: nn.Module) -> dict[str, Any]:
        return {"data_collator": Padding("right"), "compute_loss_func": own}

    stock = run(tmp_path / "stock", streamed=False, options=options)
    assert_same_run(run(tmp_path / "tiled", options=options), stock, TRAINED)
    assert not tiles_run
