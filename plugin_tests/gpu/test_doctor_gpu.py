"""``megatrain doctor`` and ``megatrain estimate`` on a machine with a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatrain_accelerate.cli import main
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.plan import machine

pytestmark = pytest.mark.gpu

SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def test_the_report_names_the_gpu_and_its_speeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--json", "--folder", str(tmp_path)]) == 0
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["GPU"]["values"]["gpu"] == torch.cuda.get_device_name()
    assert all(1 < speed < 1000 for speed in found["link"]["values"].values())
    assert found["host speed"]["values"]["host_step_g_parameters_per_second"] > 0
    assert found["plan's speeds"]["values"]["plan_device_flops"] > 0


def test_an_estimate_for_this_machine_goes_by_its_measured_speeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    main(["estimate", str(tmp_path), "--length", "1024", "--batch", "1", "--no-limits", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == torch.cuda.get_device_name()
    assert any("measured" in note for note in found["notes"])
    assert found["rows"][0]["gpu_gib"] <= found["gpu_planned_gib"]


def test_the_shares_that_copies_and_the_hosts_step_have_beside_each_other_are_measured() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    speeds = machine.measure(device, HostKernels())
    for share in (speeds.h2d_share_in_step, speeds.d2h_share_in_step, speeds.step_share_beside_copies):
        assert 0.05 < share <= 1.0
