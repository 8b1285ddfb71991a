"""Small models of experts whose loss takes the routers' logits, for the tests of compiled layers on either device."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from decoder_models import LENGTH, VOCABULARY
from families import DECODERS
from plain_torch import round_to_bf16, token_batches
from torch import nn

EXPERTS = ["qwen3_moe", "mixtral", "gpt_oss"]
KINDS = {"qwen3_moe": 2, "mixtral": 1, "gpt_oss": 1}
"""Of layers, each compiled once: Qwen3-MoE has a dense one."""
ROUTER = {"qwen3_moe": "mlp.gate.weight", "mixtral": "mlp.gate.weight", "gpt_oss": "mlp.router.weight"}
"""What the names of the routers' weights end with."""

HOOKS_RECORD = importlib.util.find_spec("transformers.utils.output_capturing") is not None
"""Whether transformers collects router logits by hooks, which it does since version 5."""


def of_experts(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A small model in train mode, fp32, that will compute in ``dtype``."""
    (family,) = (family for family in DECODERS if family.name == name)
    model = family.build().train()
    if dtype == torch.float32:
        # transformers compiles grouped products in bf16 only.
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model


def in_bf16(model: nn.Module) -> nn.Module:
    """The model with its weights rounded as the engine rounds them."""
    for parameter in model.parameters():
        parameter.data = round_to_bf16(parameter.data)
    return model


def ids_of(batch: int = 3, length: int = LENGTH) -> torch.Tensor:
    """Random token ids, (batch, length)."""
    return token_batches(1, batch, length, VOCABULARY)[0]


def one_pass(model: nn.Module, device: str = "cpu", **inputs: Any) -> Any:
    """The output of one forward and backward on the same random numbers."""
    torch.manual_seed(3)
    ids = ids_of().to(device)
    output = model(input_ids=ids, labels=ids, **inputs)
    output.loss.backward()
    return output


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients, on the CPU."""
    return {name: parameter.grad.cpu().clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def true_gradients(name: str, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Those of the model with bf16 weights that computes in fp32."""
    model = in_bf16(of_experts(name, torch.float32)).float().to(device)
    one_pass(model, device)
    return gradients_of(model)


def error_of(gradients: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], part: str = "") -> float:
    """How far the gradients of parameters with ``part`` in their names are from the true ones, relative, in the mean square.

    Single elements can't be compared: another rounding of bf16 sends a token to another expert here and there.
    """
    assert gradients.keys() == truth.keys()
    names = [name for name in truth if part in name]
    assert names
    wrong = sum(float((gradients[name].float() - truth[name]).square().sum()) for name in names)
    return float((wrong / sum(float(truth[name].square().sum()) for name in names)) ** 0.5)
