"""fp32 sums of the gradients of several backwards. ``parameter.grad`` is the bf16 half of a sum, and a 16-bit residual is the
rest: they are split as masters are (``csrc/split_master.h``). So a sum has every bit of an fp32 addition for 2 bytes a
parameter more. Over the link it adds only the residuals of resident parameters, once a step. A residual counts only while
``parameter.grad`` is the tensor, at the version, that it was made with (:attr:`ParamHandle.has_fp32_sum`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import KernelError, UnsupportedError
from megatrain_accelerate.kernels.device import DeviceKernels, StepKernels, can_step_on
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.store.host_limits import require_host_bytes
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.unit import HostUnit


def gradient_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """2-norms in fp32 of tensors on one device, computed as ``torch.nn.utils.clip_grad_norm_`` does on fp32 gradients."""
    return list(torch._foreach_norm(list(gradients), 2.0, dtype=torch.float32))


def joined_sum(gradient: torch.Tensor, residual: torch.Tensor, kernels: StepKernels) -> torch.Tensor:
    """Returns the fp32 sum of a bf16 gradient and its int16 residual, a new tensor: ``_join_sum`` of the Triton kernels."""
    total = torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)
    kernels.join(gradient, residual.where((gradient != 0) | (residual > 0), 0), total)
    return total


class RunningSum(NamedTuple):
    """The rest of a sum that is about to be added to: its residual, and the kernels of the device that holds both halves."""

    residual: torch.Tensor
    has_residual: bool
    """Whether the residual counts. Otherwise the sum so far is the gradient alone."""
    kernels: StepKernels


class Fp32Sums:
    """Decides which gradients of the ``units`` are summed in fp32, and sums those that autograd accumulates."""

    def __init__(
        self, units: Sequence[HostUnit], config: MegatrainConfig, device: torch.device, kernels: HostKernels, ranks: int
    ) -> None:
        self._units, self._device, self.kernels = units, device, kernels
        self._host_memory_gib = config.host_memory_gib
        self.is_wanted = config.accumulation_dtype == "fp32"
        self.is_budgeted = False
        """Whether the memory of the residuals was counted before the model was adopted."""
        self._device_kernels: DeviceKernels | None = None
        self._is_prepared = False
        self.ranks = ranks
        self.holds_fresh = ranks > 1
        """Whether the gradient of a backward stays in ``parameter.grad``, apart from the earlier one, until all ranks have
        made its mean and :meth:`unstash` is called."""
        self.fresh: dict[int, ParameterState] = {}
        """The states whose gradients autograd accumulates in this backward, by ``id``. Empty unless :attr:`holds_fresh`."""
        self._set_aside: dict[int, torch.Tensor] = {}  # by ``id`` of the state

    def prepare(self, staging_bytes: int = 0) -> None:
        """Allocates the residuals, 2 bytes a parameter, once. ``staging_bytes`` are about to be allocated besides. Raises a
        HostMemoryError, with nothing allocated, if they don't fit, and a KernelError for a GPU without Triton."""
        if self._is_prepared or not self.is_wanted or not any(unit.layout.split_elements for unit in self._units):
            return
        if self._device.type == "cuda":
            if not can_step_on(self._device):
                raise KernelError("fp32 sums need Triton: `pip install triton`, or megatrain_config.accumulation_dtype: bf16")
            self._device_kernels = DeviceKernels()
        if not self.is_budgeted:
            # Moments that aren't promised yet count, too: the optimizer may be prepared after this.
            units = [unit for unit in self._units if not unit.is_on_device]
            kinds = ("moments", "gradient_residuals")
            parts = {kind: sum(unit.sizes[kind] for unit in units if not unit.has(kind)) for kind in kinds}
            parts["staging"] = staging_bytes
            require_host_bytes(parts, self._host_memory_gib, remedy=BF16_REMEDY, ranks=self.ranks)
        for unit in self._units:
            unit.allocate("gradient_residuals")
        self._is_prepared = True

    def running(self, state: ParameterState) -> RunningSum | None:
        """Returns ``parameter.grad`` as a sum to add to in fp32. None if it can't be one, or isn't to be one."""
        gradient, residual = state.parameter.grad, state.sum_residual
        if not self.is_wanted or gradient is None or residual is None:
            return None
        if gradient.device != residual.device or not (_is_in_bf16(gradient) and gradient.is_contiguous()):
            return None
        kernels = self._device_kernels if gradient.is_cuda else self.kernels
        assert kernels is not None, "sums on the GPU before prepare()"
        return RunningSum(residual, state.handle.has_fp32_sum, kernels)

    @torch.no_grad()
    def scale(self, state: ParameterState, factor: float, more_gradients_follow: bool) -> None:
        """Multiplies ``parameter.grad`` in place. If ``more_gradients_follow`` it becomes an fp32 sum, where it can be one. On
        the host a sum is written without a new version."""
        assert state.parameter.grad is not None
        if more_gradients_follow:
            self.prepare()
        gradient = state.parameter.grad
        running = self.running(state) if more_gradients_follow or state.handle.has_fp32_sum else None
        if state.share is not None and state.gradient is not None and gradient.data_ptr() == state.gradient.data_ptr():
            # Each rank scales what it steps of a gradient that all of them share.
            gradient = state.share.of(state.entry, gradient)
            if running is not None:
                running = running._replace(residual=state.share.of(state.entry, running.residual))
        if running is None:
            gradient.mul_(factor)
        else:
            total = joined_sum(gradient, running.residual, running.kernels) if running.has_residual else gradient.float()
            running.kernels.split(total.mul_(factor), gradient, running.residual)
            state.handle.note_fp32_sum()
        state.normed = None

    def norms(self, states: Sequence[ParameterState]) -> list[torch.Tensor]:
        """2-norms (fp32) of the parameters' gradients, or of their fp32 sums, on the one device where all of them are."""
        found: list[torch.Tensor] = []
        plain: dict[int, torch.Tensor] = {}
        for position, state in enumerate(states):
            gradient = state.parameter.grad
            assert gradient is not None
            if not state.handle.has_fp32_sum or state.sum_residual is None:
                plain[position] = gradient
                found.append(gradient)
            elif gradient.is_cuda and self._device_kernels is not None:
                found.append(self._device_kernels.norm_split(gradient, state.sum_residual))
            else:
                found += gradient_norms([joined_sum(gradient, state.sum_residual, self.kernels)])
        for position, norm in zip(plain, gradient_norms(list(plain.values())) if plain else (), strict=True):
            found[position] = norm
        return found

    def host_norm(self, gradient: torch.Tensor, residual: torch.Tensor | None) -> float:
        """2-norm of a gradient on the host, or with a ``residual`` of the fp32 sum."""
        # torch's norm on the CPU is several times slower. The CPU stand-in uses it, to have the bits of plain PyTorch.
        if self._device.type == "cuda" and (residual is not None or gradient.is_contiguous()):
            return math.sqrt(self.kernels.square_sum(gradient, residual))
        if residual is not None:
            gradient = joined_sum(gradient, residual, self.kernels)
        return float(gradient_norms([gradient])[0])

    def before_accumulation(self, state: ParameterState, arrived: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
        """A prehook of the node by which autograd accumulates a parameter's gradient: what is summed in fp32 is added here,
        and nothing is left for autograd."""
        fresh = arrived[0]
        if fresh is None or not self._sums(state, fresh):
            return None
        if state.parameter._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"parameter {state.name} has a hook (register_post_accumulate_grad_hook), which wouldn't see the sum of "
                "several backwards; remove it, or set megatrain_config.accumulation_dtype to 'bf16'"
            )
        self.add(state, fresh)
        return (None,)

    def _sums(self, state: ParameterState, fresh: torch.Tensor) -> bool:
        """Whether ``fresh`` is to be added to the earlier gradient in fp32."""
        if state.parameter.grad is None or not _is_in_bf16(fresh):
            return False
        self.prepare()
        return self.running(state) is not None

    def stash_for(self, state: ParameterState, arrived: tuple[torch.Tensor | None, ...]) -> None:
        """A prehook like :meth:`before_accumulation`, for resident parameters, and with several ranks for all on the device:
        sets the earlier gradient aside, so that ``parameter.grad`` is the fresh one until :meth:`unstash`."""
        fresh = arrived[0]
        if fresh is not None and (self.holds_fresh or self._sums(state, fresh)):
            self._set_aside.pop(id(state), None)  # left by a backward that failed
            self.stash(state)
            if self.holds_fresh:
                self.fresh[id(state)] = state

    def stash(self, state: ParameterState) -> None:
        """Sets an earlier gradient aside until :meth:`unstash`."""
        if state.parameter.grad is not None:
            self._set_aside[id(state)] = state.parameter.grad
            state.handle.set_gradient(None, keeps_sum=True)

    def unstash(self, state: ParameterState) -> None:
        """Adds what autograd accumulated in ``parameter.grad`` to the gradient set aside, and puts the sum in its place."""
        earlier, fresh = self._set_aside.pop(id(state), None), state.parameter.grad
        state.normed = None
        if earlier is not None and fresh is not None:
            state.handle.set_gradient(earlier, keeps_sum=True)
            self.add(state, fresh)

    @torch.no_grad()
    def add(self, state: ParameterState, gradient: torch.Tensor) -> None:
        """Sets ``parameter.grad``, or adds to it, on the device where it is. No copy into it may be in flight."""
        state.normed = None
        earlier = state.parameter.grad
        if earlier is None:
            state.handle.set_gradient(gradient)
            return
        self.prepare()
        running = self.running(state)
        if running is None:
            earlier.add_(gradient)
        else:
            running.kernels.accumulate_split(earlier, running.residual, gradient.contiguous(), running.has_residual)
            state.handle.note_fp32_sum()


BF16_REMEDY = (
    "To accumulate gradients without the 2 bytes a parameter that fp32 sums take, set megatrain_config.accumulation_dtype to "
    "'bf16'. "
)


def _is_in_bf16(gradient: torch.Tensor) -> bool:
    return gradient.dtype == torch.bfloat16 and gradient.layout == torch.strided and not gradient.requires_grad
