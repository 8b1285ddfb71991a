"""``megatrain estimate --machines``: what each of several machines would hold, and what their network would carry."""

from __future__ import annotations

import argparse

import pytest
from transformers import Qwen2Config

from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.estimate import command, report
from megatrain_accelerate.estimate.findings import Estimate
from megatrain_accelerate.estimate.forecast import Forecast
from megatrain_accelerate.plan.step_simulation import StepTime
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES
from megatrain_accelerate.units import GB

STREAMED = tuple(f"placement.{name}=0" for name in ("kept_layers", "offloaded_layers", "device_layers", "device_states"))
ON_GPU = ("placement.kept_layers=0", "placement.offloaded_layers=0", "placement.device_layers=2")


def estimated(machines: int, network: str | None, *arguments: str, gpus: int = 2, batch: int = 1) -> Estimate:
    """Of a model with two layers of half a G parameters, in bf16."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    described = ["MODEL", "--gpu", "H200", "--gpus", str(gpus), "--no-limits", "--length", "128", "--batch", str(batch)]
    described += ["--machines", str(machines), *(["--network", network] if network else []), *arguments]
    shape = Qwen2Config(hidden_size=8192, intermediate_size=14336, num_hidden_layers=2, vocab_size=512)
    return Estimate(parser.parse_args(described), shape)


def row_of(machines: int, network: str | None, *settings: str, batch: int = 1) -> Forecast:
    return next(estimated(machines, network, *(("--set", *settings) if settings else ()), batch=batch).rows())


def test_a_fast_network_makes_two_machines_twice_as_fast() -> None:
    one, two = row_of(1, None, batch=256), row_of(2, "10000", batch=256)
    assert one.candidate.time.bound_by == two.candidate.time.bound_by == "compute"
    assert 1.95 < two.tokens_per_second / one.tokens_per_second < 2.1
    assert two.tflops == pytest.approx(one.tflops * two.tokens_per_second / one.tokens_per_second / 2)


def test_machines_divide_the_hosts_step_and_all_host_memory_but_weights() -> None:
    one, four = estimated(1, None), estimated(4, "10000")
    weights, processes = 2 * one.forecaster.parameters, 2 * CONSTANT_OVERHEAD_BYTES
    whole = one.forecaster.host_store_bytes - weights - processes
    assert four.forecaster.host_store_bytes == pytest.approx(weights + whole / 4 + processes, rel=1e-6)
    steps = [row_of(*machines, *STREAMED).candidate.time.host_step for machines in ((1, None), (4, "10000"))]
    assert steps[1] == pytest.approx(steps[0] / 4)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("settings", [STREAMED, ON_GPU], ids=["streamed", "on the GPUs"])
def test_a_slow_network_bounds_the_step_by_gradients_and_weights_or_means(settings: tuple[str, ...], gpus: int) -> None:
    found = estimated(4, "1", "--set", *settings, gpus=gpus)
    time: StepTime = next(found.rows()).candidate.time
    assert time.bound_by == "network"
    # Of each parameter 2 bytes twice, of those outside the layers means and weights, of which three quarters are others'.
    sizes = found.forecaster.plan.model_sizes()
    passes = 2 if next(found.rows()).candidate.placement.groups_on_device else 3
    sent = 2 * sum(unit.gradient_bytes for unit in sizes.layers) + passes * sum(unit.gradient_bytes for unit in sizes.groups)
    assert time.network == pytest.approx(0.75 * sent / GB)
    assert time.seconds >= 0.99 * time.network
    assert any(line.endswith("network") for line in report.table(found))
    assert report.as_json(found)["rows"][0]["busy_seconds"]["network"] == time.network


def test_weights_come_back_under_the_forward_and_gradients_leave_under_the_backward() -> None:
    fast, slow = (row_of(2, network, *STREAMED, batch=256) for network in ("10000", "40"))
    assert 0 < slow.seconds - fast.seconds < 0.5 * slow.candidate.time.network


def test_the_speed_of_the_network_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"--machines is 2: give --network, GB/s"):
        estimated(2, None)


def test_the_report_says_that_it_is_a_forecast_and_of_which_gpus() -> None:
    found = estimated(3, "50")
    lines = "\n".join(report.table(found))
    assert "a forecast of what isn't there: training on several machines is refused" in lines
    assert "3 machines with 2 x H200" in lines
    assert "tokens/s: of all 6 GPUs" in lines
    as_json = report.as_json(found)
    assert (as_json["machines"], as_json["network_bytes"]) == (3, 50e9)
    assert as_json["fsdp2_gpu_gib"] == pytest.approx(as_json["stock_states_gib"] / 6)
    alone = report.as_json(estimated(1, None))
    assert "machines" not in alone
    assert "network" not in alone["rows"][0]["busy_seconds"]
