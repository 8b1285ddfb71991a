"""Models that share parameters with one that was prepared before: adapters around it, a wrapper, its backbone elsewhere."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from loop_runs import Observed, adamw, both, loss_of, prepared, train
from peft import LoraConfig, get_peft_model
from plain_torch import token_batches
from torch import nn
from trainer_runs import assert_same_weights, examples, make_arguments, plugin, snapshot, tiny_llama
from transformers import Trainer

import megatrain_accelerate
from megatrain_accelerate.engine import all_engines, engine_of
from megatrain_accelerate.errors import StateError, UnsupportedError

pytestmark = pytest.mark.usefixtures("profiled_once")

LABELS = torch.tensor([0, 1])


class Classifier(nn.Module):
    """A head of its own on somebody's backbone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.backbone(input_ids=input_ids).last_hidden_state[:, -1]
        return F.cross_entropy(self.head(hidden), labels)


class Wrapper(nn.Module):
    """The whole model under another name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return self.inner(*args, **inputs)


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


def classify(accelerator: Accelerator, model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> Observed:
    observed: Observed = []
    for ids in batches:
        loss = model(ids, LABELS)
        accelerator.backward(loss)
        observed.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return observed


@pytest.mark.parametrize("first", ["train", "evaluate"])
def test_adapters_around_a_model_of_another_trainer_train_as_with_stock_trainer(tmp_path: Path, first: str) -> None:
    results = []
    for streamed in (False, True):
        with plugin(streamed):
            folder = tmp_path / str(streamed)
            before = Trainer(
                model=tiny_llama(), args=make_arguments(folder), train_dataset=examples(), eval_dataset=examples()
            )
            getattr(before, first)()
            model = with_adapters(before.model)
            trainer = Trainer(model=model, args=make_arguments(folder), train_dataset=examples(seed=8))
            trainer.train()
            assert (engine_of(trainer.model) is not None) == streamed
            results.append(snapshot(trainer.model))
    stock, ours = results
    assert any("lora_B" in name and weight.any() for name, weight in ours.items())
    assert_same_weights(ours, stock)


@pytest.mark.parametrize("forgets", [False, True])
def test_adapters_are_put_around_a_prepared_model_and_prepared_with_the_same_accelerator(forgets: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed = train(accelerator, model, optimizer, token_batches(2))
        model = with_adapters(accelerator.unwrap_model(model))
        if forgets:
            accelerator.free_memory()
        model, optimizer = accelerator.prepare(model, adamw(model))
        return model, observed + train(accelerator, model, optimizer, token_batches(3))

    both(script)


@pytest.mark.parametrize("evaluation_mode", [False, True])
def test_an_optimizer_goes_on_when_its_model_is_prepared_inside_another(evaluation_mode: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed = train(accelerator, model, optimizer, token_batches(2))
        wrapper = accelerator.prepare_model(Wrapper(model), evaluation_mode=evaluation_mode)
        observed += train(accelerator, wrapper, optimizer, token_batches(2))
        return wrapper, observed + train(accelerator, model, optimizer, token_batches(2))

    both(script)


def test_a_backbone_is_trained_under_another_head_and_then_in_its_first_model_again() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        # A first step of Adam divides by a single gradient, and three optimizers take one: eps keeps what it amplifies small.
        model, optimizer = prepared(accelerator, eps=1e-5)
        observed = train(accelerator, model, optimizer, token_batches(2))
        classifier = Classifier(model.model)
        classifier, its_optimizer = accelerator.prepare(classifier, adamw(classifier, eps=1e-5))
        observed += classify(accelerator, classifier, its_optimizer, token_batches(2))
        model, optimizer = accelerator.prepare(model, adamw(model, eps=1e-5))
        return model, observed + train(accelerator, model, optimizer, token_batches(2))

    both(script)


def test_a_model_whose_part_went_to_another_says_so_until_it_is_prepared_again() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        classifier = accelerator.prepare(Classifier(model.model))
        ids = token_batches(1)[0]
        with pytest.raises(StateError, match=r"shares 29 of its 30 parameters with a Classifier .* prepare it anew"):
            loss_of(model, ids)
        classifier(ids, LABELS).backward()
        accelerator.prepare(model)
        loss_of(model, ids).backward()
        optimizer.step()
        with pytest.raises(StateError, match="with a LlamaForCausalLM"):
            classifier(ids, LABELS)
        around = accelerator.prepare(Wrapper(classifier))
        with pytest.raises(StateError, match="with a Wrapper"):
            loss_of(model, ids)
        engine_of(around).close()
        loss_of(model, ids).backward()
        classifier(ids, LABELS).backward()  # all are plain models now


def test_the_store_of_a_model_that_was_taken_over_is_freed_while_its_trainer_and_optimizer_live(tmp_path: Path) -> None:
    with plugin():
        trainer = Trainer(model=tiny_llama(), args=make_arguments(tmp_path, bf16=True), train_dataset=examples())
        trainer.train()
        engine = engine_of(trainer.model)
        unit, slot = engine.runtime.units[0], engine.runtime.prefetcher.slots[0]
        held = [weakref.ref(tensor) for tensor in (unit.weights, unit.residuals, unit.gradients, slot.buffer)]
        engine_ref = weakref.ref(engine)
        del engine, unit, slot
        trainer.accelerator.prepare(with_adapters(trainer.model))
        gc.collect()
        assert engine_ref() is None
        assert [reference() for reference in held] == [None] * 4
        assert trainer.optimizer.optimizer.state


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_model_that_was_loaded_in_bf16_stays_so_under_adapters(mixed_precision: str) -> None:
    """Its trained weights come back from the store as fp32 masters."""
    with plugin():
        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
        model = tiny_llama().to(torch.bfloat16)
        model, optimizer = accelerator.prepare(model, adamw(model))
        train(accelerator, model, optimizer, token_batches(2))
        seen = {name: weight.clone() for name, weight in model.state_dict().items()}
        model = accelerator.prepare(with_adapters(model))
        base = {name.replace(".base_layer", ""): weight for name, weight in model.base_model.model.state_dict().items()}
        assert {weight.dtype for name, weight in seen.items() for weight in (weight, base[name])} == {torch.bfloat16}
        # One master of 65,536 lies in the middle of two bf16 numbers: the store rounds away from zero, torch to the even one.
        apart = torch.cat(
            [(weight.view(torch.int16) - base[name].view(torch.int16)).flatten() for name, weight in seen.items()]
        )
        assert apart.unique().tolist() in ([0], [0, 1])
        assert apart.sum() <= 4
        assert model.dtype == torch.bfloat16
        assert engine_of(model).host_bytes_by_kind()["residuals"] == 0


def test_a_frozen_base_that_is_cast_after_its_adapters_were_unloaded_computes_in_what_it_was_cast_to() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(with_adapters(tiny_llama().to(torch.bfloat16)))
        base = model.merge_and_unload()
        assert base.dtype == torch.bfloat16
        base = accelerator.prepare(base.float().requires_grad_(True))
        assert {weight.dtype for weight in base.state_dict().values()} == {torch.float32}


def test_a_trainer_that_was_never_used_leaves_the_model_to_the_one_around_it(tmp_path: Path) -> None:
    weights = []
    for streamed in (False, True):
        with plugin(streamed):
            unused = Trainer(model=tiny_llama(), args=make_arguments(tmp_path), train_dataset=examples())
            trainer = Trainer(model=with_adapters(unused.model), args=make_arguments(tmp_path), train_dataset=examples())
            trainer.train()
            assert (engine_of(trainer.model) is not None) == streamed
            weights.append(snapshot(trainer.model))
    assert_same_weights(weights[1], weights[0])


def test_a_part_that_cannot_stream_by_itself_leaves_the_prepared_model_as_it_is() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        engine = engine_of(model)
        with pytest.raises(UnsupportedError, match="no repeated layers"):
            accelerator.prepare(model.lm_head)
        assert engine_of(model) is engine
        train(accelerator, model, optimizer, token_batches(1))


def test_backward_through_a_model_that_was_taken_over_is_an_error() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, _ = prepared(accelerator)
        loss = loss_of(model, token_batches(1)[0])
        accelerator.prepare(Wrapper(model))
        with pytest.raises(StateError, match=r"changed between forward and backward\. .*accelerator\.prepare\(\)"):
            loss.backward()


@pytest.mark.parametrize("shares_module", [False, True])
def test_a_teacher_with_the_students_frozen_embedding_streams_beside_it(shares_module: bool) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        student, teacher = tiny_llama(), tiny_llama()
        with torch.no_grad():
            teacher.model.layers[0].mlp.up_proj.weight.mul_(2)
        if shares_module:
            teacher.model.embed_tokens = student.model.embed_tokens
        else:
            teacher.model.embed_tokens.weight = student.model.embed_tokens.weight
        teacher.requires_grad_(False)
        student, optimizer = accelerator.prepare(student, adamw(student))
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        observed: Observed = []
        for ids in token_batches(3):
            with torch.no_grad():
                wanted = teacher(input_ids=ids).logits
            loss = F.mse_loss(student(input_ids=ids).logits, wanted)
            accelerator.backward(loss)
            observed.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return student, observed

    both(script)


def sharing_frozen(part: str) -> tuple[nn.Module, nn.Module]:
    """A student and a teacher with the same frozen parameters in a part; the teacher is another model elsewhere."""
    student, teacher = tiny_llama(), tiny_llama()
    with torch.no_grad():
        teacher.model.layers[1].mlp.up_proj.weight.mul_(2)
    teacher.requires_grad_(False)
    for name, parameter in teacher.get_submodule(part).named_parameters():
        owner, _, key = name.rpartition(".")
        setattr(student.get_submodule(part).get_submodule(owner), key, parameter)
    return student, teacher


def versions(*models: nn.Module) -> list[int]:
    """Change whenever a store takes weights over."""
    engines = [engine_of(model) for model in models]
    return [unit.version for engine in engines if engine is not None for unit in engine.runtime.units]


@pytest.mark.parametrize("part", ["model.embed_tokens", "model.layers.0"])
@pytest.mark.parametrize("first", ["student", "teacher"])
@pytest.mark.parametrize("settings", [{}, {"device_layers": 1}], ids=str)
def test_frozen_weights_in_two_stores_are_read_from_each_without_copies(
    part: str, first: str, settings: dict[str, Any]
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        student, teacher = sharing_frozen(part)
        student, optimizer = accelerator.prepare(student, adamw(student))
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        shared = teacher.get_submodule(part)
        observed: Observed = []

        def wanted(ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return teacher(input_ids=ids).logits

        for ids in token_batches(3):
            before = versions(teacher)
            target = wanted(ids) if first == "teacher" else None
            logits = student(input_ids=ids).logits
            loss = F.mse_loss(logits, wanted(ids) if target is None else target)
            accelerator.backward(loss)
            observed.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            assert versions(teacher) == before, "the teacher's store took weights over that nobody wrote"
        observed.append([parameter.detach().cpu().clone() for parameter in shared.parameters()])
        return student, [*observed[:-1], *observed[-1]]

    both(script, settings=settings)


@pytest.mark.parametrize("part", ["model.embed_tokens", "model.layers.0"])
@pytest.mark.parametrize("through", ["student", "teacher"])
@pytest.mark.parametrize("way", ["in place", "as data"])
def test_what_is_written_to_frozen_weights_in_two_stores_reaches_both(part: str, through: str, way: str) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        student, teacher = sharing_frozen(part)
        student, optimizer = accelerator.prepare(student, adamw(student))
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        observed: Observed = []
        for ids in token_batches(3):
            for model in (student, teacher) if through == "student" else (teacher, student):
                with torch.no_grad():
                    observed.append(model(input_ids=ids).logits.sum().item())
            parameter = next(teacher.get_submodule(part).parameters())
            if way == "in place":
                with torch.no_grad():
                    parameter.mul_(1.5)
            else:
                parameter.data = 1.5 * parameter.data
            observed += train(accelerator, student, optimizer, [ids])
        return student, observed

    both(script, tolerance=1e-5)


def test_a_teacher_goes_on_with_frozen_weights_when_the_student_is_gone() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        student, teacher = sharing_frozen("model.layers.0")
        student, optimizer = accelerator.prepare(student, adamw(student))
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        train(accelerator, student, optimizer, token_batches(1))
        if (engine := engine_of(student)) is not None:
            before = versions(teacher)
            engine.close()
            assert all(torch.isfinite(parameter).all() for parameter in student.parameters())
        with torch.no_grad():
            observed: Observed = [teacher(input_ids=ids).logits.clone() for ids in token_batches(2)]
        assert engine is None or versions(teacher) == before
        return teacher, observed

    both(script)


def test_a_trainer_may_call_a_model_whose_part_went_to_another(tmp_path: Path) -> None:
    """As TRL's do in their constructors: the model is prepared again first."""
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, _ = prepared(accelerator)
        accelerator.prepare(Classifier(model.model))
        trainer = Trainer(model=model, args=make_arguments(tmp_path), train_dataset=examples())
        with torch.no_grad():
            loss_of(trainer.model, token_batches(1)[0])
        trainer.train()


def test_an_optimizer_that_trains_nothing_any_more_does_not_stand_in_the_way() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model = tiny_llama()
        model, earlier = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with plugin(host_gradients="passing"):  # for which SGD has no kernel
        adapted = with_adapters(model)
        adapted, optimizer = Accelerator(cpu=True).prepare(adapted, adamw(adapted))
        train(accelerator, adapted, optimizer, token_batches(1))
        with pytest.raises(StateError, match="prepared anew since"):
            earlier.step()


def test_steps_in_flight_are_waited_for_by_the_name_of_a_part() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator)
        weight = model.model.layers[-1].mlp.up_proj.weight
        before = weight.detach().clone()
        train(accelerator, model, optimizer, token_batches(1))
        megatrain_accelerate.drain(model.model)
        after = weight.detach().clone()
        engine_of(model).drain()
        assert not torch.equal(after, before)
        assert torch.equal(after, weight)


def test_what_was_inside_a_model_that_is_gone_is_prepared_anew() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model = tiny_llama()
        classifier = Classifier(model.model)
        classifier, optimizer = accelerator.prepare(classifier, adamw(classifier))
        observed = classify(accelerator, classifier, optimizer, token_batches(2))
        del classifier, optimizer
        accelerator.free_memory()
        gc.collect()
        model, optimizer = accelerator.prepare(model, adamw(model))
        if engine_of(model) is not None:
            assert all_engines() == [engine_of(model)]
        return model, observed + train(accelerator, model, optimizer, token_batches(2))

    both(script)
