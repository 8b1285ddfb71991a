"""What a model family is to the tests that compare it with plain PyTorch, and to the table in ``docs/models.md``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table: a small model of a family, what it is fed, and how near plain PyTorch it must come."""

    name: str
    """Short and unique: the test's id."""

    title: str
    """The family as the table names it."""

    build: Callable[[], nn.Module]
    """A randomly initialised model, fp32, on the CPU, in train mode; the same weights at each call."""

    batch: Callable[[int], dict[str, torch.Tensor]]
    """Keyword arguments of the model's forward for a seed, with whatever it needs to return a ``loss``."""

    kind: str = "decoder"
    """Section of the table."""

    notes: str = ""
    """What is special about it, for the table: windows, experts, ties, dropout. A phrase without a full stop."""

    tolerance: Mapping[torch.dtype, float] = dataclasses.field(default_factory=dict)
    """By compute dtype, the largest difference of an element, relative to the largest element of its tensor (1 at least). A
    dtype that isn't here must be equal bit for bit. Say in the notes why."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the plugin that the family needs."""

    refusal: str | None = None
    """A regular expression for the error with which ``prepare`` refuses the family; None for one that trains."""
