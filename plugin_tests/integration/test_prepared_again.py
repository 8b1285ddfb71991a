"""Models and optimizers that are prepared a second time, after layers were frozen, adapters merged, or others took over."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, adamw, both, gradients, loss_of, prepared, train
from peft import LoraConfig, get_peft_model
from plain_torch import token_batches
from torch import nn
from trainer_runs import examples, make_arguments, plugin, run_both, tiny_llama
from transformers import Trainer

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import StateError
from megatrain_accelerate.optim import moment_states

pytestmark = pytest.mark.usefixtures("profiled_once")

# ---------------------------------------------------------------------------------------- the same optimizer goes on


@pytest.mark.parametrize("unfreezes", [False, True])
def test_a_trainer_that_trains_on_after_layers_were_frozen_moves_the_others(tmp_path: Path, unfreezes: bool) -> None:
    def script(trainer: Trainer) -> None:
        trainer.train()
        trainer.model.model.layers[0].requires_grad_(False)
        trainer.model.model.embed_tokens.requires_grad_(False)
        trainer.train()
        if unfreezes:
            trainer.model.requires_grad_(True)
            trainer.train()

    stock, streamed = run_both(tiny_llama, tmp_path, script=script, max_steps=3)
    counts = [{float(s["step"]) for s in run.trainer.optimizer.optimizer.state.values()} for run in (stock, streamed)]
    assert counts[0] == counts[1] == ({6.0, 9.0} if unfreezes else {3.0, 6.0})


def both_again(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.prepare(model, optimizer)


def optimizer_first(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.prepare(optimizer, model)


def model_alone(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.prepare(model)


def forgotten_before(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.free_memory()
    accelerator.prepare(model, optimizer)


def evaluated_before(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.prepare(model)


def momentum(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("again", "make_optimizer"),
    [
        (both_again, adamw),
        (optimizer_first, adamw),
        (model_alone, adamw),
        (model_alone, momentum),
        (forgotten_before, adamw),
        (evaluated_before, adamw),
    ],
)
def test_an_optimizer_goes_on_when_its_model_is_prepared_with_frozen_layers(
    again: Callable[[Accelerator, nn.Module, Any], None], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    first, second = token_batches(4)[:2], token_batches(4)[2:]

    def clip(accelerator: Accelerator, model: nn.Module) -> float:
        return float(accelerator.clip_grad_norm_(model.parameters(), 1.0))

    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        observed = train(accelerator, model, optimizer, first, clip)
        model.model.layers[0].requires_grad_(False)
        again(accelerator, model, optimizer)
        observed += train(accelerator, model, optimizer, second, clip)
        model.requires_grad_(True)
        again(accelerator, model, optimizer)
        return model, observed + train(accelerator, model, optimizer, first, clip)

    both(script)


@pytest.mark.parametrize("again", [both_again, model_alone, evaluated_before])
@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
def test_an_accumulation_goes_on_when_its_model_is_prepared_with_frozen_layers(
    again: Callable[[Accelerator, nn.Module, Any], None], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    first, second, third = token_batches(3)

    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        train(accelerator, model, optimizer, [first])
        accelerator.backward(loss_of(model, second))
        model.model.layers[0].requires_grad_(False)
        model.model.layers[0].zero_grad()
        again(accelerator, model, optimizer)
        return model, gradients(model) + train(accelerator, model, optimizer, [third])

    both(script)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_closed_engine_leaves_an_optimizer_that_goes_on_to_the_bit(moments: str) -> None:
    results = []
    for closes in (False, True):
        with plugin(moments_dtype=moments):
            accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            model, optimizer = prepared(accelerator)
            observed = train(accelerator, model, optimizer, token_batches(3))
            if closes:
                engine_of(model).close()
                with pytest.raises(StateError, match=r"call accelerator\.prepare\(model, optimizer\) before it steps again"):
                    optimizer.step()
                model, optimizer = accelerator.prepare(model, optimizer)
            observed += train(accelerator, model, optimizer, token_batches(3))
            engine = engine_of(model)
            engine.drain()
            masters = [unit.read_master(state) for unit in engine.runtime.units for state in unit.states]
            results.append((observed, masters))
    (unbroken, its_masters), (broken, masters) = results
    assert broken == unbroken
    assert all(torch.equal(a, b) for a, b in zip(masters, its_masters, strict=True))


def test_an_optimizer_without_a_kernel_refuses_to_step_for_a_closed_engine() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, momentum(model))
        train(accelerator, model, optimizer, token_batches(1))
        engine_of(model).close()
        with pytest.raises(StateError, match=r"call accelerator\.prepare\(model, optimizer\) before it steps again"):
            optimizer.step()


def test_a_state_that_is_loaded_between_two_engines_counts() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed = train(accelerator, model, optimizer, token_batches(2))
        saved = copy.deepcopy(optimizer.state_dict())
        observed += train(accelerator, model, optimizer, token_batches(2))
        if engine_of(model) is not None:
            engine_of(model).close()
        optimizer.load_state_dict(saved)
        model, optimizer = accelerator.prepare(model, optimizer)
        return model, observed + train(accelerator, model, optimizer, token_batches(2))

    both(script)


# ---------------------------------------------------------------------------------------- another model, another optimizer


def test_a_merged_model_trains_as_a_whole_under_the_same_accelerator() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj"]))
        model, optimizer = accelerator.prepare(model, adamw(model, lr=1e-2))
        observed = train(accelerator, model, optimizer, token_batches(2))
        base = model.merge_and_unload()
        base.requires_grad_(True)
        # An eps at which rounding isn't blown up: AdamW's first step goes by the gradients' signs.
        base, optimizer = accelerator.prepare(base, adamw(base, eps=1e-3))
        return base, observed + train(accelerator, base, optimizer, token_batches(2))

    both(script)


def test_trainers_that_take_turns_on_one_model_keep_their_own_moments(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> None:
        arguments = make_arguments(Path(trainer.args.output_dir) / "other", learning_rate=3e-3, max_steps=3)
        other = Trainer(model=trainer.model, args=arguments, train_dataset=examples(seed=9))
        for one in (trainer, other, trainer, other, trainer):
            one.train()

    run_both(tiny_llama, tmp_path, script=script, max_steps=3)


@pytest.mark.parametrize("make_other", [adamw, momentum])
def test_an_optimizer_that_another_took_over_from_says_so_and_goes_on_when_prepared(
    make_other: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, first = prepared(accelerator)
        observed = train(accelerator, model, first, token_batches(2))
        second = accelerator.prepare(make_other(model))
        observed += train(accelerator, model, second, token_batches(2))
        observed += [first.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
        if engine_of(model) is not None:
            with pytest.raises(StateError, match=r"another optimizer has taken over.*call accelerator\.prepare\(optimizer\)"):
                first.step()
        for optimizer in (first, second, first):
            optimizer = accelerator.prepare(optimizer)
            observed += train(accelerator, model, optimizer, token_batches(2))
        return model, observed

    both(script)


def test_a_state_dict_keeps_its_moments_while_another_optimizer_trains() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, first = prepared(accelerator)
        observed = train(accelerator, model, first, token_batches(2))
        taken = first.optimizer.state_dict()
        second = accelerator.prepare(adamw(model))
        observed += train(accelerator, model, second, token_batches(2))
        # As plain AdamW has them: what the store adds is the weights' own.
        assert all(entry.keys() == {"step", "exp_avg", "exp_avg_sq"} for entry in taken["state"].values())
        observed += [entry[key].clone() for entry in taken["state"].values() for key in ("exp_avg", "exp_avg_sq")]
        first.optimizer.load_state_dict(taken)
        observed += train(accelerator, model, accelerator.prepare(first), token_batches(2))
        return model, observed

    both(script)


def test_moments_that_have_no_room_beside_anothers_are_let_go_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, first = prepared(accelerator)
        train(accelerator, model, first, token_batches(1))
        monkeypatch.setattr(moment_states, "available_host_bytes", lambda limit: 1000)
        with caplog.at_level(logging.WARNING):
            accelerator.prepare(adamw(model))
        assert "it begins without moments" in caplog.text
        assert not any(first.state.values())
        first = accelerator.prepare(first)
        train(accelerator, model, first, token_batches(1))
        assert {float(entry["step"]) for entry in first.state.values()} == {1.0}
