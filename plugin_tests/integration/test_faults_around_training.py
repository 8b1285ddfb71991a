"""What goes wrong around a training (data, callbacks, signals, files, forks) ends as it does under the stock Trainer."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from checkpoint_runs import make_trainer
from forked_process import run_in_forks
from loop_runs import Observed, adamw, both, loss_of, prepared
from peft import LoraConfig
from plain_torch import token_batches
from torch import nn
from torch.utils.data import DataLoader
from trainer_runs import Record, assert_same_weights, examples, make_arguments, plugin, run_both, snapshot, tiny_llama
from transformers import Trainer, TrainerCallback

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import StateError

pytestmark = pytest.mark.usefixtures("profiled_once")


class AccidentError(Exception):
    """What breaks off a training."""


class BrokenData(torch.utils.data.Dataset[Record]):
    """Examples, of which one can't be read."""

    def __init__(self, bad: int) -> None:
        self._rows = examples()
        self._bad = bad

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        if index == self._bad:
            raise AccidentError("a file can't be read")
        return self._rows[index]


class BrokenCallback(TrainerCallback):
    """Raises at one event of the third step."""

    def __init__(self, event: str, error: type[BaseException]) -> None:
        setattr(self, event, self._raise)
        self._error = error

    def _raise(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise self._error("in a callback")


# ---------------------------------------------------------------------------------------- exceptions outside the model


def breaks_off(arguments: Record, callbacks: list[TrainerCallback], data: Any, error: type[BaseException]) -> None:
    """A training is broken off and another one follows, stock and streamed, with the same weights after each."""
    seen = []
    for streamed in (False, True):
        with plugin(streamed):
            model = tiny_llama()
            with pytest.raises(error):
                Trainer(model, make_arguments(**arguments), train_dataset=data, callbacks=callbacks).train()
            assert (engine_of(model) is not None) == streamed
            broken_off = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            Trainer(model, make_arguments(**{**arguments, "max_steps": 2}), train_dataset=examples()).train()
            seen.append((broken_off, snapshot(model)))
    (stock, stock_after), (ours, ours_after) = seen
    assert_same_weights(ours, stock)
    assert_same_weights(ours_after, stock_after)
    assert any(not torch.equal(value, tiny_llama().state_dict()[name]) for name, value in stock.items()), "steps were taken"


@pytest.mark.parametrize(("max_grad_norm", "workers"), [(1.0, 0), pytest.param(0.0, 2, marks=pytest.mark.long)])
def test_data_that_cannot_be_read_leaves_the_steps_before_it(tmp_path: Path, max_grad_norm: float, workers: int) -> None:
    arguments: Record = {"folder": tmp_path, "max_grad_norm": max_grad_norm, "dataloader_num_workers": workers}
    breaks_off(arguments, [], BrokenData(bad=7), AccidentError)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ("on_step_begin", AccidentError),
        ("on_pre_optimizer_step", KeyboardInterrupt),
        ("on_optimizer_step", AccidentError),
        ("on_step_end", KeyboardInterrupt),
        ("on_substep_end", AccidentError),
    ],
)
def test_an_exception_in_a_callback_leaves_the_steps_before_it(tmp_path: Path, event: str, error: type[BaseException]) -> None:
    accumulation = 2 if event == "on_substep_end" else 1
    arguments: Record = {"folder": tmp_path, "gradient_accumulation_steps": accumulation}
    breaks_off(arguments, [BrokenCallback(event, error)], examples(), error)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_training_that_broke_off_between_backward_and_step_resumes(tmp_path: Path, max_grad_norm: float) -> None:
    def script(trainer: Trainer) -> None:
        trainer.add_callback(BrokenCallback("on_pre_optimizer_step", AccidentError))
        with pytest.raises(AccidentError):
            trainer.train()
        trainer.remove_callback(BrokenCallback)
        trainer.train(resume_from_checkpoint=True)

    changes = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": max_grad_norm, "max_steps": 4}
    run_both(tiny_llama, tmp_path, script=script, **changes)


def test_a_training_that_goes_on_from_half_a_step_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # By default layers wait for the step where a callback may look before it.
    with plugin(step_schedule="backward"):
        callback = BrokenCallback("on_pre_optimizer_step", AccidentError)
        arguments = make_arguments(tmp_path, max_grad_norm=0.0, max_steps=3)
        trainer = Trainer(tiny_llama(), arguments, train_dataset=examples(), callbacks=[callback])
        with pytest.raises(AccidentError):
            trainer.train()
        trainer.remove_callback(callback)
        assert "broke off" not in caplog.text
        trainer.train()
        assert "broke off in or after a backward in which 27 parameters were stepped already" in caplog.text
        assert trainer.state.global_step == 3
        caplog.clear()
        trainer.train()
        assert "broke off" not in caplog.text


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from trainer_runs import examples, make_arguments, plugin, tiny_llama
from transformers import Trainer, TrainerCallback

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without it
folder = Path(sys.argv[1])

def interrupt():
    (folder / "interrupted").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGINT)

class Ready(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            threading.Timer(0.2, interrupt).start()

with plugin():
    arguments = make_arguments(folder, max_steps=100_000, logging_steps=50_000)
    Trainer(tiny_llama(), arguments, train_dataset=examples(), callbacks=[Ready()]).train()
"""


@pytest.mark.slow
def test_control_c_ends_a_training_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(INTERRUPTED)
    ((status, output),) = run_in_forks(tmp_path / "train.py", tmp_path, environments=[{}])
    assert time.time() - float((tmp_path / "interrupted").read_text()) < 30
    assert status != 0
    assert output.rstrip().endswith("KeyboardInterrupt"), output


# ---------------------------------------------------------------------------------------- forks


def test_data_loader_workers_that_are_forked_while_steps_are_pending(tmp_path: Path) -> None:
    # A new epoch forks workers anew, while the steps of the epoch before are being applied.
    forked: Record = {"dataloader_num_workers": 2, "num_train_epochs": 3, "max_steps": -1}
    run_both(tiny_llama, tmp_path, **forked)


def in_a_child(body: Callable[[], bool]) -> bool:
    """Whether the body returned true in a fork of this process, which must end by itself."""
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = body()
        finally:
            os._exit(0 if good else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_fork_that_ends_leaves_the_parents_training_alone() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator)
        observed: Observed = []
        for ids in token_batches(4):
            accelerator.backward(loss_of(model, ids))
            optimizer.step()
            optimizer.zero_grad()
            # A copy: the store itself stays with the process that steps it.
            copied = copy.deepcopy(model)
            observed += [in_a_child(lambda model=copied, ids=ids: bool(loss_of(model, ids) > 0)) for _ in range(2)]
        assert all(observed)
        return model, observed

    both(script)


# ---------------------------------------------------------------------------------------- broken files


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace_by_text(path: Path) -> None:
    path.write_text("this is somebody else's file")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("spoil", [truncate, replace_by_text])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_broken_checkpoint_is_an_error_and_the_one_before_it_resumes(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    with plugin():
        whole = make_trainer(tiny_llama(), tmp_path, max_steps=3)
        whole.train()
        expected = {key: value.clone() for key, value in whole.model.state_dict().items()}
        spoil(tmp_path / "checkpoint-2" / name)
        before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
        trainer = make_trainer(tiny_llama(initializer_range=0.1), tmp_path, max_steps=3)
        with pytest.raises(Exception, match=r"(?i)safetensor|header|zip|pickle|unpickl|invalid|incomplete|mmap"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert {path: path.stat().st_size for path in before} == before, "a failed resume must write nothing"
        good = make_trainer(tiny_llama(initializer_range=0.1), tmp_path, max_steps=3)
        good.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert_same_weights(dict(good.model.state_dict()), expected, tolerance=0.0)


def test_a_checkpoint_of_another_model_is_an_error_and_training_goes_on(tmp_path: Path) -> None:
    with plugin():
        make_trainer(tiny_llama(num_hidden_layers=2, hidden_size=16), tmp_path / "other", max_steps=1).train()
        model = tiny_llama()
        trainer = make_trainer(model, tmp_path / "mine", max_steps=1)
        with pytest.raises(RuntimeError, match=r"size mismatch|different sizes"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-1"))
        make_trainer(model, tmp_path / "mine", max_steps=2).train()
        assert (tmp_path / "mine" / "checkpoint-2").is_dir()


# ---------------------------------------------------------------------------------------- the rest of a plain loop


def test_an_adapter_that_is_added_after_prepare_is_refused_at_the_next_forward() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, _ = prepared(accelerator)
        ids = token_batches(1)[0]
        loss_of(model, ids).backward()
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
        with pytest.raises(StateError, match=r"lora_A.default.weight was added .*change the model \(adapters"):
            loss_of(model, ids)


def test_an_adapter_that_was_added_after_prepare_trains_when_prepared_anew() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, _ = prepared(accelerator)
        torch.manual_seed(3)
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
        model, optimizer = accelerator.prepare(model, adamw(model))
        observed: Observed = []
        for ids in token_batches(3):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            observed.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script)


def rows(count: int) -> Iterator[torch.Tensor]:
    yield from torch.stack(token_batches(count)).flatten(0, 1)


def test_gather_for_metrics_drops_nothing_and_doubles_nothing() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, _ = prepared(accelerator)
        loader = accelerator.prepare(DataLoader(list(rows(4))[:7], batch_size=2))
        observed: Observed = []
        model.eval()
        for ids in loader:
            with torch.no_grad():
                logits = model(input_ids=ids).logits
            observed += list(accelerator.gather_for_metrics((logits, ids)))
        assert sum(len(each) for each in observed[1::2]) == 7
        return model, observed

    both(script)
