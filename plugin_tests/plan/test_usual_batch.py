"""Batches of many sizes: units live where a batch of the mean size wants them, and each keeps as many layers as fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_runs import Training, attach
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.layers.padding import real_tokens
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan import device_plan
from megatrain_accelerate.plan.device_plan import LIBRARY_WORKSPACE_BYTES
from megatrain_accelerate.plan.fake_runs import replaced
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.other_batches import BatchExtent
from megatrain_accelerate.plan.placement import peak_bytes
from megatrain_accelerate.plan.plan_record import PlanRecord
from megatrain_accelerate.plan.step_profile import StepProfile
from megatrain_accelerate.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("profiled_once")

MACHINE = Machine(h2d_bytes=5e10, d2h_bytes=5e10, host_step_parameters=1e8, device_bytes=4e12, device_flops=7e14)
"""Its host is so slow that states belong on the device."""
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 512}
BUDGET_MIB = 75
LENGTHS = (48, 64, 40, 56, 44, 128, 52, 90, 60, 36)
"""The sixth is the first that is much longer than the others."""


@pytest.fixture(autouse=True)
def a_machine_with_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plan, "measured_machine", lambda *_: MACHINE)


def batch(length: int, rows: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Ids and labels; with ``rows``, real tokens of each sample, a mask too."""
    ids = token_batches(1, batch=len(rows) or 8, length=length, vocabulary=512)[0]
    if not rows:
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(length) < torch.tensor(rows)[:, None]).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def planned(budget_mib: float = BUDGET_MIB, **settings: Any) -> Training:
    model = tiny_model(**SHAPE).train()
    budget = (budget_mib * MIB + LIBRARY_WORKSPACE_BYTES) / GIB
    free = {"device_layers": None, "offloaded_layers": None}
    engine = attach(model, gpu_memory_gib=budget, **{**free, **settings})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


def taken_bytes(run: Training, inputs: dict[str, torch.Tensor]) -> int:
    """What a step on the batch takes by the policy that it runs with."""
    plan, runtime = run.engine.device_plan, run.engine.runtime
    with replaced(runtime.calls, "real_tokens", real_tokens(inputs)):
        exact = device_plan.profile_step(run.model, runtime, inputs, run.engine.device)
    return plan.fixed_bytes(exact) + peak_bytes(exact, plan.model_sizes(), runtime.calls.policy)


def followed(run: Training, batches: list[dict[str, torch.Tensor]]) -> list[int]:
    """The kept layers of each batch, all of which fit and take no more than is predicted."""
    kept, plan = [], run.engine.device_plan
    for inputs in batches:
        run.plan(inputs)
        kept.append(len(run.engine.runtime.calls.policy.kept))
        real = real_tokens(inputs)
        share = BatchExtent.of(inputs, real).share_of(plan.current.planned, real is not None)
        assert taken_bytes(run, inputs) <= plan.current.at(share)[1]
        assert taken_bytes(run, inputs) <= plan.predicted_peak_bytes <= plan.current.predicted_bytes
        assert plan.current.predicted_bytes <= BUDGET_MIB * MIB + LIBRARY_WORKSPACE_BYTES
    return kept


def test_a_long_batch_sends_no_states_to_the_host_and_keeps_fewer_layers() -> None:
    run = planned()
    kept = followed(run, [batch(length) for length in LENGTHS])
    placement = run.engine.device_plan.current.placement
    assert len(placement.on_device) == 8
    assert placement.groups_on_device
    by_length = dict(zip(LENGTHS, kept, strict=True))
    assert by_length[128] < by_length[90] < by_length[36] == by_length[52] == 8
    run.engine.close()


def test_as_many_real_tokens_have_as_many_kept_layers_however_wide_the_batch_is() -> None:
    run = planned()
    rows = [(2 * length, *7 * [length // 2]) for length in LENGTHS[:6]]
    rows += [(200, *7 * [16]), (120, *7 * [27])]  # 312 and 309 tokens
    rows += [(250, *7 * [34]), (100, *7 * [55])]  # 488 and 485
    kept = followed(run, [batch(max(each), each) for each in rows])
    assert run.engine.device_plan.current.is_linear
    assert len(run.engine.device_plan.current.placement.on_device) == 8
    assert kept[-4] == kept[-3] == 8
    assert 0 < kept[-2] == kept[-1] < 8
    run.engine.close()


def test_the_number_of_kept_layers_changes_no_bit() -> None:
    batches = [batch(length) for length in LENGTHS[1:7]]
    results, kept = [], set()
    either: list[dict[str, Any]] = [{}, {"kept_layers": 0, "device_layers": 0}]
    for settings in either:
        torch.manual_seed(0)
        run = planned(2 * BUDGET_MIB, bf16=False, **settings)  # in bf16 some CPUs take ten times as long
        losses = []
        for inputs in batches:
            loss = run.model(**inputs).loss
            loss.backward()
            kept.add((len(settings), len(run.engine.runtime.calls.policy.kept)))
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        run.engine.drain()
        results.append((losses, [parameter.detach().clone() for parameter in run.model.parameters()]))
        run.engine.close()
    assert len(kept) > 3, "of the first run"
    assert results[0][0] == results[1][0]
    for ours, streamed in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(ours, streamed)


def test_the_predicted_peak_is_that_of_the_largest_batch_so_far() -> None:
    """And not that of the larger ones for which there would be room."""
    run = planned()
    lengths = (48, 64, 40, longest := 100, 60)
    taken = []
    for length in lengths:
        inputs = batch(length)
        run.plan(inputs)
        taken.append(taken_bytes(run, inputs))
    predicted = run.engine.device_plan.predicted_peak_bytes - LIBRARY_WORKSPACE_BYTES
    most = max(taken) - LIBRARY_WORKSPACE_BYTES
    largest_layer = max(
        profile.kept_bytes for profile in run.engine.device_plan.foresee(run.model, batch(longest)).profiles.values()
    )
    assert most <= predicted <= 1.05 * most + largest_layer
    assert run.engine.device_plan.predicted_peak_bytes < 0.97 * run.engine.device_plan.current.predicted_bytes
    run.engine.close()


@pytest.mark.parametrize(("first", "has_usual"), [(61, False), (50, True)])
def test_batches_of_about_one_size_are_planned_for_as_the_largest(
    monkeypatch: pytest.MonkeyPatch, first: int, has_usual: bool
) -> None:
    monkeypatch.setattr(device_plan, "FREE_GROWTH", 1.0)
    monkeypatch.setattr(device_plan, "GROWTH_FACTORS", (1.0,))
    run = planned()
    followed(run, [batch(first), batch(64)])
    assert (run.engine.device_plan.current.usual_share < 1.0) == has_usual
    run.engine.close()


def test_layers_that_a_setting_has_on_the_device_stay_there() -> None:
    run = planned(60, device_layers=7)
    for length in LENGTHS:
        run.plan(batch(length))
        assert len(run.engine.device_plan.current.placement.on_device) == 7
    run.engine.close()


def test_what_grows_more_slowly_than_the_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss by tiles takes as much of all batches but small ones: those between need more than the line says."""
    profile_step = device_plan.profile_step

    def flattened(model: object, runtime: object, inputs: dict[str, torch.Tensor], device: object) -> StepProfile:
        step_profile = profile_step(model, runtime, inputs, device)  # type: ignore[arg-type]
        flat = min(inputs["input_ids"].numel(), 8 * 90) * 100_000
        more = [
            dataclasses.replace(event, peak_bytes=event.peak_bytes + flat, live_bytes=event.live_bytes + flat)
            for event in step_profile.events
        ]
        return dataclasses.replace(step_profile, events=tuple(more))

    monkeypatch.setattr(device_plan, "profile_step", flattened)
    run = planned(90)
    for length in (48, 64, 40, 56, 128):
        inputs = batch(length)
        run.plan(inputs)
        assert taken_bytes(run, inputs) <= 90 * MIB + LIBRARY_WORKSPACE_BYTES
    assert run.engine.device_plan.current.usual_share < 1.0
    assert not run.engine.device_plan.current.is_linear
    run.engine.close()


def test_a_resumed_training_keeps_as_many_layers_of_each_batch() -> None:
    run = planned()
    batches = [batch(length) for length in LENGTHS]
    followed(run, batches[:8])
    record = json.loads(json.dumps(run.engine.device_plan.record))
    kept = followed(run, batches[8:] + batches[5:8])
    run.engine.close()
    resumed = planned()
    resumed.engine.device_plan.expect_steps(10, record=record)
    assert followed(resumed, batches[8:] + batches[5:8]) == kept
    assert resumed.engine.device_plan.record == run.engine.device_plan.record
    resumed.engine.close()


LARGEST = Placement(kept=frozenset({6, 7}), on_device=frozenset(range(8)))
RECORD = PlanRecord(
    placement=LARGEST,
    predicted_bytes=1000,
    usual_share=0.25,
    usual_placement=dataclasses.replace(LARGEST, kept=frozenset(range(8))),
    usual_bytes=600,
    is_linear=True,
)


@pytest.mark.parametrize(
    ("share", "kept", "taken"),
    [(0.1, 8, 600), (0.25, 8, 600), (0.3, 6, 627), (0.4, 5, 680), (0.5, 4, 733), (1.0, 2, 1000), (1.1, 2, 1000)],
)
def test_between_the_usual_batch_and_the_largest_kept_layers_fall_with_one_over_the_tokens(
    share: float, kept: int, taken: int
) -> None:
    placement, predicted_bytes = RECORD.at(share)
    assert placement.kept == frozenset(range(8 - kept, 8))
    assert predicted_bytes == taken


def test_where_memory_grows_faster_than_the_tokens_larger_batches_than_the_usual_have_the_placement_of_the_largest() -> None:
    faster = dataclasses.replace(RECORD, is_linear=False)
    assert faster.at(0.25) == (RECORD.usual_placement, 600)
    assert faster.at(0.3) == (LARGEST, 1000)
