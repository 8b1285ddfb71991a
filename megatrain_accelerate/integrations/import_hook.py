"""Runs the patches when their targets get imported: whichever library is imported first, and late too.

Installed by ``import torch`` in every process, hence standard library only, and next to free for other modules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatrain_accelerate.activation import active_config
from megatrain_accelerate.integrations.patches import PATCHES, TESTED_VERSIONS, Patch

_targets = frozenset(patch.module for patch in PATCHES)
_pending: set[str] = set()
"""Targets that were halfway through their import when the hook was installed."""
_failures: dict[str, Exception] = {}
"""By target: patches that couldn't be applied."""


class PatchFinder:
    """First on ``sys.meta_path``: lets the other finders find a target and patches it right after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The target's own spec with a loader that patches; None for any other module."""
        if _pending:
            _settle()
        if fullname not in _targets:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _apply_patches(module)

            # On the instance: the loader keeps its class, which inspect, pkgutil and importlib.resources look at.
            loader.exec_module = exec_module
        return spec


class _WatchedSpec(ModuleSpec):
    """Class given to the spec of a module that is being imported: importlib marks the end of the import on it."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing"))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            _settle()


def install() -> None:
    """Installs the finder, once, and patches what is imported already; see :func:`_apply_patches`."""
    if not is_installed():
        sys.meta_path.insert(0, PatchFinder())
        _pending.update(_targets & sys.modules.keys())
        for name in _pending:
            spec = getattr(sys.modules[name], "__spec__", None)
            if type(spec) is ModuleSpec and _is_initializing(sys.modules[name]):
                spec.__class__ = _WatchedSpec
    _settle()


def is_installed() -> bool:
    return any(isinstance(finder, PatchFinder) for finder in sys.meta_path)


def ensure_ready() -> None:
    """Raises the :class:`PatchError` of a patch that couldn't be applied."""
    if _pending:
        _settle()
    if _failures:
        failure, *others = _failures.values()
        for other in others:
            if hasattr(failure, "add_note"):
                failure.add_note(str(other))
        raise failure


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _settle() -> None:
    for name in list(_pending):
        module = sys.modules.get(name)
        if module is None:
            _pending.discard(name)
        elif not _is_initializing(module):
            _pending.discard(name)
            _apply_patches(module)


def _apply_patches(module: ModuleType) -> None:
    """Raises ``PatchError`` where the plugin is active and a patch can't be applied."""
    for patch in PATCHES:
        if patch.module != module.__name__:
            continue
        try:
            import_module(f"{__package__}.wrapping").apply(patch, module)
            _failures.pop(patch.target, None)
        except Exception as error:
            _failures[patch.target] = _patch_error(patch, error)
    if _failures and active_config() is not None:
        ensure_ready()


def _patch_error(patch: Patch, cause: Exception) -> Exception:
    from importlib.metadata import PackageNotFoundError, version

    from megatrain_accelerate.errors import PatchError

    try:
        installed = version(patch.package)
    except PackageNotFoundError:
        installed = "of unknown version"
    tested = TESTED_VERSIONS[patch.package]
    error = PatchError(
        f"megatrain_accelerate can't patch {patch.target}: {type(cause).__name__}: {cause}. Installed: {patch.package} "
        f"{installed}; tested with: {patch.package} {tested}. Install a tested version (pip install "
        f"'{patch.package}=={tested.split()[-1]}') or a newer megatrain-accelerate"
    )
    error.__cause__ = cause
    return error
