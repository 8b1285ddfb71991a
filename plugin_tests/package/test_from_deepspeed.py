"""``megatrain config --from``: the yaml of who comes from DeepSpeed, and what is said of each key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fresh_process import run_command, script

from megatrain_accelerate.cli import main
from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.configs.from_deepspeed import KEYS, Conversion, Kind, Remark, convert
from megatrain_accelerate.errors import ConfigError

OFFLOAD: dict[str, Any] = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 5, "buffer_size": 100000000},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 100, "warmup_type": "linear", "total_num_steps": "auto"},
    },
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 4,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "deepspeed_config": {
        "gradient_accumulation_steps": 1,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "zero3_init_flag": True,
        "zero_stage": 3,
    },
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "gpu_ids": "2,3",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "use_cpu": False,
}


def converted(tmp_path: Path, given: object) -> Conversion:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    return convert(path)


def said(conversion: Conversion, key: str) -> Remark:
    (remark,) = [remark for remark, keys in conversion.remarks.items() if key in keys]
    return remark


def kinds(conversion: Conversion, kind: Kind) -> list[str]:
    return [key for remark, keys in conversion.remarks.items() for key in keys if remark.kind is kind]


def test_offloading_needs_nothing_and_the_rest_is_for_the_script(tmp_path: Path) -> None:
    conversion = converted(tmp_path, OFFLOAD)
    written = yaml.safe_load(conversion.yaml("ds.json"))
    assert written == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MEGATRAIN",
        "num_processes": 1,
        "num_machines": 1,
        "mixed_precision": "bf16",
    }
    zero = [f"zero_optimization.{key}" for key in OFFLOAD["zero_optimization"] if not key.startswith("offload")]
    assert set(zero) <= set(kinds(conversion, Kind.NOTHING))
    assert said(conversion, "gradient_clipping").text.startswith("max_grad_norm=0.5 ")
    assert "gradient_accumulation_steps=4" in said(conversion, "gradient_accumulation_steps").text
    assert "per_device_train_batch_size=2" in said(conversion, "train_micro_batch_size_per_gpu").text
    assert "lr_scheduler_type=linear" in said(conversion, "scheduler.type").text
    assert "[0.9, 0.95]" in said(conversion, "optimizer.params.betas").text
    assert kinds(conversion, Kind.AUTO) == ["optimizer.params.weight_decay", "train_batch_size"]
    assert not kinds(conversion, Kind.UNKNOWN)
    assert not kinds(conversion, Kind.WITHOUT)
    assert not [keys for _, keys in conversion.remarks.items() if any(key.startswith("fp16") for key in keys)], "it is off"


def test_accelerates_yaml_keeps_precision_and_gpus(tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(yaml.safe_dump(ACCELERATE))
    conversion = convert(path)
    assert conversion.settings == {"mixed_precision": "bf16", "gpu_ids": "2,3", "num_processes": 2}
    assert kinds(conversion, Kind.DO) == ["deepspeed"]
    assert not kinds(conversion, Kind.UNKNOWN)


def test_the_file_that_accelerates_yaml_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(OFFLOAD))
    path = tmp_path / "accelerate.yaml"
    named = {**ACCELERATE, "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    del named["mixed_precision"]
    path.write_text(yaml.safe_dump(named))
    conversion = convert(path)
    assert conversion.settings["mixed_precision"] == "bf16"
    assert "zero_optimization.stage" in kinds(conversion, Kind.NOTHING)


def test_fp16_becomes_bf16_and_is_said(tmp_path: Path) -> None:
    conversion = converted(tmp_path, {"fp16": {"enabled": True, "loss_scale": 0}})
    assert conversion.settings == {"mixed_precision": "bf16"}
    assert said(conversion, "fp16.enabled").kind is Kind.DO
    assert "fp16 is refused" in said(conversion, "fp16.enabled").text
    assert said(conversion, "fp16.loss_scale").kind is Kind.NOTHING


def test_automatic_precision_is_left_to_the_script(tmp_path: Path) -> None:
    conversion = converted(tmp_path, {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}})
    assert conversion.settings == {}
    assert kinds(conversion, Kind.AUTO) == ["bf16.enabled"]
    assert "it must say bf16" in said(conversion, "fp16.enabled").text


def test_sums_in_bf16_are_a_setting(tmp_path: Path) -> None:
    conversion = converted(tmp_path, {"data_types": {"grad_accum_dtype": "bf16"}})
    assert yaml.safe_load(conversion.yaml("ds.json"))["megatrain_config"] == {"accumulation_dtype": "bf16"}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param.device"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights"),
        ({"aio": {"block_size": 262144}}, "aio"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel"),
        ({"mixed_precision": "fp8"}, "mixed_precision"),
    ],
)
def test_what_has_no_counterpart_is_said(given: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert said(converted(tmp_path, given), key).kind is Kind.WITHOUT


def test_what_is_off_is_passed_over(tmp_path: Path) -> None:
    zero = {"zero_quantized_weights": False, "offload_param": None}
    off = {"zero_optimization": zero, "wandb": {"enabled": False}, "gradient_clipping": 1, "mixed_precision": None}
    assert [keys for _, keys in converted(tmp_path, off).remarks.items()] == [["deepspeed"], ["gradient_clipping"]]


@pytest.mark.parametrize("clipping", [{}, {"gradient_clipping": 0.0}], ids=["absent", "0"])
def test_a_training_that_was_not_clipped_is_not_clipped_by_the_trainers_default(
    clipping: dict[str, Any], tmp_path: Path
) -> None:
    conversion = converted(tmp_path, {"zero_optimization": {"stage": 3}, **clipping})
    assert said(conversion, "gradient_clipping").text.startswith("max_grad_norm=0 in the script")
    assert said(conversion, "gradient_clipping").kind is Kind.DO


def test_what_would_be_another_training_is_said(tmp_path: Path) -> None:
    adam = {"type": "Adam", "params": {"adam_w_mode": False, "bias_correction": True}}
    schedule = {"type": "WarmupCosineLR", "params": {"warmup_min_lr": 1e-5, "cos_min_ratio": 0.1, "last_batch_iteration": -1}}
    conversion = converted(
        tmp_path, {"zero_optimization": {"stage": 2}, "optimizer": adam, "scheduler": schedule, "train_batch_size": 64}
    )
    assert "torch.optim.Adam" in said(conversion, "optimizer.params.adam_w_mode").text
    assert said(conversion, "optimizer.params.bias_correction").kind is Kind.NOTHING
    assert "by a logarithm" in said(conversion, "scheduler.params.warmup_type").text
    assert said(conversion, "scheduler.params.warmup_min_lr").kind is Kind.WITHOUT
    assert "{'min_lr_rate': 0.1}" in said(conversion, "scheduler.params.cos_min_ratio").text
    assert said(conversion, "scheduler.params.last_batch_iteration").kind is Kind.NOTHING
    assert said(conversion, "train_batch_size").text.startswith("64 sequences a step")


def test_of_several_machines_one_is_used(tmp_path: Path) -> None:
    conversion = converted(tmp_path, {"num_machines": 2, "num_processes": 8})
    assert "multiply the script's per_device_train_batch_size by 2" in said(conversion, "num_machines").text
    assert said(conversion, "num_machines").kind is Kind.DO


def test_an_unknown_key_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    conversion = converted(tmp_path, {"gradient_cliping": 1.0, "my_own": {"a": 1}})
    assert said(conversion, "gradient_cliping") == Remark(Kind.UNKNOWN, "did you mean gradient_clipping?")
    assert said(conversion, "my_own").kind is Kind.UNKNOWN
    of_zero = converted(tmp_path, {"zero_optimization": {"offload_param": {"of_tomorrow": 1}}})
    assert said(of_zero, "zero_optimization.offload_param.of_tomorrow").kind is Kind.NOTHING


@pytest.mark.parametrize("text", ["[1, 2]", "{", "a: [", "just words"])
def test_what_is_no_configuration_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"ds\.json"):
        convert(path)


@pytest.mark.parametrize(
    "content",
    [
        {"zero_optimization": {"stage": 3}, "optimizer": "AdamW", "scheduler": ["WarmupLR"]},
        {"zero_optimization": {"stage": 3}, "optimizer": {"params": 1}, "scheduler": {"type": "WarmupLR", "params": 1}},
    ],
)
def test_a_section_that_is_none_says_nothing(content: dict[str, Any], tmp_path: Path) -> None:
    conversion = converted(tmp_path, content)
    assert "max_grad_norm=0" in said(conversion, "gradient_clipping").text


def test_the_name_of_another_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 can't be read"):
        converted(tmp_path, {"deepspeed_config": {"deepspeed_config_file": 3}})


def test_settings_that_remarks_name_exist() -> None:
    conversion = Conversion()
    values = (True, "nvme", "bf16", "Lion", 0.5, {"enabled": True})
    remarks = [entry if isinstance(entry, Remark) else entry(value, conversion) for entry in KEYS.values() for value in values]
    text = " ".join(remark.text for remark in remarks if remark is not None)
    for key, value in (word.split(": ") for word in ("moments_dtype: int8", "host_gradients: passing", "moments_dtype: bf16")):
        assert f"{key}: {value}" in text
        MegatrainConfig.from_mapping({key: value})
    for key in ("compile_layers", "evaluation_weights"):
        assert key in text
        assert hasattr(MegatrainConfig(), key)


def test_the_command_prints_the_yaml_and_says_the_remarks_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(OFFLOAD))
    assert main(["config", "--from", str(path)]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["distributed_type"] == "MEGATRAIN"
    comments = [line.removeprefix("# ") for line in printed.out.splitlines() if line.startswith("# ")]
    assert comments[1:] == printed.err.splitlines()


def test_the_command_ends_with_one_line_where_the_file_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--from", "nothing.json"]) == 1
    assert capsys.readouterr().err.startswith("megatrain config: nothing.json can't be read")


@pytest.mark.slow
def test_a_script_starts_with_what_was_written(tmp_path: Path) -> None:
    given = tmp_path / "ds.json"
    given.write_text(json.dumps({**OFFLOAD, "bf16": {"enabled": "auto"}, "use_cpu": True}))
    path = tmp_path / "megatrain.yaml"
    path.write_text(convert(given).yaml("ds.json"))
    asks = "import accelerate, megatrain_accelerate as m; a = accelerate.Accelerator(); print('precision', a.mixed_precision)"
    program = tmp_path / "train.py"
    program.write_text(asks)
    printed = run_command(script("accelerate"), "launch", "--config", str(path), str(program), cwd=tmp_path)
    assert "precision no" in printed


def test_the_page_shows_what_is_written(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "from_deepspeed.md").read_text(encoding="utf-8")
    given, shown = (page.split(f"```{language}\n")[1].split("```")[0] for language in ("json", "yaml"))
    path = tmp_path / "ds_z3_offload.json"
    path.write_text(given)
    assert convert(path).yaml(path.name) == shown
