"""``megatrain estimate --gpus``: all GPUs have one store and one host's step, and exchange gradients; and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import math

import pytest
import torch
from machine_options import machine_options, machine_with
from meta_models import meta_experts, meta_model
from transformers import Qwen2Config

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.estimate import command, findings, machine_description, report
from megatrain_accelerate.estimate.findings import Estimate
from megatrain_accelerate.estimate.forecast import Forecast, Forecaster
from megatrain_accelerate.estimate.machine_description import (
    DESKTOP_DRAM,
    H2D_SHARE,
    SERVER_DRAM,
    MachineDescription,
    describe_machine,
    host_step_parameters,
    known_gpu,
)
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES
from megatrain_accelerate.units import GIB

MACHINE = Machine(h2d_bytes=5e10, d2h_bytes=5e10, host_step_parameters=6e9, device_bytes=4e12, device_flops=7e14)
STREAMED = tuple(f"placement.{name}=0" for name in ("kept_layers", "offloaded_layers", "device_layers", "device_states"))


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["MODEL", *arguments])


def estimated(gpus: int, batch: int, *arguments: str, gpu: str = "H200") -> Estimate:
    """Of a model with two layers of half a G parameters."""
    machine = ["--gpu", gpu, "--gpus", str(gpus), "--no-limits", "--length", "128", "--batch", str(batch)]
    shape = Qwen2Config(hidden_size=8192, intermediate_size=14336, num_hidden_layers=2, vocab_size=512)
    return Estimate(parsed(*machine, *arguments), shape)


def forecaster(gpus: int, host_bytes: int = 64 * GIB, micro_batches: int = 1, **settings: object) -> Forecaster:
    config = MegatrainConfig.from_mapping(settings)
    machine = machine_with(MACHINE, GIB, host_bytes, gpus=gpus, exchange_bytes=2e11)
    return Forecaster(meta_model(), config, machine, micro_batches)


def described(gpus: int, gpu: str = "H200", **options: object) -> MachineDescription:
    return describe_machine(machine_options(gpu=gpu, gpus=gpus, **options), MegatrainConfig())  # type: ignore[arg-type]


# ---------------------------------------------------------------- speed


def test_two_gpus_are_nearly_twice_as_fast_where_they_compute() -> None:
    one, two = (next(estimated(gpus, 256).rows()) for gpus in (1, 2))
    assert one.candidate.time.bound_by == "compute"
    assert 1.8 < two.tokens_per_second / one.tokens_per_second < 2
    assert two.tflops == pytest.approx(one.tflops * two.tokens_per_second / one.tokens_per_second / 2)


def test_what_waits_for_the_hosts_step_is_faster_only_with_more_memory_speed() -> None:
    def seconds(gpus: int, gpu: str) -> float:
        row = next(estimated(gpus, 1, "--set", *STREAMED, "--cores", "64", gpu=gpu).rows())
        assert row.candidate.time.bound_by == "host step"
        return row.seconds

    assert seconds(2, "RTX4090") >= 0.99 * seconds(1, "RTX4090"), "one memory of the same speed"
    assert seconds(4, "H200") > 0.9 * seconds(2, "H200"), "one socket; only copies of gradients are shorter"
    assert seconds(8, "H200") < 0.7 * seconds(4, "H200"), "two sockets"


def test_slower_exchanges_make_a_slower_step() -> None:
    fast, slow = (next(estimated(2, 16, "--peer-link", speed).rows()).seconds for speed in ("200", "1"))
    assert slow > fast + 1  # 2 GB of gradients at 1 GB/s


def test_gpus_share_the_hosts_step_and_its_memory() -> None:
    def step(gpus: int, **options: object) -> float:
        return described(gpus, **options).machine.host_step_parameters  # type: ignore[arg-type]

    assert step(2) == host_step_parameters(16, SERVER_DRAM / 2)
    assert step(8) == host_step_parameters(16, SERVER_DRAM / 4)
    assert step(2, gpu="RTX4090") == host_step_parameters(16, DESKTOP_DRAM / 2)
    assert step(2, cores=16) == host_step_parameters(8, SERVER_DRAM / 2)
    assert step(4, host_step_parameters=8e9) == 2e9, "the option is of the whole machine"
    assert any("128 cores and 426 GB/s of DRAM" in note for note in described(8).notes)
    links = [described(gpus, gpu="RTX5090").machine.h2d_bytes for gpus in (1, 4)]
    assert links == [pytest.approx(H2D_SHARE * 63e9), pytest.approx(DESKTOP_DRAM / 4)], "copies read the host's memory"
    assert described(8).machine.h2d_bytes == described(1).machine.h2d_bytes


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA A100-PCIE-40GB", None),
    ],
)
def test_gpus_are_known_by_the_names_that_torch_has_for_them(name: str, known: str | None) -> None:
    assert getattr(known_gpu(name), "name", None) == known


def test_what_several_would_have_is_refused_for_one() -> None:
    for options in ({"peer_bytes": 1e11}, {"network_bytes": 1e10}):
        with pytest.raises(ConfigError, match="is a speed between several"):
            described(1, **options)


def test_gradients_are_exchanged_over_nvlink_where_the_gpu_has_it_and_else_over_its_link() -> None:
    assert described(1).exchange_bytes == math.inf
    assert described(2).exchange_bytes == 225e9
    assert described(2, gpu="RTX4090").exchange_bytes == pytest.approx(0.5 * 31.5e9)
    assert described(2, gpu="RTX4090", link_bytes=H2D_SHARE * 1e10).exchange_bytes == pytest.approx(0.5e10)
    assert described(2, peer_bytes=3e11).exchange_bytes == 3e11
    assert any("at 225 GB/s each way (50% of 450, assumed)" in note for note in described(2).notes)


def test_what_one_process_measured_here_is_divided_among_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_description, "measured_machine", lambda *_: MACHINE)
    for name, value in (("is_available", True), ("current_device", 0), ("mem_get_info", (70 * GIB, 80 * GIB))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    found = describe_machine(machine_options(gpus=2), MegatrainConfig())
    assert found.machine == dataclasses.replace(MACHINE, host_step_parameters=MACHINE.host_step_parameters / 2)
    assert found.exchange_bytes == 225e9
    assert "speeds that no option names are as measured on this machine, by one process" in found.notes


# ---------------------------------------------------------------- memory


def test_host_memory_grows_with_the_gpus_by_what_each_process_and_each_batch_takes() -> None:
    one, four = forecaster(1), forecaster(4)
    assert four.host_store_bytes - one.host_store_bytes == 3 * CONSTANT_OVERHEAD_BYTES
    offloading = {"offloaded_layers": 4, "device_layers": 0, "kept_layers": 0}
    alone, all_four = (forecaster(gpus, placement=offloading).forecast(16, 256) for gpus in (1, 4))
    assert all_four.offloaded_bytes == alone.offloaded_bytes > 0
    assert all_four.host_bytes - alone.host_bytes == 3 * (CONSTANT_OVERHEAD_BYTES + alone.offloaded_bytes)
    rooms = [four.host_store_bytes + count * alone.offloaded_bytes for count in (4, 2)]
    sent = [forecaster(4, room, placement=offloading).forecast(16, 256).offloaded_bytes for room in rooms]
    assert sent == [alone.offloaded_bytes, 0], "each has a quarter of what is left"


def test_layers_on_the_gpus_keep_their_weights_and_residuals_in_the_shared_store() -> None:
    moved = Placement(on_device=frozenset({0, 1}))
    one, two = (forecaster(gpus).plan.model_sizes() for gpus in (1, 2))
    parameters = sum(one.layers[i].parameters for i in moved.on_device)
    assert one.moved_bytes(moved) - 2 * two.moved_bytes(moved) == pytest.approx(4 * parameters, rel=1e-3)


def test_host_memory_that_a_setting_gives_is_that_of_each_process() -> None:
    limited = describe_machine(machine_options(gpu="H200", gpus=4), MegatrainConfig(host_memory_gib=100.0))
    assert limited.host_bytes == 400 * GIB


# ---------------------------------------------------------------- what several processes can't do


@pytest.mark.parametrize("setting", ["host_gradients=passing", "step_schedule=backward"])
def test_steps_in_backward_are_refused_as_the_training_refuses_them(setting: str) -> None:
    with pytest.raises(ConfigError, match="are for a single process; leave both out"):
        estimated(2, 1, "--set", setting)


def test_gpus_fetch_experts_in_parts_each_for_itself_and_send_the_gradients_of_their_shares() -> None:
    def forecast(gpus: int) -> Forecast:
        settings = MegatrainConfig.from_mapping({"expert_parts": 2, "placement": {"device_layers": 0, "device_states": 0}})
        return Forecaster(meta_experts(False), settings, machine_with(MACHINE, gpus=gpus, exchange_bytes=2e11)).forecast(2, 64)

    alone, together = (forecast(gpus).candidate.time for gpus in (1, 2))
    assert together.h2d == pytest.approx(alone.h2d, rel=0.1)  # but for what else streams
    assert alone.d2h / 2 < together.d2h < 2 * alone.d2h  # the exchange is on the same stream


def test_gpus_that_share_memory_with_a_host_are_alone_with_it() -> None:
    with pytest.raises(ConfigError, match=r"--gpus is 2, and GB10, which shares its host's memory, is one GPU"):
        described(2, gpu="GB10")


def test_micro_batches_of_several_gpus_stay_apart() -> None:
    asked = {"micro_batches": 4, "join_micro_batches": True}
    assert [forecaster(gpus, **asked).forecast(2, 64).joined for gpus in (1, 2)] == [True, False]


def test_missing_host_memory_is_not_to_be_mended_by_gradients_that_pass() -> None:
    found = forecaster(2)
    found.host_bytes = found.host_store_bytes - 1
    assert found.settings_that_fit() is not None
    assert "host_gradients" not in found.settings_that_fit()[0]  # type: ignore[index]


# ---------------------------------------------------------------- the report


def test_the_report_has_what_other_tools_take() -> None:
    found = estimated(2, 1)
    states = 16 * found.forecaster.parameters / 2 / GIB
    lines = list(report.table(found))
    line = next(line for line in lines if line.startswith("other tools"))
    assert f"FSDP2 takes {states:,.1f} GiB of each GPU before activations, which fits" in line
    assert f"{18 / 8 * states:,.1f} GiB of host memory, DeepSpeed ZeRO-3's {20 / 8 * states:,.1f}" in line
    assert any("2 x H200" in line for line in lines)
    as_json = report.as_json(found)
    assert (as_json["gpus"], as_json["fsdp2_gpu_gib"], as_json["fsdp2_fits"]) == (2, states, True)
    assert "doesn't fit" in next(line for line in report.table(estimated(2, 1, "--gpu-memory", "8")) if "other tools" in line)
    one = estimated(1, 1)
    assert "gpus" not in report.as_json(one)
    assert not any("other tools" in line for line in report.table(one))


def test_a_table_of_models_is_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: shape for name, shape in findings._LADDER.items() if name in ("Qwen2.5-0.5B", "Qwen3-30B-A3B")}
    monkeypatch.setattr(findings, "_LADDER", kept)
    found = list(findings.ladder_estimates(parsed("--gpu", "RTX4090", "--gpus", "2", "--batch", "1", "--length", "512")))
    lines = list(report.ladder_table(found))
    assert any("FSDP2, GPU GiB" in line for line in lines)
    states = f"{8 * found[0].forecaster.parameters / GIB:.1f}"
    assert states in next(line.split() for line in lines if line.startswith("Qwen2.5-0.5B"))
    assert next(found[1].rows()).fits, "experts are fetched whole"


def test_a_model_that_transformers_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = findings._LADDER["Qwen2.5-0.5B"]
    monkeypatch.setattr(findings, "_LADDER", {"of another version": ("not_a_type", (), {}), "Qwen2.5-0.5B": known})
    assert [found.model for found in findings.ladder_estimates(parsed("--gpu", "RTX4090", "--gpus", "1"))] == ["Qwen2.5-0.5B"]
