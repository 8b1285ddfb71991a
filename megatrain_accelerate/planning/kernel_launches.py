"""Kernels that a model's code launches itself, past torch's dispatcher, do nothing where tensors have no data.

A Triton kernel takes the addresses of its arguments and no mode sees its launch (Liger's layers and loss, many linear
attentions). Tensors under ``FakeTensorMode`` are at address zero: what is written there ends the CUDA context, and with it the
run. Outputs are allocated by torch before a launch, so that shapes and memory are right without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.utils._triton import has_triton_package


@contextlib.contextmanager
def launches_without_data() -> Iterator[None]:
    """While the body runs, Triton kernels launched in a thread under ``FakeTensorMode`` return at once; others run.

    Their autotuners run nothing either, and choose when the first real call comes. A mode that is *made* in the body raises
    where other code asks a tensor for its address, instead of answering zero (``torch/_functorch/config.py``).
    """
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False), _triton_without_data():
        yield


@contextlib.contextmanager
def _triton_without_data() -> Iterator[None]:
    if not has_triton_package():
        yield
        return
    from triton.runtime.jit import KernelInterface

    launcher_of = KernelInterface.__getitem__

    def launcher_where_data_is(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = launcher_of(kernel, grid)

        def launch_where_data_is(*args: Any, **kwargs: Any) -> Any:
            return None if _is_without_data() else launch(*args, **kwargs)

        return launch_where_data_is

    KernelInterface.__getitem__ = launcher_where_data_is
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launcher_of


def _is_without_data() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
