"""The machine's speeds: measured once, kept in a file, measured anew under other circumstances."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch

from megatrain_accelerate.optim.kernel import HostKernels
from megatrain_accelerate.planning import machine
from megatrain_accelerate.planning.machine import measured_machine

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Grows by one with every real measurement; the cache is an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    count: list[int] = []
    measure = machine._measure

    def counted(device: torch.device, kernels: HostKernels, register: bool) -> machine.Machine:
        count.append(1)
        return measure(device, kernels, register)

    monkeypatch.setattr(machine, "_measure", counted)
    return count


def test_speeds_are_measured_once_and_kept(measured: list[int], tmp_path: Path) -> None:
    kernels = HostKernels(1)
    first = measured_machine(CPU, kernels, False)
    assert measured_machine(CPU, kernels, False) == first
    assert len(measured) == 1
    speeds = dataclasses.asdict(first)
    assert speeds.pop("step_overhead") == 0.0  # a GPU's
    assert (speeds.pop("h2d_share_in_step"), speeds.pop("d2h_share_in_step")) == (1.0, 1.0)  # there is no link
    assert all(value > 1e6 for value in speeds.values())
    assert len(list((tmp_path / "megatrain_accelerate").iterdir())) == 1


def test_another_number_of_threads_is_measured_anew(measured: list[int]) -> None:
    measured_machine(CPU, HostKernels(1), False)
    measured_machine(CPU, HostKernels(2), False)
    assert len(measured) == 2


@pytest.mark.parametrize("content", ["", "not json", "{}", '{"h2d_bytes": 1}', "[1, 2]"])
def test_a_broken_file_is_measured_and_written_anew(measured: list[int], tmp_path: Path, content: str) -> None:
    kernels = HostKernels(1)
    first = measured_machine(CPU, kernels, False)
    (path,) = (tmp_path / "megatrain_accelerate").iterdir()
    path.write_text(content)
    measured_machine(CPU, kernels, False)
    assert len(measured) == 2
    assert dataclasses.asdict(first).keys() == dataclasses.asdict(measured_machine(CPU, kernels, False)).keys()
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_is_no_error(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    measured_machine(CPU, HostKernels(1), False)
    assert len(measured) == 1


def test_a_kernel_on_more_memory_takes_longer(measured: list[int]) -> None:
    kernels = HostKernels(1)
    small, large = (machine._seconds(CPU, machine._host_step(kernels, count)) for count in (2**19, 2**22))
    assert large > 2 * small


def test_measuring_draws_no_random_numbers_of_the_training(measured: list[int]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measured_machine(CPU, HostKernels(1), False)
    assert len(measured) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_user_without_a_home_keeps_speeds_where_files_are_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(machine.os.path, "expanduser", lambda path: path)
    path = machine.speeds_path(CPU, HostKernels(1), False)
    assert path.parent == Path(tempfile.gettempdir()) / "megatrain_accelerate"
