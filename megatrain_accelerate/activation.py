"""Whether the plugin is on in this process, and with which settings. Standard library only; imported at start-up."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatrain_accelerate.config import MegatrainConfig

ENV_ACTIVE = "MEGATRAIN_ACTIVE"
"""Set to 1 by the launcher in the environment of the training processes."""
ENV_CONFIG = "MEGATRAIN_CONFIG"
"""The settings as JSON, set by the launcher beside :data:`ENV_ACTIVE`."""
ENV_DISABLE = "MEGATRAIN_DISABLE"
"""A user's off switch: with 1 nothing is hooked and nothing is activated."""

_active_config: MegatrainConfig | None = None


def is_disabled() -> bool:
    """Whether the user's off switch is set."""
    return os.environ.get(ENV_DISABLE, "").lower() in ("1", "true", "yes")


def activate(settings: MegatrainConfig | Mapping[str, Any] | None = None) -> MegatrainConfig:
    """Switches the plugin on for this process. A second call replaces the settings.

    Raises:
        ConfigError: an unknown key or a value out of range, or the off switch is set.
    """
    from megatrain_accelerate.config import MegatrainConfig
    from megatrain_accelerate.errors import ConfigError

    global _active_config
    if is_disabled():
        raise ConfigError(f"megatrain_accelerate was asked for but {ENV_DISABLE} is set; unset it to train with the plugin")
    _active_config = settings if isinstance(settings, MegatrainConfig) else MegatrainConfig.from_mapping(settings)
    return _active_config


def deactivate() -> None:
    """Switches the plugin off for models prepared from now on; prepared ones keep streaming."""
    global _active_config
    _active_config = None
    os.environ.pop(ENV_ACTIVE, None)
    os.environ.pop(ENV_CONFIG, None)


def active_config() -> MegatrainConfig | None:
    """The settings of this process, or None where the plugin is off.

    Raises:
        ConfigError: the launcher's settings are malformed.
    """
    if _active_config is not None:
        return _active_config
    if is_disabled() or os.environ.get(ENV_ACTIVE) != "1":
        return None
    from megatrain_accelerate.config import MegatrainConfig

    text = os.environ.get(ENV_CONFIG)
    return activate(MegatrainConfig.from_json(text) if text else None)
