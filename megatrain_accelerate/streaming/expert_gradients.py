"""Gradients of a layer's experts to the host, part by part, in the slots of the layers' gradients.

A parameter of the experts has one gradient, of which each part brings a range. Those of one backward belong together: whether
they are added to earlier ones is decided before the first, and ``parameter.grad`` shows them behind the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.profiler import record_function

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.optim.kernel import HostKernels
from megatrain_accelerate.optim.step_worker import StepWorker, Ticket
from megatrain_accelerate.streaming.device_slots import GradientSlot
from megatrain_accelerate.streaming.expert_parts import ExpertPart, StreamedExperts
from megatrain_accelerate.streaming.fp32_sums import Fp32Sums, RunningSum, gradient_norms
from megatrain_accelerate.streaming.grad_offload import GradientOffloader
from megatrain_accelerate.streaming.meter import Cause, Meter
from megatrain_accelerate.streaming.norm_table import NormTable
from megatrain_accelerate.streaming.streams import Streams


@dataclasses.dataclass(frozen=True)
class GradientWays:
    """What the experts' gradients need of the engine."""

    offloader: GradientOffloader
    streams: Streams
    meter: Meter
    worker: StepWorker
    kernels: HostKernels
    norms: NormTable
    sums: Fp32Sums


class ExpertGradients:
    """The gradients of one layer's experts in one backward.

    Args:
        ways: the engine's.
        experts: the layer's.
        is_last: whether no other backward of the same call of the layer follows (of an earlier piece of its batch).

    Raises:
        StateError: the model was prepared for evaluation only, or gradients that pass weren't consumed.
    """

    def __init__(self, ways: GradientWays, experts: StreamedExperts, is_last: bool) -> None:
        if not ways.offloader.takes_gradients:
            raise StateError(
                f"experts {experts.name} got a gradient but the model was prepared for evaluation only; prepare it with "
                "accelerator.prepare(model) (evaluation_mode=False) to train it"
            )
        self._ways, self._experts, self._is_last = ways, experts, is_last
        trainable = experts.trainable
        # One that was frozen since it was prepared gets none.
        self._rows = [row for row, state in enumerate(trainable) if state.parameter.requires_grad]
        self._states = [trainable[row] for row in self._rows]
        is_fresh = len(self._rows) == len(trainable) and all(state.parameter.grad is None for state in trainable)
        self._is_fresh = is_fresh or ways.offloader.passes
        self._left = len(experts.parts)
        self._norms = torch.zeros(len(trainable), dtype=torch.float32, device=ways.streams.device)
        self._earlier: list[tuple[torch.Tensor | None, RunningSum | None]] = []
        ways.offloader.begin_passing(experts)

    def take(self, part: ExpertPart, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Sends a part's gradients to the host.

        Args:
            part: one of the experts' parts; each is to be given once.
            gradients: one for each parameter that is trained, in entry order; None where nothing flows, or for a part that
                had no token: plain PyTorch's gradient has zeros there.
        """
        ways, layout = self._ways, part.unit.layout
        # WAR: a step that is still to be applied reads the gradients of the pass before.
        ways.meter.wait_for_step(part.name, part.gate.is_open, part.gate.wait)
        slot = ways.offloader.take_slot()
        with record_function(f"megatrain::offload_gradients ({part.name})"):
            # WAR: the copy of what used this slot last may still read it.
            ways.meter.compute_waits_for(slot.grads_copied_event, Cause.D2H)
            views = slot.views(layout)
            for place, row in enumerate(self._rows):
                gradient = None if gradients is None else gradients[place]
                if gradient is None:
                    views[row].zero_()
                else:
                    views[row].copy_(gradient)
            if self._is_fresh:
                self._norms = torch.hypot(self._norms, torch.stack(gradient_norms(views)))
                slot.norms[: len(views)].copy_(self._norms)
            slot.grads_ready_event.record(ways.streams.compute_stream)
        self._left -= 1
        if self._is_fresh:
            unit = self._experts.unit
            assert unit.gradients is not None
            pieces = part.unit.pieces(unit.gradients, slot.buffer, trainable_only=True)
            norms = None if self._left else ways.norms.of_unit(unit)
            wait = ways.offloader.send(slot, part.name, layout.gradient_bytes, pieces, norms).synchronize
        else:
            ticket = self._add_on_host(slot, part)
            ways.offloader.note_ticket(ticket)
            wait = ticket.wait
        if not self._left:
            ways.offloader.show(self._experts, self._states, self._is_fresh, wait, may_be_stepped=self._is_last)

    def _add_on_host(self, slot: GradientSlot, part: ExpertPart) -> Ticket:
        ways, layout = self._ways, part.unit.layout
        staging = ways.offloader.take_staging()
        if not self._earlier:  # not before: the first staging buffers come with the sums' memory
            self._earlier = [(state.parameter.grad, ways.sums.running(state)) for state in self._states]
        size = layout.gradient_bytes
        copied_event = ways.offloader.send(slot, part.name, size, [(staging.buffer[:size], slot.buffer[:size])], None)
        views = layout.views(staging.buffer, trainable_only=True)
        targets = [
            (state, earlier, running, views[row])
            for state, (earlier, running), row in zip(self._states, self._earlier, self._rows, strict=True)
        ]
        if not self._left:
            for state, _, running, _ in targets:
                if running is not None:
                    state.note_fp32_sum()
        norms = ways.norms.of_unit(self._experts.unit)
        takes_norms = not self._left and ways.offloader.gradients_complete()
        of_part = part.experts.of

        def add() -> None:
            copied_event.synchronize()
            for state, earlier, running, new in targets:
                assert state.gradient is not None
                if earlier is None:
                    of_part(state.gradient.data).copy_(new)  # unseen by the version that the launching thread takes
                elif running is not None:
                    sums = of_part(running.gradient), of_part(running.residual)
                    dataclasses.replace(running, gradient=sums[0], residual=sums[1]).add(new)
                elif earlier.data_ptr() == state.gradient.data_ptr():
                    ways.kernels.accumulate(of_part(state.gradient), new)
                else:  # somebody assigned a tensor of their own
                    of_part(earlier).add_(new)
            if takes_norms:
                self._take_norms([(state, *before) for state, before in zip(self._states, self._earlier, strict=True)], norms)

        staging.ticket = ways.worker.submit(f"accumulate ({part.name})", add)
        return staging.ticket

    def _take_norms(
        self, sums: Sequence[tuple[ParameterState, torch.Tensor | None, RunningSum | None]], norms: torch.Tensor
    ) -> None:
        """The norms of the whole gradients, when the last part is added."""
        for (state, earlier, running), row in zip(sums, self._rows, strict=True):
            total = state.gradient if earlier is None else earlier
            assert total is not None
            norms[row] = self._ways.sums.host_norm(total, None if running is None else running.residual)
            self._ways.norms.note(state.parameter, total)
