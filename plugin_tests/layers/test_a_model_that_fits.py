"""A model that fits the device runs as plain modules do: what autograd, hooks and a second backward see of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_runs import Training, assert_equal_states, attach
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.layers.graph_call import GraphCall
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.store import unit as host_store
from megatrain_accelerate.store.host_memory import HostMemory

pytestmark = pytest.mark.usefixtures("profiled_once")

IDS = token_batches(1)[0]


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """A training in which no layer may run in another way."""
    model = tiny_model().train()
    engine = attach(model, device_layers=-1, kept_layers=4, compile_layers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monkeypatch.setattr(GraphCall, "run", lambda *_: pytest.fail("a layer's weights are looked for in a slot"))
    yield Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    engine.close()


def loss_of(run: Training) -> torch.Tensor:
    loss: torch.Tensor = run.model(input_ids=IDS, labels=IDS).loss
    return loss


def test_the_loss_falls(fitting: Training) -> None:
    losses = [fitting.step(IDS, max_norm=1.0) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.1


def test_a_backward_through_weights_that_were_stepped_raises(fitting: Training) -> None:
    loss = loss_of(fitting)
    loss.backward(retain_graph=True)
    fitting.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_forward_counts_as_open_as_long_as_its_graph_waits_for_backward(fitting: Training) -> None:
    runtime = fitting.engine.runtime
    loss = loss_of(fitting)
    assert runtime.open_forwards == 1
    loss.backward()
    assert runtime.open_forwards == 0
    loss = loss_of(fitting)
    assert runtime.open_forwards == 1
    del loss
    assert runtime.open_forwards == 0


def test_hooks_of_a_script_see_the_gradients_of_parameters(fitting: Training) -> None:
    seen: dict[str, Any] = {}
    for name, parameter in fitting.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    loss_of(fitting).backward()
    for name, parameter in fitting.model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(seen[name], parameter.grad)


def test_weights_that_a_script_writes_are_those_that_compute_and_are_stepped(fitting: Training) -> None:
    fitting.step(IDS)
    weight = fitting.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.zero_()
        before = loss_of(fitting).item()
        weight.add_(0.25)
        assert loss_of(fitting).item() != before
    state = fitting.engine.runtime.state_of(weight)
    assert state is not None
    assert torch.equal(state.weight, torch.full_like(weight, 0.25))
    fitting.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    fitting.step(IDS)
    assert torch.equal(weight.detach(), torch.full_like(weight, 0.25))


def test_a_hook_that_would_miss_the_sum_of_two_backwards_is_refused(fitting: Training) -> None:
    fitting.model.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda _: None)
    loss_of(fitting).backward()
    with pytest.raises(UnsupportedError, match="accumulation_dtype"):
        loss_of(fitting).backward()


def test_a_parameter_that_was_replaced_is_refused(fitting: Training) -> None:
    layer = fitting.model.model.layers[1].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.detach().clone(), requires_grad=False)
    with pytest.raises(StateError, match="was replaced after the model was prepared"):
        loss_of(fitting)
    with torch.no_grad(), pytest.raises(StateError, match="was replaced after the model was prepared"):
        loss_of(fitting)


def test_sums_are_fp32_also_after_data_of_another_dtype_were_there(fitting: Training) -> None:
    fitting.engine.runtime.offloader.is_last_backward = lambda: False
    weight = fitting.model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.float()
    for _ in range(2):
        loss_of(fitting).backward()
    state = fitting.engine.runtime.state_of(weight)
    assert state is not None
    assert state.handle.has_fp32_sum


def test_a_backward_goes_on_behind_a_step_of_other_weights_of_the_layer(fitting: Training) -> None:
    biases = [p for name, p in fitting.model.named_parameters() if name.endswith("q_proj.bias")]
    optimizer = torch.optim.AdamW(biases, lr=1e-2)
    adopt_optimizer(optimizer, fitting.engine.runtime, "deferred")
    loss = loss_of(fitting)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


# ---------------------------------------------------------------------------------------- where its memory is made


def started(schedule: str = "deferred", **settings: Any) -> Training:
    model = tiny_model().train()
    engine = attach(model, compile_layers=False, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, schedule))


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [("deferred", {}), ("backward", {}), ("deferred", {"moments_dtype": "bf16"}), ("backward", {"host_gradients": "passing"})],
    ids=str,
)
def test_what_training_adds_is_never_made_on_the_host(
    schedule: str, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[HostMemory] = []

    def note(size: int, register: bool, shared: None = None) -> HostMemory:
        made.append(HostMemory(size, register=register))
        return made[-1]

    monkeypatch.setattr(host_store, "HostMemory", note)
    monkeypatch.setattr("megatrain_accelerate.gradients.buffers.HostMemory", note)
    run = started(schedule, device_layers=None, gpu_memory_gib=1.0, **settings)
    assert len(made) == 2 * len(run.engine.runtime.units), "weights and residuals"
    streamed = started(schedule, **settings)
    del made[:]
    for ids in token_batches(3):
        loss = run.step(ids)
        assert not any(run.engine.host_bytes_by_kind().values())
        assert not made
        assert loss == streamed.step(ids)
        made.clear()
    assert len(run.engine.device_plan.current.placement.on_device) == 4
    assert_equal_states(run.state(), streamed.state())


def test_an_evaluation_before_the_first_step_makes_nothing_that_training_needs() -> None:
    settings = {"device_layers": None, "gpu_memory_gib": 1.0}
    run, other = started(**settings), started(**settings)
    with torch.no_grad():
        run.model.eval()(input_ids=IDS)
    run.model.train()
    held = run.engine.host_bytes_by_kind()
    assert held["weights"]
    assert held["gradients"] == held["moments"] == 0
    for ids in token_batches(2):
        assert run.step(ids) == other.step(ids)
    assert_equal_states(run.state(), other.state())


def test_states_that_were_loaded_move_to_the_device_with_their_units() -> None:
    batches = token_batches(4)
    before, after, other = started(), started(device_layers=None, gpu_memory_gib=1.0), started()
    for ids in batches[:2]:
        before.step(ids)
        other.step(ids)
    before.engine.drain()
    after.model.load_state_dict(before.model.state_dict())
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    assert after.engine.host_bytes_by_kind()["moments"]
    for ids in batches[2:]:
        assert after.step(ids) == other.step(ids)
    assert not any(after.engine.host_bytes_by_kind().values())
    assert_equal_states(after.state(), other.state())


@pytest.mark.parametrize("use", ["layer", "part of a layer", "gradients by hand"])
def test_a_training_that_never_calls_the_model_itself_has_its_memory_too(use: str) -> None:
    states = []
    for made_before in (True, False):
        run = started()
        if made_before:
            for unit in run.engine.runtime.units:
                unit.allocate("gradients")
                unit.allocate("moments")
        base = run.model.model
        hidden = torch.randn(1, 4, base.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
        for _ in range(3):
            if use == "layer":
                positions = torch.arange(4)[None]
                output = base.layers[1](hidden, position_embeddings=base.rotary_emb(hidden, positions))
                (output[0] if isinstance(output, tuple) else output).float().square().mean().backward()
            elif use == "part of a layer":
                base.layers[1].mlp.up_proj.weight.float().square().mean().backward()
                base.norm(hidden).float().square().mean().backward()
            else:
                for parameter in run.model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e-3)
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.engine.drain()
        weights = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
        states.append(weights | {"moments": torch.tensor([unit.moments is not None for unit in run.engine.runtime.units])})
    assert any(not torch.equal(weight, states[0][name]) for name, weight in tiny_model().bfloat16().named_parameters())
    states[0]["moments"] = states[1]["moments"]
    assert_equal_states(*states)
    assert bool(states[1]["moments"].all()) == (use == "gradients by hand"), "only what is stepped has moments"


def test_units_that_come_back_to_the_host_bring_what_they_have() -> None:
    run, still = started(device_layers=None, gpu_memory_gib=1.0), started()
    batches = token_batches(3)
    assert run.step(batches[0]) == still.step(batches[0])
    for each in (run, still):
        each.model(input_ids=batches[1], labels=batches[1]).loss.backward()
    run.engine.runtime.keep_states_on_host()
    held = run.engine.host_bytes_by_kind()
    assert held["moments"]
    assert held["gradients"], "there are some"
    for each in (run, still):
        each.optimizer.step()
        each.optimizer.zero_grad()
    assert_equal_states(run.state(), still.state())
