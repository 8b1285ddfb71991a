"""Values in a run without data: what the model decides by.

Many forwards look at small integers: the longest position (rotary frequencies that depend on it), whether a mask is full, the
sizes of images. Under ``FakeTensorMode`` none has a value. This mode computes beside, for real, what follows from the batch's
integers and truth values, from single numbers beside it and from what the model makes itself, and answers with it. Everything
else stays without data.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_MOST_ELEMENTS = 1 << 22
"""Of a tensor whose values are known: positions of a few million tokens are, attention masks of all pairs of tokens aren't."""

_NOTHING_IS_LEFT_OUT = 1.0
"""In the place of a single random number between 0 and 1: models leave a layer out where it is below a rate, and a plan is for
the largest step."""

_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "uniform", "dropout", "empty")
_ATEN = torch.ops.aten


class KnownValues(TorchDispatchMode):
    """Enter it inside ``FakeTensorMode``."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._known: Any = WeakIdKeyDictionary()

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """The values of a tensor without data, from one that isn't written to; none of large tensors, and of floating-point
        ones only a single number of no dimension (what a loss is divided by)."""
        if _is_countable(real):
            with _disable_current_modes():
                self._known[fake] = real.detach().to("cpu", copy=True)

    def knows(self, tensor: Any) -> bool:
        """Whether a tensor without data has known values."""
        return isinstance(tensor, FakeTensor) and tensor in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # flex attention, say
            return func(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default:
            number = self._real_result(func, args, kwargs)
            return func(*args, **kwargs) if number is None else number
        try:
            result = _fake_result(func, args, kwargs)
            # What isn't kept isn't made either: a mask of all pairs of many tokens would take longer than the step.
            real = None if _is_large(result) else self._real_result(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            real = self._real_result(func, args, kwargs)
            if real is None:
                result = self._with_counted_masks(func, args, kwargs)
                if result is None:
                    raise
            else:
                device = next((leaf.device for leaf in _tensors((args, kwargs))), torch.device("cpu"))
                result = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device=device), real)
        self._note(func, args, kwargs, result, real)
        return result

    def _real_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result with values; None if something in it isn't known."""
        name = func._overloadpacket.__name__
        if name == "rand" and not list(_tensors((args, kwargs))) and args and list(args[0]) == []:
            with _disable_current_modes():
                return torch.tensor(_NOTHING_IS_LEFT_OUT, dtype=kwargs.get("dtype") or torch.float32)
        if func is _ATEN.ones_like.default and args[0].dim() == 0:  # a loss's own gradient, whatever the loss is
            with _disable_current_modes():
                return torch.ones((), dtype=kwargs.get("dtype") or args[0].dtype)
        if any(name.startswith(random) for random in _RANDOM):
            return None
        if not all(self._is_known(tensor) for tensor in _tensors((args, kwargs))):
            return None
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        if not list(_tensors((args, kwargs))) and not _is_small_factory(args):
            return None
        args, kwargs = tree_map_only(torch.Tensor, self._value, (args, kwargs))
        args = tree_map_only(torch.device, lambda _: torch.device("cpu"), args)
        try:
            with _disable_current_modes():
                return func(*args, **kwargs)
        except Exception:  # an operation that the CPU doesn't have
            return None

    def _with_counted_masks(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation on tensors without data at the places of masks whose values are known; None for any other."""
        if func.overloadpacket is not _ATEN.index:
            return None
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype != torch.bool:
                indices.append(index)
            elif self._is_known(index):
                with _disable_current_modes():
                    count = int(self._value(index).sum())
                indices += [torch.empty(count, dtype=torch.int64, device=index.device) for _ in range(index.dim())]
            else:
                return None
        return func(args[0], indices, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, real: Any) -> None:
        if real is None:
            for tensor in _written(func, args, kwargs):
                self._forget(tensor)
            return
        for fake, value in zip(_tensors(result), _tensors(real), strict=True):
            if isinstance(fake, FakeTensor) and not _is_large(value):
                self._known[fake] = value

    def _is_known(self, tensor: torch.Tensor) -> bool:
        # One that has data is a constant of the model's code.
        return tensor in self._known or (not isinstance(tensor, FakeTensor) and tensor.numel() <= _MOST_ELEMENTS)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor in self._known:
            known: torch.Tensor = self._known[tensor]
            return known
        with _disable_current_modes():
            return tensor.detach().to("cpu", copy=True)

    def _forget(self, written: torch.Tensor) -> None:
        """Something unknown was written to a tensor, and to all that share its memory."""
        if written in self._known:
            storage = self._known[written].untyped_storage()._cdata
            for fake in [fake for fake, value in self._known.items() if value.untyped_storage()._cdata == storage]:
                del self._known[fake]


class NumbersOfTensors(TorchFunctionMode):
    """``torch.tensor`` of a list of tensors reads their memory, past all modes: it gets their numbers instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(FakeTensor, lambda tensor: tensor.tolist(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def taken_for_data(values: KnownValues) -> Iterator[None]:
    """transformers doesn't take a tensor of known values for one of a trace while the body runs.

    Under a trace it mustn't look at values, and makes an attention mask of all tokens by all that it leaves out otherwise
    (transformers/masking_utils.py). That mask alone would be larger than the device where a sequence is long.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(module, "is_fake_tensor", None)
    if module is None or is_fake_tensor is None:  # older ones don't ask
        yield
        return
    module.is_fake_tensor = lambda tensor: is_fake_tensor(tensor) and not values.knows(tensor)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = is_fake_tensor  # type: ignore[attr-defined]


def _fake_result(func: Any, args: Any, kwargs: Any) -> Any:
    # torch knows the shapes of grouped products (experts) for bf16 only, though its kernels run others.
    if func is _ATEN._grouped_mm.default and isinstance(args[0], FakeTensor) and args[0].dtype != torch.bfloat16:
        halves = [arg.to(torch.bfloat16) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
        return torch.empty_like(func(*halves, **{**kwargs, "out_dtype": None}), dtype=kwargs.get("out_dtype") or args[0].dtype)
    if func is _ATEN.bincount.default:
        weights, minlength = (*args[1:], *[None] * (3 - len(args)))[:2]
        weights, minlength = kwargs.get("weights", weights), kwargs.get("minlength", minlength)
        # Counts of experts: as many as are named, since none has a larger number.
        if minlength:
            return torch.empty(minlength, dtype=torch.int64 if weights is None else weights.dtype, device=args[0].device)
    return func(*args, **kwargs)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))


def _is_large(result: Any) -> bool:
    """Whether every tensor in it has more elements than are kept."""
    made = list(_tensors(result))
    return bool(made) and all(tensor.numel() > _MOST_ELEMENTS for tensor in made)


def _is_countable(tensor: torch.Tensor) -> bool:
    if tensor.is_meta:
        return False
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.dim() == 0 or (not is_number and tensor.numel() <= _MOST_ELEMENTS)


def _is_small_factory(args: Any) -> bool:
    """Whether an operation on numbers alone (arange, zeros, full) makes a small tensor."""
    numbers = [number for number in tree_flatten(args)[0] if isinstance(number, (int, float)) and not isinstance(number, bool)]
    product = 1.0
    for number in numbers:
        product *= max(1.0, abs(number))
    return product <= _MOST_ELEMENTS


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that the operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            yield from _tensors(value)
