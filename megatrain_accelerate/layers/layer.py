"""A streamed layer: a module of the user's model whose weights live in a host unit; and experts of it that stream in parts.

A part is a range of the experts' parameters (experts, ...), which is fetched, computed and given back for itself.
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
from megatrain_accelerate.layers.shared_mappings import has_mappings, run_with_mappings
from megatrain_accelerate.layers.token_tiles import TokenTiles
from megatrain_accelerate.layers.unpadded_layer import SampleAttention, UnpaddedLayer
from megatrain_accelerate.layers.watched_parameters import unwatched
from megatrain_accelerate.store.layout import ExpertRange, expert_ranges
from megatrain_accelerate.store.parameter import written_among
from megatrain_accelerate.store.unit import HostUnit, UnitRange
from megatrain_accelerate.transfer.meter import UpdateGate


class StreamedLayer:
    """A layer (streaming unit) of the model: its module, the host unit of its parameters, and how weights are bound to it.
    ``index`` is its position among the model's layers, in discovery order."""

    kind = "layer"

    def __init__(self, index: int, name: str, module: nn.Module, unit: HostUnit) -> None:
        self.index, self.name = index, name
        self.module, self.unit = module, unit
        self.forward: Callable[..., Any] = module.forward
        """The module's own, before a proxy takes its place."""
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
        """What of the layer streams in parts, with units of its own; see :meth:`leave_to`."""
        position = {id(state.parameter): place for place, state in enumerate(unit.states)}
        self._known = set(position)
        self._seen: tuple[list[dict[str, Any]], list[Any], list[torch.Tensor]] = [], [], []
        """The modules' tables of parameters and children, what was in them, and what of that isn't in a unit."""
        self.times_bound = 0
        """How often weights are bound to it now: a checkpoint of the user's runs it again within its backward."""
        self.bindings: list[tuple[dict[str, nn.Parameter | None], dict[str, torch.Tensor | None], str, int]] = [
            (owner._parameters, owner._buffers, attribute, position[id(parameter)])
            for owner in module.modules()
            for attribute, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) in position
        ]
        """Where in the module each weight stands: its owner's parameters and buffers, the attribute, the place in the unit."""
        self._adopted = [parameters[attribute] for parameters, _, attribute, _ in self.bindings]
        self._handles = [state.handle for state in unit.states]

    def release(self) -> None:
        """Forgets the parameters' places in the unit's memory, which has been given back."""
        for places in (self.trainable, self._handles, self._may_train, self._frozen):
            places.clear()

    def leave_to(self, experts: StreamedExperts) -> None:
        """Parameters of the layer that aren't in its unit are in that of these experts."""
        self.experts = (*self.experts, experts)
        self.has_trainable |= experts.has_trainable
        self._known |= {id(state.parameter) for state in experts.unit.states}
        self._seen = [], [], []

    def trained_now(self) -> list[bool]:
        """Which weights of its unit are trained, in entry order: scripts freeze and unfreeze them at any time."""
        with unwatched():
            return [may_train and parameter.requires_grad for may_train, parameter in self._may_train]

    @property
    def parameter_count(self) -> int:
        """Parameters of the layer, those of its experts among them."""
        return sum(part.unit.layout.parameter_count for part in (self, *self.experts))

    def run(self, args: Args, kwargs: Kwargs, row: RealTokens | None = None) -> Any:
        """Calls the layer's own forward with the weights that are bound to it; see :func:`run_with_mappings`. The arguments
        are batches, or the tokens of ``row``."""
        if row is None and not (self.tiles.tile_tokens or has_mappings(args, kwargs)):
            return self.forward(*args, **kwargs)  # asked first: most calls of a layer end here
        with self.tiles.at_work(args, kwargs), contextlib.nullcontext() if row is None else SampleAttention(row):
            return run_with_mappings(self.forward, args, kwargs)

    def show_host_weights(self) -> None:
        """The parameters' data are the store's weights from now on."""
        for state in self.unit.states:
            state.handle.show(state.weight)

    def own_parameters(self) -> list[nn.Parameter | None]:
        """What is in the places of its parameters, in entry order. A StateError if one isn't the one that was adopted."""
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
                    f"parameter {self.name}.{added} was added or replaced after the model was prepared and has no place for a "
                    "gradient; change the model (adapters, heads, tokens) before accelerator.prepare(), or prepare it anew"
                )
            for experts in self.experts:
                experts.refuse_unfrozen()
            for state in self._frozen:
                if state.parameter.requires_grad:
                    raise StateError(
                        f"parameter {self.name}.{state.name} was unfrozen after the model was prepared and has no place for a "
                        "gradient; call the prepared model itself and not a part of it (it is adopted anew then), or prepare "
                        "again"
                    )

    def _unknown_parameters(self) -> list[torch.Tensor]:
        """The parameters below the module that weren't adopted with it. Each forward asks, and ``parameters()`` is slow:
        it looks again where a module doesn't hold what it held."""
        tables, before, unknown = self._seen
        held = [*itertools.chain.from_iterable(map(dict.values, tables))]
        if not held or len(held) != len(before) or any(map(operator.is_not, held, before)):
            tables = [table for module in self.module.modules() for table in (module._parameters, module._modules)]
            held = [*itertools.chain.from_iterable(map(dict.values, tables))]
            unknown = [at for at in held if isinstance(at, torch.Tensor) and id(at) not in self._known]
            self._seen = tables, held, unknown
        return unknown

    def require_version(self, version: int | None) -> None:
        """For a backward: raises a StateError unless the unit still has the version that its forward saw."""
        if self.unit.version != version:
            raise StateError(
                f"the weights of {self.kind} {self.name} were changed between forward and backward (by optimizer.step(), a "
                "write, accelerator.prepare(), or the step that an earlier backward through the same graph took); run "
                "backward before that, or, for a second one, set megatrain_config.step_schedule to 'deferred' (and "
                "host_gradients to 'kept')"
            )

    def refresh_if_written(self) -> None:
        """Takes over weights that somebody wrote to the parameters since they were last seen (``load_state_dict``)."""
        with unwatched():
            written = written_among(self._handles)
        if written:
            self.gate.wait()
            for state in [self.unit.states[place] for place in written]:
                self.unit.write_master(state, state.parameter.detach())
                state.handle.show(state.weight)
            self.unit.version += 1


class bound:
    """A layer's module computes with ``weights`` (in entry order) instead of its parameters while the body runs. A StateError
    if a parameter of it isn't the one that was adopted. A class, since a generator takes several times as long."""

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
            # A parametrization for the time of a call (PEFT's target_parameters) puts a weight that is no Parameter
            # back as a buffer: it would hold the slot's memory, and stand in the way of the next one.
            if attribute not in parameters:
                buffers.pop(attribute, None)
            parameters[attribute] = earlier


class StreamedExperts(StreamedLayer):
    """All experts of a layer, whose index they have, in parts of which the first has the index ``first_part``."""

    kind = "experts"

    def __init__(self, index: int, name: str, module: nn.Module, unit: HostUnit, *, parts: int, first_part: int) -> None:
        super().__init__(index, name, module, unit)
        self.count = int(module.num_experts)  # type: ignore[arg-type]
        ranges = expert_ranges(self.count, parts)
        self.parts = [ExpertPart(place, first_part + place, self, experts) for place, experts in enumerate(ranges)]
        self.gate = UpdateGate([part.gate for part in self.parts])
        self._begins: dict[torch.device, torch.Tensor] = {}

    def begins(self, device: torch.device) -> torch.Tensor:
        """int64 numbers on the device: the first expert of each part, and ``count``."""
        if device not in self._begins:
            numbers = [part.experts.first for part in self.parts] + [self.count]
            self._begins[device] = torch.tensor(numbers, device=device)
        return self._begins[device]


class ExpertPart:
    """Some of a layer's experts, which stream alone: number ``place`` of the layer's, ``index`` of the model's in forward."""

    def __init__(self, place: int, index: int, owner: StreamedExperts, experts: ExpertRange) -> None:
        self.place, self.index = place, index
        self.owner, self.experts = owner, experts
        self.name = f"{owner.name}[{experts.first}:{experts.last}]"
        self.unit = UnitRange(owner.unit, experts)
        self.gate = UpdateGate()

    def refresh_if_written(self) -> None:
        self.owner.refresh_if_written()
