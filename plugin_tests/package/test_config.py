"""The settings: defaults, checks, and the ways in which they travel."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatrain_accelerate.activation import ENV_ACTIVE, ENV_CONFIG, active_config, deactivate, read_settings
from megatrain_accelerate.config import MegatrainConfig, PlacementSettings, usable_cpu_count
from megatrain_accelerate.errors import ConfigError


def test_every_setting_has_a_default() -> None:
    assert MegatrainConfig.from_mapping(None) == MegatrainConfig.from_mapping({}) == MegatrainConfig()


def test_settings_survive_json() -> None:
    config = MegatrainConfig(
        placement=PlacementSettings(slots=3, offloaded_inputs=True),
        host_memory_gib=1.5,
        layer_classes=("A", "B"),
        step_schedule="serial",
    )
    assert MegatrainConfig.from_mapping(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_the_placement_may_be_a_mapping_in_code_too() -> None:
    assert MegatrainConfig(placement={"slots": 3}).placement == PlacementSettings(slots=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'kept_layers'"):
        MegatrainConfig(placement={"kept_layer": 2})  # type: ignore[arg-type]


def test_later_settings_count_and_those_of_the_placement_one_by_one() -> None:
    sources: list[dict[str, Any]] = [
        {"host_threads": 3, "placement": {"slots": 3, "kept_layers": 2}},
        {"host_threads": 4, "placement": {"kept_layers": None}},
        {"placement.device_layers": -1},
        {"placement": None},
    ]
    placement = PlacementSettings(slots=3, device_layers=-1)
    assert MegatrainConfig.from_mapping(*sources) == MegatrainConfig(host_threads=4, placement=placement)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slot": 3}, "did you mean 'placement.slots'"),
        ({"kept_layers": 3}, "did you mean 'placement.kept_layers'"),
        ({"hostthreads": 3}, "did you mean 'host_threads'"),
        ({"zzz": 3}, "no setting 'zzz'; known settings: step_schedule"),
        ({3: 3}, "no setting 3"),
        ({"placement": 3}, "megatrain_config.placement must be a mapping of settings, got int: 3"),
        (
            {"placement": {"keep_layers": 3}},
            "megatrain_config.placement has no setting 'keep_layers'; did you mean 'kept_layers'",
        ),
        ({"placement.keep_layers": 3}, "megatrain_config.placement has no setting 'keep_layers'; did you mean 'kept_layers'"),
        ({"placement": {"kept_layers": "auto"}}, "placement.kept_layers must be a whole number or left out, got 'auto'"),
        ({"placement": {"slots": 1}}, "megatrain_config.placement.slots must be at least 2, got 1"),
        ({"placement": {"slots": True}}, "whole number"),
        ({"placement": {"slots": None}}, "slots must be a whole number, got None"),
        ({"placement": {"slots": "3"}}, "slots must be a whole number, got '3'"),
        ({"placement": {"offloaded_layers": -1}}, "at least 0"),
        ({"placement": {"device_layers": -2}}, "at least -1"),
        ({"placement": {"kept_attention": -1}}, "kept_attention must be at least 0"),
        ({"placement": {"offloaded_layers": "all"}}, "whole number"),
        ({"placement": {"offloaded_inputs": 1}}, "offloaded_inputs must be true, false or left out; got 1"),
        ({"compile_layers": "yes"}, "compile_layers must be auto, true or false; got 'yes'"),
        ({"compile_layers": 1}, "compile_layers must be auto, true or false; got 1"),
        ({"join_micro_batches": "always"}, "join_micro_batches must be auto, true or false; got 'always'"),
        ({"join_micro_batches": 0}, "join_micro_batches must be auto, true or false; got 0"),
        ({"token_tile": -1}, "token_tile must be at least 0"),
        ({"token_tile": "all"}, "token_tile must be a whole number or auto, got 'all'"),
        ({"token_tile": 1.5}, "token_tile must be a whole number"),
        ({"micro_batch_size": 0}, "at least 1"),
        ({"micro_batch_size": "2"}, "whole number"),
        ({"host_threads": 0}, "at least 1"),
        ({"host_memory_gib": 0}, "above 0"),
        ({"host_memory_gib": float("inf")}, "host_memory_gib must be above 0 and finite, got inf"),
        ({"gpu_memory_gib": float("nan")}, "gpu_memory_gib must be above 0 and finite, got nan"),
        ({"host_memory_gib": "10"}, "number of GiB"),
        ({"resident_layers": 2}, "resident_layers is gone.*device_layers"),
        ({"keep_layers": "auto"}, "megatrain_config has no setting 'keep_layers'; did you mean 'placement.kept_layers'"),
        ({"offload_layers": 2}, "did you mean 'placement.offloaded_layers'"),
        ({"keep_attention": 0}, "did you mean 'placement.kept_attention'"),
        ({"offload_inputs": True}, "did you mean 'placement.offloaded_inputs'"),
        ({"device_layers": -1}, "did you mean 'placement.device_layers'"),
        ({"slots": 3}, "did you mean 'placement.slots'"),
        ({"gradient_slots": 2}, "gradient_slots is gone.*remove the key"),
        ({"max_nonfinite_steps": 5}, "max_nonfinite_steps is gone.*remove the key"),
        ({"pin_memory": True}, "pin_memory is gone.*remove the key"),
        ({"tiled_loss": "no"}, "tiled_loss must be true or false; got 'no'"),
        ({"tiled_loss": 1}, "tiled_loss must be true or false; got 1"),
        ({"evaluation_weights": "held"}, "auto, stream or resident"),
        ({"step_schedule": "later"}, "deferred"),
        ({"accumulation_dtype": "fp16"}, "accumulation_dtype must be fp32 or bf16; got 'fp16'"),
        ({"moments_dtype": "fp16"}, "moments_dtype must be fp32, bf16 or int8; got 'fp16'"),
        ({"moments_dtype": "int8", "placement": {"device_layers": 2}}, "placement.device_layers is 2, but moments in 8 bits"),
        ({"host_gradients": "none"}, "host_gradients must be kept or passing; got 'none'"),
        ({"host_gradients": "passing", "step_schedule": "deferred"}, "step_schedule is 'deferred'; set step_schedule to auto"),
        ({"accumulation_dtype": 32}, "accumulation_dtype must be fp32 or bf16; got 32"),
        ({"layer_classes": "Block"}, "list of class names"),
        ({"layer_classes": [1]}, "list of class names"),
        ({"layer_classes": 5}, "layer_classes must be a list of class names, got 5"),
        ({"layer_classes": None}, "layer_classes must be a list of class names, got None"),
    ],
)
def test_a_setting_that_cannot_be_honoured_raises(settings: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MegatrainConfig.from_mapping(settings)


@pytest.mark.parametrize("settings", [["slots"], "slots", 3])
def test_settings_must_be_a_mapping(settings: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        MegatrainConfig.from_mapping(settings)


def test_malformed_settings_of_the_launcher_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    deactivate()
    monkeypatch.setenv(ENV_ACTIVE, "1")
    monkeypatch.setenv(ENV_CONFIG, "{broken")
    with pytest.raises(ConfigError, match=r"must be a JSON object.*'\{broken'"):
        active_config()


def test_a_person_may_give_settings_in_three_forms(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"host_threads": 3}))
    assert read_settings({"host_threads": 3}) == read_settings(' {"host_threads": 3}')
    assert read_settings(str(file)) == {"host_threads": 3}
    assert read_settings(None) == {}
    file.write_text("")
    assert read_settings(str(file)) == {}


@pytest.mark.parametrize("content", ["[1, 2]", "slots", "{a: b: c}"])
def test_a_file_without_a_mapping_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"megatrain_config (of '.*settings\.yaml' )?must be a .*"):
        read_settings(str(file))


def test_usable_cpus_are_shared_by_the_local_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = usable_cpu_count()
    assert 1 <= alone <= (os.cpu_count() or 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    assert usable_cpu_count() == 1
