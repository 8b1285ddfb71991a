"""What is refused must be as it was: models before and after, for tests of bad input."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import Accelerator
from plain_torch import token_batches
from torch import nn

import megatrain_accelerate
from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.layers.proxy import is_proxy


def train_plainly(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for ids in token_batches(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    """No engine, no proxy, no hook; parameters in their own memory; and it trains as a plain copy does."""
    assert engine_of(model) is None
    assert not any(engine_of(module) for module in model.modules())
    assert not any(is_proxy(module) for module in model.modules())
    assert trace(model) == {key: value for key, value in before.items() if key != "copy"}
    megatrain_accelerate.disable()
    assert train_plainly(model) == train_plainly(before["copy"])
    for ours, theirs in zip(model.parameters(), before["copy"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def trace(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_backward_hooks")
    return {
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "memory": [(parameter.data_ptr(), parameter.dtype, parameter.requires_grad) for parameter in model.parameters()],
        "forwards": ["forward" in module.__dict__ for module in model.modules()],
    }


def remember(model: nn.Module) -> dict[str, Any]:
    return {**trace(model), "copy": copy.deepcopy(model)}


def prepare(model: nn.Module, **settings: Any) -> Any:
    megatrain_accelerate.enable(settings or None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Accelerator(cpu=True).prepare(model, optimizer)
