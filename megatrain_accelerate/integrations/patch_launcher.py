"""The patches of accelerate's launcher: its options and the section of its yaml; what they mean is in :mod:`.launcher`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatrain_accelerate.errors import MegatrainError
from megatrain_accelerate.integrations import launcher
from megatrain_accelerate.integrations.wrapping import add_fields, find_class, wrap_always

_FLAG_HELP = "Train with megatrain_accelerate: weights and optimizer states live in host memory and stream through one GPU."
_CONFIG_HELP = (
    "Settings of megatrain_accelerate: a JSON object or a yaml file, in place of keys of the section megatrain_config."
)


def patch_add_argument(module: ModuleType) -> None:
    """Adds the alias and the flags where the launcher adds its own."""

    def add_argument(original: Callable[..., Any], parser: Any, *names: str, **options: Any) -> Any:
        if "--config_file" in names and "--config" not in parser._option_string_actions:
            names = (*names, "--config")
            options.setdefault("dest", "config_file")
        if names == ("training_script",):
            original(parser, "--megatrain", default=None, action="store_true", help=_FLAG_HELP)
            original(parser, "--megatrain_config", default=None, help=_CONFIG_HELP)
        return original(parser, *names, **options)

    wrap_always(find_class(module, "CustomArgumentParser"), "add_argument", add_argument, needs=("self", "args", "kwargs"))


def patch_parse_args(module: ModuleType) -> None:
    """Reads the settings as soon as the command is parsed. What is wrong with them ends it as argparse's own errors do."""

    def parse_args(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = original(parser, *args, **kwargs)
        if hasattr(arguments, "training_script"):
            try:
                launcher.prepare_launch(arguments)
            except MegatrainError as error:
                parser.error(str(error))
        return arguments

    wrap_always(find_class(module, "CustomArgumentParser"), "parse_args", parse_args)


def patch_cluster_config(module: ModuleType) -> None:
    """Gives accelerate's config a field for our section."""
    add_fields(
        find_class(module, "ClusterConfig"),
        {"megatrain_config": (launcher.YamlSection | None, dataclasses.field(default=None))},
    )


def patch_process_config(module: ModuleType) -> None:
    """Reads our section and translates our type."""

    def process_config(original: Callable[..., dict[str, Any]], config_dict: dict[str, Any]) -> dict[str, Any]:
        return original(launcher.read_config(config_dict))

    wrap_always(find_class(module, "BaseConfig"), "process_config", process_config, needs=("config_dict",))


def patch_to_dict(module: ModuleType) -> None:
    """Writes our section and our type back."""

    def to_dict(original: Callable[..., dict[str, Any]], config: Any) -> dict[str, Any]:
        result = original(config)
        section = getattr(config, "megatrain_config", None)
        if section is not None:
            section.write_to(result)
        return result

    wrap_always(find_class(module, "BaseConfig"), "to_dict", to_dict)
