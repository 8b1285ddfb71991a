"""The machine's speeds: measured by the first processes, kept in a file, measured anew under other circumstances."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
import time
from pathlib import Path

import pytest
import torch

from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.plan import machine
from megatrain_accelerate.plan.machine import measured_machine
from megatrain_accelerate.units import MIB

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Grows by one with every real measurement, which is of less memory than usual, once; the cache is an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_COPY_BYTES", 16 * MIB)
    monkeypatch.setattr(machine, "_STEP_ELEMENTS", 4 * MIB)
    monkeypatch.setattr(machine, "_ROUNDS", 1)
    count: list[int] = []
    measure = machine.measure

    def counted(device: torch.device, kernels: HostKernels) -> machine.Machine:
        count.append(1)
        return measure(device, kernels)

    monkeypatch.setattr(machine, "measure", counted)
    another_process(monkeypatch)
    return count


@pytest.fixture(scope="module")
def real() -> machine.Machine:
    """Speeds of this machine, for tests of when it is measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_STEP_ELEMENTS", 4 * MIB)
        return machine.measure(CPU, HostKernels(1))


@pytest.fixture
def counted(measured: list[int], real: machine.Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As ``measured``, but each measurement has the speeds that one had before."""
    monkeypatch.setattr(machine, "measure", lambda *_: measured.append(1) or real)
    return measured


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing was measured or read yet."""
    monkeypatch.setattr(machine, "process_speeds", {})


def test_speeds_are_measured_once_in_a_process_and_kept(measured: list[int], tmp_path: Path) -> None:
    kernels = HostKernels(1)
    first = measured_machine(CPU, kernels)
    assert measured_machine(CPU, kernels) == first
    assert len(measured) == 1
    speeds = dataclasses.asdict(first)
    assert speeds.pop("step_overhead") == 0.0  # a GPU's
    assert (speeds.pop("h2d_share_in_step"), speeds.pop("d2h_share_in_step")) == (1.0, 1.0)  # there is no link
    assert speeds.pop("step_share_beside_copies") == 1.0
    assert all(value > 1e6 for value in speeds.values())
    assert len(list((tmp_path / "megatrain_accelerate").iterdir())) == 1


def test_a_machine_that_was_busy_once_is_not_taken_for_slow(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HostKernels(1)
    idle = machine.Machine(50e9, 52e9, 8e9, 4e12, 7e14, h2d_share_in_step=0.6)
    busy = machine.Machine(19e9, 31e9, 4e9, 4e12, 7e14, h2d_share_in_step=1.0)
    seen = []
    runs = [busy, idle, idle, busy, busy]
    for found in runs:
        monkeypatch.setattr(machine, "measure", lambda *_, found=found: found)
        another_process(monkeypatch)
        seen.append(measured_machine(CPU, kernels))
    # After one run its own, of two the faster; what is slow in most of them is slow.
    assert [speeds.host_step_parameters for speeds in seen] == [4e9, 8e9, 8e9, 8e9, 4e9]
    assert seen[2] == idle
    # The link beside the host's step is one that was measured, too: not idle's speed with busy's share.
    assert [speeds.h2d_bytes * speeds.h2d_share_in_step for speeds in seen] == pytest.approx([19e9, 30e9, 30e9, 30e9, 19e9])
    assert seen[1].h2d_share_in_step == 0.6
    # What has been measured often enough is kept.
    monkeypatch.setattr(machine, "measure", lambda *_: idle)
    another_process(monkeypatch)
    assert measured_machine(CPU, kernels) == seen[-1]
    assert len(machine.kept_speeds(machine.speeds_path(CPU, kernels))) == machine.MEASUREMENTS == len(runs)


def test_what_others_measured_meanwhile_is_kept_too(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HostKernels(1)
    path, speeds = machine.speeds_path(CPU, kernels), machine.Machine(50e9, 52e9, 8e9, 4e12, 7e14)

    def slowly(*_: object) -> machine.Machine:
        machine.keep_speeds(path, [speeds, speeds])  # another process'
        return speeds

    monkeypatch.setattr(machine, "measure", slowly)
    measured_machine(CPU, kernels)
    assert machine.kept_speeds(path) == [speeds] * 3


def test_another_number_of_threads_is_measured_anew(counted: list[int]) -> None:
    measured_machine(CPU, HostKernels(1))
    measured_machine(CPU, HostKernels(2))
    assert len(counted) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "{}",
        '{"h2d_bytes": 1}',
        '[{"h2d_bytes": 1}]',
        "[1, 2]",
        "7",
        "{SPEEDS: null}",
        "{SPEEDS: -1}",
        "{SPEEDS: 0}",
        "{SPEEDS: NaN}",
    ],
)
def test_a_broken_file_is_measured_and_written_anew(
    counted: list[int], tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = HostKernels(1)
    first = measured_machine(CPU, kernels)
    (path,) = (tmp_path / "megatrain_accelerate").iterdir()
    if content.startswith("{SPEEDS"):  # of the right names
        value = content.removeprefix("{SPEEDS: ").removesuffix("}")
        content = re.sub(r'("d2h_bytes": )[^,]*', rf"\g<1>{value}", path.read_text())
        assert value in content
    path.write_text(content)
    another_process(monkeypatch)
    measured_machine(CPU, kernels)
    assert len(counted) == 2
    assert len(machine.kept_speeds(path)) == 1
    assert dataclasses.asdict(first).keys() == dataclasses.asdict(measured_machine(CPU, kernels)).keys()
    assert len(counted) == 2


def test_a_folder_that_cannot_be_written_is_no_error(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    measured_machine(CPU, HostKernels(1))
    assert len(counted) == 1


def test_a_kernel_on_more_memory_takes_longer() -> None:
    kernels = HostKernels(1)
    small, large = (
        machine.seconds_of(CPU, functools.partial(kernels.adamw, *arrays, machine.STEP_ARGUMENTS))
        for arrays in (machine.step_arrays(kernels, count) for count in (2**19, 2**22))
    )
    assert large > 2 * small


def test_measuring_draws_no_random_numbers_of_the_training(measured: list[int]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measured_machine(CPU, HostKernels(1))
    assert len(measured) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_user_without_a_home_keeps_speeds_where_files_are_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(machine.os.path, "expanduser", lambda path: path)
    path = machine.speeds_path(CPU, HostKernels(1))
    assert path.parent == Path(tempfile.gettempdir()) / "megatrain_accelerate"


def test_a_file_of_a_version_that_measured_less_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HostKernels(1)
    path = machine.speeds_path(CPU, kernels)
    assert path == machine.speeds_path(CPU, kernels)
    earlier = dataclasses.make_dataclass("Machine", [("h2d_bytes", float), ("d2h_bytes", float)])
    monkeypatch.setattr(machine, "Machine", earlier)
    assert path != machine.speeds_path(CPU, kernels)


def test_work_that_is_repeated_beside_a_measurement_ends_with_it_also_where_it_raises() -> None:
    times: list[None] = []

    def fails() -> None:
        with machine.repeated(lambda: times.append(time.sleep(0.001))):
            while len(times) < 3:
                time.sleep(0.001)
            raise ValueError("no copy")

    with pytest.raises(ValueError, match="no copy"):
        fails()
    done = len(times)
    time.sleep(0.02)
    assert len(times) == done
