"""What the installed versions can do, for tests that also run with the oldest supported ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib.metadata import version

import pytest
from packaging.version import Version
from torch import nn

OLD_CHECKPOINTING_NAMES = "ignore:.gradient_checkpointing:FutureWarning"
"""A filter of warnings: transformers renamed ``gradient_checkpointing*`` to ``activation_checkpointing*`` in 5.23."""


def older(package: str, limit: str) -> bool:
    """Whether the installed package is older than the version ``limit``."""
    return Version(version(package)) < Version(limit)


def require_arguments(names: Iterable[str]) -> None:
    """Skips the test if the installed TrainingArguments have no such fields."""
    from transformers import TrainingArguments

    unknown = set(names) - {field.name for field in dataclasses.fields(TrainingArguments)}
    if unknown:
        pytest.skip(f"transformers {version('transformers')} has no {', '.join(sorted(unknown))}")


def enable_checkpointing(model: nn.Module) -> None:
    """Switches a transformers model's activation checkpointing on, by the name that the installed version has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
