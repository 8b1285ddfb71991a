"""What the caching allocator can give back, and which segments it makes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model

from megatrain_accelerate.plan import adoption
from megatrain_accelerate.plan.machine import whole_free_bytes
from megatrain_accelerate.store import expandable_segments
from megatrain_accelerate.store.expandable_segments import ALLOCATOR_VARIABLES, expand_segments
from megatrain_accelerate.units import MIB

GPU = torch.device("cuda", 0)


def segment(
    *blocks: tuple[str, int],
    is_expandable: bool,
    kind: str = "large",
    device: int = 0,
    pool: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """As in ``torch.cuda.memory_snapshot()``; blocks by their state and MiB."""
    address, made = 7 * 2**40, []
    for state, size in blocks:
        made.append({"address": address, "size": size * MIB, "state": state})
        address += size * MIB
    return {
        "device": device,
        "address": 7 * 2**40,
        "segment_type": kind,
        "segment_pool_id": pool,
        "is_expandable": is_expandable,
        "blocks": made,
    }


@pytest.mark.parametrize(
    ("held", "free_mib"),
    [
        (segment(("inactive", 300), is_expandable=False), 300),
        (segment(("inactive", 300), ("active_allocated", 20), is_expandable=False), 0),
        (segment(("inactive", 300), ("active_allocated", 20), is_expandable=True), 300),
        # Pages of 20 MiB: the block from 30 to 100 MiB has those from 40 to 100.
        (segment(("active_allocated", 30), ("inactive", 70), ("active_allocated", 60), is_expandable=True), 60),
        # From 30 to 49 MiB there is none, nor a negative number of them from 45 to 55.
        (segment(("active_allocated", 30), ("inactive", 19), ("active_allocated", 11), is_expandable=True), 0),
        (segment(("active_allocated", 45), ("inactive", 10), ("active_allocated", 5), is_expandable=True), 0),
        (segment(("active_allocated", 3), ("inactive", 5), is_expandable=True, kind="small"), 4),
        (segment(("active_pending_free", 40), ("inactive", 40), is_expandable=True), 40),
        (segment(("inactive", 300), is_expandable=True, device=1), 0),
        (segment(("inactive", 300), is_expandable=False, pool=(0, 1)), 0),
    ],
)
def test_fragments_are_what_the_allocator_cannot_give_back(
    held: dict[str, Any], free_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [held, held])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 * MIB, 2000 * MIB))
    assert whole_free_bytes(GPU) == (1000 + 2 * free_mib) * MIB


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator of a machine with a GPU is told."""
    told: list[str] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(expandable_segments.sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda size, device: None)
    monkeypatch.setattr(expandable_segments, "configure", told.append)
    monkeypatch.setattr(expandable_segments, "current_settings", lambda: told[-1] if told else "")
    monkeypatch.setattr(expandable_segments, "refused", set())
    return told


def test_segments_grow_where_nobody_configured_the_allocator(settings: list[str]) -> None:
    assert expand_segments(GPU)
    assert settings == ["expandable_segments:True"]
    assert not expand_segments(torch.device("cpu"))
    assert expand_segments(GPU)  # as it did
    assert len(settings) == 1


def test_an_engine_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(adoption, "expand_segments", asked.append)
    attach(tiny_model().train()).close()
    assert asked == [torch.device("cpu")]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_who_configured_the_allocator_decides(name: str, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert not expand_segments(GPU)
    assert settings == []


@pytest.mark.parametrize("theirs", ["max_split_size_mb:512", "expandable_segments:False"])
def test_who_configured_the_allocator_in_code_decides_too(theirs: str, settings: list[str]) -> None:
    settings.append(theirs)
    assert not expand_segments(GPU)
    assert settings == [theirs]


def test_an_allocator_of_another_kind_is_left_alone(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not expand_segments(GPU)
    assert settings == []


def test_a_gpu_without_virtual_memory_keeps_its_segments(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, device: torch.device) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch, "empty", refuse)
    assert not expand_segments(GPU)
    assert settings == ["expandable_segments:True", "expandable_segments:False"]
    # It isn't tried again, where a piece that is there already might hide that it can't be done.
    settings.clear()
    monkeypatch.setattr(torch, "empty", lambda size, device: None)
    assert not expand_segments(GPU)
    assert settings == []


def test_a_full_gpu_is_no_reason_against_them(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(size: int, device: torch.device) -> None:
        raise torch.OutOfMemoryError("2 MiB")

    monkeypatch.setattr(torch, "empty", is_full)
    assert expand_segments(GPU)
    assert settings == ["expandable_segments:True"]


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch doesn't tell its settings before 2.12"
)
def test_the_running_torch_takes_the_setting() -> None:
    before = expandable_segments.current_settings()
    try:
        expandable_segments.configure("expandable_segments:True")
        assert expandable_segments.current_settings() == "expandable_segments:True"
        with pytest.raises((RuntimeError, ValueError)):
            expandable_segments.configure("expandable_segments:perhaps")
    finally:
        expandable_segments.configure(before or "")
