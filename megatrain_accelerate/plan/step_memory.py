"""Fake runs of the user's model, and a dispatch mode that counts their memory and costs. The user's own forward runs under
``FakeTensorMode`` (torch/_subclasses/fake_tensor.py) with the shapes of the real batch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from megatrain_accelerate.hooks import HOOKS
from megatrain_accelerate.layers import token_tiles
from megatrain_accelerate.layers.attention_results import FLASH, FLEX, attention_flops
from megatrain_accelerate.layers.caches import CACHE_ARGUMENTS, tensors_in_caches
from megatrain_accelerate.layers.execution_state import rng_state_restored
from megatrain_accelerate.layers.nested_tensors import Inputs, map_tensors, tensors_in
from megatrain_accelerate.loss.products import runs_on_gpu
from megatrain_accelerate.plan.fake_runs import (
    KnownValues,
    NumbersOfTensors,
    compiled_functions_as_python,
    launches_without_data,
    nothing_kept,
    taken_for_data,
)
from megatrain_accelerate.plan.machine import Machine


@dataclasses.dataclass(frozen=True)
class OpCosts:
    """The summed costs of operations."""

    flops: float = 0.0
    """FLOPs of matrix products, convolutions and attention."""
    traffic_bytes: float = 0.0
    """Bytes that all other operations read and write, except views."""
    attention_flops: float = 0.0
    """The part of :attr:`flops` that attention's kernels take."""

    def times(self, factor: float) -> OpCosts:
        return OpCosts(factor * self.flops, factor * self.traffic_bytes, factor * self.attention_flops)

    def seconds(self, machine: Machine) -> float:
        """An estimate of the time that the operations take on the device."""
        return self.flops / machine.device_flops + self.traffic_bytes / machine.device_bytes

    def __add__(self, other: OpCosts) -> OpCosts:
        attention_flops = self.attention_flops + other.attention_flops
        return OpCosts(self.flops + other.flops, self.traffic_bytes + other.traffic_bytes, attention_flops)

    def __sub__(self, other: OpCosts) -> OpCosts:
        return self + other.times(-1.0)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are made and freed while it is active, and costs of operations. Storages of the
    ``present`` tensors don't count."""

    supports_higher_order_operators = True

    def __init__(self, present: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.costs = OpCosts()
        # Views of them return their storages, which aren't new.
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in present)
        self.operands: weakref.WeakSet[Any] = weakref.WeakSet()
        """Storages that products and attention have read or allocated."""
        self.scores: weakref.WeakSet[Any] = weakref.WeakSet()
        """Storages that softmax has allocated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A tensor that stands for others (lazy logits) has a storage of no bytes, and mustn't be materialized here.
        with torch._C.DisableTorchFunctionSubclass():
            made = tensors_in(result)
            is_new = [self.track(tensor.untyped_storage()) for tensor in made]
            self._add_costs(func, args, kwargs or {}, result, made, any(is_new))
        return result

    def take_peak(self) -> int:
        """The peak of live bytes since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def track(self, storage: torch.UntypedStorage) -> bool:
        """Counts a storage until it is freed. Returns whether it is new."""
        if storage in self._seen:
            return False
        self._seen.add(storage)
        # The caching allocator hands out multiples of 512 bytes.
        size = -(-storage.nbytes() // 512) * 512
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, size)
        return True

    def _forget(self, size: int) -> None:
        self.live_bytes -= size

    def _add_costs(self, func: Any, args: Any, kwargs: Any, result: Any, made: list[torch.Tensor], is_new: bool) -> None:
        flops, times, name = _flops(func, args, kwargs, result), token_tiles.times(), str(func.__name__)
        if flops is not None:
            self.costs += OpCosts(times * flops, attention_flops=times * flops if "attention" in name else 0.0)
            self.operands.update(tensor.untyped_storage() for tensor in [*tensors_in((args, kwargs)), *made])
        elif is_new or name.split(".")[0].endswith("_"):  # no view
            read = tensors_in((args, kwargs))
            moved = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in [*read, *made])
            self.costs += OpCosts(traffic_bytes=times * moved)
        if name.startswith("_softmax."):
            self.scores.update(tensor.untyped_storage() for tensor in made)
        if made and runs_on_gpu(made[0]):
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes(name, made))
            if name.startswith(_SOFTMAX_BACKWARD):
                self.costs += OpCosts(traffic_bytes=3 * made[0].nbytes * times)  # the workspace's traffic


_SOFTMAX_BACKWARD = "_softmax_backward_data"
_ATTENTION, _SAMPLES = ("_scaled_dot_product", "_flash_attention"), "_flash_attention"
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def workspace_bytes(name: str, made: Sequence[torch.Tensor]) -> int:
    """Bytes that a GPU kernel allocates while it runs, where they are of the size of its results ``made``. Softmax's backward
    first multiplies gradient and result into a tensor of their size (``softmax_backward_cuda_out``,
    aten/src/ATen/native/cuda/SoftMax.cu). Attention's backward, except flex attention's, sums the queries' gradient in fp32,
    and makes gradients of keys and values for each head of the queries (``dq_accum``, ``dk_expanded``, ``dv_expanded``,
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp; cuDNN's backward takes as much)."""
    if name.startswith(_SOFTMAX_BACKWARD):
        return made[0].nbytes
    if not (name.startswith(_ATTENTION) and "backward" in name) or made[0].element_size() != 2:
        return 0
    query, key, value = made[:3]
    groups = query.shape[1] // max(1, key.shape[1])
    return 2 * query.nbytes + (groups * (key.nbytes + value.nbytes) if groups > 1 else 0)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float | None:
    """FLOPs of a matrix product, a convolution or attention. None for an operation without a formula."""
    name = str(func.__name__)
    count = flop_registry.get(func._overloadpacket if isinstance(func, torch._ops.OpOverload) else func)
    if count is None and "grouped_mm" in name:
        # Tokens times their expert's matrix: (T, D) by (E, D, F), (D, T) by (T, F) for each expert, or E matrices by E.
        left, right = args[:2]
        experts = left.shape[0] if left.dim() == right.dim() == 3 else 1
        return 2.0 * experts * left.shape[-2] * left.shape[-1] * right.shape[-1]
    if name.startswith(_CPU_ATTENTION) and runs_on_gpu(args[0]):  # stands for a GPU's, which skips half of the pairs if causal
        is_causal = any(argument is True for argument in [*args, *kwargs.values()])
        return (attention_flops(name, args) or 0.0) * (0.5 if is_causal else 1.0)
    if name.startswith(_SAMPLES) and (begins := args[6 if "backward" in name else 3]) is not None:
        query, key = args[1:3] if "backward" in name else args[:2]
        with _disable_current_modes():
            lengths = begins.diff().double()
            pairs = float(lengths.square().sum()) / 2  # causal
        return 2.0 * (5 if "backward" in name else 2) * pairs * query.shape[1] * key.shape[2]
    if count is None and not name.startswith((FLEX, *FLASH)):
        return None
    if count is not None:
        with contextlib.suppress(Exception):  # torch's formula refuses grouped-query attention
            return float(count(*args, **kwargs, out_val=result))
    return attention_flops(name, args)


@contextlib.contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """While the body runs, the model has no hooks except the engine's that say ``runs_without_data``: users' hooks count real
    calls. Attributes that the body sets on modules are undone. transformers reinstalls hooks that it needs for the loss."""
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        for module, own in attributes:
            for name in HOOKS:
                ours = ((key, hook) for key, hook in own[name].items() if getattr(hook, "runs_without_data", False))
                module.__dict__[name] = OrderedDict(ours)
            # Says that transformers has installed the hooks that collect router logits (utils/output_capturing.py).
            module.__dict__.pop("_output_capturing_hooks_installed", None)
        yield
    finally:
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)


@contextlib.contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Restores the values of the module's buffers after the body, which is a trial run that mustn't count."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextlib.contextmanager
def _fake_weights(
    model: nn.Module, device: torch.device, mode: FakeTensorMode, values: KnownValues
) -> Iterator[list[torch.Tensor]]:
    """Replaces the model's parameters and buffers by fake tensors while the body runs. Yields these. Enter it before the
    modes, through which each tensor would take five times as long."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            # A new tensor, since a conversion would carry over hooks and gradients.
            twin: torch.Tensor = FakeTensor(mode, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), device)
            fakes[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
            if not tensor.is_floating_point():
                values.learn(twin, tensor)
        return fakes[id(tensor)]

    with without_hooks(model):  # which restores these dictionaries, too
        for module in model.modules():
            for store in ("_parameters", "_buffers"):
                module.__dict__[store] = map_tensors(fake, dict(module.__dict__[store]))
        yield list(fakes.values())


def _without_looks_at_data(inputs: Inputs) -> dict[str, Any]:
    """The inputs without those that a fake run can't handle. What the model does without them takes about as much memory."""
    own = dict(inputs)
    # Models skip a mask of ones, but some can't tell without data. Beside position ids, which may be packed, it stays.
    mask = own.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all()) and own.get("position_ids") is None:
        del own["attention_mask"]
    # TRL's head (trl.trainer.utils.add_fused_lm_head) selects the labelled tokens and launches Triton kernels. The model's own
    # head by tiles takes about as much. An evaluation with it would make all logits, so one position stands for the tiles.
    if own.pop("fused_lm_head", None) and not torch.is_grad_enabled():
        own.pop("labels", None)
        own["logits_to_keep"] = 1
    return own


@contextlib.contextmanager
def fake_model(model: nn.Module, inputs: Inputs, device: torch.device) -> Iterator[tuple[dict[str, Any], LiveBytes]]:
    """Sets up a fake run in the body: weights and inputs have no data, gradients are enabled, nothing counts as a real call,
    and loops over tiles run few of them. Yields the fake inputs, and the counting mode, which the caller enters."""
    inputs, values = _without_looks_at_data(inputs), KnownValues()
    with (
        rng_state_restored(torch.device("cpu")),
        nothing_kept(model),
        launches_without_data(),
        contextlib.nullcontext(FakeTensorMode(allow_non_fake_inputs=True)) as mode,
        _fake_weights(model, device, mode, values) as weights,
        mode,
        values,
        NumbersOfTensors(),
        compiled_functions_as_python(),
        token_tiles.few_tiles(),
        taken_for_data(values),
        torch.enable_grad(),
    ):

        def without_data(tensor: torch.Tensor) -> torch.Tensor:
            fake = mode.from_tensor(tensor)
            values.learn(fake, tensor)
            return fake

        fake_inputs = tree_map_only(torch.Tensor, without_data, inputs)
        for name in CACHE_ARGUMENTS:  # the model writes to caches, so it gets copies
            if (cache := inputs.get(name)) is not None:
                fake_inputs[name] = None  # the model makes its own if a cache can't be copied: an offloaded one has a stream
                with contextlib.suppress(TypeError):
                    tensors = tensors_in_caches({name: cache})
                    fake_inputs[name] = copy.deepcopy(cache, {id(tensor): without_data(tensor) for tensor in tensors})
        yield fake_inputs, LiveBytes(weights)


def loss_of(output: Any, device: torch.device) -> torch.Tensor:
    """The model's own loss. If it was given no labels, the sum over its output."""
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    return sum((tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad), torch.zeros((), device=device))
