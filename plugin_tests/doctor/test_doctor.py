"""What each check of ``megatrain doctor`` says of machines of all sorts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
from pathlib import Path

import accelerate
import pytest
import torch
import transformers

import megatrain_accelerate
from megatrain_accelerate.cli import main
from megatrain_accelerate.doctor import checks
from megatrain_accelerate.doctor.checks import Finding
from megatrain_accelerate.errors import HostMemoryError, KernelError, PatchError
from megatrain_accelerate.integrations import import_hook
from megatrain_accelerate.integrations.patches import TESTED_VERSIONS
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.plan.machine import SHARE_IN_A_STEP, Machine
from megatrain_accelerate.units import GIB

MACHINE = Machine(h2d_bytes=53e9, d2h_bytes=54e9, host_step_parameters=6e9, device_bytes=4e12, device_flops=7e14)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    # Whoever is told of something bad is told what to do.
    assert finding.remedy or finding.state in ("ok", "note")
    return finding


# ---------------------------------------------------------------- the system


@pytest.mark.parametrize(
    ("usable", "present", "state", "remedy"), [(16, 16, "ok", ""), (4, 64, "slow", "limit"), (4, 4, "slow", "more cores")]
)
def test_few_cores_are_said_to_slow_the_host_step(
    monkeypatch: pytest.MonkeyPatch, usable: int, present: int, state: str, remedy: str
) -> None:
    monkeypatch.setattr(checks, "usable_cpu_count", lambda: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: present)
    found = only(checks.cores())
    assert found.state == state
    assert remedy in found.remedy
    assert found.values == {"usable_cores": usable, "cores": present}


@pytest.mark.parametrize("may_mount", [True, False])
@pytest.mark.parametrize("mode", ["advise", "never"])
@pytest.mark.parametrize("reach", [True, False])
def test_several_gpus_want_huge_pages_for_what_their_processes_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, may_mount: bool, mode: str, reach: bool
) -> None:
    modes = tmp_path / "shmem_enabled"
    modes.write_text("always within_size advise never deny force".replace(mode, f"[{mode}]"))
    monkeypatch.setattr(checks, "open_huge_file", lambda: os.open(modes, os.O_RDONLY) if may_mount else None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach or {one, other} != {1, 2})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert checks.several_gpus(modes) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = only(checks.several_gpus(modes))
    assert ("exchange gradients directly" in found.text) is reach
    assert found.state == ("ok" if may_mount or mode == "advise" else "slow")
    assert ("echo advise" in found.remedy) is (found.state == "slow")


def test_a_cgroups_limit_is_what_a_model_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "cgroup_available_bytes", lambda: 9 * GIB)
    found = only(checks.host_memory())
    assert found.state == "note"
    assert "--memory" in found.remedy
    assert found.values["trainable_parameters"] == pytest.approx(7 * GIB / 14)
    monkeypatch.setattr(checks, "cgroup_available_bytes", lambda: None)
    assert only(checks.host_memory()).state == "ok"


@pytest.mark.parametrize(("nodes", "state"), [(1, "ok"), (2, "note")])
def test_memory_of_another_socket_is_said_with_the_command(tmp_path: Path, nodes: int, state: str) -> None:
    for node, cpus in enumerate([*["0-3", "4-7"][:nodes], ""]):  # the last one has memory only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    found = only(checks.numa(tmp_path))
    assert (found.state, found.values["numa_nodes"]) == (state, nodes)
    assert ("numactl --cpunodebind" in found.remedy) is (state == "note")


@pytest.mark.parametrize("below", ["", "runs/first"])
def test_a_file_is_no_place_for_checkpoints(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    found = only(checks.disk(tmp_path / "file" / below))
    assert found.state == "broken"
    assert f"{tmp_path / 'file'} isn't a folder" in found.text


def test_a_disk_smaller_than_the_memory_holds_no_checkpoint_of_what_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = checks.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage._replace(free=GIB))
    assert "--save_only_model" in only(checks.disk(tmp_path)).remedy
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage._replace(free=1 << 60))
    assert only(checks.disk(tmp_path)).state == "ok"


def test_a_folder_that_is_still_to_be_made_is_no_fault(tmp_path: Path) -> None:
    found = only(checks.disk(tmp_path / "runs" / "first"))
    assert found.state != "broken"
    assert str(tmp_path) in found.text


def test_a_gpu_that_cannot_be_used_keeps_training_from_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def busy() -> int:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", busy)
    found = {finding.name: finding for finding in checks.examine(tmp_path, measures=False)}
    assert found["GPU"].state == "broken"
    assert "busy or unavailable" in found["GPU"].text
    assert "disk" in found


# ---------------------------------------------------------------- the software


def test_versions_outside_the_tested_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"accelerate": "0.33.1", "transformers": "99.0", "peft": TESTED_VERSIONS["peft"].split()[-1]}

    def installed(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", installed)
    first, *others = checks.versions()
    assert first.values["transformers"] == "99.0"
    assert [found.name for found in others] == ["accelerate 0.33.1", "transformers 99.0"]
    assert all("pip install" in found.remedy for found in others)


@pytest.mark.parametrize(
    ("version", "tested", "expected"),
    [
        ("1.15.0", "0.34.0 to 1.15.0", True),
        ("1.15.1", "0.34.0 to 1.15.0", False),
        ("1.2.0.dev0", "0.34.0 to 1.15.0", True),
        ("0.21.2", "0.21.2", True),
        ("0.22", "0.21.2", False),
    ],
)
def test_versions_are_compared_by_number(monkeypatch: pytest.MonkeyPatch, version: str, tested: str, expected: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    monkeypatch.setitem(TESTED_VERSIONS, "accelerate", tested)
    assert (f"accelerate {version}" not in [found.name for found in checks.versions()]) is expected


def test_hooks_are_found_in_place() -> None:
    assert only(checks.hooks()).state == "ok"


def test_what_switches_the_plugin_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MEGATRAIN_DISABLE", "1")
        assert "unset MEGATRAIN_DISABLE" in only(checks.hooks()).remedy
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        assert "enable()" in only(checks.hooks()).remedy
    with monkeypatch.context() as patch:
        patch.setattr(checks.importlib.metadata, "entry_points", lambda **_: ())
        assert "isn't installed" in only(checks.hooks()).text
    with monkeypatch.context() as patch:
        patch.setattr(import_hook, "is_installed", lambda: False)
        assert only(checks.hooks()).state == "broken"


def test_a_patch_that_does_not_fit_keeps_training_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise PatchError("can't patch accelerate.accelerator:Accelerator.prepare_model")

    monkeypatch.setattr(checks, "require_patches", fails)
    found = only(checks.hooks())
    assert found.state == "broken"
    assert "prepare_model" in found.text


def test_missing_kernels_keep_training_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise KernelError("the library is missing")

    assert only(checks.kernels()).values["host_threads"]
    monkeypatch.setattr(checks, "HostKernels", fails)
    assert only(checks.kernels()).state == "broken"


@pytest.mark.parametrize(
    ("triton", "compiler", "state"), [(True, "/usr/bin/cc", "ok"), (False, "/usr/bin/cc", "slow"), (True, None, "slow")]
)
def test_what_compiles_layers_is_looked_for_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, triton: bool, compiler: str | None, state: str
) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(checks.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert only(checks.compilers()).state == state
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checks.compilers() == []


# ---------------------------------------------------------------- speeds


@pytest.mark.parametrize(
    ("h2d", "d2h", "state"), [(53e9, 54e9, "ok"), (12e9, 13e9, "slow"), (53e9, 10e9, "slow"), (10e9, 53e9, "slow")]
)
def test_a_link_that_is_slow_in_one_direction_is_slow(h2d: float, d2h: float, state: str) -> None:
    now = dataclasses.replace(MACHINE, h2d_bytes=h2d, d2h_bytes=d2h)
    assert only([checks.link_finding(now)]).state == state


def test_a_step_slower_than_its_memory_wants_cores() -> None:
    fast, slow = (dataclasses.replace(MACHINE, host_step_parameters=SHARE_IN_A_STEP * speed) for speed in (7e9, 2e9))
    assert only([checks.host_finding(fast, 200e9, 14, True)]).state == "ok"
    assert "cores" in only([checks.host_finding(slow, 200e9, 3, True)]).remedy
    assert only([checks.host_finding(slow, 200e9, 3, False)]).state == "ok"


def test_speeds_that_do_not_hold_any_more_are_to_be_measured_anew() -> None:
    def found(link: float, step: float, count: int = 3) -> Finding:
        now = dataclasses.replace(MACHINE, h2d_bytes=link, d2h_bytes=2 * link, host_step_parameters=step)
        return only([checks.plan_finding(MACHINE, now, "speeds.json", count)])

    alone = MACHINE.host_step_parameters
    assert found(50e9, alone).state == "ok"
    assert "3 in speeds.json" in found(50e9, alone).text
    assert "can't be kept" in found(50e9, alone, count=0).text
    for link, step, named in ((25e9, alone, "GB/s over the link"), (50e9, 0.7 * alone, "AdamW"), (50e9, 1.4 * alone, "AdamW")):
        other = found(link, step)
        assert other.state == "slow"
        assert named in other.text
        assert "delete speeds.json" in other.remedy
    both = found(25e9, 0.5 * alone).text
    assert "link" in both
    assert "AdamW" in both


def test_the_hosts_kernels_are_measured_by_what_they_move() -> None:
    with contextlib.closing(HostKernels(1)) as kernels:
        # Of an array, not of nothing: a core moves less than a hundred times what a server's whole memory does.
        assert 26e7 < checks.measure_sum(kernels, 1 << 20) < 26e11


def test_memory_that_the_driver_refuses_keeps_training_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> Machine:
        raise HostMemoryError("refused to page-lock")

    monkeypatch.setattr(checks.machine, "measure", refuses)
    found = only(checks.speeds())
    assert (found.name, found.state) == ("link", "broken")
    assert "memlock=-1" in found.remedy


# ---------------------------------------------------------------- the command


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails() -> list[Finding]:
        raise RuntimeError("no such file")

    monkeypatch.setattr(checks, "versions", fails)
    found, following, *_ = checks.examine(tmp_path, measures=False)
    assert (found.name, found.state) == ("versions", "broken")
    assert "no such file" in found.text
    assert following.name == "hooks"


@pytest.mark.parametrize(("states", "status"), [(("ok", "slow", "note"), 0), (("ok", "broken"), 1)])
def test_the_exit_status_says_whether_training_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], states: tuple[str, ...], status: int
) -> None:
    findings = [Finding(f"thing {state}", state, f"is {state}", f"mend {state}", {"number": 1.5}) for state in states]
    monkeypatch.setattr(checks, "examine", lambda *_, **__: iter(findings))
    assert main(["doctor"]) == status
    shown = capsys.readouterr().out
    assert all(f"is {state}" in shown and f"mend {state}" in shown for state in states if state != "ok")
    assert "mend ok" not in shown
    assert main(["doctor", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["fit"] is (status == 0)
    assert [finding["state"] for finding in found["findings"]] == list(states)
    assert found["findings"][0]["values"] == {"number": 1.5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_examined_and_told_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for text in ("none that torch can use", "host kernels", "NUMA", "AdamW", "patches", str(tmp_path)):
        assert text in shown
    assert main(["doctor", "--no-speed", "--json", "--folder", str(tmp_path)]) == 0
    names = [finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert "cores" in names
    assert "host speed" not in names


def test_the_version_is_one_line_with_those_that_matter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    (line,) = capsys.readouterr().out.splitlines()
    for name, version in (
        ("megatrain-accelerate", megatrain_accelerate.__version__),
        ("torch", torch.__version__),
        ("accelerate", accelerate.__version__),
        ("transformers", transformers.__version__),
    ):
        assert f"{name} {version}" in line
