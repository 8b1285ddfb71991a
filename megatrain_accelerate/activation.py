"""Whether the plugin is on in this process, and with which settings. Standard library only; imported at start-up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain_accelerate.config import MegatrainConfig

ENV_ACTIVE = "MEGATRAIN_ACTIVE"
"""Set to 1 by the launcher in the environment of the training processes."""
ENV_CONFIG = "MEGATRAIN_CONFIG"
"""The settings as JSON, set by the launcher beside :data:`ENV_ACTIVE`."""
ENV_DISABLE = "MEGATRAIN_DISABLE"
"""A user's off switch: if it is 1, nothing is hooked and nothing is activated."""

_active_config: MegatrainConfig | None = None
_base_config: MegatrainConfig | None = None
"""The settings of the launcher or ``enable()``. Training arguments are laid over them."""
_is_switched_off = False
"""Whether ``disable()`` was called since the plugin was last on."""


def is_disabled() -> bool:
    return os.environ.get(ENV_DISABLE, "").lower() in ("1", "true", "yes")


def activate(
    settings: MegatrainConfig | Mapping[str, Any] | str | None = None, arguments: Mapping[str, Any] | None = None
) -> MegatrainConfig:
    """Switches the plugin on for this process and returns the settings in force. ``settings`` replace all earlier ones.
    ``arguments``, the settings in a Trainer's training arguments, are laid over those of the launcher or ``enable()`` instead.
    Raises ``ConfigError`` if a setting is wrong, or the off switch is set."""
    from megatrain_accelerate.config import MegatrainConfig
    from megatrain_accelerate.errors import ConfigError

    global _active_config, _base_config, _is_switched_off
    if is_disabled():
        raise ConfigError(f"megatrain_accelerate was asked for but {ENV_DISABLE} is set; unset it to train with the plugin")
    if arguments is not None:
        active_config()  # The launcher's settings may not have been read yet.
        _active_config = MegatrainConfig.from_mapping(_base_config, arguments)
    else:
        given = read_settings(settings) if isinstance(settings, str) else settings
        _active_config = _base_config = MegatrainConfig.from_mapping(given)
    _is_switched_off = False
    return _active_config


def is_on_for(arguments: Any) -> bool:
    """Whether the plugin is on for a Trainer with these training arguments, or with None for code without a Trainer. The
    launcher and ``enable()`` switch it on for all Trainers, training arguments only for the Trainers that get them."""
    is_on = active_config() is not None
    return is_on and (arguments is None or _base_config is not None or bool(getattr(arguments, "megatrain", False)))


def config_for(arguments: Any) -> MegatrainConfig:
    """The settings of a Trainer for which the plugin is on; with None, those of code without a Trainer."""
    from megatrain_accelerate.config import MegatrainConfig

    config = active_config()
    assert config is not None, "called without an active plugin"
    if arguments is None:
        return config
    return MegatrainConfig.from_mapping(_base_config, read_settings(getattr(arguments, "megatrain_config", None)))


def read_settings(source: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Reads settings that a person gave: a mapping, a JSON object, or the path of a yaml or JSON file. The file has the keys
    of ``megatrain_config``, or is an accelerate config with that section. Keys and values aren't checked here. Raises
    ``ConfigError`` if the file can't be read, or its content isn't a mapping."""
    from megatrain_accelerate.config import require_mapping
    from megatrain_accelerate.errors import ConfigError

    if source is None or isinstance(source, Mapping):
        return source or {}
    import yaml  # type: ignore[import-untyped]

    is_file = not source.lstrip().startswith("{")
    try:  # JSON is yaml
        content = yaml.safe_load(Path(os.path.expanduser(source)).read_text(encoding="utf-8") if is_file else source)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"megatrain_config must be a JSON object or a yaml file's path; got {source!r}: {error}") from error
    if is_file and isinstance(content, Mapping) and "megatrain_config" in content:
        content = content["megatrain_config"]
    return require_mapping(content, f"megatrain_config of {source!r}")


def deactivate() -> None:
    """Switches the plugin off for models prepared from now on. Prepared models keep streaming."""
    global _active_config, _base_config, _is_switched_off
    _active_config = _base_config = None
    _is_switched_off = True
    os.environ.pop(ENV_ACTIVE, None)
    os.environ.pop(ENV_CONFIG, None)


def is_switched_off() -> bool:
    """Whether ``disable()`` was called since the plugin was last on."""
    return _is_switched_off


def active_config() -> MegatrainConfig | None:
    """The settings of this process, or None if the plugin is off. Raises ``ConfigError`` if the launcher's are malformed."""
    if _active_config is not None:
        return _active_config
    if is_disabled() or os.environ.get(ENV_ACTIVE) != "1":
        return None
    return activate(os.environ.get(ENV_CONFIG) or None)
