"""Applies the patches when their targets are imported, whichever library is first, or at once if they already are. ``import
torch`` installs it in every process, hence the standard library only, and next to no cost for other modules."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatrain_accelerate.activation import active_config, is_disabled
from megatrain_accelerate.integrations.patches import PATCHES

_targets = frozenset(patch.module for patch in PATCHES)


class PatchFinder:
    """First finder on ``sys.meta_path``: lets the others find a target, and patches the target right after its execution."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The target's own spec with a loader that patches; None for any other module."""
        if fullname not in _targets:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        if (spec := next(filter(None, specs), None)) is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _apply_patches(module)

            # Set on the instance: the loader keeps its class, which inspect, pkgutil and importlib.resources look at.
            loader.exec_module = exec_module
        return spec


class _WatchedSpec(ModuleSpec):
    """The class of the spec of a module during its import: importlib sets ``_initializing`` on it when that ends."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            if self.name in sys.modules:  # not after an import that failed
                _apply_patches(sys.modules[self.name])


def install() -> None:
    """Installs the finder, once, and patches what is imported already. Raises as :func:`_apply_patches` does."""
    if is_installed() or is_disabled():
        return
    sys.meta_path.insert(0, PatchFinder())
    for module in filter(None, map(sys.modules.get, _targets)):
        spec = getattr(module, "__spec__", None)
        if type(spec) is ModuleSpec and getattr(spec, "_initializing", False):
            spec.__class__ = _WatchedSpec
        else:
            _apply_patches(module)


def is_installed() -> bool:
    return any(isinstance(finder, PatchFinder) for finder in sys.meta_path)


def _apply_patches(module: ModuleType) -> None:
    """Applies a module's patches. Raises ``PatchError`` if the plugin is active and a patch can't be applied."""
    # Imported here, since processes that only import torch don't need it.
    from megatrain_accelerate.integrations.wrapping import apply, require_patches

    for patch in PATCHES:
        if patch.module == module.__name__:
            apply(patch, module)
    if active_config() is not None:
        require_patches()
