"""What every test on a GPU needs so that bits can be compared."""

from __future__ import annotations

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
