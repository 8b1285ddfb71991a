"""What the ways of weights and gradients see of the parts of a model, which upper files make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatrain_accelerate.memory.host_store import HostUnit, UnitRange
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.streaming.meter import UpdateGate


class Fetched(Protocol):
    """What is fetched into a slot as a whole: a layer, or a part of its experts."""

    @property
    def index(self) -> int:
        """Its place among all that share the slots."""

    @property
    def name(self) -> str:
        """In messages and profiles."""

    @property
    def unit(self) -> HostUnit | UnitRange:
        """The home of its weights."""

    @property
    def gate(self) -> UpdateGate:
        """Closed while a step changes the weights."""

    def refresh_if_written(self) -> None:
        """Takes over weights that somebody wrote to the parameters since they were last seen."""


class Stepped(Protocol):
    """What has a unit of its own: a layer, all experts of one that stream in parts, or a resident group."""

    @property
    def name(self) -> str:
        """In messages and profiles."""

    @property
    def unit(self) -> HostUnit:
        """The home of its weights, states and gradients."""

    @property
    def gate(self) -> UpdateGate:
        """Closed while a step reads the gradients and changes the weights."""

    def allocate_gradient_residuals(self) -> None:
        """Makes what fp32 sums of its gradients take, wherever they lie."""


class Streamed(Stepped, Fetched, Protocol):
    """A layer, or all experts of one that stream in parts: what brings its gradients through slots."""

    @property
    def kind(self) -> str:
        """In messages, before the name."""

    @property
    def trainable(self) -> Sequence[ParameterState]:
        """The parameters that were trained when the model was prepared, in entry order."""
