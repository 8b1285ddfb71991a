"""A recompute runs with the modes and the hooks that its forward had, whatever a script changed since."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, both, gradients, loss_of, prepared
from peft import LoraConfig, get_peft_model
from plain_torch import token_batches
from torch import nn
from trainer_runs import tiny_llama

PLACEMENTS: list[dict[str, Any]] = [{}, {"kept_layers": 2}, {"micro_batch_size": 1}]


def one_step(accelerator: Accelerator, model: nn.Module, optimizer: Any, loss: torch.Tensor) -> tuple[nn.Module, Observed]:
    accelerator.backward(loss)
    observed = [loss.item(), *gradients(model)]
    optimizer.step()
    return model, observed


@pytest.mark.parametrize("settings", PLACEMENTS[:2])
@pytest.mark.parametrize("trains", [True, False])
def test_a_model_may_be_evaluated_between_a_forward_and_its_backward(settings: dict[str, Any], trains: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, functools.partial(tiny_llama, attention_dropout=0.3))
        first, second = token_batches(2)
        model.train(trains)
        torch.manual_seed(5)
        loss = loss_of(model, first)
        model.train(not trains)
        with torch.no_grad():
            loss_of(model, second)
        model, observed = one_step(accelerator, model, optimizer, loss)
        # And the script's own choice is left to it.
        assert all(module.training != trains for module in model.modules())
        return model, observed

    both(script, settings=settings)


@pytest.mark.parametrize("settings", PLACEMENTS)
@pytest.mark.parametrize("kind", ["before", "after", "keywords"])
def test_hooks_of_one_forward_are_those_of_its_backward(settings: dict[str, Any], kind: str) -> None:
    def doubled(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (2 * args[0], *args[1:])

    def tripled(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return 3 * output

    def tripled_too(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return 3 * output

    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        # A gradient's rounding, another one in pieces of a batch, isn't to become a whole step of AdamW's.
        model, optimizer = prepared(accelerator, eps=1e-2)
        projections = [layer.mlp.up_proj for layer in model.model.layers]
        register: dict[str, Callable[[nn.Module], Any]] = {
            "before": lambda module: module.register_forward_pre_hook(doubled),
            "after": lambda module: module.register_forward_hook(tripled),
            "keywords": lambda module: module.register_forward_hook(tripled_too, with_kwargs=True, always_call=True),
        }
        handles = [register[kind](module) for module in projections]
        loss = loss_of(model, token_batches(1)[0])
        for handle in handles:
            handle.remove()
        # One that comes later isn't part of it.
        later = [module.register_forward_hook(tripled) for module in projections]
        model, observed = one_step(accelerator, model, optimizer, loss)
        assert all(len(module._forward_hooks) == 1 and not module._forward_pre_hooks for module in projections)
        for handle in later:
            handle.remove()
        observed.append(loss_of(model, token_batches(2)[1]).item())
        return model, observed

    both(script, settings=settings)


@pytest.mark.skipif("alora_invocation_tokens" not in LoraConfig.__dataclass_fields__, reason="this PEFT has no aLoRA")
@pytest.mark.parametrize("settings", PLACEMENTS[:2])
def test_peft_s_adapters_that_are_told_of_each_forward_train(settings: dict[str, Any]) -> None:
    def activated() -> nn.Module:
        model = tiny_llama()
        torch.manual_seed(0)
        # A sequence without these tokens isn't adapted; PEFT finds where they are before each forward.
        config = LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], alora_invocation_tokens=[7, 9], init_lora_weights=False
        )
        return get_peft_model(model, config)

    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, activated)
        ids = token_batches(1)[0]
        ids[:, 12], ids[:, 13] = 7, 9
        return one_step(accelerator, model, optimizer, loss_of(model, ids))

    stock = both(script, settings=settings)
    assert any(isinstance(seen, torch.Tensor) and bool(seen.any()) for seen in stock)


def test_peft_s_poly_trains() -> None:
    def routed() -> nn.Module:
        model = tiny_llama()
        torch.manual_seed(0)
        config = peft.PolyConfig(task_type="CAUSAL_LM", r=4, n_tasks=2, n_splits=2, target_modules=["q_proj"])
        return get_peft_model(model, config)

    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, routed)
        loss = loss_of(model, token_batches(1)[0], task_ids=torch.tensor([0, 1]))
        return one_step(accelerator, model, optimizer, loss)

    both(script)
