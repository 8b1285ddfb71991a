"""`recipes/peer_tests.py` tells tests that pass streamed from those that are refused and those that differ."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fresh_process import run_command

TESTS = """
import os
import pytest
import torch
from accelerate import Accelerator
from torch import nn

def prepare(model):
    return Accelerator(cpu=True).prepare(model)

def test_that_streams():
    prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))(torch.ones(2, 3))
    # As Transformers' tests do in the end.
    del os.environ["ACCELERATE_USE_CPU"]

def test_without_a_model():
    assert os.environ["ACCELERATE_USE_CPU"] == "true"

def test_that_is_refused():
    prepare(nn.Linear(3, 3))

def test_that_differs():
    assert "MEGATRAIN_ACTIVE" not in os.environ

def test_that_fails_anyway():
    assert False
"""


@pytest.mark.long
def test_verdicts(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(TESTS)
    # Tests are named from the folder with pytest's settings; one further up must not lend its own.
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    recipe = Path(__file__).parents[2] / "recipes" / "peer_tests.py"

    arguments = ("--cwd", tmp_path, "test_theirs.py")
    printed = run_command(sys.executable, recipe, *arguments, check=False, ACCELERATE_USE_CPU="true")
    for verdict in ("passes streamed", "passes", "refused", "differs", "not comparable"):
        assert f"| {verdict} | 1 |" in printed, printed
    assert "refused: test_theirs.py::test_that_is_refused: megatrain_accelerate.errors.UnsupportedError" in printed
    assert "differs: test_theirs.py::test_that_differs: AssertionError" in printed
