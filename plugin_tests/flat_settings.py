"""Settings in one row, as tests write them: those of the placement stand among the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatrain_accelerate.config import PlacementSettings

_OF_PLACEMENT = {field.name for field in dataclasses.fields(PlacementSettings)}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a user writes them, with those of the placement in their section."""
    placement = {key: value for key, value in settings.items() if key in _OF_PLACEMENT}
    others = {key: value for key, value in settings.items() if key not in _OF_PLACEMENT}
    return others | ({"placement": placement} if placement else {})
