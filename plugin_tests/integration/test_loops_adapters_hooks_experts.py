"""Bare Accelerate loops do the same with the plugin: adapters, hooks, experts, layers that take no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, adamw, both, gradients, loss_of, prepared, train
from peft import LoraConfig, get_peft_model
from plain_torch import token_batches
from torch import nn
from trainer_runs import plugin, snapshot, tiny_llama
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatrain_accelerate.engine import engine_of

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------- adapters and frozen parts


def lora(**changes: Any) -> Any:
    """A tiny Llama whose base is frozen, embeddings too."""
    torch.manual_seed(2)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    return get_peft_model(tiny_llama(), LoraConfig(**{**settings, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers_to_transform": [0]},
        {"layers_to_transform": [2]},
        {"modules_to_save": ["lm_head"]},
        {"lora_dropout": 0.1},
        {"use_dora": True},
        {"target_modules": "all-linear"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "all_layers",
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_lora(changes: dict[str, Any]) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, lambda: lora(**changes))
        before = snapshot(model)
        observed: Observed = []
        for ids in token_batches(4):
            accelerator.backward(loss_of(model, ids))
            observed += gradients(model)
            observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), model.disable_adapter():
                observed.append(loss_of(model, ids).item())
        model.state_dict()
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == {name for name, weight in snapshot(model).items() if not torch.equal(weight, before[name])}
        return model, observed

    both(script)


@pytest.mark.parametrize("changes", [{}, {"layers_to_transform": [2]}], ids=["all_layers", "last_layer"])
def test_frozen_weights_take_no_gradient_memory(changes: dict[str, Any]) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator, lambda: lora(**changes))
        train(accelerator, model, optimizer, token_batches(2))
        engine = engine_of(model)
        assert engine is not None
        trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        held = engine.host_bytes_by_kind()
        assert trained <= held["gradients"] < 4 * trained + 4096 < held["weights"]
        assert 2 * trained <= held["moments"] < 8 * trained + 8192 < 2 * held["weights"]
        for layer in engine.runtime.layers:
            has_adapter = any(parameter.requires_grad for parameter in layer.module.parameters())
            assert (layer.unit.gradients is not None) == has_adapter
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        assert all(parameter.grad is None for parameter in frozen)


# ---------------------------------------------------------------- hooks


def test_hooks_on_layers_fire_once_a_call() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        observed: Observed = []
        for early in (True, False):
            if not early:
                model, optimizer = accelerator.prepare(model, adamw(model))
            for index, layer in enumerate(model.model.layers):
                tag = (early, index)
                layer.register_forward_pre_hook(lambda module, args, tag=tag: observed.append(("pre", *tag)))
                layer.register_forward_hook(
                    lambda module, args, kwargs, output, tag=tag: observed.append(("post", *tag, sorted(kwargs))),
                    with_kwargs=True,
                )
                layer.register_full_backward_hook(lambda module, before, after, tag=tag: observed.append(("back", *tag)))
            model.model.norm.register_forward_hook(lambda *_: observed.append("norm"))
        for ids in token_batches(2):
            accelerator.backward(loss_of(model, ids))
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    assert both(script).count("norm") == 4


def test_hooks_may_change_what_flows_between_layers() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        layers = model.model.layers
        layers[0].register_forward_hook(lambda module, args, output: output * 0.5)
        layers[1].register_forward_pre_hook(lambda module, args: (args[0] + 1.0, *args[1:]))
        layers[2].register_full_backward_hook(lambda module, before, after: tuple(2.0 * gradient for gradient in before))
        return model, train(accelerator, model, optimizer, token_batches(3))

    assert both(script)


def test_hooks_on_parameters_see_every_gradient() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        fired: Observed = []
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad.clone()))
        train(accelerator, model, optimizer, token_batches(2))
        return model, fired

    assert len(both(script)) == 2


def test_outputs_that_the_model_records() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, lambda: tiny_llama(attn_implementation="eager"))
        observed: Observed = []
        for ids in token_batches(2):
            output = model(input_ids=ids, labels=ids, output_hidden_states=True, output_attentions=True)
            # A loss on both: what was recorded must carry gradients.
            states = sum(state.square().mean() for state in output.hidden_states)
            loss = output.loss + 0.1 * states + sum(weights.square().sum() for weights in output.attentions)
            accelerator.backward(loss)
            observed += [*output.hidden_states, *output.attentions, *gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return model, [value.detach() if isinstance(value, torch.Tensor) else value for value in observed]

    both(script)


# ---------------------------------------------------------------- mixtures of experts

MOE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
}


def tiny_mixtral(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**{**MOE, "num_local_experts": 4, **changes}))


def tiny_qwen3_moe(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**MOE, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8, **changes})
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("make", [tiny_mixtral, tiny_qwen3_moe])
@pytest.mark.parametrize("how", ["config", "argument", "own_loss"])
def test_gradient_of_the_routers_auxiliary_loss(make: Callable[..., nn.Module], how: str) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, lambda: make(output_router_logits=how == "config"))
        observed: Observed = []
        for ids in token_batches(3):
            inputs = {} if how == "config" else {"output_router_logits": True}
            output = model(input_ids=ids, labels=ids, **inputs)
            own = sum(logits.square().mean() for logits in output.router_logits) if how == "own_loss" else 0.0
            accelerator.backward(output.loss + own)
            observed += [output.loss.item(), output.aux_loss.item(), *gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    with_router = both(script)

    def without(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, _ = prepared(accelerator, make)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        return model, gradients(model)

    routers = both(without)
    changed = [
        not torch.equal(one, other)
        for one, other in zip(with_router[2 : 2 + len(routers)], routers, strict=True)
        if isinstance(one, torch.Tensor)
    ]
    assert any(changed), "the auxiliary loss must have a gradient"


# ---------------------------------------------------------------- layers that take no part


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Branches(nn.Module):
    """A trunk that may leave layers out, and two heads of layers of which each call uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, 16)
        self.trunk = nn.ModuleList(Block() for _ in range(4))
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))
        self.leave_left = nn.Linear(16, 1)
        self.leave_right = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, skipped: tuple[int, ...], side: str) -> torch.Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.trunk):
            if index not in skipped:
                x = block(x)
        for block in getattr(self, side):
            x = block(x)
        return getattr(self, f"leave_{side}")(x).square().mean()


@pytest.mark.parametrize("schedule", ["deferred", "backward", "serial"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_layers_without_a_gradient_are_not_stepped(schedule: str, accumulation: int) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, Branches, weight_decay=0.5)
        generator = torch.Generator().manual_seed(4)
        observed: Observed = []
        plans = [((), "left"), ((1,), "left"), ((0, 3), "right"), ((1, 2), "left"), ((), "right"), ((0, 1, 2, 3), "left")]
        for step, (skipped, side) in enumerate(plans):
            accelerator.gradient_state._set_sync_gradients((step + 1) % accumulation == 0)
            loss = model(torch.randn(4, 8, generator=generator), skipped, side)
            accelerator.backward(loss)
            observed.append(loss.item())
            if (step + 1) % accumulation == 0:
                observed += gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                observed += [tensor.clone() for tensor in model.state_dict().values()]
        for _, entry in sorted(optimizer.state_dict()["state"].items()):
            observed += [float(entry["step"]), entry["exp_avg"].clone(), entry["exp_avg_sq"].clone()]
        return model, observed

    both(script, settings={"step_schedule": schedule})
