"""Runs of the engine without Accelerate, for tests that look at it from inside."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
from flat_settings import nested
from plain_torch import PlainRun
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine
from megatrain_accelerate.layers.padding import real_tokens
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.optim.host_step import HostStep
from megatrain_accelerate.plan.device_plan import DevicePlan
from megatrain_accelerate.store.host_pool import HostPool


def attach(model: nn.Module, *, bf16: bool = True, device: str = "cpu", training: bool = True, **settings: object) -> Engine:
    """An engine on ``model``, without a progress bar; it streams, though models as small as these would fit a GPU whole."""
    streamed = {"device_layers": 0, "offloaded_layers": 0}
    config = MegatrainConfig.from_mapping(nested({**streamed, **settings}))
    return Engine(model, torch.device(device), config, bf16=bf16, training=training, show_progress=False)


def place(plan: DevicePlan, placement: Placement) -> None:
    """Has layers run, and units lie, as no search chose."""
    plan._place(placement)


def train_streamed(
    model: nn.Module,
    batches: list[torch.Tensor],
    *,
    bf16: bool = True,
    schedule: str = "deferred",
    max_norm: float | None = 1.0,
    accumulation: int = 1,
    device: str = "cpu",
    learning_rate: Callable[[int], float] = lambda step: 1e-3,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    gathers: bool = False,
    **settings: object,
) -> PlainRun:
    """The same loop as ``plain_torch.train_bf16_with_masters`` through the engine, on a copy of ``model``."""
    model = copy.deepcopy(model)
    if make_optimizer is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    else:
        optimizer = make_optimizer(list(model.parameters()))
    engine = attach(model, bf16=bf16, device=device, **settings)
    engine.runtime.prefetcher.gathers = gathers
    last_micro_batch = False
    engine.runtime.offloader.is_last_backward = lambda: last_micro_batch
    adopt_optimizer(optimizer, engine.runtime, schedule)
    losses, norms = [], []
    for step in range(len(batches) // accumulation):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for position in range(accumulation):
            last_micro_batch = position == accumulation - 1
            ids = batches[step * accumulation + position].to(device)
            loss = model(input_ids=ids, labels=ids).loss / accumulation
            loss.backward()
            losses.append(loss.item())
        if max_norm is not None:
            norms.append(float(engine.runtime.clip_grad_norm(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return _ended(engine, model, losses, norms)


def train_on_means(
    model: nn.Module, batches: list[torch.Tensor], ranks: int, device: str = "cpu", **settings: object
) -> PlainRun:
    """What so many ranks train together, by one process: each step is on the mean of the gradients of ``ranks`` batches, which
    are added in fp32, in their order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    engine = attach(model, device=device, **settings)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    losses = []
    for first in range(0, len(batches), ranks):
        sums: dict[str, torch.Tensor] = {}
        for ids in (batch.to(device) for batch in batches[first : first + ranks]):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            engine.drain()
            for name, parameter in model.named_parameters():
                found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                sums[name] = sums[name] + found if name in sums else found.float()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(sums[name] * (1 / ranks))
        optimizer.step()
        optimizer.zero_grad()
    return _ended(engine, model, losses, [])


def _ended(engine: Engine, model: nn.Module, losses: list[float], norms: list[float]) -> PlainRun:
    engine.runtime.bring_states()
    masters = masters_of(engine, model)
    weights = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    engine.close()
    return PlainRun(losses, norms, masters, weights)


def masters_of(engine: Engine, model: nn.Module) -> dict[str, torch.Tensor]:
    """fp32 masters by name, joined from the store."""
    owners = {id(state.parameter): (unit, state) for unit in engine.runtime.units for state in unit.states}
    return {
        name: owners[id(parameter)][0].read_master(owners[id(parameter)][1]) for name, parameter in model.named_parameters()
    }


@dataclasses.dataclass
class Training:
    """A model that streams, its optimizer, and one step of both."""

    model: nn.Module
    engine: Engine
    optimizer: torch.optim.Optimizer
    driver: HostStep

    def step(self, ids: torch.Tensor, max_norm: float | None = None) -> float:
        """One step on one batch."""
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        if max_norm is not None:
            self.engine.runtime.clip_grad_norm(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def plan(self, inputs: torch.Tensor | dict[str, torch.Tensor]) -> None:
        """Plans for a step on ids, or on a model's arguments, as the model's forward would, and takes none: on CPUs without
        instructions for bf16 a step takes seconds."""
        if isinstance(inputs, torch.Tensor):
            inputs = {"input_ids": inputs, "labels": inputs}
        self.engine.runtime.calls.real_tokens = real_tokens(inputs)
        self.engine.device_plan.follow(self.model, inputs)
        self.engine.runtime.offloader.allocate_gradients(self.engine.runtime.units)
        self.engine.runtime.end_forward()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of masters, device weights and moments."""
        self.engine.runtime.bring_states()
        found = {f"master {name}": master for name, master in masters_of(self.engine, self.model).items()}
        found |= {f"weight {name}": parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for unit in self.engine.runtime.units:
            unit.allocate("moments")  # those that no step has made yet are zero
            assert unit.moments is not None
            found[f"exp_avg {unit.name}"] = unit.moments.exp_avg.clone()
            found[f"exp_avg_sq {unit.name}"] = unit.moments.exp_avg_sq.clone()
        for index, state in self.optimizer.state_dict()["state"].items():
            found[f"step {index}"] = state["step"].clone()
        return found


def used_bytes(pool: HostPool) -> int:
    """Bytes of blocks that weren't given back, or that a copy may still use."""
    pool._reclaim(wait=False)
    return pool.size_bytes - pool._free_bytes


def assert_equal_states(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), f"{key} differs"
