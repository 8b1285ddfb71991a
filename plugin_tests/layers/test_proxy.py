"""A proxy is the user's layer in every respect but its forward, and its copies are plain."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from versions import enable_checkpointing

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.layers import proxy
from megatrain_accelerate.layers.proxy import install_proxy, is_proxy, remove_proxy


class Layer(nn.Module):
    """A layer with all that a parent may read."""

    scale_of_class = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.sliding_window = 17

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.linear(x) * factor + self.table

    def helper(self) -> int:
        return self.sliding_window


def make() -> tuple[Layer, list[Any], Any]:
    layer = Layer()
    calls: list[Any] = []
    runner = lambda _, *args, **kwargs: calls.append((args, kwargs)) or "ran"  # noqa: E731
    forward = install_proxy(layer, runner, lambda: calls.append("copied"))
    return layer, calls, forward


def test_a_proxy_keeps_class_name_attributes_children_and_methods() -> None:
    layer, _, _ = make()
    assert is_proxy(layer)
    assert type(layer) is Layer
    assert repr(layer) == repr(Layer())
    assert (layer.sliding_window, layer.scale_of_class, layer.helper()) == (17, 3, 17)
    assert [name for name, _ in layer.named_parameters()] == ["linear.weight", "linear.bias"]
    assert [name for name, _ in layer.named_buffers()] == ["table"]
    assert list(layer.state_dict()) == list(Layer().state_dict())
    layer.sliding_window = 5
    assert layer.helper() == 5


def test_a_proxy_says_what_the_layers_forward_takes() -> None:
    layer, _, _ = make()
    assert inspect.signature(layer.forward) == inspect.signature(Layer().forward)
    assert list(inspect.signature(type(layer).forward).parameters) == ["self", "x", "factor"]


def test_a_call_goes_through_the_runner_and_fires_the_layers_hooks_once() -> None:
    layer, calls, forward = make()
    fired: list[str] = []
    layer.register_forward_pre_hook(lambda *_: fired.append("before"))
    layer.register_forward_hook(lambda *_: fired.append("after"))
    x = torch.ones(4)
    assert layer(x, factor=2.0) == "ran"
    assert calls == [((x,), {"factor": 2.0})]
    assert fired == ["before", "after"]
    assert torch.equal(forward(x, factor=2.0), Layer.forward(layer, x, factor=2.0))
    assert fired == ["before", "after"]


def test_removing_gives_class_and_forward_back() -> None:
    layer, calls, forward = make()
    remove_proxy(layer, forward)
    assert type(layer) is Layer
    assert layer.__dict__.keys() == Layer().__dict__.keys()
    layer(torch.ones(4))
    assert not calls


def test_a_forward_that_somebody_patched_in_before_is_run_and_given_back() -> None:
    layer = Layer()
    patched = lambda x: x + 1000  # noqa: E731
    layer.forward = patched
    forward = install_proxy(layer, lambda _, *args, **kwargs: forward(*args, **kwargs), lambda: None)
    assert layer(torch.zeros(1)).item() == 1000
    remove_proxy(layer, forward)
    assert layer.forward is patched


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_and_pickles_are_plain_modules(how: str) -> None:
    layer, calls, forward = make()
    x = torch.ones(4)
    if how == "deepcopy":
        copied = copy.deepcopy(layer)
    elif how == "copy":
        copied = copy.copy(layer)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert type(copied) is Layer
    assert not is_proxy(copied)
    assert "copied" in calls, "pending steps are applied before weights are read"
    assert torch.equal(copied(x), forward(x))
    assert is_proxy(layer), "the original goes on"
    assert layer(x) == "ran"


@pytest.fixture
def clean_note() -> None:
    proxy.warn_once.cache_clear()


@pytest.mark.usefixtures("clean_note")
@pytest.mark.parametrize("called", ["the model", "the model inside of it"])
def test_gradient_checkpointing_stays_off_in_a_proxy_and_is_said_once(called: str, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny_model().train(), token_batches(1)[0]
    enable_checkpointing(model)
    engine = attach(model)
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    for _ in range(2):
        enable_checkpointing(model)
        (model if called == "the model" else model.model)(input_ids=ids)
        assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    assert caplog.text.count("(gradient_checkpointing) is switched off") == 1
    engine.close()
    enable_checkpointing(model)
    model(input_ids=ids)
    assert model.model.layers[0].gradient_checkpointing is True


def test_a_streaming_model_keeps_classes_names_and_order() -> None:
    model, plain = tiny_model(), tiny_model()
    engine = attach(model, bf16=False)
    assert repr(model) == repr(plain)
    assert [str(type(module)) for module in model.modules()] == [str(type(module)) for module in plain.modules()]
    assert all(isinstance(layer, Qwen2DecoderLayer) for layer in model.model.layers)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.model.layers[1].self_attn.layer_idx == 1
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    engine.close()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_streaming_model_is_plain_independent_and_equal(how: str, bf16: bool) -> None:
    model = tiny_model()
    engine = attach(model, bf16=bf16)
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert engine_of(copied) is None
    assert not any(is_proxy(module) for module in copied.modules())
    assert [type(module) for module in copied.modules()] == [type(module) for module in tiny_model().modules()]
    ids = token_batches(1)[0]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert torch.equal(copied(input_ids=ids).logits, expected)
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(model(input_ids=ids).logits, expected), "the copy shares no memory"
    fetches = engine.runtime.meter.counters.weight_fetches
    copied(input_ids=ids, labels=ids).loss.backward()
    assert engine.runtime.meter.counters.weight_fetches == fetches, "the copy must not run through the engine"
    engine.close()


@pytest.mark.usefixtures("clean_note")
def test_a_layer_that_keeps_gradient_checkpointing_in_itself_has_it_off_in_a_proxy_and_back_after() -> None:
    layer = Layer()
    layer.gradient_checkpointing = True
    forward = install_proxy(layer, lambda _, *args, **kwargs: None, lambda: None)
    assert layer.gradient_checkpointing is False
    assert copy.deepcopy(layer).gradient_checkpointing is True
    remove_proxy(layer, forward)
    assert layer.gradient_checkpointing is True


class Checkpointed(nn.Module):
    """Checkpoints what it wraps in its own forward, as models of older transformers do and parts of some layers."""

    def __init__(self, inner: nn.Module, runs: list[str]) -> None:
        super().__init__()
        self.inner = inner
        self.gradient_checkpointing = False
        self.runs = runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(type(self.inner).__name__)
        return checkpoint(self.inner, x, use_reentrant=False) if self.gradient_checkpointing else self.inner(x)


class Block(nn.Sequential):
    """A layer that streams."""


@pytest.mark.usefixtures("clean_note")
@pytest.mark.parametrize("when", ["before", "after", "after a step"])
def test_models_and_parts_of_layers_that_checkpoint_by_themselves_recompute_once(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[str] = []
    blocks = [Block(Checkpointed(nn.Linear(4, 4), runs), nn.Tanh()) for _ in range(2)]
    model = Checkpointed(nn.Sequential(*blocks), runs)
    parts = [module for module in model.modules() if isinstance(module, Checkpointed)]

    def switch_on() -> None:
        for part in parts:
            part.gradient_checkpointing = True

    if when == "before":
        switch_on()
    engine = attach(model, bf16=False, layer_classes=["Block"])
    if when == "after":
        switch_on()
    x = torch.arange(4.0).unsqueeze(0)
    model(x).sum().backward()  # the plan has been made for such a batch
    if when == "after a step":
        switch_on()
    runs.clear()
    loss = model(x).sum()
    assert runs == ["Sequential", "Linear", "Linear"]
    loss.backward()
    assert runs == ["Sequential"] + 4 * ["Linear"], "each layer again, and nothing a third time"
    assert not any(part.gradient_checkpointing for part in parts)
    assert caplog.text.count("is switched off in them") == 1
    engine.close()
