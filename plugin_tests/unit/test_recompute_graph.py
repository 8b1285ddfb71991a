"""Recomputes of compiled layers by Inductor's code for the CPU: what they leave out, and that nobody misses it."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_runs import attach
from expert_models import EXPERTS, of_experts
from plain_torch import tiny_model, token_batches
from recompute_runs import poison_recomputes, run_layer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.integrations.output_recording import CapturedOutputs
from megatrain_accelerate.streaming import recompute_graph
from megatrain_accelerate.streaming.generated_code import UnknownCodeError

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ on the CPU"),
    # On a CPU transformers asks for torch's version by a cached function.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]

LAYERS = 2


@pytest.fixture(autouse=True)
def dropped_engines_are_collected() -> Iterator[None]:
    """Their threads would be counted by other tests."""
    yield
    gc.collect()


def of_family(name: str, **changes: Any) -> nn.Module:
    settings = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "num_hidden_layers": LAYERS, "max_position_embeddings": 64, **changes}
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings))
    return model


def qwen2(**changes: Any) -> nn.Module:
    return tiny_model(num_hidden_layers=LAYERS, **changes)


def compiled(model: nn.Module, **settings: Any) -> Engine:
    return attach(model.train(), compile_layers=True, **settings)


def passes(
    build: Callable[[], nn.Module], kept: bool, lengths: tuple[int, ...] = (16,), autocast: bool = False, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor], list[tuple[str, ...]]]:
    """Losses, the sum of gradients, and what recomputes leave out, of a pass for each length."""
    model = build()
    engine = compiled(model, keep_layers=model.config.num_hidden_layers if kept else 0, **settings)
    torch.manual_seed(3)
    losses = []
    for length in lengths:
        ids = token_batches(1, 2, length, vocabulary=model.config.vocab_size)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        losses.append(output.loss.item())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    left_out = engine.runtime.compiled.recomputes.left_out
    engine.close()
    return losses, gradients, left_out


def assert_kept_is_recomputed(build: Callable[[], nn.Module], **options: Any) -> list[tuple[str, ...]]:
    recomputed, kept = (passes(build, flag, **options) for flag in (False, True))
    assert recomputed[0] == kept[0]
    assert recomputed[1].keys() == kept[1].keys()
    for name, gradient in kept[1].items():
        assert torch.equal(recomputed[1][name], gradient), name
    return recomputed[2]


def hidden_of(engine: Engine, model: nn.Module, length: int = 16) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    hidden = torch.randn(2, length, 64, requires_grad=True)
    angles = model.model.rotary_emb(hidden, torch.arange(length)[None])  # type: ignore[union-attr, operator]
    return (hidden,), {"position_embeddings": angles, "attention_mask": None}


def test_a_recompute_leaves_out_the_last_product_and_no_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_recomputes(monkeypatch)
    (left_out,) = assert_kept_is_recomputed(qwen2)
    assert left_out[0] == "extern_kernels.mm"
    assert len(left_out) == 2, "the product, and the addition of the residual"


def test_a_recompute_saves_what_forward_saves_and_returns_memory_of_the_outputs_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_recomputes(monkeypatch)
    model = qwen2()
    engine = compiled(model, bf16=False)
    args, kwargs = hidden_of(engine, model)
    (whole, saved), (short, saved_again) = (run_layer(engine, args, kwargs, flag) for flag in (False, True))
    assert len(saved) > 15
    assert all(torch.equal(mine, other) for mine, other in zip(saved_again, saved, strict=True))
    assert not whole.isnan().any()
    assert short.isnan().all()
    assert (short.shape, short.stride(), short.dtype) == (whole.shape, whole.stride(), whole.dtype)
    again, _ = run_layer(engine, args, kwargs, is_recompute=False)
    assert torch.equal(again, whole), "only a recompute leaves something out"
    assert engine.runtime.compiled.compilations == 1


def test_an_error_in_a_recompute_leaves_no_forward_short(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_recomputes(monkeypatch)
    model = qwen2()
    engine = compiled(model, bf16=False)
    args, kwargs = hidden_of(engine, model)
    run_layer(engine, args, kwargs, is_recompute=False)
    with pytest.raises(TypeError):
        run_layer(engine, (), {}, is_recompute=True)
    output, _ = run_layer(engine, args, kwargs, is_recompute=False)
    assert not output.isnan().any()


@pytest.mark.parametrize("error", [UnknownCodeError("of another form"), AttributeError("another torch")])
def test_code_that_cant_be_cut_is_recomputed_whole(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(recompute_graph, "without_outputs", fails)
    assert assert_kept_is_recomputed(qwen2) == [()]


def test_a_second_backward_gives_kept_and_recomputed_layers_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_recomputes(monkeypatch)
    gradients = []
    for kept in (0, LAYERS):
        model = qwen2()
        compiled(model, keep_layers=kept)
        ids = token_batches(1, 2, 16)[0]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(mine, other) for mine, other in zip(*gradients, strict=True))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "qwen2": (qwen2, True),
    "qwen2 with dropout": (lambda: qwen2(attention_dropout=0.3), False),
    "llama": (lambda: of_family("llama"), True),
    "llama with biases": (lambda: of_family("llama", mlp_bias=True, attention_bias=True), True),
    "qwen3": (lambda: of_family("qwen3", head_dim=16), True),
    # The norm behind the last product is differentiated with its result.
    "gemma3": (lambda: of_family("gemma3_text", head_dim=16), False),
    "gpt_neox with dropout": (lambda: of_family("gpt_neox", hidden_dropout=0.1, attention_dropout=0.1), False),
    "granite": (lambda: of_family("granite", residual_multiplier=0.3), True),
}
"""Models, and whether a recompute leaves a product out."""


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_kept_is_recomputed_to_the_bit_in_every_family(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_recomputes(monkeypatch)
    build, leaves_out = FAMILIES[name]
    left_out = assert_kept_is_recomputed(build, bf16=precision != "fp32", autocast=precision == "autocast")
    assert not leaves_out or all(any("mm" in kernel for kernel in kernels) for kernels in left_out)


@pytest.mark.long
@pytest.mark.parametrize("bf16", [False, True])
def test_kept_is_recomputed_to_the_bit_at_any_length(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_recomputes(monkeypatch)
    left_out = assert_kept_is_recomputed(qwen2, bf16=bf16, lengths=(16, 24, 17, 40))
    assert len(left_out) == 2, "of one length, and of any"
    assert all("extern_kernels.mm" in kernels for kernels in left_out)


@pytest.mark.long
@pytest.mark.skipif(CapturedOutputs.for_installed_transformers() is None, reason="transformers records nothing by hooks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPERTS)
def test_kept_is_recomputed_to_the_bit_with_recorded_routers(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_recomputes(monkeypatch)
    assert_kept_is_recomputed(lambda: of_experts(name, dtype), bf16=dtype == torch.bfloat16)
