"""Users' code beside the engine, on a GPU: readers of weights and gradients, other trained parameters, unfreezing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import loss_of
from plain_torch import token_batches
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainer_runs import plugin, run_trainer, tiny_llama
from transformers import TrainerCallback

from megatrain_accelerate.engine import engine_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LARGER: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
"""Copies and steps that take a while."""
STREAMED: dict[str, Any] = {"device_layers": 0, "kept_layers": 0, "compile_layers": False}
PLACEMENTS: list[dict[str, Any]] = [{}, {"device_layers": 3}]


def larger() -> nn.Module:
    return tiny_llama(**LARGER)


class Average(TrainerCallback):
    """An exponential average of the weights, and the gradients that there are at each event of a step."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average = AveragedModel(kwargs["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average.update_parameters(kwargs["model"])

    def _look(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gradients += [parameter.grad.cpu().clone() for parameter in kwargs["model"].parameters()]

    on_substep_end = on_pre_optimizer_step = on_optimizer_step = _look


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
@pytest.mark.parametrize("bf16", [True, False])
def test_a_callback_that_looks_sees_what_it_would_see_if_everything_were_waited_for(
    tmp_path: Path, bf16: bool, max_grad_norm: float, placement: dict[str, Any]
) -> None:
    class Waiting(Average):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_") and (engine := engine_of(trainers[-1].model)) is not None:
                torch.cuda.synchronize()
                engine.runtime.watch.settle()
            return super().__getattribute__(name)

    found, trainers = [], []

    def script(trainer: Any) -> None:
        trainers.append(trainer)
        trainer.train()

    for callback in (Average(), Waiting()):
        run = run_trainer(
            larger,
            tmp_path,
            streamed=True,
            use_cpu=False,
            bf16=bf16,
            settings={**STREAMED, **placement},
            gradient_accumulation_steps=2,
            max_grad_norm=max_grad_norm,
            options=lambda model, callback=callback: {"callbacks": [callback]},
            script=script,
        )
        averages = [parameter.detach().cpu() for parameter in callback.average.module.parameters()]
        found.append([*averages, *callback.gradients, *run.weights.values()])
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_is_still_to_be_applied_when_a_loop_that_does_not_look_goes_on(placement: dict[str, Any]) -> None:
    with plugin(**{**STREAMED, **placement}):
        accelerator = Accelerator()
        model = larger()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        engine = engine_of(model)
        submit = engine.runtime.worker.submit
        engine.runtime.worker.submit = lambda name, work: submit(name, lambda: (torch.cuda._sleep(1), work())[1])
        ids = token_batches(1)[0].cuda()
        accelerator.backward(loss_of(model, ids))
        optimizer.step()
        optimizer.zero_grad()
        assert engine.runtime.watch.is_on
        weight = model.model.layers[0].mlp.up_proj.weight
        before = weight.data.clone()
        assert not engine.runtime.watch.is_on
        engine.drain()
        assert torch.equal(before, weight)


def steps(
    model: nn.Module, optimizer: Any, parameters: Callable[[], list[nn.Parameter]], loss: Any, backward: Any, clip: Any
) -> list[float]:
    seen = []
    for ids in token_batches(3):
        value = loss(ids.cuda())
        backward(value)
        seen += [value.item(), float(clip(parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_head_beside_the_model_lives_on_the_device_and_trains_as_in_plain_pytorch(
    optimizer_class: type[torch.optim.Optimizer], is_prepared: bool, placement: dict[str, Any]
) -> None:
    results = []
    for streamed in (False, True):
        with plugin(streamed, **({**STREAMED, **placement} if streamed else {})):
            torch.manual_seed(0)
            accelerator = Accelerator()
            model, head = larger(), nn.Linear(512, 5)
            optimizer = optimizer_class([*model.parameters(), *head.parameters()], lr=1e-3, eps=1e-3)
            if is_prepared or not streamed:  # without the plugin it is the script's to move
                model, head, optimizer = accelerator.prepare(model, head, optimizer)
            else:
                model, optimizer = accelerator.prepare(model, optimizer)
            assert head.weight.is_cuda

            def loss(ids: torch.Tensor, model: nn.Module = model, head: nn.Module = head) -> torch.Tensor:
                out = model(input_ids=ids, labels=ids, output_hidden_states=True)
                return out.loss + head(out.hidden_states[-1]).square().mean()

            def parameters(model: nn.Module = model, head: nn.Module = head) -> list[nn.Parameter]:
                return [*model.parameters(), *head.parameters()]

            seen = steps(model, optimizer, parameters, loss, accelerator.backward, accelerator.clip_grad_norm_)
            results.append((seen, [value.detach().cpu() for value in parameters()]))
    (theirs, plain), (ours, mine) = results
    assert ours == pytest.approx(theirs, rel=1e-4)
    for expected, weight in zip(plain, mine, strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_layers_that_are_unfrozen_in_training_train_as_in_plain_pytorch(placement: dict[str, Any]) -> None:
    results = []
    for streamed in (False, True):
        with plugin(streamed, **({**STREAMED, **placement} if streamed else {})):
            accelerator = Accelerator()
            model = larger()
            model.model.layers[:3].requires_grad_(False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
            model, optimizer = accelerator.prepare(model, optimizer)
            seen = []
            for unfreezes in (False, True):
                if unfreezes:
                    model.requires_grad_(True)
                seen += steps(
                    model,
                    optimizer,
                    lambda model=model: list(model.parameters()),
                    lambda ids, model=model: loss_of(model, ids),
                    accelerator.backward,
                    accelerator.clip_grad_norm_,
                )
            results.append((seen, [value.detach().cpu() for value in model.parameters()]))
    (theirs, plain), (ours, mine) = results
    assert ours == pytest.approx(theirs, rel=1e-4)
    for expected, weight in zip(plain, mine, strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-5)


def test_frozen_weights_of_two_prepared_models_are_shared_without_copies() -> None:
    results = []
    for streamed in (False, True):
        with plugin(streamed, **(STREAMED if streamed else {})):
            accelerator = Accelerator()
            teacher, student = larger(), tiny_llama(**{**LARGER, "num_hidden_layers": 4})
            teacher.requires_grad_(False)
            student.model.embed_tokens.weight = teacher.model.embed_tokens.weight
            student.model.layers[0].self_attn.q_proj.weight = teacher.model.layers[0].self_attn.q_proj.weight
            trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
            student, optimizer = accelerator.prepare(student, torch.optim.AdamW(trained, lr=1e-3, eps=1e-3))
            teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
            seen = []
            for ids in token_batches(4):
                ids = ids.cuda()
                with torch.no_grad():
                    target = teacher(input_ids=ids).logits.softmax(-1)
                loss = -(target * student(input_ids=ids).logits.log_softmax(-1)).sum(-1).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            results.append(seen)
    assert results[1] == pytest.approx(results[0], rel=1e-5)
