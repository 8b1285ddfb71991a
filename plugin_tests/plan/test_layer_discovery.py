"""Which modules of a model stream, which parameters stay, and what can't be taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_torch import tiny_model
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.plan.layer_discovery import Discovery, discover_layers


def names(found: Discovery) -> list[str]:
    return [name for name, _ in found.layers]


def residents(found: Discovery) -> dict[str, list[str]]:
    return {spec.name: [key for key, _ in spec.parameters] for spec in found.residents}


def assert_complete(model: nn.Module, found: Discovery) -> None:
    """Every parameter belongs to exactly one layer or one resident group."""
    owned = [id(p) for _, module in found.layers for p in module.parameters()]
    owned += [id(p) for spec in found.residents for _, p in spec.parameters]
    assert sorted(owned) == sorted({id(p) for p in model.parameters()})
    for name, module in found.layers:
        assert model.get_submodule(name) is module


def test_qwen2_streams_its_decoder_layers() -> None:
    model = tiny_model()
    found = discover_layers(model)
    assert names(found) == [f"model.layers.{i}" for i in range(4)]
    assert residents(found) == {"model.embed_tokens": ["weight"], "model.norm": ["weight"], "lm_head": ["weight"]}
    assert [spec.layers_before > 0 for spec in found.residents] == [False, True, True]
    assert_complete(model, found)


def test_a_tied_head_and_its_embedding_are_one_resident_that_both_read() -> None:
    model = tiny_model(tie_word_embeddings=True)
    found = discover_layers(model)
    assert list(residents(found)) == ["model.embed_tokens", "model.norm"]
    assert {model.model.embed_tokens, model.lm_head} <= set(found.residents[0].users)
    assert found.residents[0].layers_before == 0
    assert_complete(model, found)


def test_gpt2_streams_its_blocks() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2))
    found = discover_layers(model)
    assert names(found) == [f"transformer.h.{i}" for i in range(3)]
    assert list(residents(found)) == ["transformer.wte", "transformer.wpe", "transformer.ln_f"]
    assert_complete(model, found)


def test_t5_streams_both_stacks_in_order() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2))
    found = discover_layers(model)
    assert names(found) == [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2)]
    shared = next(spec for spec in found.residents if spec.name == "shared")
    assert {model.encoder.embed_tokens, model.decoder.embed_tokens} <= set(shared.users)
    assert_complete(model, found)


def test_llava_streams_the_layers_of_vision_tower_and_language_model() -> None:
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))
    found = discover_layers(model)
    layers = names(found)
    assert len(layers) == 5
    assert sum("vision" in name for name in layers) == 2
    assert sum("language_model" in name for name in layers) == 3
    assert any("multi_modal_projector" in name for name in residents(found))
    assert_complete(model, found)


class Block(nn.Module):
    """A repeated layer with layers of its own in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class Plain(nn.Module):
    """No transformers: embedding, a list of blocks, a head, a parameter of its own."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8))


def test_a_plain_module_streams_its_outermost_repeated_modules() -> None:
    model = Plain()
    found = discover_layers(model)
    assert names(found) == ["blocks.0", "blocks.1", "blocks.2"]
    assert residents(found)[""] == ["scale"]
    assert {"embedding", "head.0", "head.1"} <= set(residents(found))
    assert_complete(model, found)


def test_named_classes_override_what_the_model_has() -> None:
    model = Plain()
    assert names(discover_layers(model, ["Linear"])) == [
        *(f"blocks.{i}.inner.{j}" for i in range(3) for j in range(2)),
        "head.1",
    ]
    qwen = tiny_model()
    assert names(discover_layers(qwen, ["Qwen2MLP"])) == [f"model.layers.{i}.mlp" for i in range(4)]
    assert_complete(qwen, discover_layers(qwen, ["Qwen2MLP"]))


def test_more_than_nine_layers_keep_their_order() -> None:
    # "blocks.1" is a prefix of "blocks.10" in letters, not in modules.
    assert names(discover_layers(Plain(12))) == [f"blocks.{i}" for i in range(12)]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ModuleList([nn.ReLU(), nn.ReLU()]), Plain(1).head])
def test_a_model_without_repeated_layers_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"no repeated layers that could stream.*layer_classes"):
        discover_layers(model)


def test_classes_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"layer_classes names Nope, Neither, and Plain has no repeated layers .* Block \(3 of them\)"
    ):
        discover_layers(Plain(), ["Nope", "Neither"])


def share_between_layers(model: Any) -> None:
    model.blocks[2].inner[0].weight = model.blocks[0].inner[1].weight


def share_with_the_rest(model: Any) -> None:
    model.blocks[1].inner[0].weight = model.scale


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (share_between_layers, r"blocks\.0 and blocks\.2 share the parameter 'inner\.0\.weight'"),
        (share_with_the_rest, r"scale is shared with layer blocks\.1"),
    ],
)
def test_weights_shared_across_layers_are_refused(share: Any, message: str) -> None:
    model = Plain()
    share(model)
    with pytest.raises(UnsupportedError, match=message):
        discover_layers(model)


def test_a_weight_shared_within_a_layer_is_one_parameter_of_it() -> None:
    model = Plain()
    model.blocks[0].inner[1].weight = model.blocks[0].inner[0].weight
    assert_complete(model, discover_layers(model))
