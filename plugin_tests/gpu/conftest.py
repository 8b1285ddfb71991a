"""What every test on a GPU needs so that bits can be compared."""

from __future__ import annotations

from collections.abc import Iterator

import plain_torch
import pytest
import torch


@pytest.fixture(autouse=True)
def exact_torch_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "sqrt", plain_torch.ieee_sqrt)


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    # Atomics in attention's and the embedding's backward would make two runs of the same code differ.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
