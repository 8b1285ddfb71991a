"""Protocols: what the ways of weights and gradients see of a model's parts, whose classes stand in upper folders."""

from __future__ import annotations

from typing import Protocol

from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.unit import HostUnit, UnitRange
from megatrain_accelerate.transfer.meter import UpdateGate


class Fetched(Protocol):
    """What is fetched into a slot as a whole: a layer, or a part of its experts. ``index``: of all that share the slots."""

    index: int
    name: str
    gate: UpdateGate

    @property
    def unit(self) -> HostUnit | UnitRange: ...

    def refresh_if_written(self) -> None:
        """Takes over weights that somebody wrote to the parameters since they were last seen."""


class Stepped(Protocol):
    """What has a unit of its own: a layer, all experts of one that stream in parts, or a resident group."""

    name: str
    gate: UpdateGate

    @property
    def unit(self) -> HostUnit: ...


class Streamed(Stepped, Fetched, Protocol):
    """A layer, or all experts of one that stream in parts: what brings its gradients through slots. All experts together have
    their layer's index and aren't fetched as a whole."""

    kind: str
    """In messages, before the name."""
    trainable: list[ParameterState]
    """The parameters that were trained when the model was prepared, in entry order."""
