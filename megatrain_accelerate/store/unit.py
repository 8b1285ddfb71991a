"""The memory of a unit: weights, fp32 masters, moments and gradients, on the host unless the plan moves it to the device. A
bf16 weight, which streams, and its *residual*, 16 bits more, are the master (``csrc/split_master.h``). An fp32 weight is its
own master."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.kernels.device import StepKernels
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.kernels.moments import Moments, moment_bytes, moments_within
from megatrain_accelerate.store.device_states import DeviceStates
from megatrain_accelerate.store.host_memory import DeviceMemory, HostMemory, copy_bytes, with_own_storage
from megatrain_accelerate.store.layout import ExpertRange, FlatEntry, FlatLayout, GradientRun, Share, part_bytes
from megatrain_accelerate.store.parameter import ParameterState, ParamHandle
from megatrain_accelerate.store.segments import FlatStates
from megatrain_accelerate.store.shared_store import SharedStore, SharedUnit

BytesOf = Callable[[int, int], torch.Tensor]
"""Returns the bytes of a slot between two offsets, as uint8."""
PASSING_BUFFERS = 3
"""Host buffers with ``host_gradients: passing``: one is filled, one is read by a step, one is between the two."""


class HostUnit:
    """Owner of the memory of one unit: a streamed layer, a layer's experts that stream in parts, or a resident group.

    A unit lives on the host or, whole, on the device (:attr:`is_on_device`). A unit on the host is stepped there, or on the
    device if its share's states have a copy there (:attr:`device_states`).

    Writers: adoption, the step worker (weights, residuals, moments), the d2h stream or the step worker (gradients), and
    whoever writes to the parameters from outside (``load_state_dict``). Readers: the h2d stream (weights), the step worker.
    :attr:`version` changes whenever device copies of the weights become stale. Gradients and moments are promised (their bytes
    count as taken) when the unit is to be trained, and allocated when they are first needed, see :meth:`allocate`. Residuals
    of weights that came in bf16 are zero, and take no memory until a step or somebody else writes to them.

    Args:
        parameters: (name, parameter) of the unit, each once, in model order. ``dtypes`` has their compute dtypes, by ``id``.
        register: see :class:`HostMemory`.
        holds_masters: False if the weights were loaded in bf16 and aren't to be trained yet: they have no residuals.
        moments_dtype: fp32, bf16, or int8 for codes and scales.
        store: the memory that several ranks share. The first rank's values are adopted.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        dtypes: Mapping[int, torch.dtype],
        *,
        kernels: HostKernels,
        register: bool,
        holds_masters: bool = True,
        moments_dtype: torch.dtype = torch.float32,
        store: SharedStore | None = None,
    ) -> None:
        self.name = name
        self._host_kernels = kernels
        self.kernels: StepKernels = kernels
        """Kernels of the unit's home: the host or :attr:`device`."""
        self.device: torch.device | None = None
        """The device on which the unit lives, None for the host. See :meth:`move`."""
        self._register = register
        self.moments_dtype = moments_dtype
        self.memory: dict[str, HostMemory | DeviceMemory] = {}
        """What is allocated, by kind. :func:`sizes_by_kind` lists the kinds."""
        self._promised: set[str] = set()
        """Kinds of memory that were promised, whether they are allocated or not."""
        self.layout = FlatLayout.of(parameters, dtypes)
        self.sizes = sizes_by_kind(self.layout, moments_dtype)
        self.sums_device: torch.device | None = None
        """Where fp32 sums of gradients are made: for a resident group where it computes, None for the unit's home."""
        self.shared = None if store is None else SharedUnit(store, self.layout, self.sizes)
        self.share = self.layout.share_of(0, 1) if self.shared is None else self.shared.share
        """The states that this process steps: all of them unless several ranks share the unit."""
        self.gradient_runs = self.layout.gradient_runs
        self.own_gradients = _runs_in(self.share, self.gradient_runs)
        """The gradients that this process steps, which are the ones that it copies from a gradient slot to the host."""
        self.device_states: DeviceStates | None = None
        """The share's states on the device, if they are stepped there while the unit lives on the host."""
        self.version = 0
        # Flat buffers as in :class:`FlatStates`. They are empty or None until they are allocated.
        self.weights = torch.empty(0)
        self.residuals = torch.empty(0, dtype=torch.int16)
        self.gradients: torch.Tensor | None = None
        self.gradient_residuals: torch.Tensor | None = None
        self.moments: Moments | None = None
        self.passes_gradients = False
        """Whether gradients have no memory of their own: :attr:`gradients` is the buffer to which they were last copied."""
        self.states = [
            ParameterState(ParamHandle(parameter), entry, parameter.data, share=None if store is None else self.share)
            for (_, parameter), entry in zip(parameters, self.layout.entries, strict=True)
        ]
        self.memory["weights"] = self._allocate("weights", touch=False)
        self._bind("weights")
        if holds_masters:
            self.promise("residuals")
            self.allocate("residuals", touch=False)
        if self.shared is None or self.shared.ranks.rank == 0:
            for state in self.states:
                self._adopt(state)
        self.note_written("weights")

    def _allocate(self, kind: str, touch: bool = True) -> HostMemory | DeviceMemory:
        """Makes memory of one kind where the unit lives. With ``touch`` all host threads zero it, unless ranks share it."""
        size_bytes = self.sizes[kind]
        if self.device is not None:
            return DeviceMemory(size_bytes, self.device)
        # What is copied between host and device asynchronously must be page-locked.
        is_copied = kind in ("weights", "gradients") or (kind == "gradient_residuals" and self.sums_device is not None)
        register = self._register and is_copied and size_bytes > 0
        shared = None if self.shared is None else self.shared.map(kind)
        memory = HostMemory(size_bytes, register=register, shared=shared)
        memory.is_touched = touch or shared is not None
        if touch and shared is None:  # other ranks may have written to shared memory
            self._host_kernels.zero(memory.tensor(0, (memory.size_bytes,), torch.uint8))
        return memory

    def _bind(self, kind: str) -> None:
        """Rebinds the unit's and its parameters' views to the memory of this kind."""
        tensor, elements, moments_dtype = self.memory[kind].tensor, self.layout.state_elements, self.moments_dtype
        if kind == "moments":
            self.moments = moments_within(tensor, elements, 0, (elements,), moments_dtype)
        else:
            dtype = torch.int16 if kind.endswith("residuals") else torch.uint8
            setattr(self, kind, tensor(0, (self.sizes[kind] // dtype.itemsize,), dtype))
        for state in self.states:
            spec, weight_offset, offset = state.entry.spec, state.entry.weight_offset, state.entry.state_offset
            if kind == "weights":
                state.weight = tensor(weight_offset, spec.shape, spec.dtype)
            elif offset is None:
                continue
            elif kind == "gradients":
                state.gradient = tensor(weight_offset, spec.shape, spec.dtype)
            elif kind == "moments":
                moments = moments_within(tensor, elements, offset, spec.shape, moments_dtype)
                for shown, moved in zip(state.moments or (), moments, strict=False):
                    shown.data = moved  # the optimizer's state keeps its tensors wherever the unit lives
                state.moments = state.moments or moments
            elif state.entry.has_residual and kind == "residuals":
                residual = tensor(2 * offset, spec.shape, torch.int16)
                if state.residual is None:
                    state.residual = residual
                state.residual.data = residual
            elif state.entry.has_residual:
                state.gradient_residual = state.sum_residual = tensor(2 * offset, spec.shape, torch.int16)
                if self.sums_device is not None and not self.is_on_device:
                    # The sum is made there, and this half of it copied to the host before a step.
                    state.sum_residual = state.gradient_residual.to(self.sums_device, copy=True)

    def _adopt(self, state: ParameterState) -> None:
        value = state.parameter.detach().contiguous()
        if state.residual is not None and value.dtype == torch.float32:
            self._host_kernels.split(value.cpu(), state.weight, state.residual)
            self.note_written("residuals")
        elif value.dtype == state.weight.dtype:
            copy_bytes(state.weight, value, self._host_kernels)  # all threads read a mapped file faster than one does
        else:
            state.weight.copy_(value)

    def weights_on(self, device: torch.device) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Copies the parameters' weights to the device. If ranks share the unit, the copies are views of a flat buffer with
        room for the ranks' equal ranges. Returns that buffer or None, and the copies."""
        if self.shared is None:
            copies = [torch.empty_like(state.weight, device=device) for state in self.states]
            for copy, state in zip(copies, self.states, strict=True):
                copy_bytes(copy, state.weight, self._host_kernels)
            return None, copies
        ranks = self.shared.ranks.size
        buffer = torch.empty(ranks * part_bytes(self.layout.weight_bytes, ranks), dtype=torch.uint8, device=device)
        copy_bytes(buffer[: self.layout.weight_bytes], self.weights, self._host_kernels)
        return buffer, [with_own_storage(view) for view in self.layout.views(buffer)]

    def write_master(self, state: ParameterState, value: torch.Tensor) -> None:
        """Sets a parameter's master and weight from a floating-point ``value``. Raises a ``StateError`` if its shape or dtype
        doesn't fit, and an ``UnsupportedError`` if ranks share the unit and this isn't a write of ``load_state_dict``."""
        if self.shared is not None and not self.shared.store.is_loading:
            raise UnsupportedError(
                f"a script wrote to weights of {self.name}. Several processes share them, so that each would overwrite the "
                "others' values. Change weights before accelerator.prepare(), or by load_state_dict(), or set num_processes: 1"
            )
        self.bring_states()
        if value.shape != state.weight.shape or not value.is_floating_point() or value.is_meta:
            raise StateError(
                f"parameter {self.name}.{state.name} was prepared with shape {tuple(state.weight.shape)} and is now a "
                f"{value.dtype} tensor of shape {tuple(value.shape)} on {value.device}; change the model (adapters, heads, "
                "tokens) before accelerator.prepare(), or prepare it anew"
            )
        if value.data_ptr() != state.weight.data_ptr():  # otherwise the script wrote to the weight itself, in place
            value = value.to(state.weight.device).contiguous()
            if state.residual is not None and value.dtype == torch.float32:
                self.kernels.split(value, state.weight, state.residual)
                self.note_written("residuals")
                return
            if not state.handle.is_shown and bool((state.weight == value).all()):
                return  # it was moved to another device, not written to: the residual stays valid
            state.weight.copy_(value)
        if state.residual is not None and not self.is_blank("residuals"):
            state.residual.zero_()

    def read_master(self, state: ParameterState) -> torch.Tensor:
        """A parameter's master, or its weight if it has no residual, as a new fp32 tensor on the host."""
        if state.residual is None:
            return state.weight.to("cpu", torch.float32, copy=True)
        master = torch.empty(state.weight.shape, dtype=torch.float32, device=state.weight.device)
        self.kernels.join(state.weight, state.residual, master)
        return master.cpu()

    def write_residual(self, state: ParameterState, residual: torch.Tensor | None) -> bool:
        """Sets the residual of a parameter's master from an optimizer's state, and returns whether it could. An optimizer that
        loaded a state before it was adopted has cast the residual to another dtype."""
        if state.residual is None or residual is None or residual.dtype != torch.int16:
            return False
        state.residual.copy_(residual)
        self.note_written("residuals")
        return True

    @property
    def flat_states(self) -> FlatStates:
        """All of the unit's states. The moments must be allocated."""
        assert self.moments is not None
        return FlatStates(0, self.weights, self.residuals, self.moments, self.gradients, self.gradient_residuals)

    def bring_states(self) -> None:
        """Makes this process's share of residuals and moments valid on the host, see :meth:`DeviceStates.leave`."""
        if (states := self.device_states) is not None and self.moments is not None and states.leave(self.flat_states):
            self.note_written("residuals", "moments")

    def note_written(self, *kinds: str) -> None:
        """Called when the engine has written to memory of these kinds, which counts as touched from then on."""
        for kind in self.memory.keys() & kinds:
            self.memory[kind].is_touched = True

    def is_blank(self, kind: str) -> bool:
        """Whether memory of this kind is zero, since neither the engine has written to it nor a script. Scripts write by
        operations of torch, which change a view's ``_version``."""
        if self.memory[kind].is_touched:
            return False
        residuals, moments = [state.residual for state in self.states], [state.moments or () for state in self.states]
        views = residuals if kind == "residuals" else [view for of_state in moments for view in of_state]
        return not any(view is not None and view._version for view in views)

    def allocate(self, kind: str, touch: bool = True) -> None:
        """Allocates one kind of memory, zeroed, where the unit lives, if it is missing and the unit has any of that kind.
        Gradients are allocated only if they were promised, and not on the device, where they are autograd's own. With
        ``touch=False`` the pages are first touched by a later writer, and count as promised until then."""
        is_unwanted = kind == "gradients" and (kind not in self._promised or self.is_on_device)
        if kind in self.memory or not self.sizes[kind] or is_unwanted:
            return
        memory = self.memory[kind] = self._allocate(kind, touch)
        self._bind(kind)
        if self.shared is not None and not self.is_on_device:
            # All threads touch the pages of the share, to which this rank alone writes. New ones are zero anyway.
            if kind == "gradients" and self.gradients is not None:
                self._host_kernels.zero(self.gradients[self.share.bytes])
            elif kind == "moments" and self.moments is not None:
                for part in self.moments.run(self.share.begin, self.share.end - self.share.begin):
                    self._host_kernels.zero(part)
        if kind in ("gradients", "gradient_residuals"):
            memory.register()

    def page_lock_weights(self) -> None:
        """Page-locks the weights on the host, so that their copies are asynchronous. Does nothing the second time."""
        self.memory["weights"].register()

    def promise(self, kind: str) -> None:
        """Has memory count as taken before it is touched, see :func:`available_host_bytes`."""
        if self.sizes[kind] and not (kind == "gradients" and self.passes_gradients):
            self._promised.add(kind)

    def has(self, kind: str) -> bool:
        """Whether memory of this kind is allocated or promised."""
        return kind in self.memory or kind in self._promised

    @property
    def promised_bytes(self) -> int:
        """Promised host memory that isn't touched yet, of a unit on the host. Each of several ranks counts its share."""
        missing = set() if self.is_on_device else self._promised - self._touched_kinds
        return sum(self.sizes[kind] for kind in missing) // (self.shared.ranks.size if self.shared else 1)

    @property
    def touched_bytes(self) -> int:
        """Bytes of the unit's memory, without what was never touched."""
        return sum(self.sizes[kind] for kind in self._touched_kinds)

    @property
    def _touched_kinds(self) -> set[str]:
        return {kind for kind, memory in self.memory.items() if memory.is_touched}

    def promised_moments(self, state: ParameterState) -> Moments | None:
        """A parameter's promised moments as tensors without data. None if none were promised."""
        if "moments" not in self._promised:
            return None
        spec, stored = state.entry.spec, self.moments_dtype
        return moments_within(lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), 0, 0, spec.shape, stored)

    @property
    def is_on_device(self) -> bool:
        """Whether the whole unit lives on the device."""
        return self.device is not None

    def copies(self, slot_bytes: BytesOf) -> list[tuple[torch.Tensor, ...]]:
        """(source, target) of the copies to a slot: the flat weights as uint8, and their range there."""
        return [(self.weights, slot_bytes(0, self.layout.weight_bytes))]

    def copies_of_part(self, part: slice, buffer: torch.Tensor) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        """(source, target) of the copies of some bytes of the weights to their place in a flat buffer, from
        :attr:`device_states` as far as these have them. Also returns how many bytes come from the host instead."""
        copies, on_device = [], slice(part.start, part.start)
        if self.device_states is not None and (found := self.device_states.weights_of(part)) is not None:
            on_device, weights = found
            copies = [(weights, buffer[on_device])]
        around = (slice(part.start, on_device.start), slice(on_device.stop, part.stop))
        on_host = [at for at in around if at.start < at.stop]
        copies += [(self.weights[at], buffer[at]) for at in on_host]
        return copies, sum(at.stop - at.start for at in on_host)

    def own_elements(self, entry: FlatEntry, tensor: torch.Tensor) -> torch.Tensor:
        """The elements that this process steps of a parameter's tensor or gradient: all unless ranks share the unit."""
        return tensor if self.shared is None else self.share.of(entry, tensor)

    own_elements_in_slot = own_elements
    """The same for a gradient in a slot."""

    def move(self, device: torch.device | None, kernels: StepKernels) -> None:
        """Moves the unit, with its parameters' data and gradients, to ``device``, where gradients are autograd's own, or
        (None) to newly allocated and registered host memory. ``kernels``: those of the new home. No step and no copy may be
        pending, and it may have no :attr:`device_states`. Without enough memory (``torch.OutOfMemoryError``,
        ``HostMemoryError``) nothing moves."""
        old_memory = self.memory
        gradients = [(s, s.parameter.grad, s.sum_residual if s.handle.has_fp32_sum else None) for s in self.states]
        kinds = [kind for kind in old_memory if kind != "gradients"]
        if device is None and "gradients" in self._promised and any(gradient is not None for _, gradient, _ in gradients):
            kinds.append("gradients")
        if device is not None and "moments" in self._promised.difference(kinds):
            kinds.append("moments")  # before activations take the memory that the plan sets aside for moments
        old_device, self.device = self.device, device
        new_memory: dict[str, HostMemory | DeviceMemory] = {}
        try:
            for kind in kinds:
                new_memory[kind] = self._allocate(kind)
                new_memory[kind].register()
        except BaseException:  # all memory of the new home or none, so that no move is left half-way
            self.device = old_device
            for memory in new_memory.values():
                memory.close()
            raise
        for kind in {"weights", "residuals", "moments"} & old_memory.keys():
            whole = (0, (self.sizes[kind],), torch.uint8)
            if not self.is_blank(kind):  # otherwise both are zero
                copy_bytes(new_memory[kind].tensor(*whole), old_memory[kind].tensor(*whole), self._host_kernels)
        self.memory, self.kernels = new_memory, kernels
        self.gradients = None
        for state in self.states:
            state.handle.set_gradient(None)
            state.gradient = None
        for kind in kinds:
            self._bind(kind)
        for state, gradient, residual in gradients:
            state.handle.show(state.weight)
            if gradient is not None:
                if state.gradient is not None:
                    state.gradient.copy_(gradient)
                state.handle.set_gradient(gradient.to(state.weight.device) if state.gradient is None else state.gradient)
            if residual is not None:
                for target in (state.gradient_residual, state.sum_residual):
                    assert target is not None
                    target.copy_(residual)
                state.handle.note_fp32_sum()
        for memory in old_memory.values():
            memory.close()
        self.version += 1

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that are allocated where the unit lives, by kind of memory."""
        always = dict.fromkeys(("weights", "gradients", "residuals", "moments"), 0)
        return {**always, **{kind: self.sizes[kind] for kind in self.memory}}

    def release(self) -> None:
        """Returns the parameters to ordinary memory, with their masters' full precision, and drops the unit's memory."""
        for state in self.states:
            state.handle.set_gradient(None)
            if state.parameter.shape != state.weight.shape:
                continue  # somebody resized it: it has memory of its own
            master = self.read_master(state) if state.residual is not None else state.weight.to("cpu", copy=True)
            state.handle.give_back(master)
        for memory in self.memory.values():
            memory.close()
        self.version += 1
        # Memory is unmapped when its last view dies.
        self.states, self.memory, self._promised = [], {}, set()
        self.weights = self.residuals = torch.empty(0)
        self.gradients = self.gradient_residuals = self.moments = self.device_states = None


class UnitRange:
    """Some of the experts of a unit, whose parameters have the dimensions (experts, ...): a range of each parameter. In a slot
    the ranges are contiguous, like the parameters of a small unit."""

    is_on_device = False
    """The plan moves layers and resident groups to the device, never experts that stream in parts."""

    def __init__(self, whole: HostUnit, experts: ExpertRange) -> None:
        self.whole, self.experts = whole, experts
        self.layout = experts.layout(whole.layout)
        self._runs: list[GradientRun] = []
        for entry, in_slot in zip(whole.layout.entries, self.layout.entries, strict=True):
            begin, end = (entry.spec.dtype.itemsize * element for element in experts.elements(entry))
            self._runs.append(GradientRun(entry.spec.dtype, in_slot.weight_offset, entry.weight_offset + begin, end - begin))
        runs = zip(self._runs, whole.layout.entries, strict=True)
        self.gradient_runs = [run for run, entry in runs if entry.spec.trainable]
        """The experts' gradients in a slot, one run for each trained parameter."""
        self.own_gradients = _runs_in(whole.share, self.gradient_runs)

    @property
    def version(self) -> int:
        return self.whole.version

    def page_lock_weights(self) -> None:
        self.whole.page_lock_weights()

    def copies(self, slot_bytes: BytesOf) -> list[tuple[torch.Tensor, ...]]:
        """As :meth:`HostUnit.copies`, one copy for each parameter."""
        return [(self.whole.weights[run.in_unit], slot_bytes(run.in_slot.start, run.in_slot.stop)) for run in self._runs]

    def own_elements(self, entry: FlatEntry, tensor: torch.Tensor) -> torch.Tensor:
        """The experts' elements of a parameter's tensor, or of its gradient, that this process steps."""
        if self.whole.shared is None:
            return self.experts.of(tensor)
        return tensor.reshape(-1)[self.whole.share.among(entry, *self.experts.elements(entry))]

    def own_elements_in_slot(self, entry: FlatEntry, gradient: torch.Tensor) -> torch.Tensor:
        """The same for a gradient in a slot, which has these experts alone. ``entry`` is the whole parameter's."""
        if self.whole.shared is None:
            return gradient
        first, last = self.experts.elements(entry)
        own = self.whole.share.among(entry, first, last)
        return gradient.reshape(-1)[own.start - first : own.stop - first]


def _runs_in(share: Share, runs: Iterable[GradientRun]) -> list[GradientRun]:
    return [run for whole in runs if (run := whole.of(share)).size_bytes]


def sizes_by_kind(layout: FlatLayout, moments_dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each kind of memory that a unit of this layout can have. Gradient residuals are the low halves of fp32 sums."""
    residuals = 2 * layout.split_elements
    return {
        "weights": layout.weight_bytes,
        "gradients": layout.gradient_bytes,
        "residuals": residuals,
        "moments": moment_bytes(layout.state_elements, moments_dtype),
        "gradient_residuals": residuals,
    }


def planned_host_bytes(
    layouts: Iterable[FlatLayout], moments_dtype: torch.dtype, training: bool, fp32_sums: bool = False, passing_units: int = 0
) -> dict[str, int]:
    """Bytes that units of these layouts will take with the fused optimizer, by kind of memory. ``training``: whether there are
    gradients and moments. The gradients of the first ``passing_units`` take turns in :data:`PASSING_BUFFERS` buffers."""
    units = [sizes_by_kind(layout, moments_dtype) for layout in layouts]
    parts = {kind: sum(unit[kind] for unit in units) for kind in ("weights", "gradients", "residuals", "moments")}
    passed = [unit["gradients"] for unit in units[:passing_units]]
    parts["gradients"] += PASSING_BUFFERS * max(passed, default=0) - sum(passed)
    if not training:
        parts["gradients"] = parts["moments"] = 0
    return {**parts, "gradient_residuals": parts["residuals"]} if fp32_sums else parts
