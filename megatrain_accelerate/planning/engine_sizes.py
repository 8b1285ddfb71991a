"""What the units of a running engine move and hold, as the simulation wants to know it."""

from __future__ import annotations

import dataclasses

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.planning.machine import STEP_BYTES
from megatrain_accelerate.planning.placement import Model, UnitSizes
from megatrain_accelerate.streaming.expert_parts import ExpertPart
from megatrain_accelerate.streaming.runtime import StreamingRuntime

_STEP_BYTES_BUT_FOR_MOMENTS = STEP_BYTES - 2 * 8
"""Of a step with moments in fp32, each read and written."""


def state_bytes(unit: HostUnit) -> int:
    """Weights, residuals and moments."""
    layout = unit.layout
    return layout.weight_bytes + 2 * layout.split_elements + unit.moment_bytes


def adds_on_host(runtime: StreamingRuntime, micro_batches: int) -> bool:
    """Whether gradients are added up on the host: those of several backwards, or of pieces of a batch, which experts in parts
    bring one by one."""
    return micro_batches > 1 or (runtime.micro_batch_size is not None and any(at.has_trainable for at in runtime.experts))


def unit_sizes(unit: HostUnit, runtime: StreamingRuntime, micro_batches: int) -> UnitSizes:
    """The sizes of one unit in a run with ``micro_batches`` backwards before each optimizer step."""
    layout = unit.layout
    # The first addition makes room for all units' sums.
    sum_bytes = 2 * layout.split_elements if runtime.sums.is_wanted and adds_on_host(runtime, micro_batches) else 0
    sizes = (layout.weight_bytes, layout.gradient_bytes, layout.state_elements, state_bytes(unit), sum_bytes)
    step_bytes = _STEP_BYTES_BUT_FOR_MOMENTS + 2 * unit.moment_bytes // max(1, layout.state_elements)
    if runtime.config.moments_dtype == "int8":
        # 14 bytes of traffic, but the memory isn't what it waits for: no faster than the step with moments in fp32.
        step_bytes = STEP_BYTES
    return UnitSizes(*sizes, gradients_pass=unit.passes_gradients, step_bytes=step_bytes)


def part_sizes(part: ExpertPart, whole: UnitSizes) -> UnitSizes:
    """The sizes of a part of experts, of which all have the sizes ``whole``."""
    layout = part.unit.layout

    def share(size: int) -> int:
        return size * part.experts.experts // part.experts.count

    return dataclasses.replace(
        whole,
        weight_bytes=layout.weight_bytes,
        gradient_bytes=layout.gradient_bytes,
        parameters=layout.state_elements,
        state_bytes=share(whole.state_bytes),
        sum_bytes=share(whole.sum_bytes),
    )


def engine_model(runtime: StreamingRuntime, config: MegatrainConfig, micro_batches: int) -> Model:
    """What the simulation has to know of the engine in such a run."""

    def sizes(unit: HostUnit) -> UnitSizes:
        return unit_sizes(unit, runtime, micro_batches)

    return Model(
        layers=[sizes(layer.unit) for layer in runtime.layers],
        groups_before=[sizes(group.unit) for group in runtime.groups if not group.layers_before],
        groups_after=[sizes(group.unit) for group in runtime.groups if group.layers_before],
        slots=config.slots,
        gradient_slots=config.gradient_slots,
        slot_bytes=runtime.prefetcher.shared_bytes,
        gradient_slot_bytes=runtime.offloader.slot_bytes,
        steps_in_backward=bool(runtime.offloader.layer_done_listeners),
        micro_batches=micro_batches,
        parts={
            layer.index: [part_sizes(part, sizes(part.owner.unit)) for experts in layer.experts for part in experts.parts]
            for layer in runtime.layers
            if layer.experts
        },
    )
