"""The estimate against trainings that were measured on one H200 (docs/benchmarks.md): memory within 5%, time within 10%.

The speeds are those of the machines that the cases ran on. Five cases were looked at when the shares in
``layer_costs.py`` were chosen, with the times of single layers (docs/estimate_method.md says which for what); the others
were kept out. One is known to be missed.

Most were measured when compiled layers computed their outputs again in backward, their backward kernels overwrote nothing, and
the loss ran by strips: the estimate is made to count that here.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from flat_settings import nested
from machine_options import machine_with

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.estimate import forecast as forecast_module
from megatrain_accelerate.estimate import layer_costs
from megatrain_accelerate.estimate.forecast import Forecaster
from megatrain_accelerate.estimate.machine_description import at_the_power_limit
from megatrain_accelerate.loss import tiled_cross_entropy
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.step_profile import LayerProfile, SavedInForward
from megatrain_accelerate.units import GIB

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "benchmarks"))
from model_shapes import empty_model, shape_config

STREAMED = {"kept_layers": 0, "offloaded_layers": 0, "device_layers": 0}
PLAIN = {**STREAMED, "compile_layers": False, "tiled_loss": False}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row of the document: a batch, the host's speed in G parameters/s, settings, and what was measured."""

    shape: str
    batch: int
    length: int
    host_step: float
    seconds: float
    gpu_gib: float | None = None
    """None: of a plan that is made otherwise today, where all of the model fits."""
    host_gib: float | None = None
    """None: not compared."""
    gpu_planned_gib: float = 125.0
    host_memory_gib: float = 125.9
    settings: dict[str, object] = dataclasses.field(default_factory=dict)
    layers: int | None = None
    """As many as the shape has, unless so many of them were trained."""
    other_speeds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the test's."""
        layers = f"-{self.layers}layers" if self.layers else ""
        return f"{self.shape}{layers}-{self.batch}x{self.length}-{self.gpu_planned_gib:g}gib-{self.host_step:g}"

    @property
    def machine(self) -> Machine:
        """The speeds that the plan measured where the case ran, as the estimate takes them."""
        measured = dataclasses.replace(H200, host_step_parameters=1e9 * self.host_step, **self.other_speeds)
        return at_the_power_limit(measured, "NVIDIA H200")


H200 = Machine(
    h2d_bytes=53.0e9,
    d2h_bytes=54.3e9,
    host_step_parameters=5.7e9,
    device_bytes=3.73e12,
    device_flops=716e12,
    step_overhead=0.010,
)
CORES_16 = {"h2d_bytes": 54.8e9, "d2h_bytes": 54.8e9, "device_bytes": 3.66e12, "device_flops": 790.6e12}
CORES_32 = {"h2d_bytes": 54.5e9, "d2h_bytes": 55.2e9, "device_bytes": 3.80e12, "device_flops": 787e12}
CORES_64 = {"h2d_bytes": 55.1e9, "d2h_bytes": 55.3e9, "device_bytes": 3.86e12, "device_flops": 791.9e12}
COPIES_BESIDE_A = {
    "h2d_bytes": 55.1e9,
    "d2h_bytes": 55.1e9,
    "device_bytes": 3.53e12,
    "device_flops": 749.3e12,
    "h2d_share_in_step": 0.352,
    "d2h_share_in_step": 0.478,
}
COPIES_BESIDE_B = {
    "h2d_bytes": 55.08e9,
    "d2h_bytes": 54.59e9,
    "device_bytes": 3.816e12,
    "device_flops": 769.8e12,
    "h2d_share_in_step": 0.433,
    "d2h_share_in_step": 0.651,
}
COPIES_BESIDE_C = {
    "h2d_bytes": 54.70e9,
    "d2h_bytes": 54.95e9,
    "device_bytes": 3.692e12,
    "device_flops": 748e12,
    "h2d_share_in_step": 0.402,
    "d2h_share_in_step": 0.578,
}
COPIES_BESIDE_D = {
    "h2d_bytes": 55.20e9,
    "d2h_bytes": 55.10e9,
    "device_bytes": 3.766e12,
    "device_flops": 794.2e12,
    "h2d_share_in_step": 0.462,
    "d2h_share_in_step": 0.639,
}
COPIES_BESIDE_D_64 = {
    **COPIES_BESIDE_D,
    "device_bytes": 3.885e12,
    "device_flops": 794.9e12,
    "h2d_share_in_step": 0.385,
    "d2h_share_in_step": 0.523,
}
COPIES_BESIDE_E = {
    "h2d_bytes": 46.5e9,
    "d2h_bytes": 54.9e9,
    "device_bytes": 3.45e12,
    "device_flops": 719e12,
    "h2d_share_in_step": 0.668,
    "d2h_share_in_step": 0.866,
    "step_share_beside_copies": 0.90,
}
"""Machines of other days, by their cores; five of them with what the host's step leaves to copies, the fourth one's measured
for 44 of its cores and for all 64."""


FITTED = [
    pytest.param(Measured("3b", 2, 4096, 5.7, 0.359), marks=pytest.mark.long, id="3b-2x4096"),
    pytest.param(Measured("7b", 8, 1024, 5.7, 0.672), id="7b-8x1024"),
    pytest.param(
        Measured("7b", 1, 262144, 5.07, 123.91, 124.42, None, 125.1, 125.0, other_speeds=CORES_16),
        marks=pytest.mark.long,
        id="7b-1x262144",
    ),
    pytest.param(
        Measured("7b", 1, 1048576, 8.12, 250.2, 122.21, 35.1, 125.1, 40.0, layers=4, other_speeds=CORES_64),
        marks=pytest.mark.long,
        id="7b-4layers-1x1048576",
    ),
    pytest.param(
        Measured("7b", 32, 1024, 7.1, 3.921, 66.52, 100.91, settings=PLAIN), marks=pytest.mark.long, id="7b-32x1024-plain"
    ),
]
KEPT_OUT = [
    Measured("3b", 8, 4096, 5.7, 1.261, 121.22, 42.9),
    Measured("3b", 8, 4096, 5.7, 1.648, 23.20, 42.9, gpu_planned_gib=24.0),
    Measured("3b", 2, 4096, 5.7, 0.559, 23.32, 41.8, gpu_planned_gib=24.0),
    Measured("3b", 2, 4096, 4.01, 0.648, 23.32, 41.8, gpu_planned_gib=24.0),
    Measured("7b", 32, 1024, 5.7, 2.737, 123.68, 104.6),
    Measured("14b", 8, 4096, 6.71, 5.863, 124.16, 195.4, host_memory_gib=199.0, other_speeds=COPIES_BESIDE_A),
    Measured("32b", 8, 4096, 7.05, 13.599, 120.79, 430.8, 124.9, 442.0, other_speeds=COPIES_BESIDE_B),
    Measured("30b_a3b", 8, 4096, 7.05, 4.810, 123.33, 400.9, 124.9, 412.0, other_speeds=COPIES_BESIDE_B),
    # Its plan offloaded nothing; today's would.
    Measured("14b", 8, 4096, 8.2, 6.139, 124.47, 196.8, host_memory_gib=503.0, settings={"offloaded_layers": 0}),
    Measured("7b", 1, 524288, 8.12, 433.8, 121.06, 235.0, 125.1, 240.0, other_speeds=CORES_64),
    # Its plan had one layer on the device and offloaded one; today's would have more of both.
    Measured(
        *("llama_70b", 8, 4096, 7.08, 3.604, 124.81, 142.6, 125.1, 150.0, {"offloaded_layers": 1}),
        layers=10,
        other_speeds=CORES_32,
    ),
    # Looked at to find out what was missing; no share was fitted to it. Routers that are recorded kept layers uncompiled then.
    Measured(
        *("gpt_oss_120b", 32, 1024, 7.08, 3.042, 112.25, 226.4, 125.1, 238.0, {"compile_layers": False}),
        layers=5,
        other_speeds=CORES_32,
    ),
    # It was missed until what Inductor leaves in memory was looked at in the code that it generates.
    Measured("gpt_oss_120b", 32, 1024, 7.05, 2.638, 116.79, None, 125.0, 238.0, layers=5, other_speeds=COPIES_BESIDE_B),
]
PURE_STREAMING = [
    Measured("7b", 4, 1024, 7.1, 1.559, 11.67, 100.95, settings=PLAIN),
    Measured("7b", 16, 1024, 7.1, 2.556, 35.18, 100.89, settings=PLAIN),
    Measured("7b", 48, 1024, 7.1, 5.486, 97.86, 101.07, settings=PLAIN),
    Measured("3b", 8, 4096, 7.1, 2.074, 61.87, 41.81, settings=PLAIN),
]
MISSED = [
    # It waits for the host's AdamW, whose speed in that run wasn't kept: 5.7 would fit.
    Measured("3b", 2, 4096, 7.1, 0.946, 16.39, 41.80, settings=PLAIN),
]
"""docs/estimate_method.md says by how much."""
SINCE = [
    Measured("14b", 8, 4096, 8.22, 5.779, 124.88, 194.2, 125.0, 199.0, other_speeds=COPIES_BESIDE_C),
    Measured("14b", 8, 4096, 8.04, 5.750, 124.88, 195.4, 125.0, 199.0, other_speeds=COPIES_BESIDE_D_64),
    Measured("gpt_oss_120b", 32, 1024, 6.96, 2.725, 116.79, 227.4, 125.0, 238.0, layers=5, other_speeds=COPIES_BESIDE_D),
    Measured("3b", 2, 4096, 6.96, 0.369, None, None, 125.1, 503.0, other_speeds=COPIES_BESIDE_D),
    Measured("3b", 8, 4096, 6.96, 1.259, 115.05, 41.9, 125.1, 503.0, other_speeds=COPIES_BESIDE_D),
]
"""Measured since compiled layers don't compute their outputs again in backward."""
WITH_KERNELS_THAT_OVERWRITE = [
    pytest.param(
        Measured("3b", 2, 4096, 5.53, 0.353, 61.67, None, 125.1, 503.0, other_speeds=COPIES_BESIDE_E), id="3b-2x4096"
    ),
    *(
        pytest.param(case, marks=pytest.mark.long, id=case.name)
        for case in (
            Measured("3b", 8, 4096, 5.53, 1.227, 121.16, None, 125.1, 503.0, other_speeds=COPIES_BESIDE_E),
            Measured("3b", 2, 4096, 5.67, 0.544, 23.91, None, 24.0, 503.0, other_speeds=COPIES_BESIDE_E),
            Measured("3b", 8, 4096, 5.12, 1.444, 23.04, None, 24.0, 503.0, other_speeds=COPIES_BESIDE_E),
            Measured("7b", 8, 1024, 5.53, 0.667, 122.48, None, 125.1, 503.0, other_speeds=COPIES_BESIDE_E),
            Measured("7b", 32, 1024, 5.53, 2.540, 124.10, None, 125.1, 252.0, other_speeds=COPIES_BESIDE_E),
            Measured("7b", 1, 262144, 5.53, 123.04, 119.15, 185.4, 125.1, 200.0, other_speeds=COPIES_BESIDE_E),
        )
    ),
]
"""Measured since backward kernels overwrite their inputs, and one kernel computes the loss (but for 7b-32x1024)."""


@pytest.fixture
def kernels_overwrite_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was until 2026-11-28, with the loss by strips."""

    def with_times(profile: LayerProfile, saved: SavedInForward, compiles: bool, machine: Machine) -> LayerProfile:
        found = layer_costs.with_times(profile, saved, compiles, machine)
        recomputed_bytes = max(found.forward_bytes, found.kept_bytes + found.kept_backward_bytes)
        return dataclasses.replace(found, recomputed_bytes=recomputed_bytes) if compiles else found

    monkeypatch.setattr(forecast_module, "with_times", with_times)
    monkeypatch.setattr(tiled_cross_entropy, "_is_fused", lambda *_: False)


@pytest.fixture
def layers_are_recomputed_whole(kernels_overwrite_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were when most of the cases were measured."""
    without = forecast_module.with_times

    def with_times(profile: LayerProfile, saved: SavedInForward, compiles: bool, machine: Machine) -> LayerProfile:
        return without(profile, dataclasses.replace(saved, costs=profile.forward), compiles, machine)

    monkeypatch.setattr(forecast_module, "with_times", with_times)


def assert_predicted(case: Measured) -> None:
    forecaster = Forecaster(
        empty_model(shape_config(case.shape, case.length, case.layers)),
        MegatrainConfig.from_mapping(nested(case.settings)),
        machine_with(case.machine, int(case.gpu_planned_gib * GIB), int(case.host_memory_gib * GIB)),
    )
    found = forecaster.forecast(case.batch, case.length)
    assert found.fits
    for bytes_found, measured_gib in ((found.gpu_bytes, case.gpu_gib), (found.host_bytes, case.host_gib)):
        assert measured_gib is None or bytes_found / GIB == pytest.approx(measured_gib, rel=0.05)
    assert found.seconds == pytest.approx(case.seconds, rel=0.10)


@pytest.mark.parametrize("case", FITTED)
@pytest.mark.usefixtures("layers_are_recomputed_whole")
def test_a_measured_training_is_predicted_that_the_shares_were_fitted_to(case: Measured) -> None:
    assert_predicted(case)


@pytest.mark.long
@pytest.mark.parametrize("case", [*KEPT_OUT, *PURE_STREAMING], ids=lambda case: case.name)
@pytest.mark.usefixtures("layers_are_recomputed_whole")
def test_a_measured_training_is_predicted_that_was_kept_out_of_the_fit(case: Measured) -> None:
    assert_predicted(case)


@pytest.mark.long
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="docs/estimate_method.md names it among those that are missed")
@pytest.mark.parametrize("case", MISSED, ids=lambda case: case.name)
@pytest.mark.usefixtures("layers_are_recomputed_whole")
def test_a_measured_training_is_predicted_that_was_missed_so_far(case: Measured) -> None:
    assert_predicted(case)


@pytest.mark.long
@pytest.mark.parametrize("case", SINCE, ids=lambda case: case.name)
@pytest.mark.usefixtures("kernels_overwrite_nothing")
def test_a_measured_training_is_predicted_whose_recomputes_leave_out_the_last_product(case: Measured) -> None:
    assert_predicted(case)


@pytest.mark.parametrize("case", WITH_KERNELS_THAT_OVERWRITE)
def test_a_measured_training_is_predicted_whose_kernels_overwrite_their_inputs(case: Measured) -> None:
    assert_predicted(case)


def test_a_measured_layer_and_loss_are_predicted() -> None:
    forecaster = Forecaster(empty_model(shape_config("3b", 4096)), MegatrainConfig(), machine_with(H200, 125 * GIB, 125 * GIB))
    step_profile, _ = forecaster.fastest(2, 4096)
    (profile,) = step_profile.profiles.values()
    assert profile.forward_seconds == pytest.approx(2.34e-3, rel=0.05)
    assert profile.backward_seconds == pytest.approx(4.95e-3, rel=0.05)
    # 47.9 ms by strips, of which the kernel saves 14.3: the loss alone took 41.7 and takes 27.4 ms.
    assert step_profile.outside_seconds == pytest.approx(33.6e-3, rel=0.05)
