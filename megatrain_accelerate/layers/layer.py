"""Streamed layers: modules of the user's model whose weights live in a host unit, and their experts that stream in parts.

A part is a range of the experts' parameters (experts, ...) that is fetched, computed and released on its own.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.layers.execution_state import WrittenBuffers
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs
from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.layers.shared_mappings import run_with_mappings
from megatrain_accelerate.layers.token_tiles import TokenTiles
from megatrain_accelerate.layers.unpadded_layer import SampleAttention, UnpaddedLayer
from megatrain_accelerate.layers.watched_parameters import unwatched
from megatrain_accelerate.store.layout import ExpertRange, expert_ranges
from megatrain_accelerate.store.parameter import written_among
from megatrain_accelerate.store.unit import HostUnit, UnitRange
from megatrain_accelerate.transfer.meter import UpdateGate


class StreamedLayer:
    """A layer of the model: its module, the host unit with its parameters, and how weights are bound to it. ``index`` is its
    position among the model's layers, in discovery order."""

    kind = "layer"

    def __init__(self, index: int, name: str, module: nn.Module, unit: HostUnit) -> None:
        self.index, self.name = index, name
        self.module, self.unit = module, unit
        self.forward: Callable[..., Any] = module.forward
        """The module's own forward, before a proxy replaces it."""
        self.gate = UpdateGate()
        self.tiles = TokenTiles.of_layer(module)
        self.unpadded = UnpaddedLayer(module)
        self.buffers = WrittenBuffers(module)
        self.trainable = [state for state in unit.states if state.entry.spec.trainable]
        self.trainable_places = [place for place, state in enumerate(unit.states) if state.entry.spec.trainable]
        self.has_trainable = bool(self.trainable)
        self._may_train = [(state.entry.spec.trainable, state.parameter) for state in unit.states]
        self._frozen = [state for state in unit.states if not state.entry.spec.trainable]
        self.experts: tuple[StreamedExperts, ...] = ()
        """Experts of the layer that stream in parts, with units of their own; see :meth:`leave_to`."""
        position = {id(state.parameter): place for place, state in enumerate(unit.states)}
        self._known = set(position)
        self._seen: tuple[list[dict[str, Any]], list[Any], list[torch.Tensor]] = [], [], []
        """The modules' tables of parameters and children, their contents at the last check, and which of these no unit has."""
        self.times_bound = 0
        """How many bindings of weights to it are open: a user's checkpoint runs the layer again within its backward."""
        self.bindings: list[tuple[dict[str, nn.Parameter | None], dict[str, torch.Tensor | None], str, int]] = [
            (owner._parameters, owner._buffers, attribute, position[id(parameter)])
            for owner in module.modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) in position
        ]
        """Where in the module each weight is: its owner's parameters and buffers, the attribute, the index in the unit."""
        self._adopted = [parameters[attribute] for parameters, _, attribute, _ in self.bindings]
        self._handles = [state.handle for state in unit.states]

    def release(self) -> None:
        """Drops the states of the parameters, whose memory in the unit has been given back."""
        for places in (self.trainable, self._handles, self._may_train, self._frozen):
            places.clear()

    def leave_to(self, experts: StreamedExperts) -> None:
        """Leaves the layer's parameters that aren't in its unit to these experts, whose unit has them."""
        self.experts = (*self.experts, experts)
        self.has_trainable |= experts.has_trainable
        self._known |= {id(state.parameter) for state in experts.unit.states}
        self._seen = [], [], []

    def trained_now(self) -> list[bool]:
        """Says which weights of the unit are trained, in entry order: scripts freeze and unfreeze them at any time."""
        with unwatched():
            return [may_train and parameter.requires_grad for may_train, parameter in self._may_train]

    @property
    def parameter_count(self) -> int:
        """Number of the layer's parameters, including those of its experts."""
        return sum(part.unit.layout.parameter_count for part in (self, *self.experts))

    def run(self, args: Args, kwargs: Kwargs, row: RealTokens | None = None) -> Any:
        """Calls the layer's own forward with the bound weights (:func:`run_with_mappings`), on batches or ``row``'s tokens."""
        if row is None and not self.tiles.tile_tokens:  # checked first, since most calls end here
            return run_with_mappings(self.forward, args, kwargs)
        with self.tiles.at_work(args, kwargs), contextlib.nullcontext() if row is None else SampleAttention(row):
            return run_with_mappings(self.forward, args, kwargs)

    def show_host_weights(self) -> None:
        """Makes the store's weights the data of the parameters."""
        for state in self.unit.states:
            state.handle.show(state.weight)

    def own_parameters(self) -> list[nn.Parameter | None]:
        """Returns what the module has under its parameters' names, in the order of :attr:`bindings`. A StateError if one isn't
        the parameter that was adopted."""
        found = [parameters.get(attribute) for parameters, _, attribute, _ in self.bindings]
        if not self.times_bound and any(map(operator.is_not, found, self._adopted)):
            pairs = zip(self.bindings, found, self._adopted, strict=True)
            replaced, name = next((at[0], at[2]) for at, there, adopted in pairs if there is not adopted)
            owner = next(module for module in self.module.modules() if module._parameters is replaced)
            raise StateError(
                f"parameter {name!r} of {type(owner).__name__} in layer {self.name} was replaced after the "
                "model was prepared; change the model (adapters, heads, tokens) before accelerator.prepare()"
            )
        return found

    def refuse_unfrozen(self) -> None:
        """Raises a StateError for a trained parameter that was frozen, or wasn't there, when the model was prepared."""
        if self.times_bound or not ((unknown := self._unknown_parameters()) or self._frozen or self.experts):
            return
        with unwatched():
            if any(parameter.requires_grad for parameter in unknown):
                named = self.module.named_parameters()
                added = next(name for name, p in named if p.requires_grad and id(p) not in self._known)
                raise StateError(
                    f"parameter {self.name}.{added} was added or replaced after the model was prepared and has no gradient "
                    "buffer; change the model (adapters, heads, tokens) before accelerator.prepare(), or prepare it anew"
                )
            for experts in self.experts:
                experts.refuse_unfrozen()
            for state in self._frozen:
                if state.parameter.requires_grad:
                    raise StateError(
                        f"parameter {self.name}.{state.name} was unfrozen after the model was prepared and has no gradient "
                        "buffer; call the prepared model itself (which prepares it again) and not a part of it, or prepare it "
                        "again"
                    )

    def _unknown_parameters(self) -> list[torch.Tensor]:
        """Returns the parameters below the module that weren't adopted with it. Each forward asks, and ``parameters()`` is
        slow, so modules are searched again only if one of them holds something else."""
        tables, before, unknown = self._seen
        held = [*itertools.chain.from_iterable(map(dict.values, tables))]
        if not held or len(held) != len(before) or any(map(operator.is_not, held, before)):
            tables = [table for module in self.module.modules() for table in (module._parameters, module._modules)]
            held = [*itertools.chain.from_iterable(map(dict.values, tables))]
            unknown = [at for at in held if isinstance(at, torch.Tensor) and id(at) not in self._known]
            self._seen = tables, held, unknown
        return unknown

    def require_version(self, version: int | None) -> None:
        """Raises a StateError unless the unit still has the version that a backward's forward saw."""
        if self.unit.version != version:
            raise StateError(
                f"the weights of {self.kind} {self.name} changed between forward and backward. Causes: optimizer.step(), a "
                "write to weights, accelerator.prepare(), or a step that an earlier backward through the same graph took. Run "
                "backward before that. For a second backward set megatrain_config.step_schedule to 'deferred' (and "
                "host_gradients to 'kept')"
            )

    def refresh_if_written(self) -> None:
        """Takes over weights that somebody wrote to the parameters since the last check (``load_state_dict``)."""
        with unwatched():
            written = written_among(self._handles)
        if written:
            self.gate.wait()
            for state in [self.unit.states[place] for place in written]:
                self.unit.write_master(state, state.parameter.detach())
                state.handle.show(state.weight)
            self.unit.version += 1


class bound:
    """While the body runs, a layer's module computes with ``weights`` (in entry order) instead of its parameters. A StateError
    if one of these isn't the one that was adopted. A class, since a generator takes several times as long."""

    def __init__(self, layer: StreamedLayer, weights: Sequence[torch.Tensor]) -> None:
        self._layer, self._weights = layer, weights

    def __enter__(self) -> None:
        layer, weights, self._weights = self._layer, self._weights, ()
        self._before = layer.own_parameters()
        layer.times_bound += 1
        for parameters, _, attribute, position in layer.bindings:
            parameters[attribute] = weights[position]  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        layer = self._layer
        layer.times_bound -= 1
        for (parameters, buffers, attribute, _), earlier in zip(layer.bindings, self._before, strict=True):
            # A parametrization that lasts for a call (PEFT's target_parameters) puts a weight that is no Parameter back as
            # a buffer. That would hold the slot's memory, and be in the way of the next weight.
            if attribute not in parameters:
                buffers.pop(attribute, None)
            parameters[attribute] = earlier


class StreamedExperts(StreamedLayer):
    """All experts of a layer, with its ``index``, in parts of which the first has the index ``first_part``."""

    kind = "experts"

    def __init__(self, index: int, name: str, module: nn.Module, unit: HostUnit, *, parts: int, first_part: int) -> None:
        super().__init__(index, name, module, unit)
        self.count = int(module.num_experts)  # type: ignore[arg-type]
        ranges = expert_ranges(self.count, parts)
        self.parts = [ExpertPart(place, first_part + place, self, experts) for place, experts in enumerate(ranges)]
        self.gate = UpdateGate([part.gate for part in self.parts])
        self._begins: dict[torch.device, torch.Tensor] = {}

    def begins(self, device: torch.device) -> torch.Tensor:
        """Returns int64 numbers on the device: the first expert of each part, and ``count``."""
        if device not in self._begins:
            numbers = [part.experts.first for part in self.parts] + [self.count]
            self._begins[device] = torch.tensor(numbers, device=device)
        return self._begins[device]


class ExpertPart:
    """A range of a layer's experts, which streams alone: number ``place`` in the layer, ``index`` in the model's forward."""

    def __init__(self, place: int, index: int, owner: StreamedExperts, experts: ExpertRange) -> None:
        self.place, self.index = place, index
        self.owner, self.experts = owner, experts
        self.name = f"{owner.name}[{experts.first}:{experts.last}]"
        self.unit = UnitRange(owner.unit, experts)
        self.gate = UpdateGate()

    def refresh_if_written(self) -> None:
        self.owner.refresh_if_written()
