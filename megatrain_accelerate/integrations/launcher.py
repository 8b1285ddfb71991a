"""The plugin's part of ``accelerate launch``: reads the yaml and the flags, checks them, sets the environment."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from megatrain_accelerate.activation import ENV_ACTIVE, ENV_CONFIG, read_settings
from megatrain_accelerate.config import MegatrainConfig, nearest, require_mapping, usable_cpu_count
from megatrain_accelerate.errors import ConfigError, MegatrainError, UnsupportedError
from megatrain_accelerate.integrations.training_arguments import CONFIG_HELP, FLAG_HELP, require_precision
from megatrain_accelerate.integrations.wrapping import require_patches

TYPE = "MEGATRAIN"
SECTION = "megatrain_config"

_exported: dict[str, str] = {}
"""Environment variables that this launcher set. A later launch in the same process starts without them."""


class YamlSection(NamedTuple):
    """What an accelerate config says about us. Not a dict, which Accelerate would spread over its arguments."""

    settings: dict[str, Any] | None
    """The section's content as written, or None where there is none."""
    typed: bool
    """Whether ``distributed_type`` is MEGATRAIN."""


FIELDS = {SECTION: (YamlSection | None, dataclasses.field(default=None))}
"""Fields for accelerate's ``ClusterConfig``."""


def _section_of(config_dict: Mapping[str, Any]) -> YamlSection | None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.utils import DistributedType

    kind = str(config_dict.get("distributed_type", "")).upper()
    kinds = {TYPE, *(member.value for member in DistributedType)}
    if kind not in kinds and nearest(kind, kinds) == TYPE:
        raise ConfigError(f"distributed_type: {config_dict['distributed_type']} is unknown; did you mean {TYPE!r}?")
    keys = {SECTION, *(field.name for config in (ClusterConfig, SageMakerConfig) for field in dataclasses.fields(config))}
    for key in config_dict:
        if key not in keys and nearest(str(key).lower(), keys) == SECTION:
            raise ConfigError(f"an accelerate config has no key {key!r}; did you mean {SECTION!r}?")
    typed = kind == TYPE
    if SECTION not in config_dict:
        return YamlSection(None, typed) if typed else None
    settings = require_mapping(config_dict[SECTION], SECTION)
    MegatrainConfig.from_mapping(settings)
    return YamlSection(dict(settings), typed)


def process_config(original: Callable[..., dict[str, Any]], config_dict: dict[str, Any]) -> dict[str, Any]:
    """Translates a loaded accelerate config into one that stock accelerate accepts, with a :class:`YamlSection`. Raises
    ``ConfigError`` if the section has an unknown key or a value out of range, or its name or the type is misspelt."""
    if (section := _section_of(config_dict)) is not None:
        config_dict = {**config_dict, SECTION: section}
        if section.typed or "distributed_type" not in config_dict:
            config_dict.setdefault("num_processes", 1)
            # Accelerate must see a type that it knows: with one of our own, gather() returns the local tensor only.
            config_dict["distributed_type"] = "NO"
    return original(config_dict)


def to_dict(original: Callable[..., dict[str, Any]], config: Any) -> dict[str, Any]:
    """Puts the section and the type back into what accelerate writes to a file."""
    result = original(config)
    if (section := getattr(config, SECTION, None)) is not None:
        result.pop(SECTION, None)
        if section.settings is not None:
            result[SECTION] = dict(section.settings)
        if section.typed:
            result["distributed_type"] = TYPE
    return result


def add_argument(original: Callable[..., Any], parser: Any, *names: str, **options: Any) -> Any:
    """Adds ``--config``, ``--megatrain`` and ``--megatrain_config`` where the launcher adds its own options."""
    if "--config_file" in names and "--config" not in parser._option_string_actions:
        names = (*names, "--config")
        options.setdefault("dest", "config_file")
    if names == ("training_script",):
        original(parser, "--megatrain", default=None, action="store_true", help=FLAG_HELP)
        original(parser, "--megatrain_config", default=None, help=CONFIG_HELP)
    return original(parser, *names, **options)


def parse_args(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads the settings right after the command line is parsed, and reports errors in them as argparse does its own."""
    arguments = original(parser, *args, **kwargs)
    if hasattr(arguments, "training_script"):
        try:
            _prepare_launch(arguments)
        except MegatrainError as error:
            parser.error(str(error))
    return arguments


def _prepare_launch(arguments: Any) -> None:
    """Checks the settings before anything is started, and exports them to the training processes."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    withdraw_exports()
    file = arguments.config_file  # which accelerate is going to read
    if file is None and not arguments.cpu and os.path.isfile(default_config_file):
        file = default_config_file
    written = load_config_from_file(file) if file is not None else None
    section = getattr(written, SECTION, None)
    flag_settings = getattr(arguments, SECTION, None)
    if section is None and not arguments.megatrain and flag_settings is None:
        return
    require_patches()
    config = MegatrainConfig.from_mapping(getattr(section, "settings", None), read_settings(flag_settings))
    _refuse_unsupported(arguments, written, file)
    sys.excepthook = _report
    # Accelerate copies sections of the yaml over arguments that are None.
    arguments.megatrain = True
    if arguments.num_processes is None and written is None and not arguments.multi_gpu:
        arguments.num_processes = 1  # Accelerate would start a process for each GPU.
    _exported.update({ENV_ACTIVE: "1", ENV_CONFIG: json.dumps(dataclasses.asdict(config))})
    processes = _count(arguments, written, "num_processes")
    if processes > 1:
        # Accelerate starts several processes only if it believes that there are several GPUs.
        if arguments.cpu or getattr(arguments, "use_cpu", False) or getattr(written, "use_cpu", False):
            _exported["ACCELERATE_USE_CPU"] = "true"
            arguments.cpu = False
        arguments.multi_gpu = True
    if "OMP_NUM_THREADS" not in os.environ and arguments.num_cpu_threads_per_process is None:
        # Accelerate would export 1, with which the host's work takes far too long.
        _exported["OMP_NUM_THREADS"] = str(max(1, usable_cpu_count() // processes))
    os.environ.update(_exported)


def withdraw_exports() -> None:
    """Removes from the environment what was set for the training process."""
    for name, value in _exported.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _exported.clear()


def _refuse_unsupported(arguments: Any, written: Any, file: str | None) -> None:
    for name in ("use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu"):
        if getattr(arguments, name, False):
            raise ConfigError(f"--{name} and megatrain both decide where the model lives; remove one of the two")
    # yaml reads an unquoted NO as false.
    kind = getattr(getattr(written, "distributed_type", None), "value", "NO")
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise ConfigError(
            f"megatrain was asked for, but {file} has distributed_type: {kind}, and both decide where the model lives. "
            f"Set distributed_type: {TYPE} there, or give another file with --config"
        )
    for name, size in (getattr(written, "parallelism_config", None) or {}).items():
        if name.endswith("_size") and size not in (None, 1):
            raise ConfigError(f"{file} has {name}: {size}, and megatrain divides data among GPUs only; remove the section")
    require_precision(str(arguments.mixed_precision or getattr(written, "mixed_precision", None) or "no").lower())
    machines = _count(arguments, written, "num_machines")
    if machines > 1:
        raise UnsupportedError(f"num_machines is {machines}, and megatrain trains on one machine: set num_machines: 1")


def _count(arguments: Any, written: Any, name: str) -> int:
    """A number from the command line, else from the yaml, else 1."""
    given = getattr(arguments, name)
    count = getattr(written, name, None) if given is None else given
    return count if isinstance(count, int) else 1


def _report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """The launcher's ``sys.excepthook``: one line, so that the training process's own last words stay in sight."""
    if not isinstance(error, subprocess.CalledProcessError):
        sys.__excepthook__(kind, error, traceback)
    elif error.returncode < 0:
        name = signal.Signals(-error.returncode).name
        hint = " (by the kernel, as a rule, because the host's memory ran out)" if name == "SIGKILL" else ""
        print(f"accelerate launch: the training process was ended by {name}{hint}", file=sys.stderr)
    else:
        print(f"accelerate launch: the training process ended with exit status {error.returncode}", file=sys.stderr)
