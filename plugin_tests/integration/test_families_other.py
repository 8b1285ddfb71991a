"""Vision-language models, encoder-decoders and encoders: streamed training equals plain PyTorch's bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_runs import attach
from families_other import BART, OTHERS, T5, masked_texts, translations
from families_vision import VISION_LANGUAGE
from family_models import IMAGE, VIDEO, build_of, config_of
from family_parity import assert_parity, differences, train_plainly, train_streamed
from family_registry import Family
from refusals import trace
from trainer_runs import plugin

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers.compiled_layer import CompiledLayers
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.prefetch import Prefetcher

pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
        reason="torch's baseline CPU kernels have no fused multiply-add and round AdamW differently from its others",
    ),
]
FAMILIES = {family.name: family for family in OTHERS}
TRAINED = [family for family in OTHERS if family.refusal is None]
WHOLE = [family for family in TRAINED if not family.name.endswith("_frozen")]

ROUNDING = 5e-5
"""Of fp32 sums in another order through three layers of backward, relative to a gradient's largest element."""


def named(families: list[Family], long: Callable[[Family], bool] = lambda family: False) -> Any:
    """Parametrizes a test with families, some of which take long only in the matrix that does."""
    marked = [pytest.param(f, id=f.name, marks=[pytest.mark.long] if long(f) else []) for f in families]
    return pytest.mark.parametrize("family", marked)


def is_further(family: Family) -> bool:
    """A variant of what another family shows already."""
    return family.name in ("umt5", "t5_classifier", "bert_pretraining", "siglip_classifier") or (
        family.name.endswith("_frozen") and not family.name.startswith("qwen3_vl")
    )


# ---------------------------------------------------------------------------------------- parity


@pytest.mark.usefixtures("without_predictions")
@named(TRAINED, long=is_further)
def test_bf16_training_is_bit_equal_to_plain_pytorch(family: Family) -> None:
    plain = train_plainly(family, torch.bfloat16)
    streamed = train_streamed(family, torch.bfloat16)
    assert_parity(streamed, plain, family.tolerance.get(torch.bfloat16, 0.0))


@pytest.mark.long
@named(TRAINED)
def test_fp32_training_is_bit_equal_to_plain_pytorch(family: Family) -> None:
    plain = train_plainly(family, torch.float32)
    assert_parity(train_streamed(family, torch.float32), plain, family.tolerance.get(torch.float32, 0.0))


@pytest.mark.long
@named(TRAINED)
def test_accumulated_gradients_are_those_of_plain_pytorch(family: Family) -> None:
    plain = train_plainly(family, torch.bfloat16, accumulation=2)
    assert_parity(train_streamed(family, torch.bfloat16, accumulation=2), plain, 0.0)


PLACEMENTS = {
    "kept": {"kept_layers": 99},
    "offloaded": {"offloaded_layers": 99},
    "half_kept": {"kept_layers": 2, "slots": 3},
    "planned": {"kept_layers": None, "gpu_memory_gib": 8.0},
}


@pytest.mark.long
@pytest.mark.parametrize("placement", PLACEMENTS)
@named(WHOLE)
def test_placement_changes_no_bit(family: Family, placement: str) -> None:
    settings = PLACEMENTS[placement]
    count = len(attach(family.build()).runtime.layers)
    settings = {key: min(value, count) if value == 99 else value for key, value in settings.items()}
    plain = train_plainly(family, torch.bfloat16)
    assert_parity(train_streamed(family, torch.bfloat16, **settings), plain, 0.0)


@pytest.mark.long
@pytest.mark.usefixtures("small_tiles")
@named([family for family in WHOLE if family.name in ("llava", "gemma3_vision", "qwen3_vl", "t5", "bart", "bert_mlm")])
def test_the_loss_by_tiles_is_the_whole_loss(family: Family) -> None:
    # Sums over vocabulary and tokens in another order, some 1e-7 of a gradient, which Adam makes more of where a gradient is
    # near zero. Weights move by up to 5e-3.
    assert_parity(train_streamed(family, torch.float32), train_plainly(family, torch.float32), 2e-5)


@pytest.mark.long
@named([family for family in WHOLE if family.name in ("qwen2_5_vl", "t5", "bart", "modernbert_mlm")])
def test_compiled_layers_change_no_bit_in_fp32(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiled to torch's own kernels. A layer that can't be compiled (it splits tokens by sizes of pictures) runs as it is.
    torch._dynamo.reset()
    monkeypatch.setattr(CompiledLayers, "__init__", functools.partialmethod(with_eager_kernels, CompiledLayers.__init__))
    plain = train_plainly(family, torch.float32)
    assert_parity(train_streamed(family, torch.float32, compile_layers=True), plain, 0.0)


def with_eager_kernels(self: CompiledLayers, original: Callable[..., None], *args: Any) -> None:
    original(self, *args)
    self.backend = "aot_eager"


@pytest.mark.usefixtures("without_predictions")
@pytest.mark.parametrize("kept_layers", [0, 5])
def test_a_trained_attention_bias_takes_the_kernel_of_a_plain_run(kept_layers: int) -> None:
    # Under no_grad torch's attention takes another kernel than where its mask requires grad, as T5's position biases do, and
    # with a gradient where plain PyTorch has none, as for the zeros of T5's cross attention, it does so too.
    family = FAMILIES["t5_gated"]
    plain = train_plainly(family, torch.float32)
    assert_parity(train_streamed(family, torch.float32, kept_layers=kept_layers), plain, 0.0)


# ---------------------------------------------------------------------------------------- what is special


def gradients(build: Callable[[], Any], inputs: dict[str, torch.Tensor], streamed: bool, bf16: bool = False) -> dict[str, Any]:
    """All gradients of one backward, by name; without dropout."""
    model = build().eval()
    engine = attach(model, bf16=bf16) if streamed else None
    if bf16 and not streamed:
        model.to(torch.bfloat16)
    model(**inputs).loss.backward()
    if engine is not None:
        engine.runtime.collect_gradients()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: None if gradient is None else gradient.float().clone() for name, gradient in found.items()}
    if engine is not None:
        engine.close()
    return found


def assert_near(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(expected.abs().max()) for expected in theirs.values() if expected is not None)
    for name, expected in theirs.items():
        assert (ours[name] is None) == (expected is None), name
        if expected is not None:
            # Some true gradients are zero (keys' biases): what counts is the largest of the model, and a share of it.
            scale = max(float(expected.abs().max()), 1e-3 * largest)
            difference = float((ours[name] - expected).abs().max()) / scale
            assert difference <= tolerance, f"{name}: differs by {difference}"


def distance(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """2-norm of all differences."""
    return (
        sum(float((found[name] - gradient).square().sum()) for name, gradient in exact.items() if gradient is not None) ** 0.5
    )


@pytest.mark.parametrize(
    ("model", "config"), [("T5ForConditionalGeneration", T5), ("BartForConditionalGeneration", BART)], ids=["t5", "bart"]
)
def test_the_encoder_gets_the_sum_of_all_decoder_layers_gradients(model: str, config: dict[str, Any]) -> None:
    # As users have the model, without the hook that fixes the order of the sum: equal up to that order.
    build = build_of(model, config_of(model.replace("ForConditionalGeneration", "Config"), **config))
    ours, theirs = (gradients(build, translations(0), streamed) for streamed in (True, False))
    assert_near(ours, theirs, ROUNDING)
    one_layer = build_of(model, config_of(type(build().config).__name__, **config), drop_second_decoder_layer)
    fewer = gradients(one_layer, translations(0), True)
    name = next(name for name in ours if "encoder" in name and name.endswith(("q.weight", "q_proj.weight")))
    assert not torch.allclose(fewer[name], ours[name], rtol=1e-2)


def drop_second_decoder_layer(model: Any) -> None:
    decoder = model.get_decoder()
    name = "block" if hasattr(decoder, "block") else "layers"
    setattr(decoder, name, getattr(decoder, name)[:1])


def test_position_biases_get_the_gradient_of_every_layer_that_adds_them() -> None:
    family = FAMILIES["t5_gated"]
    place = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    whole = gradients(family.build, translations(0), True)
    for stack in ("encoder", "decoder"):
        build = functools.partial(build_with_bias_cut, stack)
        first_only = gradients(build, translations(0), True)
        assert not torch.allclose(first_only[place.format(stack)], whole[place.format(stack)], rtol=1e-2)


def build_with_bias_cut(stack: str) -> Any:
    """The biases' gradient ends behind the first layer."""
    model: Any = FAMILIES["t5_gated"].build()

    def cut(module: Any, args: Any, output: Any) -> Any:
        return (output[0], output[1].detach(), *output[2:])

    getattr(model, stack).block[0].register_forward_hook(cut)
    return model


@pytest.mark.parametrize(
    ("name", "stacks"),
    [
        ("t5", {"encoder.block": 3, "decoder.block": 2}),
        ("bart", {"model.encoder.layers": 3, "model.decoder.layers": 2}),
        ("llava", {"model.vision_tower.encoder.layers": 3, "model.language_model.layers": 3}),
        ("gemma3_vision", {"model.vision_tower.encoder.layers": 3, "model.language_model.layers": 3}),
        ("qwen2_5_vl", {"model.visual.blocks": 3, "model.language_model.layers": 3}),
        ("qwen3_vl", {"model.visual.blocks": 3, "model.language_model.layers": 3}),
    ],
)
def test_both_stacks_stream(name: str, stacks: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    family, fetched = FAMILIES[name], []
    fill = Prefetcher.fill

    def noting_fill(self: Any, slot: Any, layer: Any) -> None:
        fetched.append(layer.name)
        fill(self, slot, layer)

    monkeypatch.setattr(Prefetcher, "fill", noting_fill)
    model = family.build().eval()  # BART drops no layers
    engine = attach(model)
    expected = [f"{stack}.{i}" for stack, count in stacks.items() for i in range(count)]
    assert [layer.name for layer in engine.runtime.layers] == expected
    model(**family.batch(0)).loss.backward()
    # For forward, and again for backward unless the two slots still hold it; LLaVA doesn't use the tower's last layer.
    assert set(fetched) == set(expected)
    assert all(fetched.count(layer) >= 2 for layer in expected[:2])


QUICK = ("llava", "qwen3_vl", "t5_classifier")


@named(WHOLE, long=lambda family: family.name not in QUICK)
def test_a_step_can_be_planned_for(family: Family) -> None:
    # Sizes of pictures, places of tokens, ends of sentences: what a forward decides by has its values without data, too.
    model = family.build()
    engine = attach(model)
    called: list[int] = []
    for layer in engine.runtime.layers:
        layer.module.register_forward_pre_hook(lambda *_, index=layer.index: called.append(index))
    for seed in (1, 2):  # with video, and without pictures, if there are such
        called.clear()
        step_profile = profile_step(model, engine.runtime, family.batch(seed), torch.device("cpu"))
        expected = [event.layer for event in step_profile.forward_calls]
        with torch.no_grad():
            model(**family.batch(seed))
        # The plan is for the largest step: of BART's layers none is dropped.
        assert called == [index for index in expected if index in called]
        assert expected == called or family.name == "bart"


@named([family for family in VISION_LANGUAGE if not family.name.endswith("_frozen")])
def test_pictures_reach_the_tower(family: Family) -> None:
    inputs = family.batch(0)
    model = family.build().eval()
    attach(model)
    loss = model(**inputs).loss.item()
    assert model(**{**inputs, "pixel_values": inputs["pixel_values"].flip(0)}).loss.item() != loss
    if "image_grid_thw" in inputs:
        turned = inputs["image_grid_thw"].clone()
        turned[1] = turned[1][torch.tensor([0, 2, 1])]
        assert model(**{**inputs, "image_grid_thw": turned}).loss.item() != loss


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_that_runs_twice_in_one_forward_gets_both_gradients(name: str) -> None:
    # Pictures and videos go through the tower one after the other. A layer's two gradients are added in fp32, where autograd
    # adds them in the weight's dtype.
    family = FAMILIES[name]
    still, moving = family.batch(0), family.batch(1)
    for key in ("input_ids", "labels", "attention_mask", "mm_token_type_ids"):
        still[key] = torch.cat([still[key], moving[key]])
    inputs = {**moving, **still}
    assert (inputs["input_ids"] == IMAGE).any()
    assert (inputs["input_ids"] == VIDEO).any()
    exact = gradients(family.build, inputs, False)
    assert_near(gradients(family.build, inputs, True), exact, ROUNDING)
    ours, theirs = (distance(gradients(family.build, inputs, streamed, bf16=True), exact) for streamed in (True, False))
    assert 0 < ours < 1.1 * theirs


@pytest.mark.usefixtures("without_predictions")
@pytest.mark.parametrize("name", ["bert_mlm", "llava", "siglip_classifier"])
def test_what_a_loss_does_not_use_has_no_gradient_and_stays_as_it_is(name: str) -> None:
    family = FAMILIES[name]
    unused = {"bert_mlm": "bert.pooler", "llava": "vision_tower.encoder.layers.2", "siglip_classifier": "vision_model.head"}
    before = {key: tensor.clone() for key, tensor in family.build().named_parameters() if unused[name] in key}
    outcome = train_streamed(family, torch.bfloat16)
    assert before
    for key, tensor in before.items():
        assert outcome.gradients[f"{key} 0"] is None
        assert torch.equal(outcome.masters[key], tensor)


@pytest.mark.usefixtures("without_predictions")
def test_parity_is_lost_if_a_layer_runs_with_anothers_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # The comparison sees what it is for.
    family = FAMILIES["bert_classifier"]
    plain = train_plainly(family, torch.bfloat16)
    copies, copied = HostUnit.copies, list[torch.Tensor]()

    def of_the_first_unit(unit: HostUnit, of_slot: Any) -> Any:
        copied.append(unit.weights)
        return [(copied[0], place) for _, place in copies(unit, of_slot)]

    monkeypatch.setattr(HostUnit, "copies", of_the_first_unit)
    assert list(differences(train_streamed(family, torch.bfloat16), plain))


# ---------------------------------------------------------------------------------------- refused


def test_one_layer_that_runs_again_and_again_is_refused_and_streams_where_it_is_named() -> None:
    family = FAMILIES["albert_mlm"]
    model = family.build()
    before = trace(model)
    with plugin(), pytest.raises(UnsupportedError, match=family.refusal):
        Accelerator(cpu=True).prepare(model)
    assert trace(model) == before
    named_layers = dataclasses.replace(family, settings={"layer_classes": ["AlbertLayer"]})
    # fp32: the gradients of its three runs are added in the same order.
    assert_parity(train_streamed(named_layers, torch.float32), train_plainly(named_layers, torch.float32), 0.0)


def test_layers_shared_by_encoder_and_decoder_are_refused() -> None:
    model = FAMILIES["bart"].build()
    model.model.decoder.layers[0].self_attn = model.model.encoder.layers[0].self_attn
    before = trace(model)
    with plugin(), pytest.raises(UnsupportedError, match=r"model\.encoder\.layers\.0 and model\.decoder\.layers\.0 share"):
        Accelerator(cpu=True).prepare(model)
    assert trace(model) == before


def test_batches_that_cannot_be_cut_are_refused_at_the_first_step() -> None:
    # A tower of all pictures' patches in one row has no samples that could be told apart.
    family = FAMILIES["qwen2_5_vl"]
    model = family.build()
    attach(model, micro_batch_size=1)
    with pytest.raises(UnsupportedError, match=r"micro_batch_size.*visual\.blocks\.0.*samples can't be told apart"):
        model(**family.batch(0))


def test_masked_language_modelling_in_pieces_is_that_of_the_whole_batch() -> None:
    family = FAMILIES["bert_mlm"]
    whole = gradients(family.build, masked_texts(0), True)
    model = family.build().eval()
    engine = attach(model, bf16=False, micro_batch_size=1)
    model(**masked_texts(0)).loss.backward()
    engine.runtime.collect_gradients()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_near(found, whole, ROUNDING)
