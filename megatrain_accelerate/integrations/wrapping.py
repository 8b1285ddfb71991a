"""Applies patches: wraps methods and properties, adds fields to finished dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from megatrain_accelerate.activation import is_on_for
from megatrain_accelerate.errors import PatchError
from megatrain_accelerate.integrations.patches import TESTED_VERSIONS, Patch

_ENGINE = "megatrain_accelerate.engine"
_MARK = "_megatrain_patch"
"""Set on our wrappers, so that a second application leaves them alone."""

_failures: dict[str, Exception] = {}
"""The errors of patches that couldn't be applied, by target."""

_CALLED_ALWAYS = ("launcher", "training_arguments", "wrapping")
"""Modules whose replacements are called even if the plugin is off."""

_CALLED_FOR_PREPARED_MODELS = ("shared_parts",)
"""Modules whose replacements are called also after ``disable()``, which leaves prepared models streaming."""

_EACH_TUNERS_OWN = {"merge_and_unload", "set_adapter", "unload"}
"""Methods that each class of PEFT tuners had of its own before PEFT 0.18, and that most inherit since."""

_ARGUMENTS = "_megatrain_arguments"
"""The attribute of an Accelerator with the training arguments of the Trainer that made it."""
_trainer_arguments: Any = None
"""The training arguments of the Trainer that is making an Accelerator at this moment."""


def create_accelerator(original: Callable[..., None], trainer: Any) -> None:
    """``create_accelerator_and_postprocess`` of the Trainer: checks its arguments, and the Accelerator that it makes keeps
    them."""
    global _trainer_arguments
    load_replacement("training_arguments", "check_again")(trainer.args)
    outer, _trainer_arguments = _trainer_arguments, trainer.args
    try:
        original(trainer)
        trainer.accelerator.__dict__[_ARGUMENTS] = trainer.args
    finally:
        _trainer_arguments = outer


def arguments_of(accelerator: Any) -> Any:
    """The training arguments of the Trainer that made an Accelerator, or is making it; None if a script did."""
    return accelerator.__dict__.get(_ARGUMENTS, _trainer_arguments)


_ARGUMENTS_OF: dict[str, Callable[[Any], Any]] = {
    "Accelerator": arguments_of,
    "Trainer": lambda trainer: trainer.args,
    "TrainingArguments": lambda arguments: arguments,
}
"""How to find the training arguments that decide for a call, by class. For other classes the process's switch decides."""


def require_patches() -> None:
    """Raises the :class:`PatchError` of the first patch that couldn't be applied."""
    for failure in _failures.values():
        raise failure


def is_active(arguments: Any = None) -> bool:
    """:func:`.activation.is_on_for`, but raises ``PatchError`` if it is on and a patch couldn't be applied."""
    if not is_on_for(arguments):
        return False
    require_patches()
    return True


def apply(patch: Patch, module: ModuleType) -> None:
    """Applies a patch, or notes that its target isn't what it was written for."""
    try:
        _apply(patch, module)
        _failures.pop(patch.target, None)
    except Exception as error:
        package, tested = patch.package, TESTED_VERSIONS[patch.package]
        failure = _failures[patch.target] = PatchError(
            f"megatrain_accelerate can't patch {patch.target}: {type(error).__name__}: {error}. Installed: {package} "
            f"{installed_version(package) or 'of unknown version'}; tested with: {package} {tested}. Install a tested version "
            f"(pip install '{package}=={tested.split()[-1]}') or a newer megatrain-accelerate"
        )
        failure.__cause__ = error


def _apply(patch: Patch, module: ModuleType) -> None:
    class_name, _, name = patch.target.partition(":")[2].rpartition(".")
    owner = getattr(module, class_name) if class_name else module
    place, _, needs = patch.replacement.rstrip(")").partition("(")
    home, _, function = place.partition(":")
    if function == "FIELDS":
        add_fields(owner, load_replacement(home, function))
        return

    is_for_prepared = home in _CALLED_FOR_PREPARED_MODELS
    always = is_for_prepared or home in _CALLED_ALWAYS

    def replacement(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_for_prepared and _ENGINE not in sys.modules:  # no model was prepared yet
            return original(*args, **kwargs)
        return load_replacement(home, function)(original, *args, **kwargs)

    def after_init(original: Callable[..., None], made: Any, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        if is_active(_ARGUMENTS_OF[class_name](made)):
            load_replacement(home, function)(made)

    names = needs.split(", ") if needs else ()
    if name == "__init__":
        wrap(owner, name, after_init, names, always=True)
        return
    if patch.package == "peft" and class_name:
        wrap_in_subclasses(owner, name, replacement, always=always)
        if name in _EACH_TUNERS_OWN and _EACH_TUNERS_OWN.isdisjoint(vars(owner)):
            return
    wrap(owner, name, replacement, names, always=always)


def installed_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load_replacement(module: str, name: str) -> Any:
    home = __package__.partition(".")[0] if "." in module else __package__
    return getattr(import_module(f"{home}.{module}"), name)


def wrap(owner: Any, name: str, replacement: Callable[..., Any], needs: Sequence[str] = (), *, always: bool = False) -> None:
    """Makes a method, or a property's getter, call ``replacement(original, *args, **kwargs)`` if the plugin is on, or
    ``always``. ``original``, the plain function, stays reachable as ``__wrapped__``. Raises ``TypeError`` if it is missing,
    isn't a function, or lacks a parameter of ``needs``."""
    try:
        stored = inspect.getattr_static(owner, name)
    except AttributeError:
        raise TypeError(f"{owner.__name__} has no attribute {name}") from None
    original: Any = stored.fget if isinstance(stored, property) else getattr(stored, "__func__", stored)
    if hasattr(original, _MARK):
        return
    signature = inspect.signature(original)
    if missing := [parameter for parameter in needs if parameter not in signature.parameters]:
        raise TypeError(f"it has no parameter {', '.join(missing)}; its signature is {signature}")

    find_arguments = _ARGUMENTS_OF.get(owner.__name__)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if always or is_active(find_arguments(args[0]) if find_arguments is not None else None):
            return replacement(original, *args, **kwargs)
        return original(*args, **kwargs)

    setattr(wrapper, _MARK, True)
    if isinstance(stored, property):
        setattr(owner, name, stored.getter(wrapper))
    else:
        setattr(owner, name, type(stored)(wrapper) if isinstance(stored, (classmethod, staticmethod)) else wrapper)


def wrap_in_subclasses(owner: Any, name: str, replacement: Callable[..., Any], *, always: bool = False) -> None:
    """Wraps, as :func:`wrap` does, the method of this name in each present and future subclass that has one of its own. If
    such a method calls its parent's, ``replacement`` may run within itself."""
    for cls in _subclasses(owner):
        if name in vars(cls):
            wrap(cls, name, replacement, always=always)
    inherited = inspect.getattr_static(owner, "__init_subclass__")

    def init_subclass(cls: type, **kwargs: Any) -> None:
        inherited.__get__(None, cls)(**kwargs)
        if name in vars(cls):
            wrap(cls, name, replacement, always=always)

    owner.__init_subclass__ = classmethod(init_subclass)


def add_fields(owner: Any, additions: dict[str, tuple[Any, Any]]) -> None:
    """Adds fields, by name with a type and a ``field()`` with a default, to a dataclass and its subclasses. Raises
    ``TypeError`` if it isn't a dataclass, or has a field of that name."""
    if hasattr(owner.__init__, _MARK):
        return
    if taken := additions.keys() & {field.name for field in dataclasses.fields(owner)}:
        raise TypeError(f"{owner.__name__} has a field {', '.join(taken)} of its own")

    def init(original: Callable[..., None], made: Any, *args: Any, **kwargs: Any) -> None:
        for name in additions.keys() & kwargs.keys():
            setattr(made, name, kwargs.pop(name))
        original(made, *args, **kwargs)

    # Only dataclass() itself makes complete Field objects.
    donor: Any = dataclasses.make_dataclass("Donor", [(name, *entry) for name, entry in additions.items()], kw_only=True)
    for cls in (owner, *_subclasses(owner)):
        if "__dataclass_fields__" in vars(cls):
            cls.__dataclass_fields__.update(donor.__dataclass_fields__)
        if "__init__" in vars(cls):
            wrap(cls, "__init__", init, always=True)
    for name, (kind, field) in additions.items():
        # HfArgumentParser reads the types by get_type_hints(), others the defaults from the class.
        owner.__annotations__[name] = kind
        setattr(owner, name, field.default)


def _subclasses(cls: Any) -> list[Any]:
    return [found for subclass in cls.__subclasses__() for found in (subclass, *_subclasses(subclass))]
