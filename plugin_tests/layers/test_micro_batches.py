"""A call in pieces: what is cut, what is shared, what is refused; and that a layer is still fetched once."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.gradients.call_gradients import GradientSums, LayerSums
from megatrain_accelerate.layers.micro_batches import BatchCut, BatchSplit
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.placement import Counts, peak_bytes
from megatrain_accelerate.plan.step_memory import LiveBytes
from megatrain_accelerate.store.layout import FlatLayout, ParameterSpec
from megatrain_accelerate.transfer import activation_offload

pytestmark = pytest.mark.usefixtures("profiled_once")

B, T, D = 5, 7, 4
HIDDEN = torch.randn(B, T, D)


def split_of(
    *args: Any, size: int | None = 2, cut: BatchCut | None = None, rows: int = B, is_trained: bool = True, **kwargs: Any
) -> BatchSplit:
    cut = cut or BatchCut(size)
    cut.begin({"input_ids": torch.zeros(rows, 3), "scale": torch.tensor(2.0)})
    layer: Any = types.SimpleNamespace(name="layers.0", module=nn.Linear(D, D), has_trainable=is_trained)
    return BatchSplit.of_call(layer, args, kwargs, cut)


# ---------------------------------------------------------------- arguments


def test_what_holds_the_batch_is_cut_and_what_samples_share_is_not() -> None:
    split = split_of(
        HIDDEN,
        attention_mask=torch.ones(B, 1, T, T),
        position_ids=torch.arange(T)[None],
        cache_position=torch.arange(B),
        lengths=torch.arange(B),
        per_token=torch.arange(T),
        scale=torch.tensor(2.0),
        position_embeddings=(torch.randn(1, T, D), torch.randn(B, T, D)),
        flag=True,
    )
    assert split.sizes == (2, 2, 1)
    assert split.is_split == (True, True, False, False, True, False, False, False, True)
    pieces = [args for args, _ in split.arguments((HIDDEN, *(torch.zeros(B, 1) for _ in range(8))), {})]
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), HIDDEN)
    assert [piece[1].shape[0] for piece in pieces] == [2, 2, 1]
    assert [piece[2].shape[0] for piece in pieces] == [B, B, B]


@pytest.mark.parametrize("size", [None, B, B + 1])
def test_a_batch_that_is_not_larger_runs_whole(size: int | None) -> None:
    assert split_of(HIDDEN, cu_seqlens=torch.arange(4), size=size).count == 1


def test_a_batch_that_cannot_be_cut_stays_whole_if_only_the_plan_wanted_pieces() -> None:
    cut = BatchCut(None)
    cut.chosen = 2
    assert split_of(HIDDEN, cut=cut).sizes == (2, 2, 1)
    assert split_of(HIDDEN, cu_seqlens=torch.arange(4), cut=cut).count == 1
    assert split_of(HIDDEN, mask=torch.ones(B, 1, T, T), position_ids=torch.zeros(B, T), cut=cut).sizes == (2, 2, 1)
    # Deformable attention's sizes of as many levels as there are samples.
    assert split_of(HIDDEN, spatial_shapes=torch.ones(B, 2), cut=cut).count == 1
    assert split_of(HIDDEN, lengths=torch.arange(B), cut=cut).count == 1
    cut.asked = 4
    with pytest.raises(UnsupportedError, match="cu_seqlens"):
        split_of(HIDDEN, cu_seqlens=torch.arange(4), cut=cut)


def test_a_layer_without_a_graph_runs_whole() -> None:
    assert split_of(HIDDEN, is_trained=False).count == 1
    assert split_of(HIDDEN.clone().requires_grad_(), is_trained=False).sizes == (2, 2, 1)


@pytest.mark.parametrize("shape", [(1, 4, T, T), (), (B, D)])
def test_what_pieces_return_is_looked_at_before_a_step_relies_on_it(shape: tuple[int, ...]) -> None:
    split = split_of(HIDDEN)
    (output, recorded) = split.whole("layers.0", (torch.ones(2, T, D), [("logits", torch.ones(2 * T, 3))]))
    assert output.shape == (B, T, D)
    assert recorded[0][1].shape == (B * T, 3)
    # T5's position bias is the same for all samples.
    with pytest.raises(UnsupportedError, match="a piece of 2 samples returns a tensor of shape"):
        split.whole("layers.0", ((torch.ones(2, T, D), torch.ones(shape)), []))


class BlockMask:
    """Stands for a mask object that isn't a tensor but holds some."""

    def __init__(self) -> None:
        self.blocks = torch.zeros(B, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens": torch.arange(4)}, r"argument \[1\]\['cu_seqlens'\] has shape \(4,\)"),
        ({"position_embeddings": torch.randn(3, B, T, D)}, r"shape \(3, 5, 7, 4\) beside hidden states of shape \(5, 7, 4\)"),
        ({"bias": torch.randn(B, B, T)}, "which of its dimensions is the batch"),
        ({"bias": torch.randn(B, 1, T)}, "which of its dimensions is the batch"),
        ({"bias": torch.randn(B, T, T)}, "which of its dimensions is the batch"),
        ({"table": torch.randn(T, D)}, "which of its dimensions is the batch"),
        ({"mask": BlockMask()}, "is a BlockMask, whose tensors can't be cut"),
    ],
)
def test_what_cannot_be_cut_for_certain_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        split_of(HIDDEN, **arguments)


def test_hidden_states_without_a_batch_and_lengths_that_may_be_either_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="samples can't be told apart"):
        split_of(torch.randn(B, D))
    with pytest.raises(UnsupportedError, match=r"shape \(7, 5, 4\), but the tensors .* have 5 rows"):
        split_of(torch.randn(T, B, D))
    with pytest.raises(UnsupportedError, match="either dimension may be the batch"):
        split_of(torch.randn(B, B, D))


def test_a_batch_as_large_as_it_is_long_is_cut_as_the_ones_before() -> None:
    cut = BatchCut(2)
    usual: Any = {"table": torch.randn(B, T, D), "per_token": torch.arange(T), "lengths": torch.arange(B)}
    assert split_of(HIDDEN, cut=cut, **usual).is_split == (True, True, False, True)
    square: Any = {"table": torch.randn(B, B, D), "per_token": torch.arange(B), "lengths": torch.arange(B)}
    assert split_of(torch.randn(B, B, D), cut=cut, **square).is_split == (True, True, False, True)
    with pytest.raises(UnsupportedError, match="isn't certain"):
        split_of(torch.randn(B, B, D), cut=cut, new=torch.randn(B, D))


# ---------------------------------------------------------------- outputs and gradients


def test_outputs_are_joined_in_order() -> None:
    split = split_of(HIDDEN)
    logits = torch.randn(B * T, 3)
    pieces = [[h, r] for h, r in zip(HIDDEN.split((2, 2, 1)), logits.split((2 * T, 2 * T, T)), strict=True)]
    hidden, recorded = split.joined("layers.0", pieces, outputs=1)
    assert torch.equal(hidden, HIDDEN)
    assert torch.equal(recorded, logits)


@pytest.mark.parametrize(
    ("shape", "outputs"), [((1, T), 1), ((), 0)], ids=["an output without the batch", "a recorded number without dimensions"]
)
def test_outputs_that_are_not_the_pieces_are_refused(shape: tuple[int, ...], outputs: int) -> None:
    with pytest.raises(UnsupportedError, match="a piece of 2 samples returns a tensor of shape"):
        split_of(HIDDEN).joined("layers.0", [[torch.zeros(shape)]] * 3, outputs=outputs)


def test_gradients_of_inputs_are_joined_and_of_shared_ones_summed_in_fp32() -> None:
    split = BatchSplit((2, 2, 1), (True, False, True))
    rows, shared, unused = torch.zeros(B, T), torch.zeros(1, T, dtype=torch.bfloat16), torch.zeros(B)
    for tensor in (rows, shared, unused):
        tensor.requires_grad_()
    pieces = [args for args, _ in split.arguments((rows, shared, unused), {})]
    of_rows = torch.randn(B, T)
    # 256 + 1 + 1 isn't a bf16 number step by step, but 258 is.
    of_shared = [torch.full((1, T), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    outputs = [pieces[0][0], pieces[2][0], *(piece[1] for piece in pieces)]
    torch.autograd.backward(outputs, [of_rows[:2], of_rows[4:], *of_shared])
    of_rows[2:4] = 0
    assert torch.equal(rows.grad, of_rows)
    assert torch.equal(shared.grad, torch.full((1, T), 258.0, dtype=torch.bfloat16))
    assert unused.grad is None


def test_weight_gradients_are_summed_in_fp32_and_absent_ones_stay_absent() -> None:
    specs = [ParameterSpec("a", (3, 2), torch.bfloat16, True), ParameterSpec("b", (5,), torch.float32, True)]
    specs += [ParameterSpec("frozen", (2,), torch.bfloat16, False), ParameterSpec("c", (1,), torch.bfloat16, True)]
    layout = FlatLayout(specs)
    gradient_sums = GradientSums(torch.device("cpu"), [layout])
    for _ in range(2):
        sums = gradient_sums.begin(layout)
        for value in (256.0, 1.0, 1.0):
            sums.add({0: torch.full((3, 2), value, dtype=torch.bfloat16)})
        sums.add({1: torch.arange(5.0)})
        total = sums.take(to_stay=False)
        assert total.keys() == {0, 1}
        assert torch.equal(total[0], torch.full((3, 2), 258.0))
        assert torch.equal(total[1], torch.arange(5.0))
        own = sums.take(to_stay=True)
        del sums
        gradient_sums.begin(layout).add({0: torch.zeros(3, 2), 1: torch.zeros(5)})
        assert own.keys() == {0, 1}
        assert torch.equal(own[0], torch.full((3, 2), 258.0, dtype=torch.bfloat16))
        assert torch.equal(own[1], torch.arange(5.0))


def test_sums_that_begin_while_others_live_have_memory_of_their_own() -> None:
    layout = FlatLayout([ParameterSpec("a", (3, 2), torch.bfloat16, True)])
    gradient_sums = GradientSums(torch.device("cpu"), [layout])

    def begun(value: float) -> LayerSums:
        sums = gradient_sums.begin(layout)
        sums.add({0: torch.full((3, 2), value)})
        return sums

    def taken(sums: LayerSums) -> torch.Tensor:
        (total,) = sums.take(to_stay=False).values()
        return total

    first, second = begun(1.0), begun(2.0)
    first.add({0: torch.ones(3, 2)})
    assert torch.equal(taken(first), torch.full((3, 2), 2.0))
    assert torch.equal(taken(second), torch.full((3, 2), 2.0))
    address = taken(first).data_ptr()
    assert address != taken(second).data_ptr()
    del first
    assert taken(begun(3.0)).data_ptr() == address, "the buffer is free again"


# ---------------------------------------------------------------- in the engine


def step_counters(**settings: object) -> Any:
    model = tiny_model().train()
    engine = attach(model, **settings)
    ids = token_batches(1, batch=B)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    counters = copy.copy(engine.runtime.meter.counters)
    engine.close()
    return counters


@pytest.mark.parametrize("placement", [{}, {"kept_layers": 4}, {"kept_layers": 2, "offloaded_layers": 2}], ids=str)
def test_a_layer_is_fetched_once_for_all_pieces_and_its_gradients_leave_once(placement: dict[str, int]) -> None:
    whole, cut = step_counters(**placement), step_counters(micro_batch_size=2, **placement)
    assert cut.weight_fetches == whole.weight_fetches == 4 + 2
    assert cut.d2h_bytes == whole.d2h_bytes


@pytest.mark.parametrize("size", [1, 2])
def test_inputs_that_leave_the_device_leave_it_once_for_all_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    whole, cut = step_counters(offloaded_inputs=True), step_counters(offloaded_inputs=True, micro_batch_size=size)
    assert cut.d2h_bytes == whole.d2h_bytes > step_counters().d2h_bytes


def test_a_second_backward_through_pieces_gives_the_gradients_of_the_first_twice() -> None:
    for settings in ({}, {"kept_layers": 4}):
        model = tiny_model().train()
        engine = attach(model, bf16=False, micro_batch_size=2, **settings)
        ids = token_batches(1, batch=B)[0]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]
        loss.backward()
        for first, parameter in zip(once, model.parameters(), strict=True):
            assert torch.equal(2 * first, parameter.grad)
        engine.close()


def test_layers_that_record_different_things_for_pieces_are_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
            return hidden * self.weight, hidden.shape[0]

    class Model(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden, _ = layer(hidden)
            return hidden.sum()

    model = Model()
    engine = attach(model, bf16=False, micro_batch_size=2)
    assert model(HIDDEN[:4]).isfinite()
    with pytest.raises(UnsupportedError, match="other things for other pieces"):
        model(HIDDEN)
    engine.close()


def peaks(**settings: object) -> tuple[int, int]:
    """Peak of a step's memory, besides what the engine holds, and its prediction."""
    model = tiny_model(vocab_size=16).train()
    engine = attach(model, **settings)
    ids = token_batches(1, batch=8, length=128, vocabulary=16)[0]
    step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    placement = Counts(kept=int(settings.get("kept_layers", 0))).placement(4)  # type: ignore[call-overload]
    sizes = engine.device_plan.model_sizes()
    predicted = peak_bytes(step_profile, sizes, placement) - sizes.slot_bytes - sizes.gradient_slot_bytes
    runtime = engine.runtime
    engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})  # not while it is measured
    runtime.offloader.allocate_gradients(runtime.units)
    runtime.piece_sums.begin(runtime.layers[0].unit.layout)
    assert runtime.piece_sums.buffer is not None
    present = [slot.buffer for slot in [*runtime.prefetcher.slots, *runtime.offloader.slots]]
    present += [
        *model.parameters(),
        *model.buffers(),
        *(tensor for unit in runtime.units for tensor in (unit.weights, unit.gradients)),
    ]
    present += [runtime.norms.norms, runtime.piece_sums.buffer]
    with LiveBytes(present) as live:
        model(input_ids=ids, labels=ids).loss.backward()
    engine.close()
    return live.peak_bytes, predicted


@pytest.mark.parametrize(("kept", "share"), [(0, 0.4), (4, -0.1)])
def test_the_working_set_of_a_layer_shrinks_to_a_piece_as_predicted(kept: int, share: float) -> None:
    whole, whole_predicted = peaks(kept_layers=kept)
    cut, cut_predicted = peaks(kept_layers=kept, micro_batch_size=1)
    # Kept layers hold the whole batch's activations in any case, and their outputs twice.
    assert whole - cut > share * whole
    assert cut_predicted == pytest.approx(cut, rel=0.05)
    assert whole_predicted == pytest.approx(whole, rel=0.05)
