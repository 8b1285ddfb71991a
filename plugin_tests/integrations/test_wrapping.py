"""How methods of other libraries are wrapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import megatrain_accelerate
from megatrain_accelerate.integrations.patches import PATCHES, Patch
from megatrain_accelerate.integrations.wrapping import add_fields, load_replacement, wrap_in_subclasses


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    megatrain_accelerate.enable()
    yield
    megatrain_accelerate.disable()


def with_a_star(original: Callable[..., str], *args: Any) -> str:
    return original(*args) + "*"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_replacement_is_there(patch: Patch) -> None:
    home, _, function = patch.replacement.partition(":")
    name = function.partition("(")[0]
    assert load_replacement(home, name) is not None


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


def test_added_fields_leave_an_init_of_the_scripts_own_in_place() -> None:
    @dataclasses.dataclass
    class Base:
        old: int = 1

    @dataclasses.dataclass
    class Made(Base):
        own: int = 2

    @dataclasses.dataclass
    class Written(Base):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.is_by_hand = True

    add_fields(Base, {"new": (int, dataclasses.field(default=3))})
    assert (Base(new=4).new, Made(5, 6, new=7).new, Made().new) == (4, 7, 3)  # type: ignore[call-arg]
    assert vars(Written(new=8)) == {"old": 1, "new": 8, "is_by_hand": True}


def test_fields_are_added_to_a_subclass_that_passes_arguments_on() -> None:
    @dataclasses.dataclass
    class Arguments:
        steps: int = 1

    @dataclasses.dataclass
    class Passing(Arguments):
        folder: dataclasses.InitVar[str] = "."

    add_fields(Arguments, {"megatrain": (bool, dataclasses.field(default=False))})
    assert Passing(steps=2, folder="a", megatrain=True).megatrain
