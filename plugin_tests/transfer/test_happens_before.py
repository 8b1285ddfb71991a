"""All accesses of streams and threads to one memory are ordered, whatever a step does: also where the CPU's results are right
without a wait."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_runs import Training, attach
from happens_before import Checker, Recorded
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.transfer import activation_offload

pytestmark = pytest.mark.usefixtures("profiled_once")

LAYERS = 4


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checker]:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    with pytest.MonkeyPatch.context() as patch:
        yield Checker(patch)


def training(schedule: str = "deferred", **settings: Any) -> Training:
    model = tiny_model(num_hidden_layers=LAYERS).train()
    engine = attach(model, compile_layers=False, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, schedule))


def without_gradients(run: Training) -> None:
    with torch.no_grad():
        run.model(input_ids=token_batches(1)[0])


def steps(
    run: Training,
    backwards: int = 1,
    in_graph: Callable[[Training], None] = lambda _: None,
    before_step: Callable[[Training], None] = lambda _: None,
    clips: bool = True,
    twice: bool = False,
) -> None:
    """Two steps of ``backwards`` backwards each, with something else between forward and backward, or before the step."""
    is_last = True
    run.engine.runtime.offloader.is_last_backward = lambda: is_last
    (ids,) = token_batches(1)
    for _ in range(2):
        for number in range(backwards):
            is_last = number == backwards - 1
            loss = run.model(input_ids=ids, labels=ids).loss
            in_graph(run)
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
        before_step(run)
        if clips:
            run.engine.runtime.clip_grad_norm(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.engine.drain()


def loads(run: Training) -> None:
    """``load_state_dict()`` between two forwards without gradients."""
    values = copy.deepcopy(run.model.state_dict())
    without_gradients(run)
    run.model.load_state_dict(values)
    without_gradients(run)


FETCHES, SENDS = "fetches host weights", "sends gradients"
BACKWARD: dict[str, Any] = {"schedule": "backward"}
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "plain": ({}, {}, {FETCHES, SENDS, "steps host weights", "reads norms", "computes with a resident", "fills a resident"}),
    "three slots": ({"slots": 3}, {}, {FETCHES}),
    "accumulation": ({}, {"backwards": 3}, {FETCHES, "adds to host gradients"}),
    "steps in backward": (BACKWARD, {"clips": False}, {"steps host weights"}),
    "passing gradients": ({**BACKWARD, "host_gradients": "passing"}, {"clips": False}, {"steps host weights"}),
    "serial": ({"schedule": "serial"}, {}, {"steps host weights"}),
    "kept": ({"kept_layers": 2}, {}, {FETCHES}),
    "offloaded": ({"kept_layers": 0, "offloaded_layers": 3}, {}, {"copies activations on the host"}),
    "offloaded inputs": ({"kept_layers": 0, "offloaded_inputs": True}, {"backwards": 2}, {"copies activations on the host"}),
    "pieces": ({"micro_batch_size": 1}, {"backwards": 2}, {FETCHES}),
    "layers on the device": ({"device_layers": 2, "kept_layers": 2}, {}, {FETCHES, SENDS}),
    "states on the device": ({"device_states": LAYERS}, {}, {"steps weights on the device", "brings host gradients"}),
    "states on the device, accumulation": ({"device_states": LAYERS}, {"backwards": 2}, {"steps weights on the device"}),
    "forward without gradients in a graph": ({}, {"in_graph": without_gradients}, {FETCHES}),
    "the same, steps in backward": (BACKWARD, {"in_graph": without_gradients, "clips": False}, {FETCHES}),
    "forward without gradients before a step": ({}, {"before_step": without_gradients, "clips": False}, {FETCHES}),
    "loaded weights before a step": ({}, {"before_step": loads, "clips": False}, {"loads host weights"}),
    "held": ({"evaluation_weights": "resident"}, {"before_step": without_gradients}, {FETCHES}),
    "two backwards": ({"kept_layers": LAYERS}, {"twice": True}, {FETCHES, SENDS}),
}
"""Settings, what happens in the steps, and accesses that must have been noted."""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_everything_that_streams_and_threads_do_to_one_memory_is_ordered(checker: Checker, scenario: str) -> None:
    settings, what, noted = SCENARIOS[scenario]
    run = training(**settings)
    steps(run, **what)
    assert noted <= checker.noted.keys()
    assert not checker.unordered
    run.engine.close()


def no_wait(*_: Any) -> None: ...


WAITS: dict[str, tuple[Any, str, str, str]] = {
    "before a step, for fetches": (StreamingRuntime, "wait_for_fetches", "forward without gradients before a step", FETCHES),
    "before loading, for fetches": (
        StreamingRuntime,
        "wait_for_fetches",
        "loaded weights before a step",
        "loads host weights",
    ),
    "of kernels for residents": (Recorded, "wait_event", "plain", "fills a resident"),
    "of kernels for copies": (Recorded, "wait_event", "plain", "computes with a slot"),
    "of copies for kernels": (Recorded, "wait_event", "plain", "fills a slot"),
    "of gradients for kernels": (Recorded, "wait_event", "plain", "fills a gradient slot"),
    "of copies of gradients for kernels": (Recorded, "wait_event", "plain", "d2h sends gradients"),
    "of activations for copies": (Recorded, "wait_event", "offloaded", "uses memory of activations again"),
    "at the end of backward, for gradients": (GradientOffloader, "wait", "plain", "writes host gradients"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_missing_is_found(checker: Checker, monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    owner, method, scenario, what = WAITS[wait]
    monkeypatch.setattr(owner, method, no_wait)
    settings, happens, _ = SCENARIOS[scenario]
    run = training(**settings)
    steps(run, **happens)
    assert any(what in pair for pair in checker.unordered), checker.unordered
    run.engine.close()
