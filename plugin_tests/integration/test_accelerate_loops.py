"""Bare Accelerate loops with and without the plugin, fp32 on the CPU: what scripts do to models, gradients, optimizers."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from plain_torch import token_batches
from torch import nn
from torch.utils.data import DataLoader
from trainer_runs import TOLERANCE, assert_same_weights, plugin, snapshot, tiny_llama
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import megatrain_accelerate
from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.errors import StateError, StepWorkerError, UnsupportedError

Observed = list[Any]
Script = Callable[[Accelerator], tuple[nn.Module, Observed]]


def both(script: Script, tolerance: float = TOLERANCE, settings: dict[str, Any] | None = None, **options: Any) -> Observed:
    """Runs a script without and with the plugin; compares what it observed and the weights. Returns the stock's."""
    results = []
    for streamed in (False, True):
        with plugin(streamed, **(settings or {})):
            torch.manual_seed(1)
            accelerator = Accelerator(cpu=True, **options)
            model, observed = script(accelerator)
            model = accelerator.unwrap_model(model)
            assert (engine_of(model) is not None) == streamed
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            results.append((observed, weights))
    (stock, stock_weights), (ours, our_weights) = results
    assert len(stock) == len(ours)
    for place, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        if isinstance(theirs, torch.Tensor):
            difference = float((mine - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))
            assert difference <= tolerance, f"observation {place} differs by {difference}"
        elif isinstance(theirs, float):
            assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance), f"observation {place}"
        else:
            assert mine == theirs, f"observation {place}"
    assert_same_weights(our_weights, stock_weights, tolerance)
    return stock


def adamw(model: nn.Module, **changes: Any) -> torch.optim.AdamW:
    """AdamW with a rate at which a few steps are seen."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 1e-3, "weight_decay": 0.1, **changes})


def loss_of(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The language model's loss on one batch."""
    return model(input_ids=ids, labels=ids, **inputs).loss


def gradients(model: nn.Module) -> Observed:
    """All gradients as Python sees them, by name; zero where there is none, which is noted too."""
    seen: Observed = []
    for parameter in model.parameters():
        seen.append(parameter.grad is None)
        if parameter.grad is not None:
            seen.append(parameter.grad.clone())
    return seen


def slow(model: nn.Module) -> None:
    """Steps that are taken from here on are applied late, unit by unit, if the model is streamed."""
    engine = engine_of(model)
    if engine is None or "submit" in vars(engine.runtime.worker):
        return
    submit = engine.runtime.worker.submit

    def submit_slowly(name: str, work: Callable[[], None]) -> Any:
        def slow_work() -> None:
            time.sleep(0.01)
            work()

        return submit(name, slow_work)

    engine.runtime.worker.submit = submit_slowly  # type: ignore[method-assign]


# ---------------------------------------------------------------- prepare


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


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

Clip = Callable[[Accelerator, nn.Module], Any]


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    batches: list[torch.Tensor],
    clip: Clip | None = None,
) -> Observed:
    """A plain loop; observes losses, what ``clip`` returned, and all gradients that the step used."""
    observed: Observed = []
    for ids in batches:
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        observed.append(loss.item())
        if clip is not None:
            observed.append(clip(accelerator, model))
        slow(model)
        optimizer.step()
        optimizer.zero_grad()
    return observed


def prepared(accelerator: Accelerator, make: Callable[[], nn.Module] = tiny_llama, **changes: Any) -> tuple[nn.Module, Any]:
    """(model, AdamW), prepared."""
    model = make()
    return accelerator.prepare(model, adamw(model, **changes))


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


@pytest.mark.parametrize("write", [clip_values, lambda _, model: model.lm_head.weight.grad.add_(1.0)], ids=["clip", "noise"])
@pytest.mark.parametrize("then", ["step", "clip", "forward"])
def test_gradients_written_to_after_clipping_are_an_error(write: Clip, then: str) -> None:
    # They are scaled in the step: what was written would be scaled too.
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        first, second = token_batches(2)
        accelerator.backward(loss_of(model, first))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        write(accelerator, model)
        actions: dict[str, Callable[[], Any]] = {
            "step": optimizer.step,
            "clip": lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1),
            "forward": lambda: loss_of(model, second),
        }
        with pytest.raises(StateError, match=r"after accelerator\.clip_grad_norm_"):
            actions[then]()


def test_backward_that_adds_to_clipped_gradients_is_an_error() -> None:
    # No forward lies between, at which the clipping could be carried out.
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, _ = prepared(accelerator)
        losses = [loss_of(model, ids) for ids in token_batches(2)]
        accelerator.backward(losses[0])
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(StateError, match="clip once"):
            accelerator.backward(losses[1])


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


# ---------------------------------------------------------------- what p.grad is


def test_gradients_behave_like_autograds() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        first, second, third = token_batches(3)
        observed = gradients(model)
        accelerator.backward(loss_of(model, first))
        observed += gradients(model)
        accelerator.backward(loss_of(model, second))
        observed += gradients(model)
        # Some are dropped, some replaced, some written to.
        layers = model.model.layers
        for parameter in layers[0].parameters():
            parameter.grad = None
        for parameter in [*layers[1].mlp.parameters(), model.lm_head.weight]:
            parameter.grad = torch.full_like(parameter, 1e-3)
        layers[2].mlp.up_proj.weight.grad.mul_(2.0)
        model.model.norm.weight.grad.mul_(2.0)
        accelerator.backward(loss_of(model, third))
        observed += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        observed += gradients(model)
        return model, observed

    both(script)


@pytest.mark.parametrize(
    ("how", "set_to_none"), [("optimizer", True), ("optimizer", False), ("model", True), ("by_hand", True)]
)
def test_zero_grad(how: str, set_to_none: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        for ids in token_batches(4):
            accelerator.backward(loss_of(model, ids))
            observed += gradients(model)
            slow(model)
            optimizer.step()
            if how == "optimizer":
                optimizer.zero_grad(set_to_none=set_to_none)
            elif how == "model":
                model.zero_grad(set_to_none=set_to_none)
            else:
                for parameter in model.parameters():
                    parameter.grad = None
            observed += gradients(model)
        return model, observed

    both(script)


def test_gradients_that_are_kept_over_steps() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        for ids in token_batches(4):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            slow(model)
            optimizer.step()
            optimizer.step()
            observed += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 1e4))]
        return model, observed

    both(script)


def test_gradient_of_the_inputs() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        for ids in token_batches(3):
            embedded = model.model.embed_tokens(ids).detach().requires_grad_()
            accelerator.backward(model(inputs_embeds=embedded, labels=ids).loss)
            observed.append(embedded.grad)
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script)


@pytest.mark.parametrize("what", ["grad", "inputs", "double"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_bypass_the_parameters_are_refused(what: str) -> None:
    # The layers' gradients leave in backward, whatever was asked for: better an error than gradients that nobody wanted.
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, _ = prepared(accelerator)
        ids = token_batches(1)[0]
        embedded = model.model.embed_tokens(ids).detach().requires_grad_()
        loss = model(inputs_embeds=embedded, labels=ids).loss
        if what == "grad":
            with pytest.raises(UnsupportedError, match="backward"):
                torch.autograd.grad(loss, embedded)
        elif what == "inputs":
            with pytest.raises(UnsupportedError, match="backward"):
                loss.backward(inputs=[embedded])
        else:
            loss.backward(create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                embedded.grad.sum().backward()
            model.zero_grad()


# ---------------------------------------------------------------- forwards and backwards in other orders


def test_one_backward_of_several_forwards() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        batches = token_batches(6)
        for chosen, rejected in zip(batches[::2], batches[1::2], strict=True):
            better, worse = loss_of(model, chosen), loss_of(model, rejected)
            with torch.no_grad():
                model.eval()
                reference = loss_of(model, rejected)
                model.train()
            loss = nn.functional.softplus(better - worse + reference)
            accelerator.backward(loss)
            observed += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 0.1))]
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script)


@pytest.mark.parametrize("retain", [True, False])
def test_several_backwards_after_several_forwards(retain: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        batches = token_batches(6)
        for one, other in zip(batches[::2], batches[1::2], strict=True):
            losses = [loss_of(model, one), loss_of(model, other)]
            if retain:
                accelerator.backward(losses[0], retain_graph=True)
            accelerator.backward(losses[0])
            accelerator.backward(losses[1])
            observed += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script)


def test_forward_without_backward_leaves_nothing() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        for step, ids in enumerate(token_batches(5)):
            loss = loss_of(model, ids)
            observed.append(loss.item())
            if step % 2:
                continue
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script)


def test_step_with_a_closure() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        for ids in token_batches(3):

            def closure(ids: torch.Tensor = ids) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, ids)
                accelerator.backward(loss)
                observed.append(loss.item())
                return loss

            optimizer.step(closure)
        return model, observed

    both(script)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("explicit", [True, False])
def test_key_value_cache_does_not_corrupt_gradients(explicit: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        assert model.config.use_cache
        observed: Observed = []
        for ids in token_batches(3):
            inputs = {"use_cache": True} if explicit else {}
            accelerator.backward(loss_of(model, ids, **inputs))
            observed += gradients(model)
            observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script)


def test_generation_between_steps_uses_its_cache() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        for ids in token_batches(3):
            accelerator.backward(loss_of(model, ids))
            slow(model)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                cached = model(input_ids=ids[:, :8], use_cache=True).past_key_values
                assert cached.get_seq_length() == 8
                observed.append(model(input_ids=ids[:, 8:], past_key_values=cached).logits)
            mask = torch.ones_like(ids[:, :4])
            written = model.generate(ids[:, :4], attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
            observed.append(written.tolist())
        return model, observed

    both(script)


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


# ---------------------------------------------------------------- several optimizers, several models


@pytest.mark.parametrize(("schedule", "clipped"), [("auto", True), ("auto", False), ("backward", False)])
def test_two_optimizers_of_one_model(schedule: str, clipped: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        layers = [parameter for name, parameter in model.named_parameters() if "layers" in name]
        rest = [parameter for name, parameter in model.named_parameters() if "layers" not in name]
        slower = torch.optim.AdamW(rest, lr=1e-4, eps=1e-2)
        model, faster, slower = accelerator.prepare(model, torch.optim.AdamW(layers, lr=1e-3, eps=1e-2), slower)
        observed: Observed = []
        for step, ids in enumerate(token_batches(6)):
            accelerator.backward(loss_of(model, ids))
            if clipped:
                observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
            faster.step()
            faster.zero_grad()
            if step % 2:
                slower.step()
                slower.zero_grad()
        return model, observed

    both(script, settings={"step_schedule": schedule})


def test_optimizer_that_joins_later_leaves_the_firsts_state_alone() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        layers = [parameter for name, parameter in model.named_parameters() if "layers" in name]
        rest = [parameter for name, parameter in model.named_parameters() if "layers" not in name]
        model, first = accelerator.prepare(model, torch.optim.AdamW(layers, lr=1e-3))
        observed = train(accelerator, model, first, token_batches(3))
        model.zero_grad()
        second = accelerator.prepare(torch.optim.AdamW(rest, lr=1e-3))
        for ids in token_batches(3, seed=8):
            accelerator.backward(loss_of(model, ids))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return model, observed

    both(script)


def test_two_models_in_one_loop() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        student, teacher = tiny_llama(), tiny_llama(num_hidden_layers=2)
        optimizers = [adamw(student), adamw(teacher)]
        student, teacher, *optimizers = accelerator.prepare(student, teacher, *optimizers)
        observed: Observed = []
        for ids in token_batches(4):
            with torch.no_grad():
                target = teacher(input_ids=ids).logits.softmax(-1)
            accelerator.backward(
                nn.functional.cross_entropy(student(input_ids=ids).logits.flatten(0, 1), target.flatten(0, 1))
            )
            accelerator.backward(loss_of(teacher, ids))
            for model, optimizer in zip((student, teacher), optimizers, strict=True):
                observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
        return student, [*observed, *teacher.state_dict().values()]

    both(script)


# ---------------------------------------------------------------- states, copies, the end


def trained_once(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    """A prepared model and optimizer after two steps, of which the last is applied late."""
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, token_batches(2))
    return model, optimizer


@pytest.mark.parametrize("streamed", [[True, True], [True, False], [False, True]])
def test_saved_state_is_loaded_by_either(tmp_path: Path, streamed: list[bool]) -> None:
    weights = []
    with plugin(streamed[0]):
        accelerator = Accelerator(cpu=True)
        model, optimizer = trained_once(accelerator)
        scheduler = accelerator.prepare(warmup(optimizer.optimizer))
        slow(model)
        accelerator.save_state(str(tmp_path / "state"))
        for _ in range(2):
            train(accelerator, model, optimizer, token_batches(3, seed=9))
            weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            # Back again, in the same process: whatever was under way must not survive.
            slow(model)
            accelerator.load_state(str(tmp_path / "state"))
            assert scheduler.get_last_lr() == [2.5e-4]
    assert_same_weights(weights[1], weights[0], tolerance=0.0)
    with plugin(streamed[1]):
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator, lambda: tiny_llama(initializer_range=0.1))
        accelerator.prepare(warmup(optimizer.optimizer))
        accelerator.load_state(str(tmp_path / "state"))
        train(accelerator, model, optimizer, token_batches(3, seed=9))
        assert_same_weights(dict(model.state_dict()), weights[0])


def deep_copy(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def torch_saved(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def from_state_dict(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    other = tiny_llama(initializer_range=0.1)
    other.load_state_dict(accelerator.get_state_dict(model))
    return other


def from_layers(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    layers = [copy.deepcopy(layer) for layer in model.model.layers]
    other = tiny_llama(initializer_range=0.1)
    other.load_state_dict(model.state_dict())
    for layer, copied in zip(other.model.layers, layers, strict=True):
        layer.load_state_dict(copied.state_dict())
    return other


@pytest.mark.parametrize("make_copy", [deep_copy, pickled, torch_saved, from_state_dict, from_layers])
def test_copies_of_a_prepared_model_are_plain_and_up_to_date(
    make_copy: Callable[[Accelerator, nn.Module], nn.Module],
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = trained_once(accelerator)
        twin = make_copy(accelerator, model)
        assert engine_of(twin) is None
        ids = token_batches(1, seed=9)[0]
        loss = loss_of(twin, ids)
        loss.backward()
        observed = [*snapshot(twin).values(), loss.item(), *gradients(twin)]
        # It is on its own: neither sees the other's steps.
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.optim.SGD(twin.parameters(), lr=1.0).step()
        train(accelerator, model, optimizer, token_batches(1))
        return model, [*observed, *snapshot(twin).values()]

    both(script)


def test_copy_of_a_prepared_model_can_be_prepared() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, _ = trained_once(accelerator)
        twin = copy.deepcopy(model)
        twin, optimizer = accelerator.prepare(twin, adamw(twin))
        return twin, train(accelerator, twin, optimizer, token_batches(2))

    both(script)


@pytest.mark.parametrize("keep", [True, False])
def test_unwrapped_model_is_the_users_own(keep: bool) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model = tiny_llama()
        classes = {name: str(type(module)) for name, module in model.named_modules()}
        parameters = list(model.parameters())
        wrapped, optimizer = accelerator.prepare(model, adamw(model))
        train(accelerator, wrapped, optimizer, token_batches(1))
        unwrapped = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=keep)
        assert unwrapped is model
        assert {name: str(type(module)) for name, module in unwrapped.named_modules()} == classes
        assert all(ours is theirs for ours, theirs in zip(unwrapped.parameters(), parameters, strict=True))


def test_model_saved_by_the_accelerator_is_read_by_transformers(tmp_path: Path) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, _ = trained_once(accelerator)
        accelerator.save_model(model, str(tmp_path / "accelerate"))
        model.save_pretrained(str(tmp_path / "transformers"), state_dict=accelerator.get_state_dict(model))
        loaded = type(model).from_pretrained(str(tmp_path / "transformers"))
        model.config.save_pretrained(str(tmp_path / "accelerate"))
        other = type(model).from_pretrained(str(tmp_path / "accelerate"))
        return model, [*snapshot(loaded).values(), *snapshot(other).values()]

    both(script)


def test_weights_written_by_hand_are_taken_over() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        observed = train(accelerator, model, optimizer, token_batches(2))
        megatrain_accelerate.drain()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        observed += train(accelerator, model, optimizer, token_batches(2))
        megatrain_accelerate.drain()
        model.model.layers[1].mlp.up_proj.weight.data = torch.full_like(model.model.layers[1].mlp.up_proj.weight, 0.02)
        model.lm_head.weight.data = model.lm_head.weight.data * 0.5
        observed += train(accelerator, model, optimizer, token_batches(2))
        model.load_state_dict(start)
        observed += train(accelerator, model, optimizer, token_batches(2))
        # A part of the model, right behind a step that is applied late.
        model.model.layers.load_state_dict({name[13:]: tensor for name, tensor in start.items() if "layers" in name})
        observed += train(accelerator, model, optimizer, token_batches(2))
        return model, observed

    both(script)


def test_free_memory_lets_go_of_everything() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = trained_once(accelerator)
        engine = engine_of(model)
        assert isinstance(engine, Engine)
        units = [weakref.ref(unit) for unit in engine.runtime.units]
        alive = weakref.ref(engine)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        slow(model)
        model, optimizer = accelerator.free_memory(model, optimizer)
        assert model is None
        del engine
        gc.collect()
        assert alive() is None
        assert not any(unit() for unit in units)
        # And again, with the next model.
        model, optimizer = trained_once(accelerator)
        assert_same_weights(dict(model.state_dict()), expected, tolerance=0.0)


@pytest.mark.parametrize("what", ["gradient", "weight"])
def test_writes_under_a_step_that_is_still_to_be_applied_are_an_error(what: str) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        slow(model)
        optimizer.step()
        weight = model.model.layers[1].mlp.up_proj.weight
        with torch.no_grad():
            (weight if what == "weight" else weight.grad).zero_()
        with pytest.raises(StepWorkerError, match=rf"{what} of .*up_proj.*drain\(\)"):
            model.state_dict()
