"""The store: the home of weights, fp32 masters, moments and gradients, unit by unit. On the host, unless the plan moves a
unit to the device.

A bf16 weight's fp32 master is split: the bf16 half that streams to the GPU and a 16-bit signed residual, so that
``master bits == (weight bits << 16) + residual`` exactly. An fp32 weight is its own master.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.memory.device_memory import DeviceMemory
from megatrain_accelerate.memory.flat_layout import FlatEntry, FlatLayout, ParameterSpec
from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.memory.param_handle import ParamHandle
from megatrain_accelerate.memory.parameter_state import ParameterState
from megatrain_accelerate.optim.device_kernel import StepKernels
from megatrain_accelerate.optim.kernel import HostKernels
from megatrain_accelerate.optim.moments import Moments, moment_bytes, moments_within

PASSING_BUFFERS = 3
"""Host buffers for gradients that pass (``host_gradients``): one is filled, one stepped from, one between the two."""


class HostUnit:
    """Owner of one unit's host memory: a streamed layer's, or a resident group's.

    Writers: adoption, the step worker (weights, residuals, moments), the d2h stream or the step worker (gradients),
    and whoever writes to the parameters from outside (``load_state_dict``). Readers: the h2d stream (weights), the
    step worker. :attr:`version` changes whenever a device copy of the weights becomes stale.

    Args:
        name: for messages and traces.
        parameters: (name, parameter) of the unit, each parameter once, in model order.
        dtypes: the dtype in which each of them computes.
        kernels: the host kernels.
        huge_pages, register: see :class:`HostMemory`.
        holds_masters: False if the weights are all there is of them: loaded in bf16, and not to be trained so far.
        moments_dtype: of the fused optimizer's moments: fp32, bf16, or int8 for codes and scales.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        dtypes: Sequence[torch.dtype],
        *,
        kernels: HostKernels,
        huge_pages: bool,
        register: bool,
        holds_masters: bool = True,
        moments_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name = name
        self._host_kernels = kernels
        self.kernels: StepKernels = kernels
        """Those of the unit's home."""
        self.device: torch.device | None = None
        """Where the unit lives if not on the host, see :meth:`move_to_device`."""
        self._reserved: list[HostMemory | DeviceMemory] = []
        self._huge_pages = huge_pages
        self._register = register
        self.layout = FlatLayout(
            ParameterSpec(key, tuple(parameter.shape), dtype, parameter.requires_grad)
            for (key, parameter), dtype in zip(parameters, dtypes, strict=True)
        )
        self.version = 0
        from_device = any(parameter.device.type != "cpu" for _, parameter in parameters)
        self._weight_memory = self._allocate(self.layout.weight_bytes, register, touch=from_device)
        if from_device:
            self._weight_memory.register()  # values come by copies over the link
        self.weights = self._weight_memory.tensor(0, (self.layout.weight_bytes,), torch.uint8)
        """Flat weights, uint8: what one copy moves to a slot."""
        self._gradient_memory: HostMemory | DeviceMemory | None = None
        self.gradients: torch.Tensor | None = None
        """Flat gradients, uint8: what one copy brings from a gradient slot. None before :meth:`allocate_gradients`."""
        self._gradient_residual_memory: HostMemory | DeviceMemory | None = None
        self.gradient_residuals: torch.Tensor | None = None
        """Flat low halves of fp32 gradient sums, int16. None before :meth:`allocate_gradient_residuals`."""
        self._registers_gradient_residuals = False
        self.passes_gradients = False
        """Whether gradients have no memory here: :attr:`gradients` is then the buffer that they came in last."""
        self._allocate_residuals(self.layout.split_elements if holds_masters else 0)
        self._moment_memory: HostMemory | DeviceMemory | None = None
        self._moments_dtype = moments_dtype
        self.moments: Moments | None = None
        """Flat moments of the fused optimizer. None before :meth:`allocate_moments`."""
        self.states = [
            self._adopt(parameter, entry) for (_, parameter), entry in zip(parameters, self.layout.entries, strict=True)
        ]
        self._weight_memory.register()

    def _allocate(self, size_bytes: int, register: bool, touch: bool = True) -> HostMemory | DeviceMemory:
        if self._reserved:
            return self._reserved.pop(0)
        if self.device is not None:
            return DeviceMemory(size_bytes, self.device)
        memory = HostMemory(size_bytes, huge_pages=self._huge_pages, register=register and size_bytes > 0)
        if touch:
            self._host_kernels.zero(memory.tensor(0, (memory.size_bytes,), torch.uint8))
        return memory

    def _adopt(self, parameter: nn.Parameter, entry: FlatEntry) -> ParameterState:
        state = ParameterState(ParamHandle(parameter), entry, parameter.data)
        self._bind(state)
        value = parameter.detach().contiguous()
        if state.residual is not None and value.dtype == torch.float32:
            self._host_kernels.split(value.cpu(), state.weight, state.residual)
        elif value.dtype == state.weight.dtype and value.device.type == "cpu":
            self._host_kernels.copy(state.weight, value)  # on all threads, which read a file faster than one does
        else:
            state.weight.copy_(value)
        return state

    def write_master(self, state: ParameterState, value: torch.Tensor) -> None:
        """Sets a parameter's master (and so its weight) from ``value``: same shape, any floating dtype and device.

        Raises:
            StateError: ``value`` has another shape, or isn't a floating tensor with data.
        """
        if value.shape != state.weight.shape or not value.is_floating_point() or value.is_meta:
            raise StateError(
                f"parameter {self.name}.{state.name} was prepared with shape {tuple(state.weight.shape)} and is now a "
                f"{value.dtype} tensor of shape {tuple(value.shape)} on {value.device}; change the model (adapters, heads, "
                "tokens) before accelerator.prepare(), or prepare it anew"
            )
        if value.data_ptr() != state.weight.data_ptr():
            value = value.to(state.weight.device).contiguous()
            if state.residual is not None and value.dtype == torch.float32:
                self.kernels.split(value, state.weight, state.residual)
                return
            if bool((state.weight == value).all()):
                return  # moved to another device, not written to: the master behind it stays
            state.weight.copy_(value)
        if state.residual is not None:
            state.residual.zero_()

    def read_master(self, state: ParameterState) -> torch.Tensor:
        """A new fp32 host tensor with the parameter's master, in its shape; for a frozen one, its weight."""
        if state.residual is None:
            return state.weight.to("cpu", torch.float32, copy=True)
        master = torch.empty(state.weight.shape, dtype=torch.float32, device=state.weight.device)
        self.kernels.join(state.weight, state.residual, master)
        return master.cpu()

    def _allocate_residuals(self, elements: int) -> None:
        self._residual_memory = self._allocate(2 * elements, False)
        self.residuals = self._residual_memory.tensor(0, (elements,), torch.int16)

    def allocate_masters(self) -> None:
        """Makes the low halves of the masters, zero, if there are none yet."""
        if len(self.residuals) < self.layout.split_elements:
            self._allocate_residuals(self.layout.split_elements)
            for state in self.states:
                self._bind(state)

    def allocate_gradients(self) -> None:
        """Makes the gradients' memory, registered. Does nothing if it exists, or if all parameters are frozen."""
        size = self.layout.gradient_bytes
        if self._gradient_memory is not None or not size or self.device is not None or self.passes_gradients:
            return
        self._gradient_memory = self._allocate(size, self._register)
        self._gradient_memory.register()
        self.gradients = self._gradient_memory.tensor(0, (size,), torch.uint8)
        for state in self.states:
            spec = state.entry.spec
            if spec.trainable:
                state.gradient = self._gradient_memory.tensor(state.entry.weight_offset, spec.shape, spec.dtype)

    def allocate_gradient_residuals(self, register: bool = False) -> None:
        """Makes the memory with which gradients can be summed in fp32. Does nothing if it exists, or without bf16 gradients.

        Args:
            register: page-lock it, for residuals that come from the device.
        """
        elements = self.layout.split_elements
        if self.gradient_residuals is not None or not elements:
            return
        self._registers_gradient_residuals = register and self._register
        memory = self._gradient_residual_memory = self._allocate(2 * elements, self._registers_gradient_residuals)
        memory.register()
        self.gradient_residuals = memory.tensor(0, (elements,), torch.int16)
        for state in self.states:
            offset = state.entry.state_offset
            if state.entry.has_residual and offset is not None:
                state.gradient_residual = memory.tensor(2 * offset, state.entry.spec.shape, torch.int16)
                state.sum_residual = state.gradient_residual

    @property
    def moment_bytes(self) -> int:
        """Bytes of the fused optimizer's moments, whether they exist or not."""
        return moment_bytes(self.layout.state_elements, self._moments_dtype)

    @property
    def has_moments(self) -> bool:
        """Whether :meth:`allocate_moments` was called."""
        return self._moment_memory is not None

    def allocate_moments(self) -> None:
        """Makes the fused optimizer's moments, zero. Does nothing if they exist."""
        if self.has_moments:
            return
        elements, dtype = self.layout.state_elements, self._moments_dtype
        memory = self._moment_memory = self._allocate(self.moment_bytes, False)
        self.moments = moments_within(memory.tensor, elements, 0, (elements,), dtype)
        for state in self.states:
            if (offset := state.entry.state_offset) is not None:
                state.moments = moments_within(memory.tensor, elements, offset, state.entry.spec.shape, dtype)

    def move_to_device(self, device: torch.device, kernels: StepKernels) -> None:
        """The unit lives on ``device`` from now on: weights, residuals, moments; gradients are autograd's own there.

        Nothing may be pending on the unit: no step, no copy. The parameters' data and gradients move along.

        Args:
            device: where the model computes.
            kernels: that step there.
        """
        self._move(device, kernels)

    def move_to_host(self) -> None:
        """Reverse of :meth:`move_to_device`: host memory is made and registered anew, and gradients get their place in it."""
        self._move(None, self._host_kernels)

    @property
    def is_on_device(self) -> bool:
        """Whether the unit was moved to the device."""
        return self.device is not None

    def _move(self, device: torch.device | None, kernels: StepKernels) -> None:
        old_memory = (
            self._weight_memory,
            self._residual_memory,
            self._moment_memory,
            self._gradient_memory,
            self._gradient_residual_memory,
        )
        old = (self.weights, self.residuals)
        gradients = [state.parameter.grad for state in self.states]
        sum_residuals = [state.sum_residual if state.handle.has_fp32_sum else None for state in self.states]
        sums_gradients = self.gradient_residuals is not None
        has_gradients = self._gradient_memory is not None or self.device is not None
        self._reserve(device, self.has_moments, has_gradients, sums_gradients)
        self.kernels = kernels
        self._weight_memory = self._allocate(self.layout.weight_bytes, self._register)
        self.weights = self._weight_memory.tensor(0, (self.layout.weight_bytes,), torch.uint8)
        self._allocate_residuals(len(old[1]))
        self.weights.copy_(old[0])
        self.residuals.copy_(old[1])
        self._weight_memory.register()
        for state in self.states:
            state.handle.set_gradient(None)
            state.gradient = state.gradient_residual = state.sum_residual = None
            self._bind(state)
            state.handle.show(state.weight)
        old_moments, self._moment_memory = self._moment_memory, None
        self._gradient_memory = self.gradients = self.moments = None
        self._gradient_residual_memory = self.gradient_residuals = None
        if old_moments is not None:
            self.allocate_moments()
            assert self._moment_memory is not None
            everything = (0, (self.moment_bytes,), torch.uint8)
            self._moment_memory.tensor(*everything).copy_(old_moments.tensor(*everything))
        if has_gradients:
            self.allocate_gradients()
        if sums_gradients:
            self.allocate_gradient_residuals(self._registers_gradient_residuals)
        for state, gradient, residual in zip(self.states, gradients, sum_residuals, strict=True):
            if gradient is not None:
                if state.gradient is not None:
                    state.gradient.copy_(gradient)
                state.handle.set_gradient(gradient.to(state.weight.device) if state.gradient is None else state.gradient)
            if residual is not None:
                assert state.gradient_residual is not None
                state.gradient_residual.copy_(residual)
                state.handle.note_fp32_sum()
        for memory in old_memory:
            if memory is not None:
                memory.close()
        self.version += 1

    def _reserve(self, device: torch.device | None, moments: bool, gradients: bool, sums: bool) -> None:
        """Makes all memory of the new home, in the order in which it is taken, or none: a move isn't left half-way.

        Raises:
            torch.OutOfMemoryError, HostMemoryError: it doesn't fit; the unit is as it was.
        """
        layout = self.layout
        needed = [(layout.weight_bytes, self._register), (self.residuals.nbytes, False)]
        needed += [(self.moment_bytes, False)] if moments else []
        has_place = gradients and device is None and layout.gradient_bytes and not self.passes_gradients
        needed += [(layout.gradient_bytes, self._register)] if has_place else []
        needed += [(2 * layout.split_elements, self._registers_gradient_residuals)] if sums else []
        before, self.device = self.device, device
        made: list[HostMemory | DeviceMemory] = []
        try:
            for size, register in needed:
                made.append(self._allocate(size, register))
                made[-1].register()
        except BaseException:
            self.device = before
            for memory in made:
                memory.close()
            raise
        self._reserved = made

    def _bind(self, state: ParameterState) -> None:
        """Makes the state's weight and residual views of the unit's memory."""
        entry, spec = state.entry, state.entry.spec
        state.weight = self._weight_memory.tensor(entry.weight_offset, spec.shape, spec.dtype)
        if entry.has_residual and entry.state_offset is not None and len(self.residuals):
            state.residual = self._residual_memory.tensor(2 * entry.state_offset, spec.shape, torch.int16)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that the unit holds now at its home, by what they hold."""
        return {
            "weights": self.layout.weight_bytes,
            "gradients": self.layout.gradient_bytes if self._gradient_memory is not None else 0,
            "residuals": self.residuals.nbytes,
            "moments": self.moment_bytes if self.has_moments else 0,
            **({"gradient_residuals": 2 * self.layout.split_elements} if self.gradient_residuals is not None else {}),
        }

    def release(self) -> None:
        """Gives the parameters back to ordinary memory, with their masters' full precision, and lets the store go."""
        for state in self.states:
            state.handle.set_gradient(None)
            if state.parameter.shape != state.weight.shape:
                continue  # resized by somebody, in memory of its own
            master = self.read_master(state) if state.residual is not None else state.weight.to("cpu", copy=True)
            state.handle.give_back(master)
        self.close()
        self.version += 1
        # The mapping goes with the last view of it.
        self.states = []
        self.weights = self.residuals = torch.empty(0)
        self.gradients = self.gradient_residuals = self.moments = None

    def close(self) -> None:
        """Unregisters the memory; it is unmapped when the last view of it dies."""
        self._weight_memory.close()
        for memory in (self._gradient_memory, self._gradient_residual_memory):
            if memory is not None:
                memory.close()


def planned_host_bytes(
    layouts: Iterable[FlatLayout],
    training: bool,
    fp32_sums: bool = False,
    passing: int = 0,
    moments_dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Bytes that units of these layouts will take with the fused optimizer, by what they hold.

    ``training``: whether there are gradients and moments. ``fp32_sums``: whether gradients are summed in fp32. ``passing``:
    how many of the first units are layers whose gradients pass. ``moments_dtype``: fp32, bf16 or int8.
    """
    layouts = list(layouts)
    parts = {"weights": 0, "gradients": 0, "residuals": 0, "moments": 0}
    for layout in layouts:
        parts["weights"] += layout.weight_bytes
        parts["residuals"] += 2 * layout.split_elements
        if training:
            parts["moments"] += moment_bytes(layout.state_elements, moments_dtype)
        if fp32_sums:
            parts["gradient_residuals"] = parts.get("gradient_residuals", 0) + 2 * layout.split_elements
    if training:
        parts["gradients"] = sum(layout.gradient_bytes for layout in layouts[passing:])
        parts["gradients"] += PASSING_BUFFERS * max((layout.gradient_bytes for layout in layouts[:passing]), default=0)
    return parts


def held_host_bytes(units: Iterable[HostUnit]) -> dict[str, int]:
    """Bytes of host memory that the units hold now, by kind; nothing for those that live on the device."""
    total: dict[str, int] = {}
    for unit in units:
        if not unit.is_on_device:
            for kind, count in unit.bytes_by_kind().items():
                total[kind] = total.get(kind, 0) + count
    return total
