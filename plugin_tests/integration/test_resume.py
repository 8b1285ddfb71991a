"""Resume is bit-exact: a run that was interrupted ends as the run that wasn't, whatever the plan of the second half."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator, DistributedType
from engine_runs import masters_of
from forked_process import run_forked
from pairs import long_unless
from plain_torch import tiny_model, token_batches
from torch import nn
from trainer_runs import examples, make_arguments, plugin
from transformers import Trainer

from megatrain_accelerate.checkpoint.checkpoints import load_optimizer_and_scheduler
from megatrain_accelerate.engine import engine_of

pytestmark = pytest.mark.usefixtures("profiled_once")

STEPS = 8
"""Two epochs of 5 steps each, cut off: resume has to find its place inside the first epoch and inside the second."""


@dataclasses.dataclass
class Outcome:
    """All that a resumed run must share with the one that wasn't interrupted."""

    masters: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    losses: list[float]
    norms: list[float]
    rates: list[float]
    batches: list[torch.Tensor]
    rng: torch.Tensor


def make_model(seed: int) -> nn.Module:
    """Dropout at work, so that the RNG counts."""
    return tiny_model(seed, hidden_size=32, intermediate_size=64, num_hidden_layers=3, attention_dropout=0.3)


def train(
    folder: Path, *, bf16: bool, seed: int = 0, resume: bool = False, settings: dict[str, Any], **changes: Any
) -> Outcome:
    """A run of the stock Trainer; weights of the model come from ``seed``, unless it resumes."""
    with plugin(**settings):
        model = make_model(seed)
        trained_on: list[torch.Tensor] = []

        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                trained_on.append(kwargs["input_ids"].clone())

        model.register_forward_pre_hook(note, with_kwargs=True)
        arguments = make_arguments(
            folder,
            **{
                "bf16": bf16,
                "max_steps": STEPS,
                "save_strategy": "no" if resume else "steps",
                "save_steps": 1,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 3,
                "weight_decay": 0.1,
                **changes,
            },
        )
        trainer = Trainer(model, arguments, train_dataset=examples(10))
        trainer.train(resume_from_checkpoint=True if resume else None)
        engine = engine_of(model)
        assert engine is not None
        engine.drain()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return Outcome(
            masters=masters_of(engine, model),
            weights={name: parameter.detach().clone() for name, parameter in model.named_parameters()},
            optimizer=trainer.optimizer.state_dict(),
            schedule=trainer.lr_scheduler.state_dict(),
            losses=[entry["loss"] for entry in logs],
            norms=[entry.get("grad_norm", 0.0) for entry in logs],
            rates=[entry["learning_rate"] for entry in logs],
            batches=trained_on,
            rng=torch.get_rng_state(),
        )


def resume(full_run: Path, step: int, folder: Path, **how: Any) -> Outcome:
    """Goes on from one checkpoint of ``full_run``, the only one in ``folder``, with a model of other weights."""
    shutil.copytree(full_run / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return train(folder, seed=99, resume=True, **how)


def assert_same_end(resumed: Outcome, whole: Outcome, batches_before: int) -> None:
    assert len(whole.losses) == STEPS
    assert resumed.losses == whole.losses
    assert resumed.norms == whole.norms
    assert resumed.rates == whole.rates
    assert resumed.schedule == whole.schedule
    remaining = whole.batches[batches_before:]
    assert len(resumed.batches) == len(remaining)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(resumed.batches, remaining, strict=True))
    for name, master in whole.masters.items():
        assert torch.equal(resumed.masters[name], master), f"{name}: masters differ"
        assert torch.equal(resumed.weights[name], whole.weights[name]), f"{name}: weights differ"
    assert resumed.optimizer["param_groups"] == whole.optimizer["param_groups"]
    for index, state in whole.optimizer["state"].items():
        assert state.keys() == resumed.optimizer["state"][index].keys()
        for key, value in state.items():
            assert torch.equal(resumed.optimizer["state"][index][key], value), f"parameter {index}: {key} differs"
    assert torch.equal(resumed.rng, whole.rng)


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bool, Path, Outcome]]:
    """(bf16, its folder with a checkpoint of every step, how it ended) of runs with clipping at work."""
    runs = []
    for bf16 in (True, False):
        folder = tmp_path_factory.mktemp("whole")
        outcome = train(folder, bf16=bf16, settings={})
        assert max(outcome.norms) > 1.0, "clipping must be at work"
        assert not torch.equal(outcome.batches[0], outcome.batches[5]), "the epochs must differ in order"
        runs.append((bf16, folder, outcome))
    return runs


@pytest.fixture(params=[0, 1], ids=["bf16", "fp32"])
def whole_run(request: pytest.FixtureRequest, whole_runs: list[tuple[bool, Path, Outcome]]) -> tuple[bool, Path, Outcome]:
    """Either of these runs."""
    return whole_runs[request.param]


@pytest.mark.parametrize(
    ("whole_run", "step"),
    [
        *long_unless([(0, 2), (0, STEPS - 1)], ((0, step) for step in range(1, STEPS))),
        # Within the first epoch and at its end.
        *((1, step) for step in (3, 5)),
    ],
    indirect=["whole_run"],
)
def test_resume_from_any_step_is_bit_equal_to_the_run_that_was_not_interrupted(
    whole_run: tuple[bool, Path, Outcome], step: int, tmp_path: Path
) -> None:
    bf16, folder, whole = whole_run
    assert_same_end(resume(folder, step, tmp_path, bf16=bf16, settings={}), whole, step)


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 4},
        {"step_schedule": "serial"},
        {"slots": 3, "host_threads": 2},
        {"device_layers": 1},
        {"device_layers": -1, "kept_layers": 2},
    ],
    ids=str,
)
def test_resume_under_another_plan_is_bit_equal(
    whole_run: tuple[bool, Path, Outcome], settings: dict[str, Any], tmp_path: Path
) -> None:
    bf16, folder, whole = whole_run
    assert_same_end(resume(folder, 3, tmp_path, bf16=bf16, settings=settings), whole, 3)


@pytest.mark.parametrize("bf16", [True, False])
def test_resume_between_schedules_is_bit_equal_without_clipping(bf16: bool, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", bf16=bf16, settings={"step_schedule": "deferred"}, max_grad_norm=0)
    for schedule in ("backward", "auto", "serial"):
        how = {"bf16": bf16, "settings": {"step_schedule": schedule}, "max_grad_norm": 0}
        assert_same_end(resume(tmp_path / "whole", 6, tmp_path / schedule, **how), whole, 6)


def test_resume_with_accumulation_is_bit_equal(tmp_path: Path) -> None:
    how: dict[str, Any] = {"bf16": True, "settings": {}, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    whole = train(tmp_path / "whole", **how)
    assert_same_end(resume(tmp_path / "whole", 3, tmp_path / "resumed", **how), whole, 6)


def test_resume_in_a_fresh_process_is_bit_equal(whole_runs: list[tuple[bool, Path, Outcome]], tmp_path: Path) -> None:
    run_forked(__file__, *(folder for _, folder, _ in whole_runs), tmp_path)
    for bf16, _, whole in whole_runs:
        resumed = torch.load(tmp_path / f"{bf16}.pt", weights_only=False)
        assert_same_end(Outcome(**resumed), whole, 4)


@pytest.mark.parametrize("bf16", [True, False])
def test_resume_of_a_model_that_streams_already_is_bit_equal(bf16: bool, tmp_path: Path) -> None:
    # The Trainer loads the weights into the prepared model: an outside write, which must not take the residuals with it.
    whole = train(tmp_path / "whole", bf16=bf16, settings={})
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "again" / "checkpoint-4")
    with plugin():
        model = make_model(7)
        changes = {"bf16": bf16, "max_steps": STEPS, "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1}
        trainer = Trainer(model, make_arguments(tmp_path / "again", **changes), train_dataset=examples(10))
        trainer.train()
        trainer.train(resume_from_checkpoint=True)
        engine = engine_of(model)
        assert engine is not None
        engine.drain()
        for name, master in masters_of(engine, model).items():
            assert torch.equal(master, whole.masters[name]), name


def accelerate_loop(accelerator: Accelerator, batches: list[torch.Tensor], model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh_model", "same_model"])
def test_load_state_of_a_bare_accelerate_loop_is_bit_exact(fresh: bool, tmp_path: Path) -> None:
    batches = token_batches(6)

    def prepare(seed: int) -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model = make_model(seed)
        return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))

    with plugin():
        accelerator, model, optimizer = prepare(0)
        accelerate_loop(accelerator, batches[:3], model, optimizer)
        accelerator.save_state(str(tmp_path / "state"))
        whole = accelerate_loop(accelerator, batches[3:], model, optimizer)
        engine = engine_of(model)
        assert engine is not None
        engine.drain()
        masters = masters_of(engine, model)
        if fresh:
            accelerator, model, optimizer = prepare(1)
        accelerator.load_state(str(tmp_path / "state"))
        assert accelerate_loop(accelerator, batches[3:], model, optimizer) == whole
        engine = engine_of(model)
        assert engine is not None
        engine.drain()
        for name, master in masters_of(engine, model).items():
            assert torch.equal(master, masters[name]), name


def test_several_gpus_read_the_states_that_accelerate_loads_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: dict[str, Any] = {}
    load, load_all = torch.load, accelerate.accelerator.load_accelerator_state

    def noting(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        places[Path(file).name] = str(map_location), kwargs.get("mmap")
        return load(file, map_location, *args, **kwargs)

    def noting_all(*args: Any, **kwargs: Any) -> Any:
        places["weights"] = args[7]
        return load_all(*args, **kwargs)

    with plugin():
        accelerator = Accelerator(cpu=True)
        model = make_model(0)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        accelerator.save_state(str(tmp_path))
        several = {"num_processes": 2, "distributed_type": DistributedType.MULTI_GPU, "multi_device": True}
        for name, value in several.items():
            monkeypatch.setattr(Accelerator, name, value, raising=False)  # Accelerate 0.34 has no multi_device
        monkeypatch.setattr(accelerate.accelerator, "load_accelerator_state", noting_all)
        monkeypatch.setattr(torch, "load", noting)
        accelerator.load_state(str(tmp_path))
    assert places["weights"] == "cpu"
    assert places["optimizer.bin"] == ("cpu", True)


def test_several_gpus_read_the_optimizer_states_that_the_trainer_loads_on_the_host(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"step": torch.ones(3)}, tmp_path / name)
    found = {}

    def loads_for_a_gpu(trainer: Any, checkpoint: str) -> None:
        for name in ("optimizer.pt", "scheduler.pt"):
            found[name] = torch.load(f"{checkpoint}/{name}", map_location="meta", weights_only=True)["step"].device.type

    with plugin():
        model = Accelerator(cpu=True).prepare(make_model(0))
        load_optimizer_and_scheduler(loads_for_a_gpu, SimpleNamespace(model=model), str(tmp_path))
    assert found == {"optimizer.pt": "cpu", "scheduler.pt": "meta"}


def test_a_new_optimizer_waits_for_the_steps_of_the_one_before() -> None:
    # Adopting zeroes the moments; a deferred step of the first optimizer that is still queued must not write to them.
    with plugin():
        accelerator = Accelerator(cpu=True)
        model = make_model(0)
        model, first = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        engine = engine_of(model)
        assert engine is not None
        engine.runtime.worker.submit("slow", lambda: time.sleep(0.5))
        accelerate_loop(accelerator, token_batches(1), model, first)
        second = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
        engine.drain()
        assert second.state_dict()["state"] == {}
        for unit in engine.runtime.units:
            assert unit.moments is not None
            assert not unit.moments.exp_avg.any()


if __name__ == "__main__":
    *sources, target = (Path(argument) for argument in sys.argv[1:])
    for bf16, source in zip((True, False), sources, strict=True):
        result = resume(source, 4, target / f"run-{bf16}", bf16=bf16, settings={"slots": 3})
        torch.save(dataclasses.asdict(result), target / f"{bf16}.pt")
