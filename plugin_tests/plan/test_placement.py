"""Where units live: what moves, what is copied, and what follows when they move between steps."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_runs import Training, attach
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer


def training(model: nn.Module | None = None, **settings: object) -> Training:
    model = tiny_model().train() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model, **settings)
    driver = adopt_optimizer(optimizer, engine.runtime, "deferred")
    return Training(model, engine, optimizer, driver)


def fetches_of_a_step(run: Training) -> tuple[int, int, int]:
    """Weight fetches, bytes in and bytes out of the third step."""
    batches = token_batches(3)
    for ids in batches[:2]:
        run.step(ids, max_norm=1.0)
    before = copy.copy(run.engine.runtime.meter.counters)
    run.step(batches[2], max_norm=1.0)
    run.engine.drain()
    after = run.engine.runtime.meter.counters
    return (
        after.weight_fetches - before.weight_fetches,
        after.h2d_bytes - before.h2d_bytes,
        after.d2h_bytes - before.d2h_bytes,
    )


def test_a_streamed_layer_is_fetched_twice_and_one_on_the_device_never() -> None:
    streamed = fetches_of_a_step(training())[0]
    # Four layers in two slots: the last two are still there when backward begins.
    assert streamed == 4 + 2
    assert fetches_of_a_step(training(device_layers=4))[0] == 0
    assert fetches_of_a_step(training(device_layers=1))[0] == 3 + 1


def test_a_model_wholly_on_the_device_moves_nothing_over_the_link() -> None:
    assert fetches_of_a_step(training(device_layers=-1)) == (0, 0, 0)


def test_nobody_waits_for_the_pages_of_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training(device_layers=0)
    unit = run.engine.runtime.layers[0].unit
    zeroed: list[int] = []
    zero = HostKernels.zero

    def note(self: HostKernels, tensor: torch.Tensor) -> None:
        zeroed.append(tensor.nbytes)
        zero(self, tensor)

    monkeypatch.setattr(HostKernels, "zero", note)
    run.step(token_batches(1)[0])
    assert "moments" in unit.memory
    assert unit.memory["gradients"].size_bytes in zeroed  # type: ignore[union-attr]
    assert unit.memory["moments"].size_bytes not in zeroed  # type: ignore[union-attr]


def test_host_memory_of_units_on_the_device_is_given_back() -> None:
    run = training(device_layers=-1)
    run.step(token_batches(1)[0])
    assert sum(run.engine.host_bytes_by_kind().values()) == 0
    held = run.engine.device_plan.budget.held_bytes_by_kind()
    count = sum(parameter.numel() for parameter in run.model.parameters())
    assert held["resident"] + held["layers"] + held["states"] == pytest.approx(12 * count, rel=0.02)
    assert held["slots"] == held["gradient_slots"] == 0


def test_units_that_move_between_steps_change_no_bit() -> None:
    placements = [((), False), ((0,), False), ((0, 1, 2, 3), True), ((), True), ((1, 3), False)]
    batches = token_batches(10)
    still, moving = training(), training()
    for step, ids in enumerate(batches):
        assert still.step(ids, max_norm=1.0) == moving.step(ids, max_norm=1.0)
        moving.engine.runtime.place(*placements[step % len(placements)])
    a, b = still.state(), moving.state()
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(b[key].cpu(), value), key


def test_gradients_move_along_in_the_middle_of_an_accumulation() -> None:
    batches = token_batches(2)
    results = []
    for move in (False, True):
        run = training()
        for position, ids in enumerate(batches):
            run.engine.runtime.offloader.is_last_backward = lambda position=position: position == 1
            run.model(input_ids=ids, labels=ids).loss.backward()
            if move and position == 0:
                run.engine.runtime.place((1, 2), True)
        run.engine.runtime.clip_grad_norm(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        if move:
            run.engine.runtime.place((), False)
        results.append(run.state())
    for key, value in results[0].items():
        assert torch.equal(results[1][key], value), key


def test_weights_written_from_outside_reach_units_on_the_device() -> None:
    run = training(device_layers=-1)
    batches = token_batches(2)
    run.step(batches[0])
    other = {name: torch.randn_like(value) for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(other)
    run.engine.drain()
    for layer in run.engine.runtime.layers:
        for state in layer.unit.states:
            master = layer.unit.read_master(state)
            torch.testing.assert_close(master.to(torch.bfloat16), other[f"{layer.name}.{state.name}"].to(torch.bfloat16))


def test_an_optimizer_without_a_kernel_brings_everything_back_to_the_host() -> None:
    model = tiny_model().train()
    engine = attach(model, device_layers=-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    assert not any(unit.is_on_device for unit in engine.runtime.units)
    run = Training(model, engine, optimizer, None)  # type: ignore[arg-type]
    losses = [run.step(token_batches(1)[0]) for _ in range(3)]
    assert losses[-1] < losses[0]


def test_each_parameter_on_the_device_has_a_storage_of_its_own() -> None:
    run = training(device_layers=-1)
    run.step(token_batches(1)[0])
    pointers = [p.untyped_storage().data_ptr() for p in run.model.parameters()]
    assert len(set(pointers)) == len(pointers)
    sizes = [p.untyped_storage().nbytes() for p in run.model.parameters()]
    assert sizes == [p.nbytes for p in run.model.parameters()]


def test_closing_gives_masters_of_units_on_the_device_back() -> None:
    run = training(device_layers=2)
    run.step(token_batches(1)[0])
    masters = {key: value for key, value in run.state().items() if key.startswith("master")}
    run.engine.close()
    for name, parameter in run.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.detach(), masters[f"master {name}"])


class Summed(nn.Module):
    """A layer whose two gates get one gradient: autograd hands out the same tensor for both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.both = nn.Parameter(torch.ones(2, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (self.first + self.second) * self.both.sum(0).expand_as(hidden)


class SummedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Summed(), Summed()])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.square().mean()


@pytest.mark.parametrize("on_device", [0, 2])
def test_gradients_that_autograd_shares_are_added_up_apart(on_device: int) -> None:
    torch.manual_seed(0)
    plain, model = SummedModel(), SummedModel()
    engine = attach(model, bf16=False, device_layers=on_device)
    last = False
    engine.runtime.offloader.is_last_backward = lambda: last
    batches = [torch.randn(4, 8) for _ in range(3)]
    for step, batch in enumerate(batches):
        last = step == 2
        plain(batch).backward()
        model(inputs=batch).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6), name
    engine.close()
