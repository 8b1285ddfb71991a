"""What can't be honoured is one clear error, before anything is touched: the model trains plainly after it."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate import Accelerator
from fresh_process import clean_environment
from plain_torch import tiny_model, token_batches
from torch import nn
from trainer_runs import examples, make_arguments, plugin
from transformers import Trainer

import megatrain_accelerate
from megatrain_accelerate.engine import all_engines, engine_of
from megatrain_accelerate.errors import ConfigError, HostMemoryError, StateError, UnsupportedError
from megatrain_accelerate.streaming.proxy import is_proxy
from megatrain_accelerate.units import GIB, MIB

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with plugin():
        yield
    for engine in all_engines():
        engine.close()


def train_plainly(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for ids in token_batches(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    """No engine, no proxy, no hook; parameters in their own memory; and it trains as a plain copy does."""
    assert engine_of(model) is None
    assert not any(engine_of(module) for module in model.modules())
    assert not any(is_proxy(module) for module in model.modules())
    assert trace(model) == {key: value for key, value in before.items() if key != "copy"}
    megatrain_accelerate.disable()
    assert train_plainly(model) == train_plainly(before["copy"])
    for ours, theirs in zip(model.parameters(), before["copy"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def trace(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_backward_hooks")
    return {
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "memory": [(parameter.data_ptr(), parameter.dtype, parameter.requires_grad) for parameter in model.parameters()],
        "forwards": ["forward" in module.__dict__ for module in model.modules()],
    }


def remember(model: nn.Module) -> dict[str, Any]:
    return {**trace(model), "copy": copy.deepcopy(model)}


def prepare(model: nn.Module, **settings: Any) -> Any:
    megatrain_accelerate.enable(settings or None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Accelerator(cpu=True).prepare(model, optimizer)


# ---------------------------------------------------------------------------------------- the machine and the precision


@needs_no_gpu
def test_no_gpu_and_no_wish_for_the_cpu_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    before = remember(model)
    with pytest.raises(ConfigError, match=r"found no CUDA device.*use_cpu: true.*--use_cpu.*ACCELERATE_USE_CPU"):
        Accelerator()
    with pytest.raises(ConfigError, match="found no CUDA device"):
        Trainer(model, make_arguments(tmp_path, use_cpu=False), train_dataset=examples())
    assert_untouched(model, before)


@needs_no_gpu
@pytest.mark.parametrize("wish", ["argument", "environment"])
def test_the_cpu_is_taken_where_it_is_asked_for(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wish == "environment":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = Accelerator(cpu=True if wish == "argument" else None or False).prepare(tiny_model())
    assert engine_of(model) is not None


def test_fp16_is_refused_by_the_accelerator_and_by_the_training_arguments(tmp_path: Path) -> None:
    model = tiny_model()
    before = remember(model)
    with pytest.raises(UnsupportedError, match=r"fp16=True .* loss scaling.*Use bf16=True"):
        make_arguments(tmp_path, fp16=True)
    with pytest.raises(UnsupportedError, match=r"mixed_precision='fp16' .*Use mixed_precision: bf16"):
        Accelerator(mixed_precision="fp16", cpu=True)
    assert_untouched(model, before)


def test_whole_model_compilation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    before = remember(model)
    # Transformers hands it to Accelerate by environment.
    for name in ("BACKEND", "MODE"):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}")
    with pytest.raises(UnsupportedError, match="torch_compile"):
        Trainer(model, make_arguments(tmp_path, torch_compile=True), train_dataset=examples())
    assert_untouched(model, before)


def test_several_processes_are_refused(tmp_path: Path) -> None:
    code = """
import megatrain_accelerate, sys
from accelerate import Accelerator
megatrain_accelerate.enable()
try:
    Accelerator(cpu=True)
except megatrain_accelerate.errors.UnsupportedError as error:
    assert "this run has 2" in str(error) and "num_processes: 1" in str(error), error
    sys.exit(0)
sys.exit("two processes were accepted")
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment = clean_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, ACCELERATE_USE_CPU="true", **place)
        command = [sys.executable, "-c", "import megatrain_accelerate.errors\n" + code]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs


# ---------------------------------------------------------------------------------------- the model


def half(model: nn.Module) -> None:
    model.half()


def one_half_norm(model: nn.Module) -> None:
    model.model.norm.half()


def double_layer(model: nn.Module) -> None:
    model.model.layers[2].double()


def integer_weight(model: nn.Module) -> None:
    old = model.model.layers[3].mlp.up_proj
    old.weight = nn.Parameter(torch.zeros_like(old.weight, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (half, r"torch\.float16.*dtype=torch\.bfloat16 or torch\.float32"),
        (one_half_norm, r"model\.norm\.weight has dtype torch\.float16"),
        (double_layer, r"model\.layers\.2\.\S+ has dtype torch\.float64"),
        (integer_weight, r"model\.layers\.3\.mlp\.up_proj\.weight has dtype torch\.int8.*quantised"),
    ],
)
def test_weights_of_other_dtypes_are_refused(spoil: Callable[[nn.Module], None], message: str) -> None:
    model = tiny_model()
    spoil(model)
    classes, memory = trace(model)["classes"], trace(model)["memory"]
    with pytest.raises(UnsupportedError, match=message):
        prepare(model)
    assert trace(model)["classes"] == classes
    assert trace(model)["memory"] == memory
    assert engine_of(model) is None
    if message.endswith("quantised"):
        return
    before = remember(model.float())
    assert_untouched(model, before)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj", "lm_head"])
def test_weights_on_the_meta_device_are_refused(name: str) -> None:
    model = tiny_model()
    module = model.get_submodule(name)
    weight = module.weight
    module.weight = nn.Parameter(weight.to("meta"))
    module.weight, meta = weight, module.weight
    whole = remember(model)
    module.weight = meta
    with pytest.raises(UnsupportedError, match=rf"{name}\.weight is on the meta device .*without device_map"):
        prepare(model)
    module.weight = weight
    assert_untouched(model, whole)


def test_a_model_that_was_spread_by_a_device_map_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    megatrain_accelerate.disable()
    model = type(tiny_model()).from_pretrained(tmp_path, device_map={"": "cpu"})
    model.hf_device_map = {"model.embed_tokens": "cpu", "model.layers": "disk"}
    before = remember(model)
    with pytest.raises(UnsupportedError, match=r"device_map.*from_pretrained without device_map"):
        prepare(model)
    assert_untouched(model, before)


def test_a_device_map_is_ignored_with_a_warning_while_the_plugin_is_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = type(tiny_model()).from_pretrained(tmp_path, device_map="auto")
    assert "device_map='auto' is ignored" in caplog.text
    model, _ = prepare(model)
    assert engine_of(model) is not None


class Unlayered(nn.Module):
    """Nothing in it repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))


def test_a_model_without_repeated_layers_is_refused() -> None:
    model = Unlayered()
    before = trace(model)
    with pytest.raises(UnsupportedError, match=r"Unlayered has no repeated layers.*megatrain_config\.layer_classes"):
        prepare(model)
    assert trace(model) == before
    assert engine_of(model) is None


def test_layer_classes_that_the_model_has_not_are_refused() -> None:
    model = tiny_model()
    before = remember(model)
    with pytest.raises(UnsupportedError, match=r"no repeated layers of class LlamaDecoderLayer"):
        prepare(model, layer_classes=["LlamaDecoderLayer"])
    assert_untouched(model, before)


def test_layers_that_share_a_weight_are_refused() -> None:
    model = tiny_model()
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    before = trace(model)
    with pytest.raises(UnsupportedError, match=r"layers model\.layers\.0 and model\.layers\.2 share .*up_proj"):
        prepare(model)
    assert trace(model) == before
    assert engine_of(model) is None


# ---------------------------------------------------------------------------------------- the settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slot": 3}, r"no setting 'slot'; did you mean 'slots'\?.*gradient_slots"),
        ({"slots": 1}, "slots must be at least 2, got 1"),
        ({"slots": "2"}, "slots must be a whole number, got '2'"),
        ({"slots": True}, "slots must be a whole number, got True"),
        ({"gradient_slots": 0}, "gradient_slots must be at least 1"),
        ({"step_schedule": "eager"}, "step_schedule must be one of auto, deferred, backward, serial; got 'eager'"),
        ({"host_memory_gib": 0}, "host_memory_gib must be above 0"),
        ({"layer_classes": "Block"}, "layer_classes must be a list"),
        ({"huge_pages": "yes"}, "huge_pages must be true or false"),
    ],
)
def test_settings_that_make_no_sense_are_refused_and_change_nothing(settings: dict[str, Any], message: str) -> None:
    megatrain_accelerate.disable()
    with pytest.raises(ConfigError, match=message):
        megatrain_accelerate.enable(settings)
    # The plugin stays off.
    model = Accelerator(cpu=True).prepare(tiny_model())
    assert engine_of(model) is None


def test_too_little_memory_is_refused_with_numbers_before_anything_is_allocated() -> None:
    model = tiny_model(vocab_size=8192, hidden_size=256, intermediate_size=704)
    count = sum(parameter.numel() for parameter in model.parameters())
    before = remember(model)
    process = psutil.Process()
    limit = process.memory_info().rss / GIB + 0.05
    held = process.memory_info().rss
    with pytest.raises(HostMemoryError) as raised:
        prepare(model, host_memory_gib=limit)
    assert process.memory_info().rss - held < 4 * MIB
    expected = 16 * count / GIB  # fp32: weight, gradient and two moments
    assert f"take {expected:.2f} GiB" in str(raised.value)
    assert "megatrain_config.host_memory_gib leaves" in str(raised.value)
    assert "LoRA" in str(raised.value)
    assert_untouched(model, before)


# ---------------------------------------------------------------------------------------- the optimizer, and later changes


@pytest.mark.parametrize("order", ["model_first", "optimizer_first"])
def test_an_optimizer_over_foreign_parameters_is_refused_and_a_right_one_works(order: str) -> None:
    model = tiny_model()
    stranger = nn.Parameter(torch.ones(3))
    wrong = torch.optim.AdamW([*model.parameters(), stranger], lr=1e-3)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UnsupportedError, match=r"holds 1 parameters that the prepared model doesn't train"):
        accelerator.prepare(*((model, wrong) if order == "model_first" else (wrong, model)))
    assert type(wrong) is torch.optim.AdamW
    model, right = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for ids in token_batches(1) * 3:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        right.step()
        right.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


def test_an_optimizer_over_a_frozen_parameter_is_refused() -> None:
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"doesn't train \(frozen when it was prepared"):
        Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def test_an_optimizer_of_other_parameters_alone_stays_a_stock_one() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(tiny_model())
    loose = nn.Parameter(torch.ones(3))
    optimizer = accelerator.prepare(torch.optim.AdamW([loose], lr=0.1, weight_decay=0))
    loose.sum().backward()
    optimizer.step()
    torch.testing.assert_close(loose.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize("training", [True, False])
def test_embeddings_that_are_resized_after_prepare_are_refused_at_the_next_forward(training: bool) -> None:
    model, _ = prepare(tiny_model())
    ids = token_batches(1)[0]
    model(input_ids=ids, labels=ids)
    model.resize_token_embeddings(160)
    with (
        torch.set_grad_enabled(training),
        pytest.raises(StateError, match=r"after the model was prepared; change the model \(.*tokens\) before"),
    ):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.norm", "lm_head"])
def test_a_weight_that_is_replaced_after_prepare_is_refused_at_the_next_forward(name: str, training: bool) -> None:
    model, _ = prepare(tiny_model())
    module = model.get_submodule(name)
    kept = module.weight
    module.weight = nn.Parameter(kept.detach().clone())
    ids = token_batches(1)[0]
    with torch.set_grad_enabled(training), pytest.raises(StateError, match=r"replaced .*after the model was prepared"):
        model(input_ids=ids, labels=ids)
    module.weight = kept
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("name", ["lm_head", "model.layers.2"])
def test_a_module_that_is_replaced_after_prepare_is_refused_at_the_next_forward(name: str) -> None:
    model, _ = prepare(tiny_model())
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, copy.deepcopy(model.get_submodule(name)))
    ids = token_batches(1)[0]
    with pytest.raises(StateError, match=rf"{name}.* was replaced or removed after the model was prepared"):
        model(input_ids=ids, labels=ids)


def test_layers_that_are_removed_after_prepare_are_refused_at_the_next_forward() -> None:
    model, _ = prepare(tiny_model())
    model.model.layers = model.model.layers[:2]
    with pytest.raises(StateError, match=r"layer model\.layers\.2 was replaced or removed"):
        model(input_ids=token_batches(1)[0])


def test_weights_that_were_written_before_a_model_is_prepared_anew_are_kept() -> None:
    model, _ = prepare(tiny_model())
    weights = tiny_model(5).state_dict()
    model.load_state_dict(weights)
    model.model.layers[0].requires_grad_(False)
    model, _ = Accelerator(cpu=True).prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_a_model_that_was_resized_can_be_prepared_anew(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = prepare(tiny_model())
    model.resize_token_embeddings(160)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert "adopting it anew" in caplog.text
    ids = token_batches(1, vocabulary=160)[0]
    before = model.lm_head.weight.detach().clone()
    assert before.shape[0] == 160
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    megatrain_accelerate.drain(model)
    assert not torch.equal(model.lm_head.weight, before)
    assert sum(engine is engine_of(model) for engine in all_engines()) == 1
