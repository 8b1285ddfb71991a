"""Activations that go to the host: what leaves, what stays, what comes back, and what is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from engine_runs import attach, used_bytes
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.errors import ConfigError, UnsupportedError
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.placement import Counts, peak_bytes
from megatrain_accelerate.store.host_pool import HostPool
from megatrain_accelerate.transfer import activation_offload
from megatrain_accelerate.transfer.activation_offload import ActivationOffloader, Recording
from megatrain_accelerate.transfer.call_order import CallOrder, Tape
from megatrain_accelerate.transfer.meter import Meter
from megatrain_accelerate.transfer.streams import Streams
from megatrain_accelerate.units import MIB

pytestmark = pytest.mark.usefixtures("profiled_once")


@pytest.fixture
def offloader() -> Iterator[ActivationOffloader]:
    kernels = HostKernels(1)
    pool = HostPool(MIB, kernels=kernels, register=False)
    made = ActivationOffloader(pool, Meter(Streams(torch.device("cpu"))))
    yield made
    made.close()
    kernels.close()


@pytest.fixture
def small_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)


def prepared(**settings: object) -> tuple[nn.Module, Engine, torch.optim.AdamW]:
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model, **settings)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    return model, engine, optimizer


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


# ---------------------------------------------------------------- one recording


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_views_come_back_with_their_bits_and_strides_and_their_storage_travels_once(
    offloader: ActivationOffloader, dtype: torch.dtype, small_tensors_leave: None
) -> None:
    base = torch.randint(0, 2, (6, 8, 4)).to(dtype)
    saved = [base, base.transpose(0, 2), base[2:5, 1::2], base[:1].expand(3, 8, 4), base.flatten()[7]]
    recording, tape = Recording(offloader, "layer"), Tape(CallOrder(1))
    places = [recording.place(tensor) for tensor in saved]
    offloader.send(recording, tape, 0)
    assert used_bytes(offloader.pool) == 64 * 1024, "one block"
    expected = [tensor.clone() for tensor in saved]
    shapes = [(tensor.stride(), tensor.storage_offset()) for tensor in saved]
    gone = weakref.ref(base.untyped_storage())
    del base, saved
    offloader.settle()
    assert gone() is None
    offloader.bring_back(tape, 0, 0)
    for place, value, (stride, offset) in zip(places, expected, shapes, strict=True):
        assert place is not None
        tensor = place.tensor()
        assert torch.equal(tensor, value)
        assert (tensor.dtype, tensor.stride(), tensor.storage_offset()) == (dtype, stride, offset)
    del place, places
    assert used_bytes(offloader.pool) == 0


def test_small_tensors_and_those_that_others_hold_stay(offloader: ActivationOffloader) -> None:
    held, large = torch.zeros(MIB), torch.zeros(MIB)
    recording = Recording(offloader, "layer", [held])
    assert recording.place(torch.zeros(MIB // 4 - 1)) is None
    assert recording.place(held[1:]) is None
    assert recording.place(large.to_sparse()) is None
    assert recording.place(large) is not None


def test_what_is_written_to_after_it_was_saved_is_an_error_not_a_wrong_gradient(
    offloader: ActivationOffloader, small_tensors_leave: None
) -> None:
    tensors = [torch.zeros(16) for _ in range(3)]
    recording = Recording(offloader, "layers.3")
    places = [recording.place(tensor) for tensor in tensors]
    tensors[0].add_(1)  # while its layer runs
    offloader.send(recording, Tape(CallOrder(1)), 0)
    tensors[1].add_(1)  # while its copy is under way
    offloader.settle()
    for place in places[:2]:
        assert place is not None
        with pytest.raises(UnsupportedError, match=r"layer layers\.3 saved for backward was modified in place"):
            place.tensor()
    assert places[2] is not None
    assert torch.equal(places[2].tensor(), torch.zeros(16))


def test_a_tensor_saved_before_and_after_a_write_is_two_values(
    offloader: ActivationOffloader, small_tensors_leave: None
) -> None:
    tensor = torch.zeros(16)
    recording = Recording(offloader, "layer")
    before = recording.place(tensor)
    tensor.add_(1)
    after = recording.place(tensor)
    offloader.send(recording, Tape(CallOrder(1)), 0)
    assert before is not None
    assert after is not None
    with pytest.raises(UnsupportedError):
        before.tensor()
    assert torch.equal(after.tensor(), torch.ones(16))


def test_device_memory_is_given_up_one_run_later(offloader: ActivationOffloader, small_tensors_leave: None) -> None:
    tape, alive, places = Tape(CallOrder(1)), [], []
    for position in range(4):
        offloader.run_begins()
        alive.append([ref() is not None for ref in places_storages(places)])
        recording = Recording(offloader, "layer")
        tensor = torch.full((1000,), float(position))
        places.append((recording.place(tensor), weakref.ref(tensor.untyped_storage())))
        del tensor
        offloader.send(recording, tape, position)
    assert alive == [[], [True], [False, True], [False, False, True]]
    offloader.settle()
    assert len(offloader.leaving) == 0
    for position in (3, 2, 1, 0):
        offloader.bring_back(tape, position, 0)
        back = [place.saved.on_device is not None for place, _ in places[: position + 1] if place is not None]
        # This run's and the next one's.
        assert back == [index >= position - 1 for index in range(position + 1)]


def test_between_runs_that_leave_others_have_time_for_the_copies(
    offloader: ActivationOffloader, small_tensors_leave: None
) -> None:
    offloader.spacing = 3
    tape, alive, places = Tape(CallOrder(1)), [], []
    for position in range(9):
        offloader.run_begins()
        alive.append(sum(ref() is not None for ref in places_storages(places)))
        if position % 3 == 0:
            recording = Recording(offloader, "layer")
            tensor = torch.full((1000,), float(position))
            places.append((recording.place(tensor), weakref.ref(tensor.untyped_storage())))
            del tensor
            offloader.send(recording, tape, position)
    # Three runs to leave in, and never more than one that leaves while the next is made.
    assert alive == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    offloader.settle()
    back = []
    for position in range(8, -1, -1):
        offloader.bring_back(tape, position, 0)
        back.append([place.saved.on_device is not None for place, _ in places if place is not None])
        while len(places) * 3 - 3 >= position:
            places.pop()  # its backward is over
    assert back == [
        [False, False, True],  # 8, and two ahead of 6
        [False, False, True],
        [False, True, True],  # 6: three ahead of 3
        [False, True],
        [False, True],
        [True, True],
        [True],
        [True],
        [True],
    ]


def places_storages(places: list[tuple[object, weakref.ref[torch.UntypedStorage]]]) -> list[weakref.ref[torch.UntypedStorage]]:
    return [ref for _, ref in places]


# ---------------------------------------------------------------- in the engine


@pytest.mark.parametrize(
    "settings", [{"offloaded_layers": 4}, {"kept_layers": 1, "offloaded_layers": 2}, {"offloaded_inputs": True}]
)
def test_the_pool_does_not_grow_after_the_first_step(settings: dict[str, object], small_tensors_leave: None) -> None:
    model, engine, optimizer = prepared(**settings)
    pool, sizes = engine.runtime.activations.pool, []
    for ids in token_batches(20):
        loss = loss_of(model, ids)
        assert used_bytes(pool) > 0
        loss.backward()
        # The loss is still alive: what backward needed isn't.
        assert used_bytes(pool) == 0
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(pool.size_bytes)
        assert engine.host_bytes_by_kind()["activations"] == pool.size_bytes
    assert len(set(sizes)) == 1
    engine.close()


def test_shorter_and_longer_batches_share_the_pool(small_tensors_leave: None) -> None:
    model, engine, optimizer = prepared(offloaded_layers=4)
    pool, sizes = engine.runtime.activations.pool, []
    for length in (256, 32, 200, 77, 256, 133, 255):
        loss_of(model, token_batches(1, length=length)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(pool.size_bytes)
    assert len(set(sizes)) == 1
    engine.close()


def test_a_forward_that_fails_half_way_leaves_nothing_behind(small_tensors_leave: None) -> None:
    model, engine, _ = prepared(offloaded_layers=4)
    activations, ids = engine.runtime.activations, token_batches(1)[0]

    def fail(*_: object) -> None:
        raise RuntimeError("half-way")

    handle = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="half-way"):
            loss_of(model, ids)
    gc.collect()
    handle.remove()
    loss_of(model, ids).backward()
    gc.collect()
    assert used_bytes(activations.pool) == len(activations.leaving) == 0
    after = gradients(model)
    engine.close()
    model, engine, _ = prepared(offloaded_layers=4)
    loss_of(model, ids).backward()
    assert all(torch.equal(a, b) for a, b in zip(after, gradients(model), strict=True))
    engine.close()


@pytest.mark.parametrize("settings", [{"offloaded_layers": 4}, {"offloaded_layers": 2, "offloaded_inputs": True}])
def test_forwards_evaluations_and_backwards_in_any_order_give_the_gradients_of_recompute(
    settings: dict[str, object], small_tensors_leave: None
) -> None:
    results = []
    for chosen in ({}, settings):
        model, engine, _ = prepared(**chosen)
        other, other_engine, _ = prepared(**chosen)
        first, second, third = token_batches(3)
        losses = [loss_of(model, first), loss_of(other, second)]
        with torch.no_grad():
            losses.append(loss_of(model, second))
        losses.append(loss_of(model, third))
        loss_of(model, third)  # dropped
        for loss in (losses[0], losses[1], losses[3]):
            loss.backward()
        results.append([*losses, *gradients(model), *gradients(other)])
        for each in (engine, other_engine):
            gc.collect()
            assert used_bytes(each.runtime.activations.pool) == len(each.runtime.activations.leaving) == 0
            each.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("settings", [{"offloaded_layers": 4}, {"offloaded_inputs": True}])
def test_a_second_backward_gives_the_gradients_of_recompute(settings: dict[str, object], small_tensors_leave: None) -> None:
    results = []
    for chosen in ({}, settings):
        model, engine, _ = prepared(**chosen)
        loss = loss_of(model, token_batches(1)[0])
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(gradients(model))
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("settings", [{"offloaded_layers": 4}, {"offloaded_inputs": True}])
def test_a_backward_that_fails_half_way_leaves_nothing_behind(settings: dict[str, object], small_tensors_leave: None) -> None:
    model, engine, _ = prepared(**settings)
    activations = engine.runtime.activations

    def fail(*_: object) -> None:
        raise RuntimeError("half-way")

    def forward() -> torch.Tensor:
        handle = model.model.layers[2].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        loss = loss_of(model, token_batches(1)[0])
        handle.remove()
        return loss

    with pytest.raises(RuntimeError, match="half-way"):
        forward().backward()
    model.zero_grad()
    loss_of(model, token_batches(1)[0]).backward()
    gc.collect()
    assert used_bytes(activations.pool) == len(activations.leaving) == len(activations.strays) == 0
    engine.close()


def test_a_closed_engine_lets_a_graph_that_is_still_alive_go(small_tensors_leave: None) -> None:
    model, engine, _ = prepared(offloaded_layers=4)
    loss = loss_of(model, token_batches(1)[0])
    engine.close()
    del loss
    gc.collect()
    assert engine.runtime.activations.pool.size_bytes == 0


# ---------------------------------------------------------------- the plan


def test_offloaded_layers_lie_directly_before_the_kept_ones() -> None:
    engine = attach(tiny_model(), kept_layers=1, offloaded_layers=2)
    assert engine.runtime.calls.policy.kept == {3}
    assert engine.runtime.calls.policy.offloaded == {1, 2}
    engine.close()


@pytest.mark.parametrize("settings", [{"offloaded_layers": 5}, {"offloaded_layers": 2, "kept_layers": 3}])
def test_more_offloaded_layers_than_there_are_is_an_error(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"of the model's 4 layers aren't kept"):
        attach(tiny_model(), **settings)


def test_the_predicted_step_counts_offloaded_activations_only_on_their_way(small_tensors_leave: None) -> None:
    model = tiny_model(num_hidden_layers=12, vocab_size=16).train()
    engine = attach(model)
    ids = token_batches(1, vocabulary=16, length=128)[0]
    step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    sizes = engine.device_plan.model_sizes()

    def predicted(kept: int, offloaded: int, inputs: bool = False) -> int:
        placement = Counts(kept=kept, offloaded=offloaded, inputs_offloaded=12 * inputs).placement(12)
        return peak_bytes(step_profile, sizes, placement)

    (profile,) = step_profile.profiles.values()
    hidden = 2 * 128 * 64 * 2
    assert profile.input_bytes == hidden
    assert 0.9 * profile.kept_bytes < profile.offloaded_bytes <= profile.kept_bytes
    recomputed, kept = predicted(0, 0), predicted(12, 0)
    # Two layers' activations at once, that of the layer in backward and that of the one before it.
    assert predicted(0, 12) - recomputed < 2.2 * profile.kept_bytes
    assert predicted(0, 12) - predicted(0, 6) < 0.2 * profile.kept_bytes
    assert kept - predicted(4, 8) > 5.5 * profile.kept_bytes
    # All inputs but those of the last runs are away at the peak, where the step of the last layers is.
    assert recomputed - predicted(0, 0, inputs=True) >= 9 * hidden
    engine.close()
