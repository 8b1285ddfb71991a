"""Layers by tiles of tokens have the outputs, input gradients and weight gradients of whole ones; placement changes no bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from decoder_models import LENGTH, Decoder
from engine_runs import attach, train_streamed
from families import DECODERS
from family_parity import assert_parity
from family_parity import train_streamed as train_family
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.layers.proxy import is_proxy
from megatrain_accelerate.layers.token_tiles import TokenTiles

pytestmark = pytest.mark.usefixtures("profiled_once")

FAMILIES = {family.name: family for family in DECODERS}
TILE = 15
"""Of 72 tokens, 5 of each of three texts: the last tile has 4."""

PARTS = {
    "llama3": {"input_layernorm", "post_attention_layernorm", "mlp"},
    "qwen2": {"input_layernorm", "post_attention_layernorm", "mlp"},
    "qwen3": {"input_layernorm", "post_attention_layernorm", "mlp", "self_attn.q_norm", "self_attn.k_norm"},
    "qwen3_moe": {"input_layernorm", "post_attention_layernorm", "mlp", "self_attn.q_norm", "self_attn.k_norm"},
    "mixtral": {"input_layernorm", "post_attention_layernorm"},
    "gemma2": {
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "mlp",
    },
    "gemma3": {
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "mlp",
        "self_attn.q_norm",
        "self_attn.k_norm",
    },
    "phi4": {"input_layernorm", "post_attention_layernorm", "mlp"},
    "gpt2": {"mlp.act"},
}
"""What runs by tiles in some layer. Experts run whole: which tokens they get is decided in the layer (Qwen3-MoE's second layer
is dense). GPT-2's norm is one kernel, and its MLP here has dropout, whose masks would be others."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}
"""Relative to a tensor's largest entry: products of other sizes add in another order, and in bf16 what comes of it is rounded
to 8 bits in each of three layers."""


def gradients(family: Decoder, dtype: torch.dtype, **settings: object) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Loss, gradients of all parameters and of the layers' inputs (through the embeddings); and what ran by tiles."""
    model = family.build()
    model.config.output_router_logits = False  # nothing collects them here
    engine = attach(model, bf16=dtype == torch.bfloat16, kept_layers=0, **settings)
    torch.manual_seed(3)
    output = model(**family.batch(0))
    output.loss.backward()
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    found["loss"] = output.loss.detach()
    tiled = {name for layer in engine.runtime.layers for name in layer.tiles.tiled_names}
    # The last norm too, where it isn't one kernel.
    assert engine.runtime.outside_tiles.tiled_names == (["model.norm"] if tiled - {"mlp.act"} else [])
    engine.close()
    assert not any("forward" in module.__dict__ for module in model.modules())
    return found, tiled


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> Iterator[tuple[float, str]]:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        scale = max(float(expected.abs().max()), 1e-3)
        yield float((ours[name].float() - expected.float()).abs().max()) / scale, name


QUICK = ("qwen2", "phi4")
"""Those that ``make test`` runs in both dtypes."""
QUICK_FP32 = (*QUICK, "gpt2", "qwen3_moe")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name, dtype, marks=[] if name in (QUICK if dtype == torch.bfloat16 else QUICK_FP32) else [pytest.mark.long]
        )
        for name in PARTS
        for dtype in TOLERANCE
    ],
)
@pytest.mark.usefixtures("without_predictions")
def test_tiles_give_the_gradients_of_whole_layers(name: str, dtype: torch.dtype) -> None:
    whole, none = gradients(FAMILIES[name], dtype)
    tiled, parts = gradients(FAMILIES[name], dtype, token_tile=TILE)
    assert none == set()
    assert parts == PARTS[name]
    assert max(worst(tiled, whole))[0] <= TOLERANCE[dtype], sorted(worst(tiled, whole))[-3:]


@pytest.mark.long
@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_tiles_change_no_family_beyond_rounding(family: Decoder) -> None:
    # After five steps of AdamW, auxiliary losses among them: what is rounded otherwise grows a little with each.
    assert_parity(train_family(family, torch.float32, token_tile=TILE), train_family(family, torch.float32), 1e-3)


def test_one_tile_is_the_whole_layer_to_the_bit() -> None:
    family = FAMILIES["qwen3"]
    whole, _ = gradients(family, torch.bfloat16)
    tiled, parts = gradients(family, torch.bfloat16, token_tile=3 * LENGTH)
    assert parts == set()
    assert max(worst(tiled, whole))[0] == 0.0


class _Norm(nn.Module):
    """A layer of a norm alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(16, elementwise_affine=False), nn.GELU(), nn.GELU(), nn.GELU(), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 11, 16), (1, 22, 16), (22, 1, 16)])
def test_what_adds_nothing_over_tokens_has_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer, tiles = _Norm(), None
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradient = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    expected = layer(x)
    (of_input,) = torch.autograd.grad(expected, x, gradient)
    tiles = TokenTiles.of_layer(layer)
    tiles.tile_tokens = 6
    with tiles.at_work((x,), {}):
        found = layer(x)
    if shape[1] > 1:
        assert tiles.tiled_names == ["norm"]
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, x, gradient)[0], of_input)
    assert "forward" not in layer.norm.__dict__


PLACEMENTS: list[dict[str, object]] = [
    {"kept_layers": 2},
    {"kept_layers": 4, "slots": 3},
    {"kept_layers": 1, "offloaded_layers": 2},
    {"kept_layers": 0, "offloaded_inputs": True},
    {"kept_layers": 1, "kept_attention": 2},
    {"kept_layers": 0, "device_layers": 2},
    {"kept_layers": 1, "compile_layers": True},
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_changes_no_bit_of_layers_with_tiles(monkeypatch: pytest.MonkeyPatch, placement: dict[str, object]) -> None:
    monkeypatch.setattr("megatrain_accelerate.transfer.activation_offload.MIN_OFFLOADED_BYTES", 1)
    model, batches = tiny_model(), token_batches(2)
    expected = train_streamed(model, batches, kept_layers=0, token_tile=24)
    found = train_streamed(model, batches, token_tile=24, **placement)
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    for name, master in expected.masters.items():
        assert torch.equal(found.masters[name], master), name


def test_pieces_of_a_batch_run_by_tiles_too() -> None:
    model, batches = tiny_model(), token_batches(2, batch=4)
    whole = train_streamed(model, batches, bf16=False, micro_batch_size=2)
    tiled = train_streamed(model, batches, bf16=False, micro_batch_size=2, token_tile=24)
    assert tiled.losses == pytest.approx(whole.losses, rel=1e-5)
    assert tiled.norms == pytest.approx(whole.norms, rel=1e-5)


def test_frozen_weights_and_evaluation_run_by_tiles() -> None:
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.up_proj" in name)
    (ids,) = token_batches(1)
    engine = attach(model, bf16=False)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    engine.runtime.token_tile = 24
    with torch.no_grad():
        found = model(input_ids=ids).logits
    model(input_ids=ids, labels=ids).loss.backward()
    assert "mlp" in engine.runtime.layers[0].tiles.tiled_names
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(gradients) == 4
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in gradients)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7)
    engine.close()


def test_modules_that_somebody_watches_inside_run_whole() -> None:
    model = tiny_model()
    engine = attach(model, token_tile=24)
    seen: list[tuple[int, ...]] = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    (ids,) = token_batches(1)
    model(input_ids=ids, labels=ids)
    assert seen == [(2, 32, 176), (2, 32, 64)]
    first, second = (engine.runtime.layers[index].tiles for index in (0, 1))
    assert first.found["mlp"] == "hooks are registered inside it"
    assert "mlp" in second.tiled_names
    engine.close()


def test_modules_run_whole_while_somebody_watches_all() -> None:
    model = tiny_model()
    engine = attach(model, token_tile=24)
    watched = {layer.mlp.act_fn for layer in model.model.layers}
    seen: list[int] = []
    (ids,) = token_batches(1)
    with torch.no_grad():
        model(input_ids=ids)
        assert "mlp" in engine.runtime.layers[0].tiles.tiled_names
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen.append(output.shape[1]) if module in watched else None
        )
        try:
            model(input_ids=ids)
        finally:
            handle.remove()
    assert seen == [32] * len(watched)
    engine.close()


def test_a_model_is_copied_as_it_is_while_tiles_are_on_and_after_a_failed_call() -> None:
    model = tiny_model()
    engine = attach(model, token_tile=24)
    (ids,) = token_batches(1)

    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    handle = model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model(input_ids=ids, labels=ids)
    handle.remove()
    early = copy.deepcopy(model)
    model(input_ids=ids, labels=ids).loss.backward()
    twin = copy.deepcopy(model)
    for module in (*early.modules(), *model.modules(), *twin.modules()):
        assert "forward" not in module.__dict__ or is_proxy(module)
    assert not any(map(is_proxy, (*early.modules(), *twin.modules())))
    engine.close()
