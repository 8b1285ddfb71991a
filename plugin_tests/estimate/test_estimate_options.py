"""What the arguments of ``megatrain estimate`` make of the machine and the settings, and what they can't be."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flat_settings import nested
from fresh_process import clean_environment, run_python
from machine_options import machine_options
from transformers import LlamaConfig

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.estimate.command import add_arguments, parse_size
from megatrain_accelerate.estimate.findings import Estimate
from megatrain_accelerate.estimate.machine_description import MachineDescription, describe_machine
from megatrain_accelerate.units import GIB

DESKTOP = machine_options(gpu="RTX4090")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["MODEL", *arguments])


def described(options: argparse.Namespace = DESKTOP, **settings: object) -> MachineDescription:
    return describe_machine(options, MegatrainConfig.from_mapping(nested(settings)))


@pytest.mark.parametrize("option", ["--host-step", "--tflops", "--link"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1", "1e999", "fast"])
def test_a_speed_is_a_finite_number_above_0(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"{option}={value}")
    assert "isn't a finite number above 0" in capsys.readouterr().err


def test_a_size_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="isn't a size"):
        parse_size("9" * 400)


def test_an_argument_that_is_given_again_adds_to_the_first() -> None:
    options = parsed(
        "--set",
        "placement.slots=3",
        "placement.kept_layers=0",
        "--batch",
        "1",
        "2",
        "--set",
        "placement.slots=4",
        "--batch",
        "8",
    )
    assert options.batch == [1, 2, 8]
    assert dict(options.set) == {"placement.slots": 4, "placement.kept_layers": 0}
    assert parsed().set == []
    assert parsed().batch is None


def test_a_gpu_without_room_beside_cudas_context_is_refused_by_the_argument_that_says_so() -> None:
    with pytest.raises(ConfigError, match=r"--gpu-memory 0\.10 GiB: CUDA's context alone takes 0\.5"):
        described(machine_options(DESKTOP, gpu_memory_bytes=GIB // 10))


def test_settings_cannot_take_more_gpu_memory_than_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"gpu_memory_gib is 500, and the GPU \(RTX4090\) has 23\.0 GiB beside CUDA's context; lower it"
    ):
        described(gpu_memory_gib=500)
    assert described(gpu_memory_gib=23).gpu_bytes == 23 * GIB


@pytest.mark.parametrize(("option", "setting", "smaller"), [(256, 60, 60), (60, 256, 60), (None, 60, 60), (60, None, 60)])
def test_the_smaller_host_memory_counts(option: int | None, setting: int | None, smaller: int) -> None:
    options = machine_options(DESKTOP, host_memory_bytes=None if option is None else option * GIB)
    assert described(options, host_memory_gib=setting).host_bytes == smaller * GIB


def test_host_threads_bound_the_step_of_a_described_host() -> None:
    options = machine_options(gpu="H200", cores=16)
    whole, some, more = (described(options, host_threads=threads) for threads in (None, 7, 64))
    assert some.machine.host_step_parameters == pytest.approx(0.5 * whole.machine.host_step_parameters)
    assert more.machine == whole.machine
    assert any("16 cores, host_threads 7" in note for note in some.notes)
    fixed = machine_options(options, host_step_parameters=3e9)
    assert described(fixed, host_threads=2).machine.host_step_parameters == 3e9


def test_a_step_that_hides_under_nothing_is_not_estimated_as_one_that_does() -> None:
    with pytest.raises(ConfigError, match="step_schedule is 'serial'"):
        Estimate(parsed("--gpu", "H200", "--set", "step_schedule=serial"))


def test_speeds_that_options_name_are_not_said_to_be_estimated() -> None:
    def notes(**speeds: float) -> str:
        return "\n".join(described(machine_options(gpu="H200", **speeds)).notes)  # type: ignore[arg-type]

    assert "speeds that no option names are estimated" in notes(dense_flops=6e14)
    assert "host step estimated from 16 cores" in notes()
    assert notes(dense_flops=6e14, device_bytes=3e12, link_bytes=4e10, host_step_parameters=5e9) == ""
    unknown = machine_options(dense_flops=1e14, gpu_memory_bytes=GIB, device_bytes=1e12, link_bytes=2e10)
    assert not any("public figures" in note for note in described(unknown).notes)


@pytest.mark.parametrize("command", ["config", pytest.param("estimate", marks=pytest.mark.long)])
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_word(tmp_path: Path, command: str) -> None:
    arguments: list[str] = []
    if command == "estimate":
        LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=64).save_pretrained(tmp_path)
        arguments = [str(tmp_path), "--json", "--no-limits", "--batch", "1"]
        arguments += ["--gpu", "RTX4090", "--host-memory", "64GiB", "--length", "64"]
    line = [sys.executable, "-m", "megatrain_accelerate", command, *arguments]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()) as run:
        assert run.stdout is not None
        run.stdout.close()  # as `| head` does
        assert run.stderr is not None
        errors = run.stderr.read()
    assert "BrokenPipe" not in errors
    assert "Traceback" not in errors
    assert run.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("command", [(), ("estimate",), ("doctor",), ("trace",)])
def test_the_help_imports_neither_torch_nor_transformers(command: tuple[str, ...]) -> None:
    script = f"""
        import contextlib, sys
        from megatrain_accelerate.cli import main
        with contextlib.suppress(SystemExit):
            main([*{command!r}, "--help"])
        assert not {{"torch", "transformers"}} & sys.modules.keys()
    """
    run_python(script)
