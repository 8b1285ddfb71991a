"""Weight slots: their states, and that the prefetcher never overwrites what is in use nor reads what is stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.store.layout import FlatLayout, ParameterSpec
from megatrain_accelerate.store.step_worker import Future
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.meter import Meter
from megatrain_accelerate.transfer.prefetch import Prefetcher
from megatrain_accelerate.transfer.streams import GradientSlot, Streams, WeightSlot


def test_views_of_layers_with_equal_layout_are_made_once() -> None:
    slot = WeightSlot(torch.empty(4096, dtype=torch.uint8), Streams(torch.device("cpu")))
    layout = FlatLayout([ParameterSpec("a", (4, 5), torch.bfloat16, True)])
    twin = FlatLayout([ParameterSpec("a", (4, 5), torch.bfloat16, True)])
    other = FlatLayout([ParameterSpec("a", (5, 4), torch.bfloat16, True)])
    assert slot.views(layout)[0] is slot.views(twin)[0]
    assert slot.views(other)[0].shape == (5, 4)
    assert slot.views(other)[0].data_ptr() == slot.buffer.data_ptr()


def test_a_gradient_slot_shows_trained_parameters_only_and_begins_with_zeros() -> None:
    layout = FlatLayout(
        [ParameterSpec("a", (3,), torch.float32, False), ParameterSpec("b", (5,), torch.float32, True)],
    )
    slot = GradientSlot(layout.gradient_bytes, 1, Streams(torch.device("cpu")))
    assert [view.shape for view in slot.views(layout)] == [(5,)]
    assert not slot.buffer.any()


# ---------------------------------------------------------------------------------------- the prefetcher

LAYERS = 5


class Bench:
    """Layers of one weight each, whose value is known, and a prefetcher over them."""

    def __init__(self, slots: int, kernels: HostKernels) -> None:
        self.layers = []
        for index in range(LAYERS):
            module = nn.Linear(8 + index, 4, bias=False)
            module.weight.data.fill_(index)
            unit = HostUnit(
                f"layers.{index}",
                [("weight", module.weight)],
                {id(module.weight): torch.float32},
                kernels=kernels,
                register=False,
            )
            self.layers.append(StreamedLayer(index, f"layers.{index}", module, unit))
            self.layers[-1].show_host_weights()
        self.meter = Meter(Streams(torch.device("cpu")))
        self.prefetcher = Prefetcher(self.layers, slots, self.meter)

    def acquire(self, index: int, upcoming: list[int]) -> WeightSlot:
        """Acquires a layer and checks that the slot holds its weights as they are now."""
        layer = self.layers[index]
        slot = self.prefetcher.acquire(layer, upcoming)
        assert slot.user_count
        assert torch.equal(slot.views(layer.unit.layout)[0], layer.unit.states[0].weight)
        return slot

    def use(self, index: int, upcoming: list[int]) -> None:
        """Acquires and releases."""
        self.prefetcher.release(self.acquire(index, upcoming))

    def step(self, index: int) -> None:
        """A step of the optimizer that is applied at once."""
        unit = self.layers[index].unit
        unit.version += 1
        unit.states[0].weight += 100

    @property
    def fetches(self) -> int:
        return self.meter.counters.weight_fetches


@pytest.fixture(scope="module")
def kernels() -> Iterator[HostKernels]:
    made = HostKernels(1)
    yield made
    made.close()


@pytest.fixture(params=[2, 3, 6])
def bench(request: pytest.FixtureRequest, kernels: HostKernels) -> Bench:
    return Bench(request.param, kernels)


def test_every_order_of_calls_gets_the_right_weights(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        index, *upcoming = torch.randint(0, LAYERS, (4,), generator=generator).tolist()
        bench.use(index, upcoming)
        if torch.rand((), generator=generator) < 0.3:
            bench.step(int(torch.randint(0, LAYERS, (), generator=generator)))


def test_a_slot_in_use_is_not_overwritten(bench: Bench) -> None:
    held = bench.acquire(0, [1, 2, 3, 4])
    for index in (1, 2, 3, 4, 1):
        bench.use(index, [2, 3, 4, 1])
        assert held.user_count
        assert bool((held.views(bench.layers[0].unit.layout)[0] == 0).all())
    bench.prefetcher.release(held)


def test_a_predicted_order_fetches_each_layer_once(kernels: HostKernels) -> None:
    bench = Bench(2, kernels)
    for index in range(LAYERS):
        bench.use(index, list(range(index + 1, LAYERS))[:2])
    assert bench.fetches == LAYERS


def test_what_the_slots_still_hold_is_not_fetched_again(kernels: HostKernels) -> None:
    bench = Bench(LAYERS, kernels)
    for _ in range(3):
        for index in range(LAYERS):
            bench.use(index, [])
    assert bench.fetches == LAYERS
    bench.step(2)
    for index in range(LAYERS):
        bench.use(index, [])
    assert bench.fetches == LAYERS + 1, "only the stepped layer is stale"


def test_a_layer_whose_step_is_pending_is_not_prefetched_and_waited_for_when_used(kernels: HostKernels) -> None:
    bench = Bench(3, kernels)
    future = Future("step")
    bench.layers[1].unit.version += 1
    bench.layers[1].gate.close_until(future)
    bench.use(0, [1, 2])
    assert bench.fetches == 1, "neither the layer that isn't ready nor one behind it"
    bench.layers[1].unit.states[0].weight += 7
    future.finish()
    bench.use(0, [1, 2])
    assert bench.fetches == 3
    bench.use(1, [])
    assert bench.fetches == 3


def test_an_outside_write_makes_the_slot_stale(bench: Bench) -> None:
    bench.use(0, [1])
    with torch.no_grad():
        bench.layers[0].module.weight.mul_(3).add_(1)
        bench.layers[1].module.weight.add_(5)
    bench.use(0, [1])
    bench.use(1, [])


def test_a_failed_prefetch_leaves_no_slot_in_use(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.prefetcher, "prefetch", fail)
    for _ in range(10):
        with pytest.raises(KeyboardInterrupt):
            bench.prefetcher.acquire(bench.layers[0], [1])
    monkeypatch.undo()
    assert not any(slot.user_count for slot in bench.prefetcher.slots)
    bench.use(0, [1])


def test_an_interrupted_copy_is_not_taken_for_the_layer(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(2, kernels)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(bench.layers[0].unit, "copies", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.prefetcher.acquire(bench.layers[0], [])
    for slot in bench.prefetcher.slots:
        slot.buffer.fill_(0xFF)
    bench.use(0, [])
