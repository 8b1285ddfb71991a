"""What every test on a GPU needs so that bits can be compared."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_square_roots(exact_torch_sqrt: None) -> None:
    """The fixture of all tests, for each one here."""


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    # Atomics in attention's and the embedding's backward would make two runs of the same code differ.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def nothing_is_left_of_the_test_before() -> None:
    """What it left in reference cycles would be given back in the middle of a measurement of memory."""
    gc.collect()
    torch.cuda.empty_cache()
