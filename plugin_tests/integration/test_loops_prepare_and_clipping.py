"""Bare Accelerate loops do the same with the plugin: prepare in any order, schedulers, clipping, accumulation."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Clip, Observed, adamw, both, gradients, loss_of, prepared, slow, train, warmup
from pairs import pairwise
from plain_torch import token_batches
from torch import nn
from torch.utils.data import DataLoader
from trainer_runs import plugin, tiny_llama

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------- prepare


@pytest.mark.parametrize("order", ["together", "reversed", "model_first", "optimizer_first", "optimizer_alone"])
@pytest.mark.parametrize("early_scheduler", [True, False])
def test_prepare_in_any_order(order: str, early_scheduler: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        optimizer = adamw(model)
        data = DataLoader(token_batches(5), batch_size=None)
        scheduler = warmup(optimizer) if early_scheduler else None
        if order == "together":
            model, optimizer, data = accelerator.prepare(model, optimizer, data)
        elif order == "reversed":
            data, optimizer, model = accelerator.prepare(data, optimizer, model)
        elif order == "model_first":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        elif order == "optimizer_first":
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        else:
            optimizer = accelerator.prepare_optimizer(optimizer)
            model = accelerator.prepare_model(model)
        scheduler = accelerator.prepare(scheduler or warmup(optimizer.optimizer))
        observed: Observed = []
        for ids in data:
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            observed += [loss.item(), scheduler.get_last_lr()[0]]
        return model, observed

    assert len(set(both(script)[1::2])) > 1


def test_scheduler_that_is_not_prepared_at_all() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
        observed: Observed = []
        for ids in token_batches(4):
            accelerator.backward(loss_of(model, ids))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            observed.append(optimizer.param_groups[0]["lr"])
        return model, observed

    assert both(script)[-1] == 1e-3 / 16


# ---------------------------------------------------------------- one loop, many ways to clip


def clip_layers_and_the_rest_apart(accelerator: Accelerator, model: nn.Module) -> float:
    layers = [p for name, p in model.named_parameters() if "layers" in name]
    rest = [p for name, p in model.named_parameters() if "layers" not in name]
    first = accelerator.clip_grad_norm_(layers, 0.05)
    return float(first) + float(accelerator.clip_grad_norm_(rest, 0.1))


def clip_one_layer(accelerator: Accelerator, model: nn.Module) -> float:
    return float(accelerator.clip_grad_norm_(model.model.layers[1].parameters(), 0.01))


def clip_twice(accelerator: Accelerator, model: nn.Module) -> float:
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    return float(accelerator.clip_grad_norm_(model.parameters(), 0.1))


def clip_values(accelerator: Accelerator, model: nn.Module) -> float:
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    return max(float(p.grad.abs().max()) for p in model.parameters())


def clip_values_then_norm(accelerator: Accelerator, model: nn.Module) -> float:
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    return float(accelerator.clip_grad_norm_(model.parameters(), 0.01))


CLIPS: dict[str, Clip] = {
    "norm": lambda accelerator, model: float(accelerator.clip_grad_norm_(model.parameters(), 0.1)),
    "loose": lambda accelerator, model: float(accelerator.clip_grad_norm_(model.parameters(), 1e4)),
    "inf_norm": lambda accelerator, model: float(
        accelerator.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
    ),
    "1_norm": lambda accelerator, model: float(accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)),
    "generator": lambda accelerator, model: float(accelerator.clip_grad_norm_((p for p in model.parameters()), 0.1)),
    "apart": clip_layers_and_the_rest_apart,
    "one_layer": clip_one_layer,
    "twice": clip_twice,
    "values": clip_values,
    "values_then_norm": clip_values_then_norm,
    "torch": lambda accelerator, model: float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
    "torch_foreach": lambda accelerator, model: float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)),
}


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_clipping(kind: str, optimizer_class: type[torch.optim.Optimizer]) -> None:
    def script(accelerator: Accelerator, clip: Clip | None = CLIPS[kind]) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        # A large eps: Adam alone wouldn't notice a factor that is the same in all steps.
        rate = {"lr": 1e-3, "eps": 1e-2} if optimizer_class is torch.optim.AdamW else {"lr": 1.0}
        model, optimizer = accelerator.prepare(model, optimizer_class(model.parameters(), **rate))
        return model, train(accelerator, model, optimizer, token_batches(4), clip)

    losses = both(script)[::2]
    with plugin(False):
        unclipped = script(Accelerator(cpu=True), None)[1]
    assert (losses == unclipped) == (kind == "loose"), "clipping must be at work"


def add_noise(_: Accelerator, model: nn.Module) -> None:
    model.lm_head.weight.grad.add_(1.0)


def test_clipping_applies_to_the_gradients_it_was_given_and_no_others() -> None:
    # A step that is left out after clipping (a spike): its factor must not reach the next gradients.
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, eps=1e-2)
        observed: Observed = []
        for step, ids in enumerate(token_batches(6)):
            accelerator.backward(loss_of(model, ids))
            observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            if step % 2:
                optimizer.step()
            optimizer.zero_grad()
        return model, observed

    assert min(both(script)) > 0.1


@pytest.mark.parametrize(
    ("write", "then", "optimizer_class"),
    pairwise([clip_values, add_noise], ["step", "clip", "forward"], [torch.optim.AdamW, torch.optim.SGD]),
)
def test_gradients_may_be_written_to_after_clipping(
    write: Clip, then: str, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, optimizer_class(model.parameters(), lr=1e-3))
        observed: Observed = []
        for first, second in zip(token_batches(2), token_batches(2, seed=9), strict=True):
            accelerator.backward(loss_of(model, first))
            observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            write(accelerator, model)
            if then == "clip":
                observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
            elif then == "forward":
                accelerator.backward(loss_of(model, second))
            observed += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script)


def test_a_backward_adds_to_clipped_gradients_of_another() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, eps=1e-2)
        losses = [loss_of(model, ids) for ids in token_batches(2)]
        accelerator.backward(losses[0])
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
        accelerator.backward(losses[1])
        observed = [norm, *gradients(model)]
        optimizer.step()
        return model, observed

    both(script)


@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_gradients_that_were_clipped_and_stepped_are_added_to_as_they_are_seen(max_norm: float) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, eps=1e-2)
        observed: Observed = []
        for ids in token_batches(3):  # without zero_grad()
            accelerator.backward(loss_of(model, ids))
            observed += gradients(model)
            observed.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
            observed += gradients(model)
            slow(model)
            optimizer.step()
            observed += gradients(model)
        return model, observed

    both(script)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_clipping_in_every_micro_batch(accumulation: int) -> None:
    # Scripts that don't ask accelerator.sync_gradients: gradients are added to clipped ones.
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, eps=1e-2)
        data = accelerator.prepare(DataLoader(token_batches(7), batch_size=None))
        observed: Observed = []
        for ids in data:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, ids))
                observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
        return model, observed

    assert min(both(script, gradient_accumulation_steps=accumulation)) > 0.1


@pytest.mark.parametrize("clipped", [True, False])
def test_accumulate(clipped: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        optimizer = adamw(model)
        data = DataLoader(token_batches(7), batch_size=None)
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, warmup(optimizer))
        observed: Observed = []
        for _ in range(2):
            for ids in data:
                with accelerator.accumulate(model):
                    loss = loss_of(model, ids)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and clipped:
                        observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    observed += [loss.item(), scheduler.get_last_lr()[0], accelerator.sync_gradients]
        return model, observed

    observed = both(script, gradient_accumulation_steps=3)
    assert observed.count(True) == 6, "the last accumulation of an epoch is incomplete"
