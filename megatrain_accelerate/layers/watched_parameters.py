"""Notices the first access to a model's parameters while Python would see old weights or gradients in them.

``optimizer.step()`` returns before the weights are stepped, gradients of a micro-batch arrive after its backward has returned,
and clipping leaves scaling to the step. Whoever looks in between (a callback, an average of the weights) must see what plain
PyTorch shows. So until the next backward the parameters' class is a subclass with ``__torch_function__``, which torch calls
for each of their functions, methods and attributes. The first call that could read or change values brings all up to date and
ends the watch. If nobody looks, a watch costs two assignments of ``__class__`` a parameter, and ``zero_grad()`` one call.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
"""The watches that are on, one for each model whose parameters are out of date: usually one or none."""
_settling = threading.RLock()


class Watch:
    """Watches the parameters of one model. ``settle`` makes weights and gradients what plain PyTorch would show. It is called
    when a parameter is touched, or at once if one has another class than ``nn.Parameter`` and can't be watched."""

    def __init__(self, parameters: Iterable[nn.Parameter], settle: Callable[[], None]) -> None:
        self._parameters = list(parameters)
        self._settle = settle
        self._can_watch = all(type(parameter) is nn.Parameter for parameter in self._parameters)
        self.is_on = False

    def begin(self) -> None:
        """Begins to watch. Does nothing if the watch is on."""
        if not self._can_watch:
            self._settle()
        elif not self.is_on:
            self.is_on = True
            _watches.add(self)
            for parameter in self._parameters:
                parameter.__class__ = _WatchedParameter

    def end(self) -> None:
        """Ends the watch, whether or not the parameters are up to date. Does nothing if it is off."""
        if self.is_on:
            self.is_on = False
            _watches.discard(self)
            self.release(self._parameters)

    @staticmethod
    def release(parameters: Iterable[nn.Parameter]) -> None:
        """Stops watching some parameters, which are up to date, until the next watch begins."""
        for parameter in parameters:
            if type(parameter) is _WatchedParameter:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    __del__ = end

    def settle(self) -> None:
        """Calls ``settle``, and ends the watch if that doesn't raise."""
        with unwatched():
            self._settle()
        self.end()


def unwatched() -> Any:
    """Returns a context manager under which this thread touches parameters without being noticed."""
    return torch._C.DisableTorchFunctionSubclass()


_tensor: Any = torch.Tensor
_PROPERTIES = (
    *("shape", "device", "dtype", "layout", "ndim", "nbytes", "itemsize", "names", "requires_grad", "is_leaf"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_nested", "is_quantized", "is_sparse", "retains_grad"),
    *("grad_fn", "output_nr", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "element_size", "get_device", "is_contiguous", "is_complex"),
    *("is_floating_point", "storage_offset", "data_ptr", "__hash__", "__len__", "requires_grad_", "register_hook"),
    "register_post_accumulate_grad_hook",
)
_HARMLESS = frozenset(
    [getattr(_tensor, name).__get__ for name in _PROPERTIES if hasattr(_tensor, name)]
    + [getattr(_tensor, name) for name in _METHODS if hasattr(_tensor, name)]
    + [_tensor.requires_grad.__set__]
)
"""Functions that neither read nor change values. Properties are here by their ``__get__`` and ``__set__``."""
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]
_ZERO_GRAD = nn.Module.zero_grad.__code__


class _WatchedParameter(nn.Parameter):
    """The class of a parameter while it is watched. Afterwards it is ``nn.Parameter`` again."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _GRADIENT.__get__ and _drops_gradients(sys._getframe(1)):
            with unwatched():
                args[0].grad = None
            return None
        drops = func == _GRADIENT.__set__ and args[1] is None
        if not drops and func not in _HARMLESS:
            with _settling:  # another thread that looks meanwhile waits here
                for watch in list(_watches):
                    watch.settle()
            if any(kind is not cls for kind in types):  # other classes' ``__torch_function__`` must see the call, too
                return func(*args, **(kwargs or {}))
        with unwatched():
            return func(*args, **(kwargs or {}))

    def __new__(cls, *args: Any) -> nn.Parameter:  # type: ignore[misc]
        # nn.Parameter calls the class for a deep copy, which nobody watches.
        return nn.Parameter(*args)


# Code that asks for the class's name gets that of nn.Parameter.
_WatchedParameter.__name__, _WatchedParameter.__qualname__ = nn.Parameter.__name__, nn.Parameter.__qualname__
_WatchedParameter.__module__ = nn.Parameter.__module__


def _drops_gradients(frame: Any) -> bool:
    """Whether the code that reads a gradient is ``model.zero_grad(set_to_none=True)``, which only drops it."""
    return frame.f_code is _ZERO_GRAD and bool(frame.f_locals.get("set_to_none"))
