"""Bare Accelerate loops do the same with the plugin: several optimizers and models, states, copies, the end."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_runs import masters_of
from loop_runs import Observed, adamw, both, gradients, loss_of, prepared, slow, train, warmup
from plain_torch import token_batches
from torch import nn
from trainer_runs import assert_same_weights, examples, make_arguments, plugin, snapshot, tiny_llama
from transformers import PreTrainedModel, Trainer

import megatrain_accelerate
from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.errors import StepWorkerError

pytestmark = pytest.mark.usefixtures("profiled_once")

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


keeps_the_last_model = pytest.mark.skipif(
    hasattr(PreTrainedModel.loss_function.fget, "cache_info"), reason="this transformers keeps the last model in a cache"
)


def used_by_a_loop(folder: Path) -> weakref.ref[Engine]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, token_batches(1), clip=lambda a, m: a.clip_grad_norm_(m.parameters(), 1.0))
    return weakref.ref(engine_of(model))


def used_by_a_trainer(folder: Path) -> weakref.ref[Engine]:
    trainer = Trainer(tiny_llama(), make_arguments(folder, max_steps=1), train_dataset=examples())
    trainer.train()
    return weakref.ref(engine_of(trainer.model))


def used_by_an_evaluation(folder: Path) -> weakref.ref[Engine]:
    trainer = Trainer(tiny_llama(), make_arguments(folder))
    trainer.evaluate(examples(2))
    return weakref.ref(engine_of(trainer.model))


@keeps_the_last_model
@pytest.mark.parametrize("use", [used_by_a_loop, used_by_a_trainer, used_by_an_evaluation])
def test_an_engine_goes_with_the_model_the_optimizer_and_the_accelerator(
    use: Callable[[Path], weakref.ref[Engine]], tmp_path: Path
) -> None:
    with plugin():
        alive = use(tmp_path)
        gc.collect()
        assert alive() is None


@keeps_the_last_model
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
def test_writes_through_kept_tensors_under_a_step_that_is_still_to_be_applied_are_an_error(what: str) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        slow(model)
        weight = model.model.layers[1].mlp.up_proj.weight
        kept = weight.detach() if what == "weight" else weight.grad
        optimizer.step()
        kept.zero_()
        with pytest.raises(StepWorkerError, match=rf"{what} of .*up_proj.*drain\(\)"):
            model.state_dict()


def test_a_model_that_is_prepared_again_has_the_settings_and_the_precision_of_that_time() -> None:
    model = tiny_llama()
    ids = token_batches(1)
    with plugin():
        accelerator = Accelerator(cpu=True)
        _, optimizer = accelerator.prepare(model, adamw(model))
        train(accelerator, model, optimizer, ids)
        first = engine_of(model)
        assert first is not None
        trained = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    with plugin(slots=3, moments_dtype="bf16"):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        _, optimizer = accelerator.prepare(model, adamw(model))
        engine = engine_of(model)
        assert engine is not None
        assert first.is_closed
        assert engine.config.placement.slots == 3
        assert engine.config.moments_dtype == "bf16"
        assert_same_weights(dict(model.state_dict()), trained, tolerance=0.0)
        train(accelerator, model, optimizer, ids)
        accelerator.prepare(model)
        assert engine_of(model) is engine  # nothing has changed
        engine.close()


def test_weights_that_are_swapped_out_and_back_keep_their_masters_if_the_optimizers_state_is() -> None:
    """bf16: a script that evaluates other weights (an average) and puts the trained ones back."""
    masters = []
    for swaps in (False, True):
        with plugin():
            torch.manual_seed(1)
            accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            model, optimizer = prepared(accelerator, lr=1e-5)
            for ids in token_batches(6):
                train(accelerator, model, optimizer, [ids])
                if swaps:
                    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                    model.load_state_dict({name: torch.zeros_like(weight) for name, weight in kept[0].items()})
                    model.load_state_dict(kept[0])
                    optimizer.load_state_dict(kept[1])
            engine_of(model).drain()
            masters.append(masters_of(engine_of(model), model))
    assert_same_weights(masters[1], masters[0], tolerance=0.0)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters[0].values())
