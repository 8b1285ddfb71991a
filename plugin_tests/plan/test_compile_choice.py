"""Compiling pays for itself or isn't done: by the length of the training, never by a clock."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from trainer_runs import run_trainer, tiny_llama
from transformers import Trainer

from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.layers import compiled_layer
from megatrain_accelerate.layers.compiled_layer import CompiledLayers
from megatrain_accelerate.plan import device_plan
from megatrain_accelerate.plan.machine import Machine

pytestmark = pytest.mark.usefixtures("profiled_once")


@pytest.fixture(autouse=True)
def a_device_whose_layers_are_worth_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layer, "SMALLEST_LAYER_PARAMETERS", 0)
    made = CompiledLayers.__init__

    def on_a_gpu(self: CompiledLayers, wanted: Any, device: torch.device, *others: Any) -> None:
        made(self, wanted, torch.device("cuda"), *others)
        self._device = device

    monkeypatch.setattr(CompiledLayers, "__init__", on_a_gpu)


@pytest.fixture
def a_torch_that_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layer, "_missing_in_torch", lambda: "nothing is compiled here")


def would_compile(engine: Engine) -> bool:
    """Whether the next step runs compiled layers."""
    return engine.runtime.compiled.wants(engine.runtime.layers[0]) is not None


@contextlib.contextmanager
def trial(batch: int, length: int, layers: int) -> Iterator[Callable[[float], bool]]:
    """Tells for how many steps a model's layers are compiled."""
    model = tiny_model(num_hidden_layers=layers).train()
    engine = attach(model)
    ids = token_batches(1, batch=batch, length=length)[0]

    def compiles(steps: float) -> bool:
        engine.device_plan.expect_steps(int(steps))
        engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
        return bool(engine.device_plan.expected[1])

    yield compiles
    engine.close()


def test_a_training_compiles_from_a_number_of_steps_on_that_falls_with_the_size_of_a_step() -> None:
    fewest, most = 0.0, 40.0  # as powers of two
    with trial(batch=2, length=16, layers=2) as compiles:
        while most - fewest > 1 / 140:  # one part in 200
            power = (fewest + most) / 2
            fewest, most = (fewest, power) if compiles(2**power) else (power, most)
    steps = 2**most
    for shape in ({"batch": 4, "layers": 2}, {"batch": 2, "layers": 4}):
        with trial(length=16, **shape) as compiles:
            assert not compiles(0.99 * steps / 2)
            assert compiles(1.01 * steps / 2)


def test_the_first_step_does_not_wait_for_the_compiler() -> None:
    model = tiny_model().train()
    engine = attach(model)
    engine.device_plan.expect_steps(2**40)
    ids = token_batches(1)[0]
    for compiles in (False, True, True):
        engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
        assert would_compile(engine) is compiles
        assert engine.device_plan.expected == (2**40, True), "a checkpoint after the first step says so too"
        assert engine.device_plan.record is None, "there is no plan to resume by before the second step's"
        engine.runtime.steps_taken += 1
    engine.close()


def padded_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Of which all rows but the last are padded."""
    ids = token_batches(1, batch=rows, length=length)[0]
    mask = torch.ones_like(ids)
    mask[:-1, length // 2 :] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def compilations_of(batches: Iterable[dict[str, torch.Tensor]], backend: str = "eager") -> list[int]:
    """Graphs that a training has compiled after each of its steps; AOTAutograd's ``aot_eager``, which takes most of the time,
    may want more of them than dynamo alone."""
    model = tiny_model(num_hidden_layers=2).train()
    engine = attach(model, compile_layers="auto", bf16=False)
    engine.runtime.compiled.backend = backend
    engine.device_plan.expect_steps(2**40)
    counts = []
    for batch in batches:
        model(**batch).loss.backward()
        counts.append(engine.runtime.compiled.compilations)
        engine.runtime.steps_taken += 1
    engine.close()
    return counts


def test_batches_of_varying_lengths_are_compiled_for_once() -> None:
    # That of the hidden size, that of the number of rows, multiples of 16 and others.
    lengths = [64, 40, 64, 33, 96, 6, 16, 70, 64, 57, 100, 12, 80, 3, 64]
    batches = [padded_batch(rows, length) for rows, some in ((6, lengths), (4, lengths[:4])) for length in some]
    counts = compilations_of(batches, "aot_eager")
    assert counts == [0] + 18 * [1], "the second step's graph is for all lengths and numbers of rows"
    without_padding = {name: value for name, value in padded_batch(6, 50).items() if name != "attention_mask"}
    assert compilations_of([*batches[:2], without_padding, *batches[2:6]])[-1] == 2, "layers without a mask have another"


def test_an_odd_batch_leaves_the_others_their_own_graph() -> None:
    """An epoch of batches of one length may end with a shorter one, or with fewer rows."""
    epoch = [*[padded_batch(4, 32)] * 3, padded_batch(4, 20)]
    assert compilations_of(2 * epoch) == [0, 1, 1, 2, 2, 2, 2, 2]
    assert compilations_of([*epoch, padded_batch(4, 24), *epoch])[3:] == 6 * [2], "a third length means that they vary"


def test_a_training_that_is_resumed_knows_whether_lengths_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = Machine(device_flops=1e12, device_bytes=1e12, h2d_bytes=1e9, d2h_bytes=1e9, host_step_parameters=1e9)
    monkeypatch.setattr(device_plan, "measured_machine", lambda *_: speeds)

    def record_after(lengths: list[int], record: Any = None) -> tuple[Any, bool]:
        model = tiny_model().train()
        engine = attach(model, gpu_memory_gib=4.0)
        engine.device_plan.expect_steps(2**40, True, record)
        for length in lengths:
            engine.device_plan.follow(model, padded_batch(2, length))
        record = json.loads(json.dumps(engine.device_plan.record))
        engine.close()
        return record, engine.runtime.compiled.sizes_vary

    for lengths, vary in (([32, 32], False), ([32, 20], True), ([32, 32, 20, 32], False), ([32, 32, 20, 24, 32], True)):
        record, varied = record_after(lengths)
        assert (varied, record_after([32], record)[1]) == (vary, vary)


def test_the_first_step_is_compiled_where_nothing_else_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def out_of_memory_unless_compiled(model: Any, runtime: Any, inputs: Any, step_profile: Any, *_: Any) -> Any:
        measured.append(runtime.compiled.may_compile)
        if not runtime.compiled.may_compile:
            raise torch.OutOfMemoryError
        return step_profile

    monkeypatch.setattr(device_plan, "measure_layers", out_of_memory_unless_compiled)
    monkeypatch.setattr(device_plan.DevicePlan, "measures", True)
    monkeypatch.setattr(device_plan, "CERTAIN_SHARE", 0.0)
    model = tiny_model().train()
    engine = attach(model, gpu_memory_gib=4.0)
    engine.device_plan.expect_steps(2**40)
    ids = token_batches(1)[0]
    engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
    assert measured[0] is False
    assert measured[-1] is True
    assert would_compile(engine)
    engine.close()


@pytest.mark.parametrize("why", ["accumulation", "compiled before"])
def test_layers_are_compiled_at_once_where_waiting_gains_nothing(why: str) -> None:
    model = tiny_model().train()
    engine = attach(model)
    if why == "accumulation":
        engine.device_plan.micro_batches = 2
    else:
        engine.runtime.compiled.compilations = 1
    engine.device_plan.expect_steps(2**40)
    ids = token_batches(1)[0]
    engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
    assert would_compile(engine)
    engine.close()


@pytest.mark.parametrize(("compile_layers", "compiles"), [("auto", False), (True, True), (False, False)])
def test_what_the_user_sets_is_done_however_short_the_training(compile_layers: bool | str, compiles: bool) -> None:
    model = tiny_model().train()
    engine = attach(model, compile_layers=compile_layers)
    engine.device_plan.expect_steps(1)
    ids = token_batches(1)[0]
    engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
    assert would_compile(engine) is compiles
    engine.close()


def test_a_loop_whose_number_of_steps_is_not_known_compiles() -> None:
    model = tiny_model().train()
    engine = attach(model)
    ids = token_batches(1)[0]
    engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
    assert would_compile(engine)
    engine.close()


@pytest.mark.usefixtures("a_torch_that_compiles_nothing")
def test_a_training_that_is_resumed_goes_on_with_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run_trainer(tiny_llama, tmp_path, streamed=True, **arguments)
    # It would choose otherwise by now.
    monkeypatch.setattr(device_plan, "COMPILE_SECONDS", 0.0)
    chosen: dict[str, bool | None] = {}
    for name, checkpoint in (("resumed", str(tmp_path / "checkpoint-2")), ("anew", None)):
        script = functools.partial(Trainer.train, resume_from_checkpoint=checkpoint)
        run = run_trainer(tiny_llama, tmp_path / name, streamed=True, script=script, **arguments)
        engine = engine_of(run.trainer.model)
        assert engine is not None
        chosen[name] = engine.runtime.compiled.pays
    assert chosen == {"resumed": False, "anew": True}


@pytest.mark.usefixtures("a_torch_that_compiles_nothing")
def test_a_training_that_is_resumed_goes_on_by_its_plan_whatever_the_machine_measures_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def plan_of(name: str, link: float, checkpoint: str | None) -> Any:
        speeds = Machine(device_flops=1e12, device_bytes=1e12, h2d_bytes=link, d2h_bytes=link, host_step_parameters=link)
        monkeypatch.setattr(device_plan, "measured_machine", lambda *_: speeds)
        script = functools.partial(Trainer.train, resume_from_checkpoint=checkpoint)
        settings = {"gpu_memory_gib": 0.1255}
        run = run_trainer(tiny_llama, tmp_path / name, streamed=True, script=script, settings=settings, **arguments)
        engine = engine_of(run.trainer.model)
        assert engine is not None
        return engine.device_plan.record

    whole = json.dumps(plan_of("whole", 1e6, None))
    assert json.dumps(plan_of("resumed", 1e18, str(tmp_path / "whole" / "checkpoint-2"))) == whole
    assert plan_of("anew", 1e18, None)["placement"] != json.loads(whole)["placement"]


def test_what_the_user_sets_counts_more_than_what_a_training_chose_before() -> None:
    model = tiny_model().train()
    engine = attach(model, compile_layers=True)
    engine.device_plan.expect_steps(4, compiles=False)
    assert would_compile(engine)
    engine.close()


def test_a_second_training_of_another_length_is_planned_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    profile_step = device_plan.profile_step
    monkeypatch.setattr(device_plan, "profile_step", lambda *args: plans.append(1) or profile_step(*args))
    model = tiny_model().train()
    engine = attach(model)
    ids = token_batches(1)[0]
    for steps in (10, 10, 20):
        engine.device_plan.expect_steps(steps)
        engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
    assert len(plans) == 2
    engine.close()
