"""The peak of a step's memory on the device under a placement, by arithmetic on its outline."""

from __future__ import annotations

from megatrain_accelerate.planning.placement import Placement
from megatrain_accelerate.planning.step_profile import StepOutline
from megatrain_accelerate.planning.step_simulation import Model, sent_bytes


class _Away:
    """What of a step's activations is on the device besides, or less than, what the outline and kept layers hold.

    Of the calls whose activations or inputs go to the host those of two are on the device at a time: in forward this one and,
    for as many calls as there are from one offloaded layer to the next, the one before it; in backward the one that follows.
    """

    def __init__(self, outline: StepOutline, placement: Placement) -> None:
        self._calls = [event.layer for event in outline.forward_calls]
        self._spacing = placement.offload_spacing
        self._sent = sent_bytes(outline, placement)
        # Of a batch that runs in pieces, two pieces are on the device.
        pieces = [outline.profiles[event.kind].pieces for event in outline.forward_calls]
        self._at_once = [sent // count for sent, count in zip(self._sent, pieces, strict=True)]
        # An outline's inputs are all there, and results of attention count as kept; what an offloaded layer saved doesn't.
        self._is_input = [layer not in placement.offloaded for layer in self._calls]
        self._inputs_before = [0]
        for sent, is_input in zip(self._sent, self._is_input, strict=True):
            self._inputs_before.append(self._inputs_before[-1] + (sent if is_input else 0))
        self._forward, self._backward = -1, len(self._calls)
        self.extra_bytes = 0
        """To be added to what lives outside the layers now; negative if more is away."""

    def forward_begins(self) -> None:
        """The next call begins: the call before the last gives up its memory."""
        self._forward += 1
        self._set(self._forward, makes=False)

    def forward_ends(self) -> None:
        """The call's activations are made and begin to leave."""
        self._set(self._forward, makes=True)

    def backward_begins(self, layer: int) -> None:
        """A layer's backward begins: its activations are back, those of the call before it come."""
        self._backward -= 1
        while self._backward > 0 and self._calls[self._backward] != layer:
            self._backward -= 1
        self._set(self._backward, makes=True)

    def _set(self, call: int, makes: bool) -> None:
        before = max(0, call - self._spacing)
        there = sum(self._at_once[i] for i in range(before, call + makes) if not self._is_input[i])
        self.extra_bytes = there - self._inputs_before[before]


def peak_bytes(outline: StepOutline, model: Model, placement: Placement) -> int:
    """The most that a step has alive on the device, besides what the engine holds there in any case."""
    outline = outline.at(*placement.budgets)
    peak = kept = grown = 0
    held = sum(model.layers[i].state_bytes for i in placement.on_device)
    held += sum(model.layers[i].weight_bytes for i in placement.resident)
    held += model.slot_bytes if len(placement.on_device | placement.resident) < len(model.layers) else 0
    leave = len(placement.on_device) < len(model.layers) or model.gradients_of_parts_leave
    held += model.gradient_slot_bytes if leave else 0
    groups = [*model.groups_before, *model.groups_after]
    held += sum(unit.state_bytes - unit.weight_bytes for unit in groups) if placement.groups_on_device else 0
    there = [*(model.layers[i] for i in placement.on_device), *groups]
    held += sum(unit.sum_bytes for unit in there)
    if model.micro_batches > 1:
        # From the second on, the gradients of the first are there.
        held += sum(unit.gradient_bytes for unit in there)
    away = _Away(outline, placement)
    for event in outline.events:
        profile = outline.profiles[event.kind]
        peak = max(peak, event.peak_bytes + kept + grown + away.extra_bytes)
        keeps = event.layer in placement.kept
        offloads = event.layer in placement.offloaded
        # Kept results of attention, and of experts that stream in parts unless inputs leave.
        result_bytes = profile.attention_bytes if event.layer in placement.attention_kept else 0
        result_bytes += 0 if event.layer in placement.inputs_offloaded else profile.expert_bytes
        if keeps:
            staying = profile.kept_bytes
        elif offloads:  # what is too small to go to the host stays
            staying = profile.kept_bytes - profile.offloaded_bytes
        else:
            staying = result_bytes + profile.lean_bytes
        if event.is_backward:
            away.backward_begins(event.layer)
            # The recomputed graph holds the results themselves.
            above = profile.kept_backward_bytes if keeps or offloads else profile.recomputed_bytes - result_bytes
            peak = max(peak, event.live_bytes + kept + grown + above + away.extra_bytes)
            kept -= staying
            if event.layer in placement.on_device and model.micro_batches == 1:
                grown += model.layers[event.layer].gradient_bytes
        else:
            away.forward_begins()
            # Kept results stay while the rest of the layer runs.
            above = profile.kept_forward_bytes if keeps or offloads else profile.forward_bytes + staying
            if offloads and profile.pieces > 2:  # the earlier pieces' have left
                above -= profile.offloaded_bytes * (profile.pieces - 2) // profile.pieces
            peak = max(peak, event.live_bytes + kept + above + away.extra_bytes)
            kept += staying
            away.forward_ends()
    return held + max(peak, outline.tail_peak_bytes + kept + grown)
