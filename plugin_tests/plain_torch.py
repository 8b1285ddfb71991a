"""Plain PyTorch references and tiny models, shared by the tests. No part of the package is used here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM


def ieee_sqrt(tensor: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root; torch's own CPU one comes from MKL and is off by an ulp for some floats."""
    if tensor.is_cuda:  # CUDA's own is correctly rounded
        return torch.sqrt(tensor)
    return torch.from_numpy(np.sqrt(tensor.numpy()))


def tiny_config(**changes: object) -> Qwen2Config:
    """A Qwen2 small enough for tests: 4 layers of 64 hidden units."""
    settings: dict[str, object] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
    }
    return Qwen2Config(**{**settings, **changes})


def tiny_model(seed: int = 0, **changes: object) -> Qwen2ForCausalLM:
    """A randomly initialised tiny Qwen2 in fp32."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(tiny_config(**changes))


def token_batches(count: int, batch: int = 2, length: int = 32, vocabulary: int = 128, seed: int = 7) -> list[torch.Tensor]:
    """Random token ids, (batch, length) each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (batch, length), generator=generator) for _ in range(count)]


def round_to_bf16(master: torch.Tensor) -> torch.Tensor:
    """fp32 to the nearest bf16, ties away from zero: the rounding of the split master's upper half."""
    bits = (master.view(torch.int32) + 0x8000) & -0x10000
    return bits.view(torch.float32).to(torch.bfloat16)


def _add_to_masters(model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    """Moves the model's bf16 gradients to the masters', in fp32."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            new, total = parameter.grad.float().to(masters[name].device), masters[name].grad
            masters[name].grad = new if total is None else total + new
            parameter.grad = None


@dataclasses.dataclass
class PlainRun:
    """What a plain run left: losses, norms, and fp32 masters by name."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def train_bf16_with_masters(
    model: nn.Module,
    batches: list[torch.Tensor],
    *,
    max_norm: float | None = 1.0,
    accumulation: int = 1,
    learning_rate: Callable[[int], float] = lambda step: 1e-3,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    fp32_sums: bool = True,
    ranks: int = 1,
    device: str = "cpu",
    clip_by: Sequence[float] | None = None,
) -> PlainRun:
    """bf16 weights and gradients, fp32 masters, ``torch.optim.AdamW``: the loop that the engine must equal bit for bit.

    Gradients of several micro-batches are summed in fp32; with ``fp32_sums=False`` as autograd does it, in bf16. With
    ``ranks`` so many batches at a time are one micro-batch, whose gradient is the mean of theirs. Forward and backward run on
    the ``device``; masters and optimizer stay on the CPU, as the engine has them. ``clip_by``: the norm to clip each step by
    instead of its own. A factor that differs in its last bit flips bf16 weights here and there, and with them the later norms
    by up to 2e-3.
    """
    model = copy.deepcopy(model)
    masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = round_to_bf16(parameter.data)
    model.to(device)
    if make_optimizer is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            list(masters.values()), lr=1e-3, weight_decay=0.01, foreach=False, fused=False
        )
    else:
        optimizer = make_optimizer(list(masters.values()))
    losses, norms = [], []
    micro_batches = [batches[first : first + ranks] for first in range(0, len(batches), ranks)]
    for step in range(len(micro_batches) // accumulation):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for of_ranks in micro_batches[step * accumulation : (step + 1) * accumulation]:
            parts: list[dict[str, torch.Tensor]] = []
            for ids in (batch.to(device) for batch in of_ranks):
                loss = model(input_ids=ids, labels=ids).loss / accumulation
                loss.backward()
                losses.append(loss.item())
                if ranks > 1:
                    parts.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
                    model.zero_grad()
            for name, parameter in model.named_parameters() if parts else ():
                total = parts[0][name].float()
                for part in parts[1:]:
                    total += part[name]
                parameter.grad = (total * (1 / ranks)).to(parameter.dtype)
            if fp32_sums:
                _add_to_masters(model, masters)
        if not fp32_sums:
            _add_to_masters(model, masters)
        if max_norm is not None:
            most = max_norm if clip_by is None else float("inf")
            norms.append(float(nn.utils.clip_grad_norm_(list(masters.values()), most, foreach=False)))
            if clip_by is not None:
                factor = torch.clamp(max_norm / (torch.tensor(clip_by[step]) + 1e-6), max=1.0)
                for master in masters.values():
                    master.grad = None if master.grad is None else master.grad * factor
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.data = round_to_bf16(masters[name].detach()).to(device)
                masters[name].grad = None
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return PlainRun(losses, norms, {name: master.detach() for name, master in masters.items()}, weights)


def train_fp32(model: nn.Module, batches: list[torch.Tensor]) -> PlainRun:
    """What :func:`train_bf16_with_masters` does, in fp32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False)
    losses, norms = [], []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return PlainRun(losses, norms, weights, weights)
