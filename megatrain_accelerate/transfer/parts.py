"""Protocols by which this folder sees what is fetched and stepped. The classes are in folders that it may not import."""

from __future__ import annotations

from typing import Protocol

from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.unit import HostUnit, UnitRange
from megatrain_accelerate.transfer.meter import UpdateGate


class Fetched(Protocol):
    """What is fetched into a slot as a whole: a layer, or a part of its experts. ``index`` numbers all that share slots."""

    index: int
    name: str
    gate: UpdateGate

    @property
    def unit(self) -> HostUnit | UnitRange: ...

    def refresh_if_written(self) -> None:
        """Takes over weights that somebody has written to the parameters."""


class Stepped(Protocol):
    """What owns a unit: a layer, all experts of a layer that stream in parts, or a resident group."""

    name: str
    gate: UpdateGate

    @property
    def unit(self) -> HostUnit: ...


class Streamed(Stepped, Fetched, Protocol):
    """What sends its gradients through slots: a layer, or all experts of a layer that stream in parts. These have their
    layer's index, and aren't fetched as a whole."""

    kind: str
    """What messages call it, before the name."""
    trainable: list[ParameterState]
    """The parameters that were trained when the model was prepared, in entry order."""
