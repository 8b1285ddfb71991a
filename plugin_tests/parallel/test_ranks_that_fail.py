"""When a rank dies, raises or does something else, all of them end within seconds, and the cause is on the screen."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from rank_ends import note_cause, require_prompt_end
from rank_runs import join_ranks, require_success, run_ranks

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.parallel.lifeline import ranks_of_run

of_either = pytest.mark.parametrize("culprit", [1, pytest.param(0, marks=pytest.mark.long)])
LATER = ("in backward", "before a step", "in a step", "while loading")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any) -> None:
    raise ValueError("out of luck")


def report_in_a_fork() -> None:
    """A process that this one forks, and that doesn't train, has an error that it doesn't expect."""
    process = os.fork()
    if process == 0:
        try:
            fail()
        except ValueError:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


def main() -> None:
    """What each rank does: one does what the case says in its second step."""
    case, is_culprit = sys.argv[1], join_ranks() == int(sys.argv[2])
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    has_little = case == "has too little memory" and is_culprit
    if has_little:
        ranks_of_run()
        note_cause(sys.argv[3])
    engine = attach(model, host_memory_gib=0.001 if has_little else None)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    for step, ids in enumerate(token_batches(4)):
        is_now = step == 1 and is_culprit
        if is_now:
            note_cause(sys.argv[3])
        if is_now and case == "dies in forward":
            model.model.layers[2].mlp.register_forward_pre_hook(die)
        if is_now and case == "dies in a step":
            engine.kernels.adamw = die  # type: ignore[method-assign]
        if is_now and case == "dies while loading":
            model.model.layers[2].register_load_state_dict_pre_hook(die)
        if step == 1 and case == "dies while loading":
            model.load_state_dict(model.state_dict())
        if is_now and case == "leaves a layer out":
            model.config.num_hidden_layers = 3
        if is_now and case == "ends early":
            return
        if is_now and case == "forks":
            report_in_a_fork()
        if is_now and case == "writes to weights":
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight.mul_(0.5)
        loss = model(input_ids=ids, labels=ids).loss
        if is_now and case in ("dies in backward", "raises in backward"):
            loss.register_hook(die if case == "dies in backward" else fail)
        loss.backward()
        engine.runtime.clip_grad_norm(model.parameters(), 1.0)
        if is_now and case == "dies before a step":
            die()
        optimizer.step()
        optimizer.zero_grad()
    engine.drain()
    print("went on to the end")


def outputs_of(case: str, culprit: int, tmp_path: Path, culprit_fails: bool = True) -> list[str]:
    """Of both ranks, which soon both failed."""
    cause = tmp_path / "cause"
    results = run_ranks(__file__, 2, case, str(culprit), cause)
    require_prompt_end(cause)
    for rank, (status, output) in enumerate(results):
        assert (status != 0) is (culprit_fails or rank != culprit), output
        assert "went on to the end" not in output
    return [output for _, output in results]


@pytest.mark.parametrize(
    ("case", "culprit"),
    [
        ("dies in forward", 0),
        ("dies in forward", 1),
        *(pytest.param(f"dies {when}", culprit, marks=pytest.mark.long) for when in LATER for culprit in (0, 1)),
    ],
)
def test_ranks_end_with_one_that_was_killed(case: str, culprit: int, tmp_path: Path) -> None:
    output = outputs_of(case, culprit, tmp_path)[1 - culprit]
    assert f"megatrain: rank {culprit} (process " in output
    assert "it was killed" in output
    assert "Traceback" not in output


@of_either
def test_ranks_end_with_the_cause_of_one_that_raised(culprit: int, tmp_path: Path) -> None:
    output = outputs_of("raises in backward", culprit, tmp_path)[1 - culprit]
    assert f"megatrain: rank {culprit} (process " in output
    assert "has ended: ValueError: out of luck" in output
    assert "Traceback" not in output


def test_ranks_do_not_end_with_a_process_that_one_of_them_forked(tmp_path: Path) -> None:
    results = run_ranks(__file__, 2, "forks", "0", tmp_path / "cause")
    require_success(results)
    assert "ValueError: out of luck" in results[0][1]
    assert all("went on to the end" in output for _, output in results)


@of_either
def test_ranks_end_with_one_that_has_too_little_memory(culprit: int, tmp_path: Path) -> None:
    output = outputs_of("has too little memory", culprit, tmp_path)[1 - culprit]
    assert f"megatrain: rank {culprit} (process " in output
    assert "has ended: HostMemoryError: the model's weights and optimizer states take" in output
    assert "moments_dtype: bf16" in output
    assert "passing" not in output, "what several ranks can't do is no remedy"
    assert "Traceback" not in output


@of_either
def test_a_rank_that_leaves_a_layer_out_ends_all_and_both_layers_are_named(culprit: int, tmp_path: Path) -> None:
    output = "".join(outputs_of("leaves a layer out", culprit, tmp_path))
    assert "model.layers.3" in output
    assert "model.layers.2" in output
    assert "run different layers, or the same ones in a different order" in output


@pytest.mark.long
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_takes_fewer_steps_is_named(culprit: int, tmp_path: Path) -> None:
    output = outputs_of("ends early", culprit, tmp_path, culprit_fails=False)[1 - culprit]
    assert f"ranks [{culprit}] ended before, without an error" in output


@of_either
def test_weights_that_several_processes_share_are_not_written_to(culprit: int, tmp_path: Path) -> None:
    outputs = outputs_of("writes to weights", culprit, tmp_path)
    message = "a script wrote to weights of model.layers.1. Several processes share them"
    assert message in outputs[culprit]
    assert f"rank {culprit} (process " in outputs[1 - culprit]
    assert message in outputs[1 - culprit]


if __name__ == "__main__":
    main()
