"""Compiled layers that are recomputed, by Inductor's code for the CPU: what they save, and that their gradients are right."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_runs import attach, place
from expert_models import EXPERTS, HOOKS_RECORD, of_experts
from plain_torch import tiny_model, token_batches
from torch import nn
from torch._inductor import config as inductor_config
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain_accelerate.layers.compiled_layer import CANDIDATES, MemoryBudget
from megatrain_accelerate.layers.saved_tensors import SavedTensors, SlotPlace
from megatrain_accelerate.transfer import activation_offload

pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ on the CPU"),
    # On a CPU transformers asks for torch's version by a cached function.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]

LAYERS = 2
TOLERANCE = {False: 1e-5, True: 2e-2}
"""Of gradients, relative to the largest, by whether they are bf16: another budget's graph fuses and rounds otherwise."""


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


Passes = tuple[list[float], dict[str, torch.Tensor], int]


def passes(
    build: Callable[[], nn.Module],
    *,
    lengths: tuple[int, ...] = (16,),
    autocast: bool = False,
    budgets: tuple[float, float] = (0.0, 1.0),
    **settings: Any,
) -> Passes:
    """Losses, the sum of gradients, and the number of graphs, of a pass for each length."""
    model = build().train()
    engine = attach(model, **{"compile_layers": True, "kept_layers": 0, **settings})
    place(engine.device_plan, dataclasses.replace(engine.device_plan.current.placement, budgets=budgets))
    torch.manual_seed(3)
    losses = []
    for length in lengths:
        ids = token_batches(1, 2, length, vocabulary=model.config.vocab_size)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        losses.append(output.loss.item())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    compilations = engine.runtime.compiled.compilations
    engine.close()
    return losses, gradients, compilations


@functools.cache
def passes_of_qwen2(**settings: Any) -> Passes:
    """Those that several tests compare with."""
    return passes(qwen2, **settings)


def assert_equal(mine: Passes, other: Passes) -> None:
    assert mine[0] == other[0]
    assert mine[1].keys() == other[1].keys()
    for name, gradient in other[1].items():
        assert torch.equal(mine[1][name], gradient), name


def assert_close(mine: Passes, other: Passes, bf16: bool) -> None:
    assert mine[1].keys() == other[1].keys()
    for name, gradient in other[1].items():
        scale = max(1e-2, float(gradient.float().abs().max()))
        assert float((mine[1][name].float() - gradient.float()).abs().max()) <= TOLERANCE[bf16] * scale, name


@pytest.mark.parametrize("kept", [0, LAYERS])
def test_a_recomputed_layer_saves_its_inputs_alone(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen2().train()
    engine = attach(model, bf16=False, compile_layers=True, kept_layers=kept)
    inputs, saved = set[int](), list[torch.Tensor]()

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        inputs.update(tensor.data_ptr() for tensor in (*args, *kwargs["position_embeddings"]))

    def pack(self: SavedTensors, tensor: torch.Tensor) -> Any:
        packed = original(self, tensor)
        if not isinstance(packed, SlotPlace):
            saved.append(tensor)
        return packed

    original = SavedTensors.pack
    monkeypatch.setattr(SavedTensors, "pack", pack)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    ids = token_batches(1, 2, 16)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    assert saved
    assert all(tensor.data_ptr() in inputs for tensor in saved) == (kept == 0)
    engine.close()


@pytest.mark.parametrize("bf16", [False, True])
def test_recomputed_layers_train_as_kept_ones_and_as_their_own_code(bf16: bool) -> None:
    recomputed, kept, plain = (
        passes_of_qwen2(bf16=bf16, **settings) for settings in ({}, {"kept_layers": LAYERS}, {"compile_layers": False})
    )
    assert recomputed[2] == kept[2] == 1
    assert plain[2] == 0
    assert_close(recomputed, kept, bf16)
    assert_close(recomputed, plain, bf16)


@pytest.mark.parametrize("settings", [{"slots": 3}, {"micro_batch_size": 2}], ids=str)
def test_where_weights_lie_changes_no_bit_of_recomputed_layers(settings: dict[str, Any]) -> None:
    assert_equal(passes(qwen2, **settings), passes_of_qwen2(bf16=True))


def test_equal_budgets_give_equal_bits_whether_layers_are_kept_and_another_one_trains_alike() -> None:
    lean, kept = (passes(qwen2, bf16=False, budgets=(0.4, 0.4), kept_layers=count) for count in (0, LAYERS))
    assert lean[2] == kept[2] == 1
    assert_equal(lean, kept)
    divided = passes(qwen2, bf16=False, budgets=(0.2, 0.4), kept_layers=1)
    assert divided[2] == 2
    assert_close(lean, passes_of_qwen2(bf16=False, compile_layers=False), bf16=False)
    assert_close(divided, lean, bf16=False)


def test_what_a_memory_budget_saves_is_the_same_to_the_bit_after_it_waited_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    send, sent = activation_offload.ActivationOffloader.send, list[int]()

    def count(self: activation_offload.ActivationOffloader, recording: activation_offload.Recording, *call: Any) -> None:
        before = self._meter.counters.d2h_bytes
        send(self, recording, *call)
        sent.append(self._meter.counters.d2h_bytes - before)

    monkeypatch.setattr(activation_offload.ActivationOffloader, "send", count)
    away = {budget: passes(qwen2, bf16=False, budgets=(budget, 1.0), offloaded_inputs=True) for budget in (0.0, 0.4)}
    assert len(sent) == 2 * LAYERS
    assert all(saved > inputs > 0 for inputs, saved in zip(sent[:LAYERS], sent[LAYERS:], strict=True))
    assert_equal(away[0.4], passes(qwen2, bf16=False, budgets=(0.4, 1.0)))


def saved_bytes(budgets: tuple[float, float], foretold: list[MemoryBudget] | None = None) -> int:
    """What a pass saves besides inputs and places in slots; ``foretold`` gets the distinct budgets of a layer."""
    model = tiny_model(hidden_size=128, intermediate_size=512, num_hidden_layers=1).train()
    engine = attach(model, bf16=False, compile_layers=True, kept_layers=0)
    runtime = engine.runtime
    place(engine.device_plan, dataclasses.replace(engine.device_plan.current.placement, budgets=budgets))
    inputs, saved = set[int](), dict[int, int]()

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        inputs.update(tensor.data_ptr() for tensor in (*args, *kwargs["position_embeddings"]))

    def pack(self: SavedTensors, tensor: torch.Tensor) -> Any:
        packed = original(self, tensor)
        if not isinstance(packed, SlotPlace) and tensor.data_ptr() not in inputs:
            saved[tensor.data_ptr()] = tensor.nbytes
        return packed

    original = SavedTensors.pack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensors, "pack", pack)
        model.model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
        ids = token_batches(1, 2, 16)[0]
        loss = model(input_ids=ids, labels=ids).loss
    if foretold is not None:
        captures = runtime.compiled.wants(runtime.layers[0])
        assert captures is not None
        foretold += runtime.compiled.budgets(runtime.layers[0], captures)
    loss.backward()
    engine.close()
    return sum(saved.values())


@pytest.mark.skipif(not hasattr(inductor_config, "custom_partitioner_fn"), reason="this torch's partitioner can't be asked")
def test_budgets_save_what_was_foretold_without_compiling_them() -> None:
    budgets: list[MemoryBudget] = []
    least = saved_bytes((0.0, 1.0), budgets)
    most = saved_bytes((1.0, 1.0))
    assert [budgets[0].value, budgets[-1].value] == [0.0, 1.0]
    assert len(budgets) > 2
    for lower, higher in itertools.pairwise(budgets):
        assert lower.saved_share < higher.saved_share
        assert lower.recompute_share >= higher.recompute_share
    middle = budgets[1]
    share = (saved_bytes((middle.value, 1.0)) - least) / (most - least)
    assert share == pytest.approx(middle.saved_share, abs=0.02)


@pytest.mark.parametrize(("budget", "times"), [(0.0, 2), (CANDIDATES[0], 1)])
def test_attention_is_computed_again_at_the_lowest_memory_budget_alone(budget: float, times: int) -> None:
    model = qwen2(attn_implementation="sdpa").train()
    engine = attach(model, bf16=False, compile_layers=True, kept_layers=0)
    place(engine.device_plan, dataclasses.replace(engine.device_plan.current.placement, budgets=(budget, 1.0)))
    ids = token_batches(1, 2, 16)[0]
    for is_compiled in (False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(input_ids=ids, labels=ids).loss.backward()
        if is_compiled:
            calls = {event.key: event.count for event in profile.key_averages()}
            assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] == times * LAYERS
    engine.close()


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "in attention": lambda: qwen2(attention_dropout=0.3),
    "of hidden states": lambda: of_family("gpt_neox", hidden_dropout=0.2),
    "of both": lambda: of_family("gpt_neox", hidden_dropout=0.2, attention_dropout=0.2),
}


# Both have what hidden states alone have.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "of hidden states")) for name in DROPPING]
)
def test_backward_drops_what_forward_dropped(name: str) -> None:
    build = DROPPING[name]
    recomputed, partly, kept, plain = (
        passes(build, bf16=False, lengths=(16, 16), **settings)
        for settings in ({}, {"budgets": (0.4, 0.4)}, {"kept_layers": LAYERS}, {"compile_layers": False})
    )
    # The partitioner's own recompute would draw other masks, so that one graph serves both, and their bits are the same.
    assert_equal(recomputed, kept)
    assert_equal(partly, kept)
    assert_close(recomputed, plain, bf16=False)


def test_later_lengths_compile_one_graph_more() -> None:
    lengths = (16, 24, 17, 40)
    recomputed, plain = (passes(qwen2, bf16=False, lengths=lengths, compile_layers=flag) for flag in (True, False))
    assert recomputed[2] == 2, "of one length, and of any"
    assert_close(recomputed, plain, bf16=False)


def test_a_second_backward_gives_the_same_gradients_again() -> None:
    gradients = []
    model = qwen2().train()
    engine = attach(model, bf16=False, compile_layers=True)
    ids = token_batches(1, 2, 16)[0]
    for backwards in (1, 2):
        loss = model(input_ids=ids, labels=ids).loss
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        gradients.append([parameter.grad / backwards for parameter in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(mine, other) for mine, other in zip(*gradients, strict=True))
    engine.close()


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: of_family("llama"),
    "llama with biases": lambda: of_family("llama", mlp_bias=True, attention_bias=True),
    "qwen3": lambda: of_family("qwen3", head_dim=16),
    "gemma3": lambda: of_family("gemma3_text", head_dim=16),
    "granite": lambda: of_family("granite", residual_multiplier=0.3),
}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_as_when_it_is_kept(name: str, precision: str) -> None:
    options: dict[str, Any] = {"bf16": precision != "fp32", "autocast": precision == "autocast"}
    recomputed, kept = (passes(FAMILIES[name], kept_layers=count, **options) for count in (0, LAYERS))
    assert_close(recomputed, kept, bf16=precision != "fp32")


@pytest.mark.long
@pytest.mark.skipif(not HOOKS_RECORD, reason="transformers records nothing by hooks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPERTS)
def test_recorded_routers_are_trained_as_when_their_layers_are_kept(name: str, dtype: torch.dtype) -> None:
    bf16 = dtype == torch.bfloat16
    recomputed, kept = (passes(lambda: of_experts(name, dtype), bf16=bf16, kept_layers=count) for count in (0, LAYERS))
    assert_close(recomputed, kept, bf16)
