"""Makes placements from counts of layers, and predicts a step's device memory under a placement from the step's profile."""

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
"""Most layers from one offloaded layer to the next: while so many compute, any link worth using copies its activations."""


def require_layers(layers: int, settings: PlacementSettings) -> None:
    """Raises a :class:`ConfigError` if the settings name more layers than the model has."""
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
    """How many layers of each sort a placement has. A number above that of the model's layers means all. Layers on the device
    are the first of the model, followed by those that are stepped there: forward can begin with them while the host steps the
    others. Kept layers are the last, since backward begins with them."""

    kept: int = 0
    attention_kept: int = 0
    inputs_offloaded: int = 0
    offloaded: int = 0
    on_device: int = 0
    groups_on_device: bool = False
    states_on_device: int = 0
    budgets: tuple[float, float] = (0.0, 1.0)

    def placement(self, layers: int) -> Placement:
        """The placement of a model of so many ``layers``. Attention is kept in the last layers that aren't kept whole. Inputs
        of the first layers are offloaded, since they are needed last."""
        kept = min(self.kept, layers)
        offloaded = min(self.offloaded, layers - kept)
        # Copies of offloaded inputs leave the link no pauses, so that spacing gains nothing.
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
    """The :class:`Counts` of a model of so many layers that the settings fix, by name."""
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
    """Sizes of a unit, or of a part of its experts."""

    weight_bytes: int
    gradient_bytes: int
    parameters: int
    """Trained parameters, including padding."""
    state_bytes: int
    """Bytes of weights, residuals and moments."""
    sum_bytes: int = 0
    """Bytes of residuals of fp32 gradient sums, in a run that sums gradients."""
    step_bytes: int = STEP_BYTES
    """Memory traffic of the optimizer step in bytes a parameter."""
    staying_bytes: int = 0
    """Host bytes among the others that the unit doesn't free when it moves to the device: those of passing gradients, which
    share buffers, and with several ranks pages of the mapped file that were written."""

    @classmethod
    def of_unit(cls, unit: HostUnit, is_summed: bool, is_shared: bool = False) -> UnitSizes:
        """The sizes of a unit. ``is_summed``: gradients are summed in fp32. ``is_shared``: several ranks map the unit."""
        layout = unit.layout
        residual_bytes = 2 * layout.split_elements
        moment_bytes = unit.sizes["moments"] // max(1, layout.state_elements)
        staying_bytes = layout.gradient_bytes if unit.passes_gradients else 0
        if is_shared:
            filled_bytes = layout.weight_bytes + residual_bytes  # touched at adoption
            staying_bytes += max(filled_bytes, sum(unit.shared.mapped.values()) if unit.shared else 0)
        return cls(
            weight_bytes=layout.weight_bytes,
            gradient_bytes=layout.gradient_bytes,
            parameters=layout.state_elements,
            state_bytes=layout.weight_bytes + residual_bytes + unit.sizes["moments"],
            sum_bytes=residual_bytes if is_summed else 0,
            # Moments are read and written, and :data:`STEP_BYTES` counts 8 bytes of them a parameter. With 8-bit moments the
            # traffic is 14 bytes, but the step is no faster, since memory doesn't bound it.
            step_bytes=STEP_BYTES + (2 * (moment_bytes - 8) if moment_bytes >= 4 else 0),
            staying_bytes=staying_bytes,
        )

    @property
    def host_bytes(self) -> int:
        """Host memory that the unit frees when it moves to the device."""
        return max(0, self.state_bytes + self.gradient_bytes + self.sum_bytes - self.staying_bytes)

    def of_part(self, part: ExpertPart) -> UnitSizes:
        """The sizes of one part of experts, where these are the sizes of all experts together."""
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
        """Bytes on all ranks' devices together if the unit lives on the host and is stepped on the device."""
        return self.gradient_bytes + self.state_bytes - self.weight_bytes  # trained weights have their gradients' bytes

    @property
    def step_traffic(self) -> int:
        return self.parameters * self.step_bytes


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model's units and the properties of the engine on which predictions depend."""

    layers: Sequence[UnitSizes]
    groups_before: Sequence[UnitSizes]
    """Resident groups that are needed before the first layer."""
    groups_after: Sequence[UnitSizes]
    slots: int
    slot_bytes: int
    """Bytes of all weight slots together, held if any layer streams."""
    gradient_slot_bytes: int
    """Bytes of all gradient slots together, held if any layer or trained part of experts streams."""
    steps_in_backward: bool
    micro_batches: int
    """Backwards before an optimizer step."""
    parts: Mapping[int, Sequence[UnitSizes]] = dataclasses.field(default_factory=dict)
    """The parts of experts that stream on their own, by layer. :attr:`layers` leaves them out."""
    ranks: int = 1
    """Processes, each with a GPU. Each steps its share of every unit."""
    fetch_share: float = 1.0
    """Time of a layer's fetch over that of copying it whole. Below 1 where ranks copy parts and gather them."""
    exchange_bytes: float = math.inf
    """Bytes of gradients a second that each rank exchanges with the others of its machine, summing included."""
    machines: int = 1
    """Machines, each with equally many of the ranks and with all weights."""
    network_bytes: float = math.inf
    """Bytes a second, each way, between one machine and the others."""
    calls: int = 1
    """The most calls of a layer in one backward: of several forwards, or of one that calls its layers again."""

    @property
    def adds_gradients(self) -> bool:
        """Whether gradients are on the device while others are computed that are added to them."""
        return self.micro_batches > 1 or self.calls > 1

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
        """The cost of a layer's fetch, as bytes that the link could copy in that time. If a layer's states are on the devices,
        so are the parts of its weights, and these are only gathered. That isn't so where ranks gather other parts than they
        step: with frozen parameters, and on several machines."""
        unit = self.layers[layer]
        if layer in placement.states_on_device and self.gathers_states and unit.gradient_bytes == unit.weight_bytes:
            return self.gathered_bytes(unit)
        return int(self.fetch_share * unit.weight_bytes)

    @property
    def gathers_states(self) -> bool:
        """Whether ranks gather weights from the devices that hold their states."""
        return self.fetch_share < 1.0 and self.machines == 1

    def gathered_bytes(self, unit: UnitSizes) -> int:
        """Bytes that the link could copy while ranks gather a unit's weights from parts on their devices."""
        return int(max(0.0, self.fetch_share - 1 / self.ranks) * unit.weight_bytes)

    def moved_bytes(self, placement: Placement) -> int:
        """Host memory that is freed by the units on the device, divided by the ranks."""
        return sum(unit.host_bytes for unit in self.on_device(placement)) // self.ranks


def sent_bytes(step_profile: StepProfile, placement: Placement) -> list[int]:
    """For each call of the forward, the bytes that are offloaded after it and copied back in backward."""
    step_profile, sent = step_profile.at(*placement.budgets), []
    for event in step_profile.forward_calls:
        profile = step_profile.profiles[event.kind]
        # What a recomputed layer saves besides its inputs is kept where they are.
        attention_bytes = profile.attention_bytes if event.layer in placement.attention_kept else 0
        waiting = profile.input_bytes + profile.lean_bytes + attention_bytes
        leaving = profile.offloaded_bytes * (event.layer in placement.offloaded)
        sent.append(leaving + waiting * placement.offloads_inputs(event.layer))
    return sent


def peak_bytes(step_profile: StepProfile, model: Model, placement: Placement) -> int:
    """The most bytes that a step has on the device, without what the engine holds there under any placement."""
    return held_bytes(model, placement) + step_bytes(step_profile, model, placement)


def step_bytes(step_profile: StepProfile, model: Model, placement: Placement) -> int:
    """The part of :func:`peak_bytes` that isn't allocated during the whole step."""
    step_profile = step_profile.at(*placement.budgets)
    calls = step_profile.forward_calls
    sent = sent_bytes(step_profile, placement)
    # The profile counts inputs of all calls, and attention's results count as kept: they are subtracted while on the host.
    # What an offloaded layer saved isn't counted: it is added while on the device.
    is_input = [event.layer not in placement.offloaded for event in calls]
    inputs_before = [0, *itertools.accumulate(size * flag for size, flag in zip(sent, is_input, strict=True))]
    # If a batch runs in pieces, activations of two pieces are on the device at a time.
    shares = (step_profile.profiles[event.kind].piece_share for event in calls)
    at_once = [math.ceil(size * share) for size, share in zip(sent, shares, strict=True)]
    others_before = [0, *itertools.accumulate(size * (not flag) for size, flag in zip(at_once, is_input, strict=True))]

    def extra_bytes(call: int, made: int) -> int:
        """Bytes on the device besides those that the profile and kept layers account for. Negative if more is offloaded. Two
        calls with offloaded activations or inputs have these on the device: in forward this one, once they are ``made`` (0 or
        1), and the one before it until the next offloaded layer. In backward this one and the next."""
        before = max(0, call - placement.offload_spacing)
        own, other = others_before[call + 1] - others_before[call], others_before[call] - others_before[before]
        if made and step_profile.profiles[calls[call].kind].pieces > 1:
            other = max(own, other)  # or two of the call's own pieces
        return made * own + other - inputs_before[before]

    peak = kept = grown = extra = 0
    forward_call, backward_call = -1, len(calls)
    for event in step_profile.events:
        profile = step_profile.profiles[event.kind]
        peak = max(peak, event.peak_bytes + kept + grown + extra)
        offloads = event.layer in placement.offloaded
        remembers = not placement.is_recomputed(event.layer)
        # Kept results of attention, and of experts that stream in parts unless inputs are offloaded.
        result_bytes = profile.attention_bytes if event.layer in placement.attention_kept else 0
        result_bytes += 0 if event.layer in placement.inputs_offloaded else profile.expert_bytes
        staying = profile.kept_bytes if remembers else result_bytes + profile.lean_bytes
        if offloads:  # tensors that are too small to be offloaded stay
            staying -= profile.offloaded_bytes
        if event.is_backward:
            backward_call -= 1
            while backward_call > 0 and calls[backward_call].layer != event.layer:
                backward_call -= 1
            extra = extra_bytes(backward_call, made=1)
            # recomputed_bytes includes kept results, which aren't made a second time.
            above = profile.kept_backward_bytes if remembers else profile.recomputed_bytes - result_bytes
            peak = max(peak, event.live_bytes + kept + grown + above + extra)
            kept -= staying
            if event.layer in placement.on_device:
                gradient_bytes = model.layers[event.layer].gradient_bytes
                grown += 0 if model.adds_gradients else gradient_bytes
                if profile.pieces > 1:  # the sums become the gradients, or are added to them, while the last piece's are there
                    made_bytes = gradient_bytes * (2 if model.adds_gradients else 1)
                    peak = max(peak, event.live_bytes + kept + grown + made_bytes + extra_bytes(backward_call, made=0))
        else:
            forward_call += 1
            # Kept results are alive while the rest of the layer runs.
            above = profile.kept_forward_bytes if remembers else profile.forward_bytes + staying
            if offloads and profile.pieces > 2:  # those of earlier pieces are offloaded
                above -= int(profile.offloaded_bytes * (1 - 2 * profile.piece_share))
            peak = max(peak, event.live_bytes + kept + above + extra_bytes(forward_call, made=0))
            kept += staying
            extra = extra_bytes(forward_call, made=1)
    return max(peak, step_profile.tail_peak_bytes + kept + grown)


def held_bytes(model: Model, placement: Placement) -> int:
    """Bytes on the device during the whole step, without what the engine holds there under any placement."""
    layers = [model.layers[i] for i in placement.on_device]
    held = sum(unit.state_bytes for unit in layers) + sum(unit.sum_bytes for unit in [*layers, *model.groups])
    if model.adds_gradients:
        held += sum(unit.gradient_bytes for unit in [*layers, *model.groups])
    if stepped := model.stepped_on_device(placement):
        arriving = max(3 * unit.gradient_bytes for unit in stepped)  # two buffers of gradients, one of residuals of sums
        held += (sum(unit.stepped_bytes for unit in stepped) + arriving) // model.ranks
    if placement.groups_on_device:
        held += sum(unit.state_bytes - unit.weight_bytes for unit in model.groups)
    if streams := len(layers) < len(model.layers):
        held += model.slot_bytes
    if streams or any(part.gradient_bytes for parts in model.parts.values() for part in parts):
        held += model.gradient_slot_bytes
    return held
