"""What can't be honoured is one clear error, before anything is touched: the model trains plainly after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from plain_torch import tiny_model
from refusals import assert_untouched, prepare, remember, trace
from torch import nn
from trainer_runs import examples, make_arguments
from transformers import Trainer

import megatrain_accelerate
from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import ConfigError, HostMemoryError, UnsupportedError
from megatrain_accelerate.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("active", "profiled_once")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


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
@pytest.mark.parametrize("wish", ["argument", "environment", "environment, after Accelerate's state was made"])
def test_the_cpu_is_taken_where_it_is_asked_for(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wish.startswith("environment"):
        if "after" in wish:
            PartialState()
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = Accelerator(cpu=True if wish == "argument" else None or False).prepare(tiny_model())
    assert engine_of(model) is not None


def test_fp16_is_refused_by_the_accelerator_and_by_the_training_arguments(tmp_path: Path) -> None:
    model = tiny_model()
    before = remember(model)
    with pytest.raises(UnsupportedError, match=r"fp16=True .* loss scaling.*Use bf16=True"):
        make_arguments(tmp_path, fp16=True)
    with pytest.raises(UnsupportedError, match=r"mixed_precision: fp16 .*Use mixed_precision: bf16"):
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
    with pytest.raises(UnsupportedError, match=r"torch_compile.*dynamo_backend"):
        Accelerator(cpu=True, dynamo_backend="inductor")
    assert_untouched(model, before)


@pytest.fixture
def as_on_several_gpus(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate believes to be one of several processes with a GPU each, for which alone it divides models."""
    PartialState(cpu=True)
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.MULTI_GPU)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):  # which the plugin sets for good
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("as_on_several_gpus")
@pytest.mark.parametrize("version", [1, 2])
def test_an_fsdp_plugin_of_a_script_without_a_trainer_is_refused(version: int) -> None:
    model = tiny_model()
    before = remember(model)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    with pytest.raises(ConfigError, match=r"FSDP and megatrain both decide where the model lives.*fsdp_plugin"):
        Accelerator(fsdp_plugin=plugin).prepare(model)
    assert_untouched(model, before)


@pytest.mark.usefixtures("as_on_several_gpus")
def test_a_parallelism_config_of_a_script_without_a_trainer_is_refused() -> None:
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    model = tiny_model()
    before = remember(model)
    accelerator = Accelerator()
    accelerator.state.parallelism_config = parallelism.ParallelismConfig(tp_size=2)  # its processes would have to be there
    with pytest.raises(UnsupportedError, match="parallelism_config asks for 2 processes"):
        accelerator.prepare_model(model)
    assert_untouched(model, before)


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
    with pytest.raises(UnsupportedError, match=r"device_map.*load it without"):
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
    with pytest.raises(UnsupportedError) as refusal:
        prepare(model, layer_classes=["Qwen2DecoderLayr"])
    message = str(refusal.value)
    assert "names Qwen2DecoderLayr, and Qwen2ForCausalLM has no repeated layers of such a class" in message
    assert "did you mean 'Qwen2DecoderLayer'?" in message
    assert "modules with parameters are Qwen2DecoderLayer (4 of them), " in message, "those of the blocks first"
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
        ({"slot": 3}, r"no setting 'slot'; did you mean 'placement\.slots'\?.*host_threads"),
        ({"slots": 3}, r"no setting 'slots'; did you mean 'placement\.slots'\?.*host_threads"),
        ({"placement": {"slots": 1}}, r"placement\.slots must be at least 2, got 1"),
        ({"placement": {"slots": "2"}}, "slots must be a whole number, got '2'"),
        ({"placement": {"slots": True}}, "slots must be a whole number, got True"),
        ({"host_threads": 0}, "host_threads must be at least 1"),
        ({"step_schedule": "eager"}, "step_schedule must be auto, deferred, backward or serial; got 'eager'"),
        ({"host_memory_gib": 0}, "host_memory_gib must be above 0"),
        ({"layer_classes": "Block"}, "layer_classes must be a list"),
        ({"huge_pages": "yes"}, "huge_pages is gone.*remove the key"),
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
    assert f"megatrain_config.host_memory_gib ({limit:g}) leaves" in str(raised.value)
    for remedy in ("LoRA", "raise megatrain_config.host_memory_gib", "host_gradients: passing", "moments_dtype: bf16"):
        assert remedy in str(raised.value)
    assert_untouched(model, before)
