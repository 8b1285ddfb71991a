"""Padding that layers and the loss leave out: when, and that nothing else changes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from unpadded_calls import UnpaddedCalls

from megatrain_accelerate.layers.padding import RealTokens, may_leave_padding_out, real_tokens
from megatrain_accelerate.loss import tiled_cross_entropy
from megatrain_accelerate.plan.device_plan import LIBRARY_WORKSPACE_BYTES
from megatrain_accelerate.plan.fake_step import what_sees_a_batch
from megatrain_accelerate.plan.other_batches import BatchExtent, resized_batch

pytestmark = pytest.mark.usefixtures("profiled_once")

WIDTH = 128
LENGTHS = (128, 70, 41, 12, 3)
TOLERANCE = 2e-6
"""Relative to the largest, in fp32: products of other numbers of rows may add in another order."""


def batch(lengths: tuple[int, ...] = LENGTHS, left: bool = False) -> dict[str, torch.Tensor]:
    """Random texts, padded, and labels that leave the padding out."""
    ids = torch.randint(1, 128, (len(lengths), WIDTH), generator=torch.Generator().manual_seed(3))
    mask = torch.stack([(torch.arange(WIDTH) < length).long() for length in lengths])
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of a layer computed that left padding out."""
    computed: list[int] = []
    put_back = RealTokens.batch

    def noting(self: RealTokens, row: torch.Tensor) -> torch.Tensor:
        computed.append(row.shape[1])
        return put_back(self, row)

    monkeypatch.setattr(RealTokens, "batch", noting)
    monkeypatch.setattr(tiled_cross_entropy, "STRIP_BYTES", 2**14)
    return computed


def gradients(model: nn.Module, *batches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    losses = [model(**one).loss for one in batches]
    torch.stack(losses).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | {"losses": torch.stack(losses).detach()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert float((ours[name] - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max())), name


@pytest.mark.parametrize(
    "settings",
    [
        {"kept_layers": 0},
        {"kept_layers": 4},
        {"kept_layers": 0, "offloaded_layers": 4},
        {"kept_layers": 0, "micro_batch_size": 2},
        {"kept_layers": 0, "kept_attention": 4},
        {"kept_layers": 0, "tiled_loss": False},
        {"kept_layers": 0, "token_tile": 64},
    ],
    ids=lambda settings: "-".join(f"{key}_{value}" for key, value in settings.items()),
)
def test_gradients_are_those_of_all_tokens(settings: dict[str, Any], rows: list[int]) -> None:
    model = tiny_model(max_position_embeddings=WIDTH).train()
    expected = gradients(copy.deepcopy(model), batch())
    engine = attach(model, bf16=False, **settings)
    assert_close(gradients(model, batch()), expected)
    # 254 tokens, filled up to a multiple of 64. In pieces of two samples 198 of 256 are filled up to all, 53 and 3 to 64.
    assert set(rows) == ({64} if "micro_batch_size" in settings else {256})
    engine.close()


@pytest.mark.parametrize("kept_layers", [4, 0])
def test_compiled_layers_have_one_graph_for_all_padded_batches(kept_layers: int, rows: list[int]) -> None:
    model = tiny_model(max_position_embeddings=WIDTH).train()
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, compile_layers=True, kept_layers=kept_layers)
    compiled = engine.runtime.compiled
    compiled.backend = "aot_eager"
    for lengths in (LENGTHS, (100, 3, 4, 128, 7), (128, 128, 128, 20, 20, 3, 3)):
        assert_close(gradients(model, batch(lengths)), gradients(plain, batch(lengths)))
        model.zero_grad()
        plain.zero_grad()
    assert {256, 448} <= set(rows)
    assert compiled.compilations == 1
    engine.close()


def test_each_of_two_forwards_before_a_backward_has_its_own_tokens(rows: list[int]) -> None:
    model = tiny_model().train()
    batches = batch(), batch((5, 128, 20, 60, 9))
    expected = gradients(copy.deepcopy(model), *batches)
    engine = attach(model, bf16=False, kept_layers=0)
    assert_close(gradients(model, *batches), expected)
    assert set(rows) == {256}
    engine.close()


def test_a_batch_with_little_padding_is_computed_as_it_is(rows: list[int]) -> None:
    model = tiny_model().train()
    engine = attach(model, bf16=False, kept_layers=0)
    expected = gradients(copy.deepcopy(tiny_model().train()), batch((128, 128, 120)))
    assert_close(gradients(model, batch((128, 128, 120))), expected)
    assert not rows
    engine.close()


def test_a_layer_that_draws_random_numbers_computes_all_tokens_and_drops_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    unpadded = UnpaddedCalls(monkeypatch)
    model = tiny_model().train()
    for layer in model.model.layers[1:]:
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, kept_layers=0)
    torch.manual_seed(1)
    expected = gradients(plain, batch())
    torch.manual_seed(1)
    assert_close(gradients(model, batch()), expected)
    assert unpadded.of(engine) == [True, False, False, False]
    for layer in model.model.layers[1:]:
        layer.mlp[1].p = 0.0
    gradients(model, batch())
    assert all(unpadded.of(engine))
    engine.close()


def test_a_mask_that_hides_more_than_padding_has_all_tokens_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    unpadded = UnpaddedCalls(monkeypatch)

    model = tiny_model().train()
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, kept_layers=0)

    def forgets(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        first = torch.zeros(WIDTH, WIDTH, dtype=torch.bool)
        first[2:, 0] = True
        return args, {**kwargs, "attention_mask": mask & ~first}

    for one in (model, plain):
        one.model.layers[2].register_forward_pre_hook(forgets, with_kwargs=True)
    assert_close(gradients(model, batch()), gradients(plain, batch()))
    assert unpadded.of(engine) == [True, True, False, True]
    engine.close()


@pytest.mark.parametrize("kept_layers", [4, 0])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_inside_a_layer_around_its_attention_computes_all_tokens(
    use_reentrant: bool, kept_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpadded = UnpaddedCalls(monkeypatch)

    class Checkpointed(Qwen2Attention):
        def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
            attend = functools.partial(Qwen2Attention.forward, self, **others)
            return checkpoint(attend, hidden_states, use_reentrant=use_reentrant)

    model = tiny_model(use_cache=False).train()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Checkpointed
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, kept_layers=kept_layers)
    assert_close(gradients(model, batch()), gradients(plain, batch()))
    assert not any(unpadded.of(engine))
    engine.close()


def test_a_checkpoint_of_the_users_around_layers_runs_them_as_in_forward() -> None:
    class Checkpointing(nn.ModuleList):
        def __iter__(self) -> Any:
            for layer in super().__iter__():
                yield functools.partial(checkpoint, layer, use_reentrant=False)

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            return list(found) if isinstance(index, slice) else found

    model = tiny_model(use_cache=False).train()
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, kept_layers=0)
    model.model.layers.__class__ = Checkpointing
    assert_close(gradients(model, batch()), gradients(plain, batch()))
    engine.close()


def test_another_attention_from_one_step_to_the_next_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    unpadded = UnpaddedCalls(monkeypatch)
    model = tiny_model().train()
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, kept_layers=0)
    for implementation, expected in (("sdpa", True), ("eager", False)):
        for one in (model, plain):
            one.set_attn_implementation(implementation)
            one.zero_grad()
        assert_close(gradients(model, batch()), gradients(plain, batch()))
        assert unpadded.of(engine) == [expected] * 4
    engine.close()


def test_a_piece_of_empty_samples_is_computed_as_it_is() -> None:
    model = tiny_model().train()
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, kept_layers=0, micro_batch_size=1)
    assert_close(gradients(model, batch((128, 70, 0))), gradients(plain, batch((128, 70, 0))))
    engine.close()


def test_a_hook_inside_a_layer_sees_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    unpadded = UnpaddedCalls(monkeypatch)
    model = tiny_model().train()
    engine = attach(model, bf16=False, kept_layers=4)
    seen: list[tuple[int, ...]] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    gradients(model, batch())
    assert set(seen) == {(5, WIDTH, model.config.hidden_size)}
    handle.remove()
    gradients(model, batch())
    assert model.model.layers[1].mlp is not None
    assert len(seen) == 1
    assert all(unpadded.of(engine))
    engine.close()


def test_a_loss_that_looks_at_all_tokens_has_them_computed(rows: list[int]) -> None:
    model = tiny_model().train()
    model.config.output_router_logits = True  # the balance of experts, say
    engine = attach(model, bf16=False, kept_layers=0)
    gradients(model, batch())
    assert not rows
    engine.close()


def with_label(row: int, token: int) -> dict[str, torch.Tensor]:
    found = batch()
    found["labels"][row, token] = 5
    return found


@pytest.mark.parametrize(
    "inputs",
    [
        batch(left=True),  # a token of padding is asked for the first one of the text
        with_label(1, 71),
        with_label(1, 127),
        batch((128, 120, 125)),
        {**batch(), "attention_mask": batch()["attention_mask"].flip(0)},
        {**batch(), "attention_mask": batch()["attention_mask"].index_fill(1, torch.tensor([1]), 0)},
        {**batch(), "labels": torch.zeros(5)},
        {**batch(), "weights": torch.ones(5)},
        {key: value for key, value in batch().items() if key != "labels"},
        {key: value for key, value in batch().items() if key != "attention_mask"},
    ],
    ids=[
        "left",
        "label_of_padding",
        "last_label",
        "little",
        "another_mask",
        "a_hole",
        "classes",
        "more_than_text",
        "no_labels",
        "no_mask",
    ],
)
def test_all_of_a_batch_is_computed_where_its_padding_may_be_read(inputs: dict[str, torch.Tensor]) -> None:
    assert real_tokens(inputs) is None
    assert real_tokens(batch()) is not None


def test_the_plan_covers_batches_of_no_more_real_tokens_and_predicts_less_memory_for_padding(rows: list[int]) -> None:
    model = tiny_model().train()
    engine = attach(model, bf16=False, kept_layers=4)
    plan, predicted = engine.device_plan, []
    for lengths in ((128, 10, 10, 10, 10), (128, 8, 8, 8, 8), (128, 128, 128, 128, 128)):
        model(**batch(lengths)).loss.backward()
        predicted.append(plan.current.predicted_bytes - LIBRARY_WORKSPACE_BYTES)
    assert predicted[0] == predicted[1] < 0.8 * predicted[2]
    assert 192 in rows
    engine.close()


def test_a_larger_batch_to_plan_for_has_as_much_padding() -> None:
    seen = BatchExtent.of(batch(), real_tokens(batch()))
    assert (seen.length, seen.real) == (WIDTH, 256)
    enlarged = resized_batch(nn.Module(), batch(), seen, 1.5)
    assert enlarged is not None
    inputs, real = enlarged
    assert real is not None
    found = BatchExtent.of(inputs, real)
    assert found.covers(seen)
    assert (found.length, found.real) == (192, 384)
    assert not seen.covers(BatchExtent.of(batch()))
    assert BatchExtent.of(batch()).covers(seen)


def test_the_first_tokens_of_each_sample_are_real_and_padding_fills_up_a_multiple_of_64() -> None:
    found = real_tokens(batch())
    assert found is not None
    expected = [row * WIDTH + token for row, length in enumerate(LENGTHS) for token in range(length)]
    assert set(expected) < set(found.index.tolist())
    assert len(found.index) == 256
    pieces = found.of_pieces((1, 2, 2))
    assert [piece and len(piece.index) for piece in pieces] == [None, 128, 64]


def test_padding_is_left_out_of_causal_models_of_text_alone() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    causal = tiny_model()
    names = [f"model.layers.{index}" for index in range(4)]
    assert may_leave_padding_out(causal, names)
    assert not may_leave_padding_out(causal, [*names, "vision.blocks.0"])
    of_a_checkpoint = type("RemoteForCausalLM", (type(causal),), {"__module__": "transformers_modules.remote"})
    assert not may_leave_padding_out(of_a_checkpoint(causal.config), names)
    assert what_sees_a_batch(causal) is None
    causal.config.z_loss_coefficient = 0.1  # Bamba's mean over all tokens' logits
    assert what_sees_a_batch(causal) is not None
    del causal.config.z_loss_coefficient
    assert may_leave_padding_out(get_peft_model(causal, LoraConfig(target_modules=["q_proj"])), names)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    assert not may_leave_padding_out(BertForMaskedLM(BertConfig(vocab_size=64, **sizes)), names)
    two_parts = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2))
    assert not may_leave_padding_out(two_parts, names)
