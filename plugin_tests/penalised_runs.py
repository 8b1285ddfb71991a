"""Trainings whose weights get gradients from outside their layer: penalties, AdaLoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import AdaLoraConfig, get_peft_model
from torch import nn
from trainer_runs import tiny_llama
from transformers import Trainer


def penalty(model: nn.Module) -> torch.Tensor:
    """Of the size of the gradients that the data makes."""
    return 0.1 * sum((weight.pow(2).sum() for weight in model.parameters()), torch.zeros(()))


class Penalised(Trainer):
    """The penalty's graph is made last: on the CPU its gradients come before the layers' own."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        return model(**inputs).loss + penalty(model)


class PenalisedBefore(Trainer):
    """The penalty's graph is made first: its gradients come last."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        before = penalty(model)
        return before + model(**inputs).loss


def loss_with_penalty(model: nn.Module, of: str = "") -> dict[str, Callable[..., torch.Tensor]]:
    """Options of a Trainer whose loss function adds the penalty on the weights of a part of the model."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten()) + penalty(model.get_submodule(of))

    return {"compute_loss_func": loss}


def adalora(**changes: Any) -> nn.Module:
    """A tiny Llama (with changes) and adapters whose regularisation is a penalty."""
    torch.manual_seed(3)
    adapter = AdaLoraConfig(
        init_r=6, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=8, orth_reg_weight=0.5, task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
    )  # fmt: skip
    return get_peft_model(tiny_llama(**changes), adapter)
