"""Weights that get gradients from outside their layer as well (penalties, AdaLoRA), where layers are stepped in backward."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_runs import attach
from loop_runs import adamw, both, loss_of, prepared, train
from pairs import pairwise
from penalised_runs import Penalised, PenalisedBefore, adalora, loss_with_penalty, penalty
from plain_torch import tiny_model, token_batches
from torch import nn
from trainer_runs import plugin, run_both, run_trainer, tiny_llama
from transformers import Trainer, TrainerCallback

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import ConfigError, StateError
from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = pytest.mark.usefixtures("profiled_once")

REMEDY = "step_schedule to 'deferred'"


class Halving(Trainer):
    """Changes gradients before the Trainer asks for their norm."""

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, *args, **kwargs)
        for weight in model.parameters():
            weight.grad.mul_(0.5)
        return loss


class Landing:
    """An event of copies that land on another thread, in order, long after they were issued, as a stream's do."""

    def __init__(self, stream: ThreadPoolExecutor, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._landed = stream.submit(self._land, copies)

    @staticmethod
    def _land(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        time.sleep(0.03)
        for target, source in copies:
            target.copy_(source)

    def synchronize(self) -> None:
        self._landed.result()

    def query(self) -> bool:
        return self._landed.done()


@pytest.fixture(params=["at once", "late"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients arrive on the host so."""
    with ThreadPoolExecutor(1) as stream:

        def send(offloader: GradientOffloader, name: str, ready_event: Any, copies: Any, norms: Any) -> Landing:
            landing = [(target, source.clone()) for target, source in (*copies, *norms)]
            offloader.last_copied_event = Landing(stream, landing)
            return offloader.last_copied_event

        if request.param == "late":
            monkeypatch.setattr(GradientOffloader, "send", send)
        yield


@pytest.mark.parametrize(
    ("trainer_class", "accumulation", "max_grad_norm", "copies"),
    pairwise([Penalised, PenalisedBefore, Trainer], [1, 2], [0.0, 1.0], ["at once", "late"]),
    indirect=["copies"],
)
@pytest.mark.usefixtures("copies")
def test_a_penalty_on_the_weights_counts(
    tmp_path: Path, trainer_class: type[Trainer], accumulation: int, max_grad_norm: float
) -> None:
    settings = {"gradient_accumulation_steps": accumulation, "max_grad_norm": max_grad_norm, "max_steps": 3}
    options = loss_with_penalty if trainer_class is Trainer else None
    _, streamed = run_both(tiny_llama, tmp_path, trainer_class=trainer_class, options=options, **settings)
    plain = run_trainer(tiny_llama, tmp_path, streamed=False, **settings)
    assert plain.logged("grad_norm") != streamed.logged("grad_norm")


@pytest.mark.parametrize("copies", ["late"], indirect=True)
@pytest.mark.usefixtures("copies")
def test_a_penalty_counts_after_a_step_on_other_weights_than_those_in_bf16() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = attach(model)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    saved, seen = optimizer.state_dict(), []
    for step in range(3):
        before = penalty(model)
        (before + loss_of(model, token_batches(1)[0])).backward()
        seen.append([weight.grad.clone() for weight in model.parameters()])
        optimizer.load_state_dict(saved) if step else optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(*pair) for later in seen[1:] for pair in zip(later, seen[0], strict=True))
    engine.close()


@pytest.mark.usefixtures("copies")
def test_a_penalty_with_a_backward_of_its_own_counts() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, list[Any]]:
        model, optimizer = prepared(accelerator)
        observed = []
        for place, ids in enumerate(token_batches(3)):
            parts = [lambda: loss_of(model, ids), lambda: penalty(model)]  # noqa: B023
            for part in parts if place % 2 else reversed(parts):
                accelerator.backward(part())
            observed.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script)


class StepsInBackward(TrainerCallback):
    """Notes which units' steps were submitted within the backward of each step."""

    def __init__(self) -> None:
        self.found: dict[int, list[str]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        worker = engine_of(kwargs["model"]).runtime.worker
        submit = worker.submit

        def noting(name: str, work: Callable[[], None]) -> Any:
            in_backward = self.found.setdefault(state.global_step, [])
            if torch._C._current_graph_task_id() != -1:
                in_backward.append(name)
            return submit(name, work)

        worker.submit = noting


def test_only_layers_without_such_gradients_are_stepped_in_backward_and_not_in_the_first(tmp_path: Path) -> None:
    noted = StepsInBackward()
    run_trainer(
        tiny_llama, tmp_path, streamed=True, max_grad_norm=0.0, max_steps=3,
        options=lambda model: {"callbacks": [noted], **loss_with_penalty(model, of="model.layers.1")},
    )  # fmt: skip
    others = ["step (model.layers.2)", "step (model.layers.0)"]
    assert list(noted.found.values()) == [[], others, others]


def test_adalora_is_that_of_peft_alone_without_clipping(tmp_path: Path) -> None:
    run_both(adalora, tmp_path, max_grad_norm=0.0)


@pytest.mark.parametrize("trainer_class", [PenalisedBefore, Halving])
def test_gradients_that_change_after_their_layers_step_are_an_error_though_the_trainer_logs_norms(
    tmp_path: Path, trainer_class: type[Trainer]
) -> None:
    settings = {"step_schedule": "backward"}
    with pytest.raises(StateError, match=REMEDY):
        run_trainer(tiny_llama, tmp_path, streamed=True, trainer_class=trainer_class, settings=settings, max_grad_norm=0.0)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_training_step_of_the_users_may_change_gradients(tmp_path: Path, max_grad_norm: float) -> None:
    run_both(tiny_llama, tmp_path, trainer_class=Halving, max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("trainer_class", [Penalised, PenalisedBefore])
def test_gradients_that_pass_are_refused_from_outside_with_the_reason(tmp_path: Path, trainer_class: type[Trainer]) -> None:
    with pytest.raises(StateError, match=r"from outside its layer.*host_gradients to 'kept'"):
        run_trainer(
            tiny_llama, tmp_path, streamed=True, trainer_class=trainer_class, max_grad_norm=0.0,
            settings={"host_gradients": "passing"},
        )  # fmt: skip


@pytest.mark.parametrize("asked", [True, False])
def test_asking_for_the_norm_hides_no_change(asked: bool) -> None:
    ids = token_batches(1)[0]
    with plugin(step_schedule="backward"):
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        for change in (False, True):
            accelerator.backward(loss_of(model, ids))
            if change:
                next(iter(model.model.layers[1].parameters())).grad.mul_(2)
            if asked:
                accelerator.clip_grad_norm_(model.parameters(), float("inf"))
            if change:
                with pytest.raises(StateError, match=f"1 gradients were changed.*{REMEDY}"):
                    optimizer.step()
            else:
                optimizer.step()
                optimizer.zero_grad()


def test_steps_in_backward_and_clipping_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm to 0, or leave step_schedule out"):
        run_trainer(tiny_llama, tmp_path, streamed=True, settings={"step_schedule": "backward"}, max_grad_norm=1.0)


def test_clipping_in_a_loop_that_steps_in_backward_is_named_with_its_factor() -> None:
    with plugin(step_schedule="backward"):
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(StateError, match=r"at step\(\) gradients were clipped \(by 0\.\d+\); set max_grad_norm to 0"):
            optimizer.step()


# ---------------------------------------------------------------- frozen weights in the optimizer


def half_frozen() -> nn.Module:
    model = tiny_llama()
    for frozen in (model.model.embed_tokens, model.model.layers[0]):
        frozen.requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [half_frozen, adalora])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_over_all_parameters_leaves_the_frozen_ones(
    make: Callable[[], nn.Module], optimizer_class: type[torch.optim.Optimizer]
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, list[Any]]:
        model = make()
        model, optimizer = accelerator.prepare(model, optimizer_class(model.parameters(), lr=1e-2, weight_decay=0.1))
        observed = []
        for ids in token_batches(3):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            observed += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 0.5))]
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()
        observed.append(len(saved["state"]))
        optimizer.load_state_dict(saved)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        optimizer.step()
        optimizer.zero_grad()
        return model, observed

    both(script)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_moments_of_frozen_weights_are_loaded_and_go_on_when_these_are_trained_again(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, list[Any]]:
        model = tiny_llama()
        options = {} if optimizer_class is torch.optim.AdamW else {"momentum": 0.9}
        model, optimizer = accelerator.prepare(model, optimizer_class(model.parameters(), lr=1e-2, **options))
        observed = train(accelerator, model, optimizer, token_batches(2))
        for frozen in (True, False):
            model.model.layers[0].requires_grad_(not frozen)
            model, optimizer = accelerator.prepare(model, optimizer)
            saved = copy.deepcopy(optimizer.state_dict())
            observed.append(len(saved["state"]))
            optimizer.load_state_dict(saved)
            observed += train(accelerator, model, optimizer, token_batches(2, seed=3))
        return model, observed

    both(script)


def test_an_optimizer_that_holds_anothers_weight_frozen_takes_nothing_over() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, list[Any]]:
        model = tiny_llama()
        layer, head = list(model.model.layers[0].parameters()), [model.lm_head.weight]
        rest = [weight for weight in model.parameters() if id(weight) not in {id(at) for at in (*layer, *head)}]
        first, second = adamw(model), adamw(model)
        for optimizer, own in ((first, [*head, *layer]), (second, rest)):
            optimizer.param_groups[0]["params"] = own
        model, first, second = accelerator.prepare(model, first, second)
        observed = train(accelerator, model, first, token_batches(1))
        second.zero_grad()
        model.model.layers[0].requires_grad_(False)
        second.param_groups[0]["params"] = [*rest, *layer]
        model, first, second = accelerator.prepare(model, first, second)
        for ids in token_batches(2, seed=3):
            accelerator.backward(loss_of(model, ids))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return model, observed

    both(script)


def test_two_optimizers_may_both_hold_the_frozen_weights() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, list[Any]]:
        model = half_frozen()
        frozen = [weight for weight in model.parameters() if not weight.requires_grad]
        head, rest = [model.lm_head.weight], [weight for weight in model.model.parameters() if weight.requires_grad]
        first, second = adamw(model), adamw(model)
        for optimizer, own in ((first, head), (second, rest)):
            optimizer.param_groups[0]["params"] = [*own, *frozen]
        model, first, second = accelerator.prepare(model, first, second)
        observed = []
        for ids in token_batches(3):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            observed.append(loss.item())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return model, observed

    both(script)
