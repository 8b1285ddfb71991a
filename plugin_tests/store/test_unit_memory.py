"""A unit's memory before its first step: what nobody wrote takes none, and what somebody wrote moves along."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_runs import Training, attach
from plain_torch import tiny_model, token_batches
from process_memory import anonymous_bytes

from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.units import MIB


def run_of(model: torch.nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Training:
    engine = attach(model.train())
    stock = optimizer(model.parameters(), lr=1e-3)
    return Training(model, engine, stock, adopt_optimizer(stock, engine.runtime, "deferred"))


def moments_of(run: Training) -> list[torch.Tensor]:
    states = (state for unit in run.engine.runtime.units for state in unit.states)
    return [moment.cpu().clone() for state in states for moment in state.moments or ()]


def residuals_of(run: Training) -> list[torch.Tensor]:
    states = (state for unit in run.engine.runtime.units for state in unit.states)
    return [state.residual.cpu().clone() for state in states if state.residual is not None]


def move_all(run: Training, to_device: bool) -> None:
    runtime = run.engine.runtime
    runtime.place(range(len(runtime.layers)) if to_device else (), groups_on_device=to_device)


def test_zero_residuals_take_no_memory_before_the_first_step_and_count_as_promised() -> None:
    model = tiny_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=6).to(torch.bfloat16)
    ids = token_batches(1)[0]
    before = anonymous_bytes()
    run = run_of(model)
    units = run.engine.runtime.units
    residual_bytes = sum(unit.residuals.nbytes for unit in units)
    assert residual_bytes > 40 * MIB, "more than what else is allocated meanwhile"
    assert anonymous_bytes() - before < sum(unit.weights.nbytes for unit in units) + residual_bytes // 2
    promised = sum(unit.promised_bytes for unit in units)
    run.model.load_state_dict({name: value + 1 for name, value in run.model.state_dict().items()})
    run.engine.runtime.refresh_if_written()
    assert sum(unit.promised_bytes for unit in units) == promised
    assert anonymous_bytes() - before < sum(unit.weights.nbytes for unit in units) + residual_bytes // 2
    in_use = sum(unit.touched_bytes for unit in units)
    move_all(run, to_device=True)
    assert not any(residual.any() for residual in residuals_of(run))
    move_all(run, to_device=False)
    run = run_of(tiny_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=6).to(torch.bfloat16))
    units = run.engine.runtime.units
    run.step(ids, max_norm=1.0)
    run.engine.drain()
    assert any(residual.any() for residual in residuals_of(run))
    used, missing = (sum(getattr(unit, name) for unit in units) for name in ("touched_bytes", "promised_bytes"))
    assert (used, missing) == (in_use + promised, 0)


def of_fp32_weights() -> Training:
    return run_of(tiny_model())


def of_replaced_weights() -> Training:
    run = run_of(tiny_model().to(torch.bfloat16))
    for parameter, other in zip(run.model.parameters(), tiny_model(seed=1).parameters(), strict=True):
        parameter.data = other.data
    run.engine.runtime.refresh_if_written()
    return run


def of_residuals_written_in_place() -> Training:
    run = run_of(tiny_model().to(torch.bfloat16))
    for unit in run.engine.runtime.units:
        for state in unit.states:
            assert state.residual is not None
            state.residual.fill_(5)
    return run


def _of_a_loaded_optimizer(optimizer: Callable[..., torch.optim.Optimizer]) -> Training:
    trained = run_of(tiny_model(), optimizer)
    trained.step(token_batches(1)[0])
    saved = trained.optimizer.state_dict()
    run = run_of(tiny_model().to(torch.bfloat16), optimizer)
    for unit in run.engine.runtime.units:
        unit.allocate("moments", touch=False)  # as a first step does that is skipped
    run.optimizer.load_state_dict(saved)
    return run


def of_a_loaded_fused_optimizer() -> Training:
    return _of_a_loaded_optimizer(torch.optim.AdamW)


def of_a_loaded_stock_optimizer() -> Training:
    return _of_a_loaded_optimizer(torch.optim.RMSprop)


WAYS = [of_fp32_weights, of_replaced_weights, of_residuals_written_in_place]
WAYS += [of_a_loaded_fused_optimizer, of_a_loaded_stock_optimizer]


@pytest.mark.parametrize("made", WAYS)
def test_states_that_were_written_before_the_first_step_move_along(made: Callable[[], Training]) -> None:
    run = made()
    before = residuals_of(run)
    moments = moments_of(run)
    assert any(moment.any() for moment in moments) == (made is of_a_loaded_fused_optimizer)
    assert all(residual.any() for residual in before if residual.numel() > 64)
    for to_device in (True, False):
        move_all(run, to_device)
        # Moments that there weren't are allocated by the move.
        now = residuals_of(run) + (moments_of(run) if moments else [])
        assert all(map(torch.equal, before + moments, now))
        assert len(before + moments) == len(now)
