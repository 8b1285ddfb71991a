"""Bare Accelerate loops do the same with the plugin: gradients, forwards and backwards in any order, caches."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, both, gradients, loss_of, prepared, slow
from plain_torch import token_batches
from torch import nn
from transformers import DynamicCache

pytestmark = pytest.mark.usefixtures("profiled_once")

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
                cached = model(input_ids=ids[:, :8], past_key_values=DynamicCache(), use_cache=True).past_key_values
                assert cached.get_seq_length() == 8
                observed.append(model(input_ids=ids[:, 8:], past_key_values=cached).logits)
            mask = torch.ones_like(ids[:, :4])
            written = model.generate(ids[:, :4], attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
            observed.append(written.tolist())
        return model, observed

    both(script)
