"""TorchScript functions run as the Python that they were made of.

A function under ``torch.jit.script`` (DeBERTa's relative positions) is compiled by an executor of its own. It fuses on a GPU,
and launches what it fused on the addresses that it finds in its arguments; tensors under ``FakeTensorMode`` have none, so that
kernels write to address zero. No mode sees its operations either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def scripted_functions_as_python() -> Iterator[None]:
    """While the body runs, in every thread, each scripted function calls its original, which ``torch.jit.script`` leaves on it
    for TorchDynamo; one without runs as it is."""
    scripted: Any = torch.jit.ScriptFunction
    call = scripted.__call__

    def call_original(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(self, "_torchdynamo_inline", None)
        return call(self, *args, **kwargs) if original is None else original(*args, **kwargs)

    scripted.__call__ = call_original
    try:
        yield
    finally:
        scripted.__call__ = call
