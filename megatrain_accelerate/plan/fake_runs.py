"""What fake runs of a model need besides ``FakeTensorMode``: values, since many forwards read small integer tensors (position
ids, masks, sizes of images), and care for code that torch's dispatcher doesn't see. Compiled functions and Triton kernels
would write to address zero, which ends the CUDA context, and caches would keep fake tensors."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._triton import has_triton_package
from torch.utils.weak import WeakIdKeyDictionary

from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.layers.nested_tensors import tensors_in

_MOST_ELEMENTS = 1 << 22
"""Values of larger tensors aren't tracked: positions of a few million tokens are, masks of all pairs of tokens aren't."""

_CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, set, collections.deque)
"""Types of containers that are restored. Other types may import a library when they are read (transformers' mappings do)."""
_MOST_ENTRIES = 10_000
"""Containers with more entries are left alone: they hold a script's data."""

_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "uniform", "dropout", "empty")
_ATEN = torch.ops.aten
_Cache = functools._lru_cache_wrapper
_NOT_OF_MODELS = ("torch", "builtins", "typing", "abc")


class KnownValues(TorchDispatchMode):
    """Computes real values, and answers with them, where they follow from the batch's integer and bool tensors, from single
    numbers beside them, or from tensors that the model makes itself. Enter it inside ``FakeTensorMode``."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._known: Any = WeakIdKeyDictionary()

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Records a fake tensor's values if ``real`` is a small integer or bool tensor, or has no dimension (the divisor of a
        loss). ``real`` is copied, so that the run never writes to it."""
        is_number = real.is_floating_point() or real.is_complex()
        if not real.is_meta and (real.dim() == 0 or (not is_number and real.numel() <= _MOST_ELEMENTS)):
            with _disable_current_modes():
                self._known[fake] = real.detach().to("cpu", copy=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # flex attention, for one
            return func(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default:
            number = self._real_result(func, args, kwargs)
            return func(*args, **kwargs) if number is None else number
        try:
            result = _fake_result(func, self._with_counted_masks(func, args), kwargs)
            # Values that wouldn't be kept aren't computed: a mask of all pairs of many tokens would take longer than the step.
            is_large = min((tensor.numel() for tensor in tensors_in(result)), default=0) > _MOST_ELEMENTS
            real = None if is_large else self._real_result(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            real = self._real_result(func, args, kwargs)
            if real is None:
                raise
            device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
            result = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device=device), real)
        if real is None:
            for tensor in _written(func, args, kwargs):
                self._forget(tensor)
        else:
            for fake, value in zip(tensors_in(result), tensors_in(real), strict=True):
                if isinstance(fake, FakeTensor) and value.numel() <= _MOST_ELEMENTS:
                    self._known[fake] = value
        return result

    def _real_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result with values. None if these don't follow from known ones."""
        name, tensors = func._overloadpacket.__name__, tensors_in((args, kwargs))
        # Models skip a layer if a random number is below a rate. A plan is for the largest step, so the number is 1.
        is_one_draw = name == "rand" and not tensors and args and list(args[0]) == []
        # The gradient of a loss with respect to itself is 1, whatever the loss is.
        if is_one_draw or (func is _ATEN.ones_like.default and args[0].dim() == 0):
            with _disable_current_modes():
                return torch.ones((), dtype=kwargs.get("dtype") or (torch.float32 if is_one_draw else args[0].dtype))
        if name.startswith(_RANDOM) or not all(map(self.knows, tensors)) or not (tensors or _is_small_factory(args)):
            return None
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        args, kwargs = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        args = tree_map_only(torch.device, lambda _: torch.device("cpu"), args)
        try:
            with _disable_current_modes():
                return func(*args, **kwargs)
        except Exception:  # the CPU may lack the operation
            return None

    def _with_counted_masks(self, func: Any, args: Any) -> Any:
        """The operation's arguments, in which integer indices replace bool masks of known values, as many as these select."""
        if func.overloadpacket is not _ATEN.index:
            return args
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype != torch.bool or not self.knows(index):
                indices.append(index)
                continue
            with _disable_current_modes():
                count = int(self._value(index).sum())
            indices += [torch.empty(count, dtype=torch.int64, device=index.device) for _ in range(index.dim())]
        return args[0], indices

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are known. A tensor with data is a constant of the model's code."""
        return tensor in self._known or (not isinstance(tensor, FakeTensor) and tensor.numel() <= _MOST_ELEMENTS)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        known: torch.Tensor | None = self._known.get(tensor)
        if known is not None:
            return known
        with _disable_current_modes():
            return tensor.detach().to("cpu", copy=True)

    def _forget(self, written: torch.Tensor) -> None:
        """Forgets the values of a tensor to which unknown ones were written, and of all tensors that share its memory."""
        if written in self._known:
            storage = self._known[written].untyped_storage()._cdata
            for fake in [fake for fake, value in self._known.items() if value.untyped_storage()._cdata == storage]:
                del self._known[fake]


class NumbersOfTensors(TorchFunctionMode):
    """Gives ``torch.tensor`` numbers in place of a list of fake tensors, whose memory it would read past all modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(FakeTensor, lambda tensor: tensor.tolist(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def taken_for_data(values: KnownValues) -> contextlib.AbstractContextManager[None]:
    """While the body runs, transformers takes fake tensors of known values for real ones. Else it assumes a trace and makes a
    mask of all pairs of tokens, too large for the device if a sequence is long (transformers/masking_utils.py)."""
    module = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(module, "is_fake_tensor", None)
    if is_fake_tensor is None:  # older versions don't ask
        return contextlib.nullcontext()
    return replaced(module, "is_fake_tensor", lambda tensor: is_fake_tensor(tensor) and not values.knows(tensor))


def _fake_result(func: Any, args: Any, kwargs: Any) -> Any:
    # torch infers shapes of grouped products (experts) for bf16 alone, though its kernels take others. Older ones have none.
    if func.name() == "aten::_grouped_mm" and isinstance(args[0], FakeTensor) and args[0].dtype != torch.bfloat16:
        halves = tree_map_only(torch.Tensor, lambda at: at.to(torch.bfloat16) if at.is_floating_point() else at, args)
        return torch.empty_like(func(*halves, **{**kwargs, "out_dtype": None}), dtype=kwargs.get("out_dtype") or args[0].dtype)
    if func is _ATEN.bincount.default:
        given = {**dict(zip(("self", "weights", "minlength"), args, strict=False)), **kwargs}
        # It counts tokens per expert, and no expert has a number of ``minlength`` or more.
        if minlength := given.get("minlength"):
            dtype = torch.int64 if given.get("weights") is None else given["weights"].dtype
            return torch.empty(minlength, dtype=dtype, device=args[0].device)
    return func(*args, **kwargs)


def _is_small_factory(args: Any) -> bool:
    """Whether an operation that takes numbers alone (arange, zeros, full) makes a small tensor."""
    numbers = (number for number in tree_leaves(args) if isinstance(number, (int, float)) and not isinstance(number, bool))
    return math.prod(max(1.0, abs(number)) for number in numbers) <= _MOST_ELEMENTS


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among the arguments that the operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(kwargs.get(argument.name, args[place] if place < len(args) else None))


@contextlib.contextmanager
def compiled_functions_as_python() -> Iterator[None]:
    """While the body runs, in every thread, compiled functions call the Python functions that they were made of. TorchScript
    (DeBERTa's relative positions) launches its fused kernels itself. A function under ``torch.compile`` that is called under
    modes (flex attention) isn't traced. In torch 2.11 it isn't traced later either, so that its first real call fails.
    Scripted functions whose original isn't known run as they are, as do those under ``torch.compile`` before torch 2.6."""
    call: Any = torch.jit.ScriptFunction.__call__

    def call_original(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(self, "_torchdynamo_inline", None)
        return call(self, *args, **kwargs) if original is None else original(*args, **kwargs)

    set_stance = getattr(torch.compiler, "set_stance", None)
    uncompiled = contextlib.nullcontext() if set_stance is None else set_stance("force_eager")
    with replaced(torch.jit.ScriptFunction, "__call__", call_original), uncompiled:
        yield


@contextlib.contextmanager
def launches_without_data() -> Iterator[None]:
    """While the body runs, Triton kernels launched under ``FakeTensorMode`` return at once, and other launches run. torch
    allocates outputs before a launch, so shapes and memory are right without it. Autotuners choose at the first real call. A
    mode that is *made* in the body raises if other code asks a tensor for its address, instead of answering zero
    (``torch/_functorch/config.py``)."""
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        if not has_triton_package():
            yield
            return
        from triton.runtime.jit import KernelInterface

        launcher_of = KernelInterface.__getitem__

        def launcher_where_data_is(kernel: Any, grid: Any) -> Callable[..., Any]:
            launch = launcher_of(kernel, grid)

            def launch_where_data_is(*args: Any, **kwargs: Any) -> Any:
                has_data = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
                return launch(*args, **kwargs) if has_data else None

            return launch_where_data_is

        with replaced(KernelInterface, "__getitem__", launcher_where_data_is):
            yield


@contextlib.contextmanager
def nothing_kept(model: nn.Module) -> Iterator[None]:
    """Undoes what the body adds to caches and containers of the model's code. Caches (``functools.lru_cache``) that got an
    entry are emptied. Lists, dicts, sets, deques and attributes of plain objects get their former content back. All are looked
    for among the attributes of the model's modules and the globals of the Python modules that define their classes, in
    decorated functions, and in objects of classes that these Python modules define."""
    caches, containers = _kept_by(model)
    misses = [cache.cache_info().misses for cache in caches]
    held = [container.copy() for container in containers]
    try:
        yield
    finally:
        for cache, missed in zip(caches, misses, strict=True):
            if cache.cache_info().misses != missed:
                cache.cache_clear()
        for container, before in zip(containers, held, strict=True):
            # Most are empty, before and after.
            if (container or before) and list(map(id, _entries(container))) != list(map(id, _entries(before))):
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(before)


def _entries(container: Any) -> list[Any]:
    """What the container holds. In a dict's entries each key precedes its value."""
    return [at for item in container.items() for at in item] if isinstance(container, dict) else list(container)


def _kept_by(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The caches and the containers that :func:`nothing_kept` restores."""
    # Values to look at. A class is looked into if it is defined in the Python module that is named beside it.
    todo = [(value, "") for module in model.modules() for value in vars(module).values()]
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    homes = {name for name in names if name.split(".")[0] not in _NOT_OF_MODELS and name in sys.modules}
    for home in homes:
        todo += [(value, home) for name, value in vars(sys.modules[home]).items() if not name.startswith("__")]
    caches: list[Any] = []
    containers: list[Any] = []
    seen: set[tuple[int, str]] = set()
    for value, home in todo:  # grows meanwhile
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if (id(value), home) in seen:
            continue
        seen.add((id(value), home))
        if isinstance(value, _Cache):
            caches.append(value)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # the cell is still empty
                    if isinstance(cell.cell_contents, (_Cache, types.FunctionType)):
                        todo.append((cell.cell_contents, home))
        elif isinstance(value, type) and value.__module__ == home:
            todo += [(attribute, home) for attribute in vars(value).values()]
        elif type(value) in _CONTAINERS and len(value) <= _MOST_ENTRIES:
            containers.append(value)
            entries = value.values() if isinstance(value, dict) else value
            todo += [(entry, "") for entry in entries if not isinstance(entry, str)]
        elif type(value).__module__ in homes and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
            todo.append((vars(value), ""))
    return caches, containers
