"""Tools of the patches: wrap a method or a property for active processes only, add fields to a finished dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from megatrain_accelerate.activation import is_on_for
from megatrain_accelerate.integrations import import_hook

_MARK = "_megatrain_patch"
"""Set on our wrappers, so that a second application leaves them alone."""


class UnknownShapeError(Exception):
    """The target isn't what the patch was written for."""


def is_active(arguments: Any = None) -> bool:
    """Whether the plugin is on, with all patches in place.

    Args:
        arguments: those of the Trainer that is concerned, or None for code without a Trainer.

    Raises:
        ConfigError: the launcher's settings are malformed.
        PatchError: it is on and a patch couldn't be applied.
    """
    if not is_on_for(arguments):
        return False
    import_hook.ensure_ready()
    return True


def delegate(module: str, function: str) -> Callable[..., Any]:
    """``module.function`` of integrations/, imported at the first call."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(f"megatrain_accelerate.integrations.{module}"), function)(original, *args, **kwargs)

    return call


def find_class(module: Any, name: str) -> type:
    """The class of that name.

    Raises:
        UnknownShapeError: there is none.
    """
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        raise UnknownShapeError(f"{module.__name__} has no class {name}")
    return found


def find_attribute(owner: Any, name: str) -> Any:
    """The attribute as it is stored, without binding.

    Raises:
        UnknownShapeError: there is none.
    """
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        raise UnknownShapeError(f"{owner.__name__} has no attribute {name}") from None


def require_parameters(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Checks that a function takes parameters of these names.

    Raises:
        UnknownShapeError: it doesn't.
    """
    signature = inspect.signature(function)
    missing = [name for name in names if name not in signature.parameters]
    if missing:
        raise UnknownShapeError(f"it has no parameter {', '.join(missing)}; its signature is {signature}")


def wrap_always(owner: Any, name: str, replacement: Callable[..., Any], needs: Iterable[str] = ()) -> None:
    """Replaces a function, method, class method or static method by ``replacement(original, *args, **kwargs)``.

    ``original`` is the plain function, which stays reachable as ``__wrapped__``.

    Raises:
        UnknownShapeError: it is missing, isn't a function, or lacks a parameter of ``needs``.
    """
    stored = find_attribute(owner, name)
    kind = type(stored) if isinstance(stored, (classmethod, staticmethod)) else None
    original = stored.__func__ if kind is not None else stored
    if hasattr(original, _MARK):
        return
    if not callable(original):
        raise UnknownShapeError(f"{name} is a {type(original).__name__}, not a function")
    require_parameters(original, needs)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(wrapper, _MARK, True)
    setattr(owner, name, kind(wrapper) if kind is not None else wrapper)


def wrap(
    owner: Any,
    name: str,
    replacement: Callable[..., Any],
    needs: Iterable[str] = (),
    arguments_of: Callable[[Any], Any] | None = None,
) -> None:
    """As :func:`wrap_always`; where the plugin is off the original is called.

    Args:
        owner: the class or module.
        name: the function's.
        replacement: called with the original first.
        needs: parameters that the original must have.
        arguments_of: gives the training arguments that decide, by the first argument of a call.
    """

    def when_active(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_active(arguments_of(args[0]) if arguments_of is not None else None):
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    wrap_always(owner, name, when_active, needs)


def wrap_in_subclasses(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """As :func:`wrap`, for the method of this name that a subclass has of its own: of those that exist, and of those to come.

    Where such a method calls its parent's, ``replacement`` may run within itself.
    """
    for cls in _subclasses(owner):
        if name in vars(cls):
            wrap(cls, name, replacement)
    inherited = vars(owner).get("__init_subclass__")

    def init_subclass(cls: type, **kwargs: Any) -> None:
        if inherited is None:
            super(owner, cls).__init_subclass__(**kwargs)
        else:
            inherited.__func__(cls, **kwargs)
        if name in vars(cls):
            wrap(cls, name, replacement)

    owner.__init_subclass__ = classmethod(init_subclass)


def wrap_property(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a getter of training arguments by ``replacement(original, self)`` where the plugin is on for them.

    Raises:
        UnknownShapeError: it is missing or not a property.
    """
    stored = find_attribute(owner, name)
    if not isinstance(stored, property) or stored.fget is None:
        raise UnknownShapeError(f"{name} is a {type(stored).__name__}, not a property")
    original = stored.fget
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def getter(self: Any) -> Any:
        return replacement(original, self) if is_active(self) else original(self)

    setattr(getter, _MARK, True)
    setattr(owner, name, stored.getter(getter))


def add_fields(owner: Any, additions: dict[str, tuple[Any, Any]]) -> None:
    """Adds keyword-only fields to a dataclass that exists, and to its subclasses that exist.

    Args:
        owner: the dataclass.
        additions: by name, the type and a ``dataclasses.field()`` with a default.

    Raises:
        UnknownShapeError: it isn't a dataclass, or has a field of that name.
    """
    existing = getattr(owner, "__dataclass_fields__", None)
    if existing is None:
        raise UnknownShapeError(f"{owner.__name__} is not a dataclass")
    if hasattr(owner.__init__, _MARK):
        return
    taken = [name for name in additions if name in existing]
    if taken:
        raise UnknownShapeError(f"{owner.__name__} has a field {', '.join(taken)} of its own")
    # Only dataclass() itself makes complete Field objects.
    donor = dataclasses.make_dataclass("donor", [(name, *entry) for name, entry in additions.items()], kw_only=True)
    fields = {field.name: field for field in dataclasses.fields(donor)}
    for name, (annotation, _) in additions.items():
        # HfArgumentParser reads the types by get_type_hints(), others the defaults from the class.
        owner.__annotations__[name] = annotation
        setattr(owner, name, fields[name].default)
    for cls in (owner, *_subclasses(owner)):
        if "__dataclass_fields__" in cls.__dict__:
            for name, field in fields.items():
                cls.__dataclass_fields__.setdefault(name, field)
            if "__init__" in cls.__dict__ and not hasattr(cls.__init__, _MARK):
                _accept_fields(cls, fields)


def _subclasses(cls: Any) -> list[Any]:
    found: list[Any] = []
    for subclass in cls.__subclasses__():
        found += [subclass, *_subclasses(subclass)]
    return found


def _accept_fields(cls: Any, fields: dict[str, dataclasses.Field[Any]]) -> None:
    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, field in fields.items():
            # A subclass's __init__ that calls this one may have set it.
            value = kwargs.pop(name) if name in kwargs else self.__dict__.get(name, field.default)
            self.__dict__[name] = value
        original(self, *args, **kwargs)

    parameters = list(signature.parameters.values())
    at = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    parameters[at:at] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for name, field in fields.items()
        if name not in signature.parameters
    ]
    init.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    setattr(init, _MARK, True)
    cls.__init__ = init
