"""``accelerate launch`` with the plugin's yaml and flags, from the command to the environment of the training process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from fresh_process import run_command, script

from megatrain_accelerate.config import MegatrainConfig, PlacementSettings, usable_cpu_count
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.integrations import launcher

Refused = Callable[[str], contextlib.AbstractContextManager[None]]

BASE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MEGATRAIN",
    "num_processes": 1,
    "num_machines": 1,
    "mixed_precision": "bf16",
    "use_cpu": True,
}

TRAINING_SCRIPT = """
import json, os, sys
names = ("MEGATRAIN_ACTIVE", "MEGATRAIN_CONFIG", "OMP_NUM_THREADS", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION")
print(json.dumps({"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))
"""


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "MEGATRAIN_ACTIVE", "MEGATRAIN_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    # The default config of the person who runs the tests.
    nowhere = str(tmp_path / "no_default.yaml")
    for module in ("accelerate.commands.config.config_args", "accelerate.commands.launch"):
        monkeypatch.setattr(sys.modules[module], "default_config_file", nowhere)
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    launcher.withdraw_exports()
    for name in ("MEGATRAIN_ACTIVE", "MEGATRAIN_CONFIG", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)


def write(folder: Path, name: str = "megatrain.yaml", drop: tuple[str, ...] = (), **keys: Any) -> Path:
    content = {key: value for key, value in {**BASE, **keys}.items() if key not in drop}
    path = folder / name
    path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    return path


def parse(*command: str | Path) -> Any:
    arguments = launch_command_parser().parse_args([*map(str, command), "train.py"])
    return _validate_launch_command(arguments)[0]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Makes contexts whose body ends the launcher with a line like argparse's own, and no traceback."""

    @contextlib.contextmanager
    def ends_with(pattern: str) -> Iterator[None]:
        with pytest.raises(SystemExit) as ended:
            yield
        assert ended.value.code == 2
        assert re.search(f"(?m)^[^:\n]*: error: .*{pattern}", capsys.readouterr().err)

    return ends_with


def environment(*command: str | Path) -> dict[str, str]:
    """What the training process of a command gets."""
    return prepare_simple_launcher_cmd_env(parse(*command))[1]


def exported(env: dict[str, str]) -> MegatrainConfig:
    assert env["MEGATRAIN_ACTIVE"] == "1"
    return MegatrainConfig.from_mapping(json.loads(env["MEGATRAIN_CONFIG"]))


class TestYaml:
    @pytest.mark.parametrize("option", ["--config", "--config_file", "--config-file"])
    @pytest.mark.parametrize("name", ["megatrain.yaml", "megatrain.json"])
    def test_settings_reach_the_training_process(self, tmp_path: Path, option: str, name: str) -> None:
        env = environment(option, write(tmp_path, name, megatrain_config={"host_threads": 3}))
        assert exported(env) == MegatrainConfig(host_threads=3)
        assert env["ACCELERATE_USE_CPU"] == "True"
        assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"

    def test_the_type_alone_activates(self, tmp_path: Path) -> None:
        assert exported(environment("--config", write(tmp_path))) == MegatrainConfig()

    def test_the_section_alone_activates(self, tmp_path: Path) -> None:
        path = write(tmp_path, distributed_type="NO", megatrain_config={"host_threads": 3})
        assert exported(environment("--config", path)).host_threads == 3
        path = write(tmp_path, drop=("distributed_type",), megatrain_config=None)
        assert exported(environment("--config", path)) == MegatrainConfig()

    def test_a_yaml_of_somebody_else_activates_nothing(self, tmp_path: Path) -> None:
        environment("--config", write(tmp_path))
        env = environment("--config", write(tmp_path, distributed_type="NO", use_cpu=False))
        assert not [name for name in env if name.startswith("MEGATRAIN")], "left over from the first launch"
        assert env["OMP_NUM_THREADS"] == "1"

    def test_an_unknown_key_is_refused_before_anything_starts(self, refused: Refused, tmp_path: Path) -> None:
        path = write(tmp_path, megatrain_config={"host_threadz": 3})
        with refused("did you mean 'host_threads'"):
            parse("--config", path)
        with pytest.raises(ConfigError, match="did you mean 'host_threads'"):
            load_config_from_file(str(path))
        assert "MEGATRAIN_ACTIVE" not in os.environ

    @pytest.mark.parametrize("kind", ["MEGATRAN", "Megatrain-accelerate", "mega_train"])
    def test_a_misspelt_type_names_the_right_one(self, refused: Refused, tmp_path: Path, kind: str) -> None:
        path = write(tmp_path, distributed_type=kind)
        with refused(f"distributed_type: {kind} is unknown; did you mean 'MEGATRAIN'"):
            parse("--config", path)
        with pytest.raises(ConfigError, match="did you mean 'MEGATRAIN'"):
            load_config_from_file(str(path))

    @pytest.mark.parametrize("key", ["megatrain_cfg", "megatrainconfig", "Megatrain_config", "megatrain"])
    @pytest.mark.parametrize("kind", ["MEGATRAIN", "NO"])
    def test_a_misspelt_section_names_the_right_one(self, refused: Refused, tmp_path: Path, kind: str, key: str) -> None:
        with refused(f"no key '{key}'; did you mean 'megatrain_config'"):
            parse("--config", write(tmp_path, distributed_type=kind, **{key: {"host_threads": 3}}))

    @pytest.mark.parametrize("keys", [{"distributed_type": "MEGATRON_LN"}, {"megatron_lm_cfg": {}}, {"fsdp_cfg": {}}])
    def test_what_is_like_another_name_of_accelerate_stays_its_error(self, tmp_path: Path, keys: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"unknown keys|MEGATRON_LN"):
            parse("--config", write(tmp_path, drop=("megatrain_config",), **{"distributed_type": "NO", **keys}))

    def test_an_unknown_key_outside_the_section_stays_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="unknown keys"):
            parse("--config", write(tmp_path, no_such_key=1))

    @pytest.mark.parametrize("precision", ["fp16", "fp8"])
    def test_low_precision_is_refused_with_the_reason(self, refused: Refused, tmp_path: Path, precision: str) -> None:
        with refused(rf"mixed_precision: {precision}.*loss scaling.*bf16"):
            parse("--config", write(tmp_path, mixed_precision=precision))
        with refused("loss scaling"):
            parse("--config", write(tmp_path), "--mixed_precision", precision)
        assert parse("--config", write(tmp_path, mixed_precision=precision), "--mixed_precision", "no").megatrain

    @pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
    def test_another_way_to_place_the_model_is_refused(self, refused: Refused, tmp_path: Path, kind: str) -> None:
        path = write(tmp_path, distributed_type=kind, megatrain_config={})
        with refused(f"distributed_type: {kind}"):
            parse("--config", path)

    def test_a_section_that_divides_the_model_is_refused(self, refused: Refused, tmp_path: Path) -> None:
        if "parallelism_config" not in ClusterConfig.__dataclass_fields__:
            pytest.skip("this accelerate has no such section")
        sizes = {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1}
        with refused(r"parallelism_config_tp_size: 2.*remove"):
            parse("--config", write(tmp_path, num_processes=2, parallelism_config=sizes))

    def test_stock_errors_stay(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            parse("--config", tmp_path / "missing.yaml")


class TestProcesses:
    @pytest.mark.parametrize("use_cpu", [False, True])
    def test_several_machines_are_refused(self, refused: Refused, tmp_path: Path, use_cpu: bool) -> None:
        remedy = "num_machines is 2, .*set num_machines: 1"
        with refused(remedy):
            parse("--config", write(tmp_path, use_cpu=use_cpu, num_machines=2))
        with refused(remedy):
            parse("--config", write(tmp_path, use_cpu=use_cpu), "--num_machines", "2")
        with refused(remedy):
            parse("--megatrain", "--num_machines", "2")

    @pytest.mark.parametrize("use_cpu", [False, True])
    def test_several_are_started_as_accelerate_starts_those_of_several_gpus(self, tmp_path: Path, use_cpu: bool) -> None:
        one = write(tmp_path, use_cpu=use_cpu)
        two = write(tmp_path, "two.yaml", use_cpu=use_cpu, num_processes=2)
        for arguments in (("--config", two), ("--config", one, "--num_processes", "2")):
            parsed = parse(*arguments)
            assert (parsed.megatrain, parsed.multi_gpu) == (True, True)
            assert os.environ.get("ACCELERATE_USE_CPU") == ("true" if use_cpu else None)
        parsed = parse("--config", two, "--num_processes", "1")
        assert (parsed.megatrain, parsed.multi_gpu) == (True, False)
        assert "ACCELERATE_USE_CPU" not in os.environ

    @pytest.mark.parametrize("use_cpu", [False, True])
    def test_the_type_becomes_one_that_the_world_knows(self, tmp_path: Path, use_cpu: bool) -> None:
        path = write(tmp_path, use_cpu=use_cpu)
        assert parse("--config", path).multi_gpu is False
        assert load_config_from_file(str(path)).distributed_type == DistributedType.NO

    def test_the_number_of_processes_may_be_left_out(self, tmp_path: Path) -> None:
        assert parse("--config", write(tmp_path, drop=("num_processes", "num_machines"))).num_processes == 1


class TestFlags:
    def test_a_flag_is_enough(self) -> None:
        arguments = parse("--megatrain", "--cpu")
        assert exported(prepare_simple_launcher_cmd_env(arguments)[1]) == MegatrainConfig()
        assert arguments.num_processes == 1

    def test_a_flag_starts_one_process_on_a_machine_with_several_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        arguments = parse("--megatrain")
        assert (arguments.num_processes, arguments.multi_gpu) == (1, False)
        assert parse().multi_gpu is True

    def test_settings_on_the_command_line_win(self, refused: Refused, tmp_path: Path) -> None:
        path = write(tmp_path, megatrain_config={"host_threads": 3, "micro_batch_size": 4})
        config = exported(environment("--config", path, "--megatrain_config", '{"host_threads": 5}'))
        assert config == MegatrainConfig(host_threads=5, micro_batch_size=4)
        settings = tmp_path / "settings.yaml"
        settings.write_text("host_threads: 6")
        assert exported(environment("--cpu", "--megatrain-config", settings)).host_threads == 6
        with refused("did you mean 'host_threads'"):
            parse("--megatrain_config", '{"host_thread": 5}')
        settings.write_bytes(b"\xff\xfe")
        with refused("must be a JSON object or a yaml file's path"):
            parse("--megatrain_config", settings)
        path = write(tmp_path, megatrain_config={"placement": {"slots": 3, "kept_layers": 2}})
        config = exported(environment("--config", path, "--megatrain_config", '{"placement": {"slots": 4}}'))
        assert config.placement == PlacementSettings(slots=4, kept_layers=2)

    def test_a_default_config_of_another_kind_is_named(
        self, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(tmp_path, "default.yaml", distributed_type="FSDP")
        for module in ("accelerate.commands.config.config_args", "accelerate.commands.launch"):
            monkeypatch.setattr(sys.modules[module], "default_config_file", str(path))
        with refused(r"default\.yaml has distributed_type: FSDP"):
            parse("--megatrain")

    @pytest.mark.parametrize("flag", ["--use_deepspeed", "--use_fsdp", "--use_megatron_lm", "--tpu"])
    def test_a_contradicting_flag_is_named(self, refused: Refused, flag: str) -> None:
        with refused(flag):
            parse("--megatrain", flag)

    def test_the_flag_after_the_script_is_the_scripts(self) -> None:
        arguments = launch_command_parser().parse_args(["--cpu", "train.py", "--megatrain", "--config", "x"])
        assert arguments.training_script_args == ["--megatrain", "--config", "x"]
        assert not arguments.megatrain
        assert arguments.config_file is None


class TestThreads:
    def test_the_process_gets_the_cpus(self, tmp_path: Path) -> None:
        assert environment("--config", write(tmp_path))["OMP_NUM_THREADS"] == str(usable_cpu_count())

    def test_what_the_user_set_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(tmp_path)
        assert environment("--config", path, "--num_cpu_threads_per_process", "7")["OMP_NUM_THREADS"] == "7"
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        assert environment("--config", path)["OMP_NUM_THREADS"] == "5"


class TestConfigFiles:
    @pytest.mark.parametrize("name", ["megatrain.yaml", "megatrain.json"])
    @pytest.mark.parametrize("keys", [{"megatrain_config": {"host_threads": 3}}, {"megatrain_config": {}}, {}])
    def test_update_keeps_the_section_and_the_type(self, tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
        from accelerate.commands.config.update import update_config

        path = write(tmp_path, name, **keys)
        for _ in range(2):
            update_config(type("Arguments", (), {"config_file": str(path)}))
        content = yaml.safe_load(path.read_text())
        assert content["distributed_type"] == "MEGATRAIN"
        assert content.get("megatrain_config") == keys.get("megatrain_config")
        assert "machine_rank" in content, "the update itself was done"

    def test_other_configs_are_written_as_before(self, tmp_path: Path) -> None:
        config = load_config_from_file(str(write(tmp_path, distributed_type="NO")))
        assert isinstance(config, ClusterConfig)
        assert "megatrain_config" not in config.to_dict()
        assert config.to_dict()["distributed_type"] == "NO"


@pytest.fixture
def training_script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINING_SCRIPT)
    return path


class TestCommands:
    """The ways in which people start it, for real."""

    def check(self, output: str, host_threads: int | None, *arguments: str) -> None:
        seen = json.loads(output.splitlines()[-1])
        assert exported(seen).host_threads == host_threads
        assert seen["arguments"] == list(arguments)
        assert seen["ACCELERATE_USE_CPU"] == "True"
        assert seen["OMP_NUM_THREADS"] == "3"

    def test_accelerate_launch_with_a_yaml_starts_an_active_process(self, tmp_path: Path) -> None:
        path = write(tmp_path, megatrain_config={"host_threads": 3})
        training = tmp_path / "active.py"
        training.write_text(
            "from accelerate import Accelerator\n"
            "from megatrain_accelerate.activation import active_config\n"
            "accelerator = Accelerator()\n"
            "threads = active_config().host_threads\n"
            "print(threads, accelerator.distributed_type, accelerator.device, accelerator.mixed_precision)\n" + TRAINING_SCRIPT
        )
        command = (script("accelerate"), "launch", "--config", path, training, "--lr", "1")
        output = run_command(*command, OMP_NUM_THREADS="3")
        assert output.splitlines()[-2] == "3 DistributedType.NO cpu bf16"
        self.check(output, 3, "--lr", "1")

    def test_dashed_command_with_a_flag(self, training_script: Path) -> None:
        command = (script("accelerate-launch"), "--megatrain", "--cpu", "--num_cpu_threads_per_process", "3")
        self.check(run_command(*command, training_script), None)

    def test_python_m_and_a_module_as_the_script(self, tmp_path: Path, training_script: Path) -> None:
        path = write(tmp_path, megatrain_config={"host_threads": 4})
        command = (sys.executable, "-m", "accelerate.commands.launch", f"--config={path}", "-m", "train", "--config", "x")
        self.check(run_command(*command, cwd=tmp_path, OMP_NUM_THREADS="3"), 4, "--config", "x")

    def test_an_error_ends_the_command(self, tmp_path: Path, training_script: Path) -> None:
        path = write(tmp_path, megatrain_config={"host_threadz": 4})
        output = run_command(script("accelerate"), "launch", "--config", path, training_script, check=False)
        assert "did you mean 'host_threads'" in output.splitlines()[-1]

    @pytest.mark.parametrize(
        ("code", "before", "end"),
        [
            (
                "raise ConfigError('wrong')",
                "megatrain_accelerate.errors.ConfigError: wrong",
                "exit status 1",
            ),
            ("os.kill(os.getpid(), 9)", "begins", "SIGKILL (by the kernel, as a rule, because the host's memory ran out)"),
        ],
    )
    def test_the_launcher_adds_one_line_to_the_error_of_the_training(
        self, tmp_path: Path, code: str, before: str, end: str
    ) -> None:
        path = tmp_path / "failing.py"
        path.write_text(
            f"import os\nfrom megatrain_accelerate.errors import ConfigError\nprint('begins', flush=True)\n{code}\n"
        )
        output = run_command(script("accelerate"), "launch", "--megatrain", "--cpu", path, check=False)
        *earlier, last = output.splitlines()
        assert last.startswith("accelerate launch: the training process ")
        assert last.endswith(end)
        assert earlier[-1] == before

    def test_the_off_switch_leaves_the_stock_launcher(self, training_script: Path) -> None:
        command = (script("accelerate-launch"), "--megatrain", training_script)
        assert "--megatrain" in run_command(*command, check=False, MEGATRAIN_DISABLE="1")
