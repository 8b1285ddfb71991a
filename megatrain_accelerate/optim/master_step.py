"""Optimizers without a kernel of their own: their own step() on fp32 masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.optim.host_step import HostStep
from megatrain_accelerate.streaming.fp32_sums import joined_sum
from megatrain_accelerate.streaming.meter import Cause
from megatrain_accelerate.streaming.resident import ResidentGroup
from megatrain_accelerate.streaming.runtime import StreamingRuntime


class MasterStep(HostStep):
    """Any other torch optimizer: its own ``step()``, on fp32 masters on the host. Serial, and not fused."""

    def __init__(self, optimizer: Optimizer, runtime: StreamingRuntime) -> None:
        super().__init__(optimizer, runtime)
        runtime.steps_on_host.add(id(self))

    def retire(self, why: str, copies: bool = False) -> None:
        """See :meth:`HostStep.retire`."""
        super().retire(why, copies)
        self.runtime.steps_on_host.discard(id(self))

    def step(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> Any:
        """Shows the optimizer fp32 masters and gradients in the place of the weights, and writes back what it made.

        Takes 8 bytes a parameter of host memory while it runs, besides the optimizer's own state.

        Raises:
            StateError: the optimizer was retired.
            StepWorkerError: an earlier step failed.
        """
        self.refuse_retired()
        runtime = self.runtime
        runtime.worker.raise_if_failed()
        runtime.refresh_if_written()
        runtime.collect_gradients()
        found = self.with_gradients(optimizer)
        norm = float(runtime.total_norm([state.parameter for state, _ in found]))
        factors = runtime.take_clip_factors(self.parameters(optimizer))
        self.forget_norms(optimizer)
        if not self.allows(norm):
            return None
        owners = {id(state): (unit, gate, group) for unit, gate, group in runtime.in_forward_order() for state in unit.states}
        shown: list[tuple[ParameterState, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        touched: dict[int, tuple[HostUnit, ResidentGroup | None]] = {}
        for state, _ in found:
            unit, _, group = owners[id(state)]
            assert state.gradient is not None
            master = unit.read_master(state)
            gradient = state.gradient.float()
            if state.has_fp32_sum and state.gradient_residual is not None:
                gradient = joined_sum(state.gradient, state.gradient_residual, runtime.kernels)
            gradient = gradient * factors.get(id(state.parameter), 1.0)
            shown.append((state, master, state.parameter.data, state.parameter.grad))
            state.parameter.grad = None
            state.parameter.data = master
            state.parameter.grad = gradient
            touched[id(unit)] = (unit, group)
        try:
            parameters = sum(master.numel() for _, master, _, _ in shown)
            with runtime.meter.blocked_by(Cause.HOST_STEP), runtime.meter.stepping(parameters):
                result = own_step()
        finally:
            for state, master, weight, gradient_before in shown:
                state.parameter.grad = None
                state.parameter.data = weight
                state.parameter.grad = gradient_before
                owners[id(state)][0].write_master(state, master)
                state.seen_version = state.parameter._version
            for unit, group in touched.values():
                unit.version += 1
                if group is not None:
                    group.push_weights(group.announce_push())
            runtime.drain()
        return result
