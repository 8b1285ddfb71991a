"""Models that share parameters with one that was prepared before: adapters around it, a wrapper, its backbone elsewhere."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from loop_runs import Observed, adamw, both, loss_of, prepared, train
from peft import LoraConfig, get_peft_model
from plain_torch import token_batches
from torch import nn
from trainer_runs import assert_same_weights, examples, make_arguments, plugin, snapshot, tiny_llama
from transformers import Trainer

from megatrain_accelerate.engine import all_engines, engine_of
from megatrain_accelerate.errors import StateError

LABELS = torch.tensor([0, 1])


class Classifier(nn.Module):
    """A head of its own on somebody's backbone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.backbone(input_ids=input_ids).last_hidden_state[:, -1]
        return F.cross_entropy(self.head(hidden), labels)


class Wrapper(nn.Module):
    """The whole model under another name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


def classify(accelerator: Accelerator, model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> Observed:
    observed: Observed = []
    for ids in batches:
        loss = model(ids, LABELS)
        accelerator.backward(loss)
        observed.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return observed


@pytest.mark.parametrize("first", ["train", "evaluate"])
def test_adapters_around_a_model_of_another_trainer_train_as_with_stock_trainer(tmp_path: Path, first: str) -> None:
    results = []
    for streamed in (False, True):
        with plugin(streamed):
            folder = tmp_path / str(streamed)
            before = Trainer(
                model=tiny_llama(), args=make_arguments(folder), train_dataset=examples(), eval_dataset=examples()
            )
            getattr(before, first)()
            model = with_adapters(before.model)
            trainer = Trainer(model=model, args=make_arguments(folder), train_dataset=examples(seed=8))
            trainer.train()
            assert (engine_of(trainer.model) is not None) == streamed
            results.append(snapshot(trainer.model))
    stock, ours = results
    assert any("lora_B" in name and weight.any() for name, weight in ours.items())
    assert_same_weights(ours, stock)


@pytest.mark.parametrize("forgets", [False, True])
def test_adapters_are_put_around_a_prepared_model_and_prepared_with_the_same_accelerator(forgets: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed = train(accelerator, model, optimizer, token_batches(2))
        model = with_adapters(accelerator.unwrap_model(model))
        if forgets:
            accelerator.free_memory()
        model, optimizer = accelerator.prepare(model, adamw(model))
        return model, observed + train(accelerator, model, optimizer, token_batches(3))

    both(script)


@pytest.mark.parametrize("evaluation_mode", [False, True])
def test_an_optimizer_goes_on_when_its_model_is_prepared_inside_another(evaluation_mode: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed = train(accelerator, model, optimizer, token_batches(2))
        wrapper = accelerator.prepare_model(Wrapper(model), evaluation_mode=evaluation_mode)
        observed += train(accelerator, wrapper, optimizer, token_batches(2))
        return wrapper, observed + train(accelerator, model, optimizer, token_batches(2))

    both(script)


def test_a_backbone_is_trained_under_another_head_and_then_in_its_first_model_again() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        # A first step of Adam divides by a single gradient, and three optimizers take one: eps keeps what it amplifies small.
        model, optimizer = prepared(accelerator, eps=1e-5)
        observed = train(accelerator, model, optimizer, token_batches(2))
        classifier = Classifier(model.model)
        classifier, its_optimizer = accelerator.prepare(classifier, adamw(classifier, eps=1e-5))
        observed += classify(accelerator, classifier, its_optimizer, token_batches(2))
        model, optimizer = accelerator.prepare(model, adamw(model, eps=1e-5))
        return model, observed + train(accelerator, model, optimizer, token_batches(2))

    both(script)


def test_a_model_whose_part_went_to_another_says_so_until_it_is_prepared_again() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        classifier = accelerator.prepare(Classifier(model.model))
        ids = token_batches(1)[0]
        with pytest.raises(StateError, match=r"shares 29 of its 30 parameters with a Classifier .* prepare it anew"):
            loss_of(model, ids)
        classifier(ids, LABELS).backward()
        accelerator.prepare(model)
        loss_of(model, ids).backward()
        optimizer.step()
        with pytest.raises(StateError, match="with a LlamaForCausalLM"):
            classifier(ids, LABELS)
        engine_of(model).close()
        loss_of(model, ids).backward()
        classifier(ids, LABELS).backward()  # both are plain models now


def test_what_was_inside_a_model_that_is_gone_is_prepared_anew() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        classifier = Classifier(model.model)
        classifier, optimizer = accelerator.prepare(classifier, adamw(classifier))
        observed = classify(accelerator, classifier, optimizer, token_batches(2))
        del classifier, optimizer
        accelerator.free_memory()
        gc.collect()
        model, optimizer = accelerator.prepare(model, adamw(model))
        if engine_of(model) is not None:
            assert all_engines() == [engine_of(model)]
        return model, observed + train(accelerator, model, optimizer, token_batches(2))

    both(script)
