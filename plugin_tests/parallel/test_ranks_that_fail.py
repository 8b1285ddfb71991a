"""When a rank dies, raises or does something else, all of them end within seconds, and the cause is on the screen."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from rank_runs import join_ranks, run_ranks

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

CULPRIT = 1
LATER = ("in backward", "before a step", "in a step", "while loading")
SECONDS = 5.0
"""Within which the others end."""


def die(*_: Any) -> None:
    Path(sys.argv[2]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any) -> None:
    raise ValueError("out of luck")


def main() -> None:
    """What each rank does: the rank :data:`CULPRIT` does what the case says in its second step."""
    case, rank = sys.argv[1], join_ranks()
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    has_little = case == "has too little memory" and rank == CULPRIT
    engine = attach(model, host_memory_gib=0.001 if has_little else None)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    for step, ids in enumerate(token_batches(4)):
        is_now = step == 1 and rank == CULPRIT
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


def outputs_of(case: str, tmp_path: Path) -> list[str]:
    """Of both ranks, which both failed."""
    killed = tmp_path / "killed"
    results = run_ranks(__file__, 2, case, killed)
    if killed.exists():
        assert time.time() - float(killed.read_text()) < SECONDS + 1.0  # and the end of this process's wait
    for status, output in results:
        assert status != 0, output
        assert "went on to the end" not in output
    return [output for _, output in results]


@pytest.mark.parametrize(
    "case",
    ["dies in forward", *(pytest.param(f"dies {when}", marks=pytest.mark.long) for when in LATER)],
)
def test_ranks_end_with_one_that_was_killed(case: str, tmp_path: Path) -> None:
    output = outputs_of(case, tmp_path)[1 - CULPRIT]
    assert f"megatrain: rank {CULPRIT} (process " in output
    assert "it was killed" in output
    assert "Traceback" not in output


def test_ranks_end_with_the_cause_of_one_that_raised(tmp_path: Path) -> None:
    output = outputs_of("raises in backward", tmp_path)[1 - CULPRIT]
    assert "has ended: ValueError: out of luck" in output
    assert "Traceback" not in output


def test_ranks_end_with_one_that_has_too_little_memory(tmp_path: Path) -> None:
    output = outputs_of("has too little memory", tmp_path)[1 - CULPRIT]
    assert "has ended: HostMemoryError: the model's weights and optimizer states take" in output
    assert "moments_dtype: bf16" in output
    assert "passing" not in output, "what several ranks can't do is no remedy"
    assert "Traceback" not in output


def test_a_rank_that_leaves_a_layer_out_ends_all_and_both_layers_are_named(tmp_path: Path) -> None:
    output = "".join(outputs_of("leaves a layer out", tmp_path))
    assert "model.layers.3" in output
    assert "model.layers.2" in output
    assert "run other layers, or in another order" in output


@pytest.mark.long
def test_a_rank_that_takes_fewer_steps_is_named(tmp_path: Path) -> None:
    results = run_ranks(__file__, 2, "ends early", tmp_path / "killed")
    status, output = results[1 - CULPRIT]
    assert status != 0
    assert f"ranks [{CULPRIT}] ended before, without an error" in output


def test_weights_that_several_processes_share_are_not_written_to(tmp_path: Path) -> None:
    output = outputs_of("writes to weights", tmp_path)[CULPRIT]
    assert "weights of model.layers.1 were written to, which several processes share" in output


if __name__ == "__main__":
    main()
