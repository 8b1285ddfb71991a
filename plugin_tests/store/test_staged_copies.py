"""Copies through two buffers, by the host's threads: every byte arrives, whatever ends first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.store.host_memory import copy_bytes, copy_staged
from megatrain_accelerate.transfer.streams import Immediate


@pytest.fixture
def kernels() -> Iterator[HostKernels]:
    kernels = HostKernels(1)
    yield kernels
    kernels.close()


ISSUED: list[Callable[[], object]] = []
"""Copies over the link that no event was recorded behind so far."""


class LateEvent(Immediate):
    """The copies before it run when it is waited for, and no earlier."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []

    def record(self, stream: object = None) -> None:
        self.copies += ISSUED
        ISSUED.clear()

    def synchronize(self) -> None:
        for copy in self.copies:
            copy()
        self.copies.clear()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    now = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        ISSUED.append(lambda: now(self, source))
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 40])
def test_every_byte_arrives_however_late_the_links_copies_are(count: int, to_host: bool, kernels: HostKernels) -> None:
    source = torch.arange(count, dtype=torch.int16).view(1, -1) + 1
    target = torch.zeros_like(source)
    events = [LateEvent(), LateEvent()]
    copy_staged(target, source, torch.zeros(2, 16, dtype=torch.uint8), events, kernels, to_host=to_host)
    assert torch.equal(target, source)
    assert not ISSUED
    assert not any(event.copies for event in events)


def test_copies_within_the_host_need_no_buffer(kernels: HostKernels) -> None:
    source = torch.randn(3, 5)
    target = torch.empty_like(source)
    copy_bytes(target, source, kernels)
    assert torch.equal(target, source)
