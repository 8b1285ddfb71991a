"""How methods of other libraries are wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import megatrain_accelerate
from megatrain_accelerate.integrations.wrapping import wrap_in_subclasses


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    megatrain_accelerate.enable()
    yield
    megatrain_accelerate.disable()


def with_a_star(original: Callable[..., str], *args: Any) -> str:
    return original(*args) + "*"


def test_methods_of_subclasses_are_wrapped_before_and_after_they_are_defined() -> None:
    class Base:
        def __init_subclass__(cls, kind: str = "", **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.kind = kind

        def inherited(self) -> str:
            return "inherited"

    class Early(Base, kind="early"):
        def own(self) -> str:
            return "early"

    wrap_in_subclasses(Base, "own", with_a_star)
    wrap_in_subclasses(Base, "inherited", with_a_star)

    class Late(Base, kind="late"):
        def own(self) -> str:
            return "late"

    class Below(Late):
        def inherited(self) -> str:
            return "below"

    assert (Early().own(), Late().own(), Below().own()) == ("early*", "late*", "late*")
    assert (Late().inherited(), Below().inherited()) == ("inherited", "below*")
    assert (Early.kind, Late.kind, Below.kind) == ("early", "late", "")


def test_subclasses_are_followed_where_nobody_did_so_before() -> None:
    class Base:
        pass

    wrap_in_subclasses(Base, "own", with_a_star)

    class Late(Base):
        def own(self) -> str:
            return "late"

    assert Late().own() == "late*"
    megatrain_accelerate.disable()
    assert Late().own() == "late"


def test_a_second_application_changes_nothing() -> None:
    class Base:
        pass

    class Early(Base):
        def own(self) -> str:
            return "early"

    for _ in range(2):
        wrap_in_subclasses(Base, "own", with_a_star)

    class Late(Base):
        def own(self) -> str:
            return "late"

    assert (Early().own(), Late().own()) == ("early*", "late*")
