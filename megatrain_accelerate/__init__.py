"""megatrain_accelerate: full-precision training of LLMs larger than the GPU, for stock Hugging Face scripts."""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"

__all__ = ["MegatrainConfig", "__version__", "disable", "drain", "enable", "export_masters"]


def __getattr__(name: str) -> Any:
    # Lazy, since `import torch` imports this package in every process of every user.
    if name in __all__:
        from megatrain_accelerate import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
