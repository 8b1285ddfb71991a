"""A placement: for each layer what becomes of its activations, where its weights are, and where its states live; and what
memory a step takes on the device under it, by arithmetic on the step's profile.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_accelerate.config import PlacementSettings
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.layers.layer import ExpertPart
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.plan.machine import STEP_BYTES
from megatrain_accelerate.plan.step_profile import StepProfile
from megatrain_accelerate.store.unit import HostUnit

MOST_SPACING = 8
"""A layer's activations reach the host while this many others compute, on any link worth using."""


def require_layers(layers: int, settings: PlacementSettings) -> None:
    """Raises a :class:`ConfigError` where the settings name more layers than the model has."""
    kept, offloaded = settings.kept_layers or 0, settings.offloaded_layers or 0
    if kept > layers:
        raise ConfigError(f"megatrain_config.placement.kept_layers is {kept}, but the model has {layers} layers; lower it")
    if offloaded > layers - kept:
        raise ConfigError(
            f"megatrain_config.placement.offloaded_layers is {offloaded}, but {layers - kept} of the model's "
            f"{layers} layers aren't kept (kept_layers is {kept}); lower one of the two"
        )


@dataclasses.dataclass(frozen=True)
class Counts:
    """How many layers of each sort a placement has; more than there are mean all. Layers on the device come first in the
    model, and those that are stepped there follow: the forward can begin with them while the host steps the others. Kept ones
    come last, since backward begins with them."""

    kept: int = 0
    attention_kept: int = 0
    inputs_offloaded: int = 0
    offloaded: int = 0
    on_device: int = 0
    groups_on_device: bool = False
    states_on_device: int = 0
    budgets: tuple[float, float] = (0.0, 1.0)

    def placement(self, layers: int) -> Placement:
        """That of so many ``layers``. Attention is kept in the last that aren't kept; the first inputs are offloaded, since
        they are away longest."""
        kept = min(self.kept, layers)
        offloaded = min(self.offloaded, layers - kept)
        # Where recomputed layers' inputs leave there is no pause between copies.
        spacing = min(MOST_SPACING, (layers - kept) // offloaded) if offloaded and not self.inputs_offloaded else 1
        last = layers - kept - 1
        first = min(self.on_device, layers)
        away = frozenset(last - i * spacing for i in range(offloaded))
        return Placement(
            kept=frozenset(range(layers - kept, layers)),
            offloaded=away,
            offload_spacing=spacing,
            attention_kept=frozenset(range(max(0, layers - kept - self.attention_kept), layers - kept)) - away,
            inputs_offloaded=frozenset(range(min(self.inputs_offloaded, layers))),
            on_device=frozenset(range(first)),
            groups_on_device=self.groups_on_device,
            states_on_device=frozenset(range(first, min(first + self.states_on_device, layers))),
            budgets=self.budgets,
        )


def fixed_counts(settings: PlacementSettings, layers: int) -> dict[str, Any]:
    """Those of the :class:`Counts` of so many layers that the settings leave no choice of, by name."""
    fixed = {
        "kept": settings.kept_layers,
        "offloaded": settings.offloaded_layers,
        "on_device": settings.device_layers,
        "inputs_offloaded": None if settings.offloaded_inputs is None else layers * settings.offloaded_inputs,
        "attention_kept": settings.kept_attention,
        "states_on_device": layers if settings.device_states == -1 else settings.device_states,
    }
    every = {"on_device": layers, "groups_on_device": True} if settings.device_layers == -1 else {}
    return {name: count for name, count in fixed.items() if count is not None} | every


@dataclasses.dataclass(frozen=True)
class UnitSizes:
    weight_bytes: int
    gradient_bytes: int
    parameters: int
    """Trained ones, the padding included."""
    state_bytes: int
    """Weights, residuals and moments."""
    sum_bytes: int = 0
    """Residuals of gradients that are summed in fp32, in a run in which some are added up."""
    step_bytes: int = STEP_BYTES
    """Memory traffic of its optimizer step, a parameter."""
    staying_bytes: int = 0
    """What the host doesn't get back when the unit moves: passing gradients, which have no place of their own there, and of
    several ranks what was written to the file that all map."""

    @classmethod
    def of_unit(cls, unit: HostUnit, is_summed: bool, is_shared: bool = False) -> UnitSizes:
        """``is_summed``: whether gradients are added up in fp32; ``is_shared``: whether several ranks map the unit."""
        layout = unit.layout
        residual_bytes = 2 * layout.split_elements
        moment_bytes = unit.sizes["moments"] // max(1, layout.state_elements)
        staying_bytes = layout.gradient_bytes if unit.passes_gradients else 0
        if is_shared:
            filled_bytes = layout.weight_bytes + residual_bytes  # at adoption
            staying_bytes += max(filled_bytes, sum(unit.shared.mapped.values()) if unit.shared else 0)
        return cls(
            weight_bytes=layout.weight_bytes,
            gradient_bytes=layout.gradient_bytes,
            parameters=layout.state_elements,
            state_bytes=layout.weight_bytes + residual_bytes + unit.sizes["moments"],
            sum_bytes=residual_bytes if is_summed else 0,
            # Moments are read and written, those of 8 bytes a parameter where the traffic is :data:`STEP_BYTES`. The step with
            # 8-bit ones has 14 bytes of it, but the memory isn't what it waits for: it is no faster.
            step_bytes=STEP_BYTES + (2 * (moment_bytes - 8) if moment_bytes >= 4 else 0),
            staying_bytes=staying_bytes,
        )

    @property
    def host_bytes(self) -> int:
        """Host memory of a unit that lives there, less what it doesn't give back."""
        return max(0, self.state_bytes + self.gradient_bytes + self.sum_bytes - self.staying_bytes)

    def of_part(self, part: ExpertPart) -> UnitSizes:
        """The sizes of a part of experts, of which all have these."""
        layout, experts = part.unit.layout, part.experts
        return dataclasses.replace(
            self,
            weight_bytes=layout.weight_bytes,
            gradient_bytes=layout.gradient_bytes,
            parameters=layout.state_elements,
            state_bytes=self.state_bytes * experts.experts // experts.count,
            sum_bytes=self.sum_bytes * experts.experts // experts.count,
        )

    @property
    def stepped_bytes(self) -> int:
        """What of it is on the device, divided among ranks, where it is stepped there and lives on the host."""
        return self.gradient_bytes + self.state_bytes - self.weight_bytes  # a gradient has as many bytes as its weight

    @property
    def step_traffic(self) -> int:
        return self.parameters * self.step_bytes


@dataclasses.dataclass(frozen=True)
class Model:
    """What predictions have to know of the engine."""

    layers: Sequence[UnitSizes]
    groups_before: Sequence[UnitSizes]
    """Resident groups that the first layer needs."""
    groups_after: Sequence[UnitSizes]
    slots: int
    slot_bytes: int
    """Of all weight slots, and of all gradient slots, where any layer uses them."""
    gradient_slot_bytes: int
    steps_in_backward: bool
    micro_batches: int
    """Backwards before a step."""
    parts: Mapping[int, Sequence[UnitSizes]] = dataclasses.field(default_factory=dict)
    """By layer, those of its experts that stream in parts, which :attr:`layers` leaves out."""
    ranks: int = 1
    """Processes with a GPU each, of which each steps its share."""
    fetch_share: float = 1.0
    """Of the link's time for a layer's weights: below 1 where ranks fetch parts, and gather them, see :meth:`fetch_bytes`."""
    exchange_bytes: float = math.inf
    """Bytes of its gradients a second that each rank sends to the others of its machine while it adds up what it gets."""
    machines: int = 1
    """That the ranks are on, as many on each; each machine holds all weights."""
    network_bytes: float = math.inf
    """A second, each way, between one machine and the others."""

    @property
    def groups(self) -> list[UnitSizes]:
        return [*self.groups_before, *self.groups_after]

    def on_device(self, placement: Placement) -> list[UnitSizes]:
        """Units that live on the device."""
        return [self.layers[i] for i in placement.on_device] + (self.groups if placement.groups_on_device else [])

    def stepped_on_device(self, placement: Placement) -> list[UnitSizes]:
        """Units that live on the host and are stepped on the device."""
        layers = [self.layers[i] for i in placement.states_on_device]
        return layers + (self.groups if layers and not placement.groups_on_device else [])

    def fetch_bytes(self, layer: int, placement: Placement) -> int:
        """What a layer's fetch costs, in bytes that the link could copy meanwhile. Where the layer's states are on the devices
        the parts are, too, and are only gathered. Not where ranks gather other parts than they step: with frozen parameters,
        and on several machines."""
        unit = self.layers[layer]
        if layer in placement.states_on_device and self.gathers_states and unit.gradient_bytes == unit.weight_bytes:
            return self.gathered_bytes(unit)
        return int(self.fetch_share * unit.weight_bytes)

    @property
    def gathers_states(self) -> bool:
        """Whether ranks gather weights from the devices that have their states."""
        return self.fetch_share < 1.0 and self.machines == 1

    def gathered_bytes(self, unit: UnitSizes) -> int:
        """What the link could copy while ranks gather a unit's weights whose parts are on their devices."""
        return int(max(0.0, self.fetch_share - 1 / self.ranks) * unit.weight_bytes)

    def moved_bytes(self, placement: Placement) -> int:
        """Host memory that units give up which the placement moves to the device; of several ranks, what each gets of it."""
        return sum(unit.host_bytes for unit in self.on_device(placement)) // self.ranks


def sent_bytes(step_profile: StepProfile, placement: Placement) -> list[int]:
    """For each call of the forward pass, the bytes that go to the host after it and come back in backward."""
    step_profile, sent = step_profile.at(*placement.budgets), []
    for event in step_profile.forward_calls:
        profile = step_profile.profiles[event.kind]
        # What a recomputed layer saves besides its inputs waits where they do.
        attention_bytes = profile.attention_bytes if event.layer in placement.attention_kept else 0
        waiting = profile.input_bytes + profile.lean_bytes + attention_bytes
        leaving = profile.offloaded_bytes * (event.layer in placement.offloaded)
        sent.append(leaving + waiting * placement.offloads_inputs(event.layer))
    return sent


def peak_bytes(step_profile: StepProfile, model: Model, placement: Placement) -> int:
    """The most that a step has alive on the device, besides what the engine holds there in any case."""
    return held_bytes(model, placement) + step_bytes(step_profile, model, placement)


def step_bytes(step_profile: StepProfile, model: Model, placement: Placement) -> int:
    """The part of :func:`peak_bytes` that isn't there during all of the step."""
    step_profile = step_profile.at(*placement.budgets)
    calls = step_profile.forward_calls
    sent = sent_bytes(step_profile, placement)
    # An profile's inputs are all there, and results of attention count as kept; what an offloaded layer saved doesn't.
    is_input = [event.layer not in placement.offloaded for event in calls]
    inputs_before = [0, *itertools.accumulate(size * flag for size, flag in zip(sent, is_input, strict=True))]
    # Of a batch that runs in pieces, two pieces are on the device.
    at_once = [size // step_profile.profiles[event.kind].pieces for size, event in zip(sent, calls, strict=True)]
    others_before = [0, *itertools.accumulate(size * (not flag) for size, flag in zip(at_once, is_input, strict=True))]

    def extra_bytes(call: int, made: int) -> int:
        """What is there besides what the profile and kept layers hold; negative if more is away. Of the calls whose
        activations or inputs go to the host two's are on the device at a time: in forward this one's, if they are ``made`` (0
        or 1), and until the next offloaded layer those of the one before it; in backward the next one's."""
        before = max(0, call - placement.offload_spacing)
        return others_before[max(before, call + made)] - others_before[before] - inputs_before[before]

    peak = kept = grown = extra = 0
    forward_call, backward_call = -1, len(calls)
    for event in step_profile.events:
        profile = step_profile.profiles[event.kind]
        peak = max(peak, event.peak_bytes + kept + grown + extra)
        offloads = event.layer in placement.offloaded
        remembers = not placement.is_recomputed(event.layer)
        # Kept results of attention, and of experts that stream in parts unless inputs leave.
        result_bytes = profile.attention_bytes if event.layer in placement.attention_kept else 0
        result_bytes += 0 if event.layer in placement.inputs_offloaded else profile.expert_bytes
        staying = profile.kept_bytes if remembers else result_bytes + profile.lean_bytes
        if offloads:  # what is too small to go to the host stays
            staying -= profile.offloaded_bytes
        if event.is_backward:
            backward_call -= 1
            while backward_call > 0 and calls[backward_call].layer != event.layer:
                backward_call -= 1
            extra = extra_bytes(backward_call, made=1)
            # The recomputed graph holds the results themselves.
            above = profile.kept_backward_bytes if remembers else profile.recomputed_bytes - result_bytes
            peak = max(peak, event.live_bytes + kept + grown + above + extra)
            kept -= staying
            if event.layer in placement.on_device and model.micro_batches == 1:
                grown += model.layers[event.layer].gradient_bytes
        else:
            forward_call += 1
            # Kept results stay while the rest of the layer runs.
            above = profile.kept_forward_bytes if remembers else profile.forward_bytes + staying
            if offloads and profile.pieces > 2:  # the earlier pieces' have left
                above -= profile.offloaded_bytes * (profile.pieces - 2) // profile.pieces
            peak = max(peak, event.live_bytes + kept + above + extra_bytes(forward_call, made=0))
            kept += staying
            extra = extra_bytes(forward_call, made=1)
    return max(peak, step_profile.tail_peak_bytes + kept + grown)


def held_bytes(model: Model, placement: Placement) -> int:
    """What is on the device during all of a step, besides what the engine holds there in any case."""
    layers = [model.layers[i] for i in placement.on_device]
    held = sum(unit.state_bytes for unit in layers) + sum(unit.sum_bytes for unit in [*layers, *model.groups])
    if model.micro_batches > 1:  # from the second on, the gradients of the first are there
        held += sum(unit.gradient_bytes for unit in [*layers, *model.groups])
    if stepped := model.stepped_on_device(placement):
        arriving = max(3 * unit.gradient_bytes for unit in stepped)
        held += (sum(unit.stepped_bytes for unit in stepped) + arriving) // model.ranks
    if placement.groups_on_device:
        held += sum(unit.state_bytes - unit.weight_bytes for unit in model.groups)
    if streams := len(layers) < len(model.layers):
        held += model.slot_bytes
    if streams or any(part.gradient_bytes for parts in model.parts.values() for part in parts):
        held += model.gradient_slot_bytes
    return held
