"""docs/errors.md has every error that the package raises, by its text."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from megatrain_accelerate import errors

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "errors.md").read_text(encoding="utf-8")
HANDED_ON = {"integrations/joined_batches.py:_require_exact", "integrations/training_arguments.py:_refuse_unsupported"}
"""Functions whose error says a reason that another one returned."""


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(DOCS / "make_errors.py"))


def test_the_page_is_what_its_script_makes(script: Any) -> None:
    assert script["page"]() == PAGE, "run `python docs/make_errors.py`"


def test_every_error_that_is_raised_has_a_text_on_it(script: Any) -> None:
    raised = list(script["raised"]())
    assert len(raised) > 170
    silent = {place for place, _, texts in raised if not any(text.strip(". :=") for text in texts)}
    assert silent <= HANDED_ON
    for _, _, texts in raised:
        for text in filter(lambda text: text.strip(". "), texts):
            assert f"- {script['shown'](text)}\n" in PAGE


def test_every_class_is_a_heading_with_what_it_means() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MegatrainError)]
    headings = re.findall(r"^## (\w+Error)$", PAGE, re.M)
    assert sorted(headings) == sorted(kind.__name__ for kind in kinds if kind is not errors.MegatrainError)


def test_what_is_called_internal_is_raised(script: Any) -> None:
    shown = [script["shown"](text) for _, _, texts in script["raised"]() for text in texts]
    assert [begin for begin in script["INTERNAL"] if not any(text.startswith(begin) for text in shown)] == []
