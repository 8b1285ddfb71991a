"""Functions that a model's author compiled run as the Python that they were made of, where tensors have no data.

TorchScript (DeBERTa's relative positions) has an executor of its own. It fuses on a GPU, and launches what it fused on the
addresses that it finds in its arguments; tensors under ``FakeTensorMode`` have none, so that kernels write to address zero.
A function under ``torch.compile`` that is called under modes (flex attention) isn't traced, and torch 2.11 doesn't trace it
afterwards either: its first real call fails. No mode sees the operations of either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def compiled_functions_as_python() -> Iterator[None]:
    """While the body runs, in every thread, compiled functions call their originals.

    A scripted function whose original isn't known (``torch.jit.script`` leaves it there for TorchDynamo) runs as it is; so
    does any under ``torch.compile`` before torch 2.6, which has no way to switch them off.
    """
    scripted: Any = torch.jit.ScriptFunction
    call = scripted.__call__

    def call_original(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(self, "_torchdynamo_inline", None)
        return call(self, *args, **kwargs) if original is None else original(*args, **kwargs)

    set_stance = getattr(torch.compiler, "set_stance", None)
    scripted.__call__ = call_original
    try:
        with contextlib.nullcontext() if set_stance is None else set_stance("force_eager"):
            yield
    finally:
        scripted.__call__ = call
