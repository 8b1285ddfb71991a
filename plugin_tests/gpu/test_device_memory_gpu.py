"""The caching allocator under an engine: what is freed serves tensors of other sizes, and what can be given back is known."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.pages import map_pages
from megatrain_accelerate.plan import device_plan
from megatrain_accelerate.plan.machine import whole_free_bytes
from megatrain_accelerate.store.expandable_segments import ALLOCATOR_VARIABLES
from megatrain_accelerate.store.host_memory import HostMemory
from megatrain_accelerate.units import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine was made in this process, and nobody configured the allocator."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    attach(tiny_model(num_hidden_layers=1).train(), device="cuda").close()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def with_gaps() -> list[torch.Tensor]:
    """Tensors of 63 MiB with gaps of the same size, eight of each, where one was before, and small ones with gaps."""
    torch.empty(16 * 63 * MIB, dtype=torch.uint8, device=GPU)
    large = [torch.empty(63 * MIB, dtype=torch.uint8, device=GPU) for _ in range(16)]
    small = [torch.empty(MIB // 2, dtype=torch.uint8, device=GPU) for _ in range(32)]
    return [*large[::2], *small[::8]]


def test_gaps_between_tensors_serve_a_larger_one_under_a_cap() -> None:
    before = torch.cuda.memory_reserved(GPU)
    held = with_gaps()
    total = torch.cuda.mem_get_info(GPU)[1]
    torch.cuda.set_per_process_memory_fraction((before + 1200 * MIB) / total)
    # 506 MiB are held, and 1,024 were. A gap has two whole pages of 20 MiB at the least.
    larger = torch.empty(480 * MIB, dtype=torch.uint8, device=GPU)
    assert torch.cuda.memory_reserved(GPU) <= before + 1200 * MIB
    del held, larger


def test_what_counts_as_whole_is_what_the_allocator_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held = with_gaps()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))  # others use the device
    whole, reserved = whole_free_bytes(GPU), torch.cuda.memory_reserved(GPU)
    torch.cuda.empty_cache()
    assert whole == reserved - torch.cuda.memory_reserved(GPU)
    # Eight gaps, of which the last may be the end, and four of small ones.
    assert 8 * 40 * MIB <= whole <= 8 * 63 * MIB + 16 * MIB
    assert whole_free_bytes(GPU) == 0
    del held


def test_pages_that_the_driver_refuses_to_lock_fail_no_later_kernel() -> None:
    pages = map_pages(MIB)
    first, second = (HostMemory(MIB, register=True, shared=pages) for _ in range(2))
    first.register()
    with pytest.raises(HostMemoryError, match="error 712"):  # they are locked already
        second.register()
    assert torch.full((3,), 2.0, device=GPU).sum().item() == 6
    first.close()


@pytest.mark.parametrize(
    "settings",
    [{"kept_layers": 4}, {"kept_layers": 4, "compile_layers": True}],
    ids=["kept", "compiled"],
)
def test_a_forward_without_a_backward_gives_its_memory_back(settings: dict[str, Any]) -> None:
    model = tiny_model().train()
    engine = attach(model, device="cuda", **{"compile_layers": False, **settings})
    ids = token_batches(1, batch=4, length=512)[0].cuda()
    model(input_ids=ids, labels=ids).loss.backward()  # is planned for
    held = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        alive = torch.cuda.memory_allocated(GPU)
        del loss
        gc.collect()
        held.append(torch.cuda.memory_allocated(GPU))
        assert alive > held[-1]
    assert held[2] == held[0]
    engine.close()


def test_planning_leaves_nothing_behind_where_layers_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plan, "CERTAIN_SHARE", 0.0)  # a model that surely fits isn't measured

    def fails(graph: Any, inputs: list[Any]) -> Any:
        raise NotImplementedError("no such kernel")

    left = []
    # The first one isn't looked at: a process's first products leave the workspaces of their library (33 MiB).
    for compile_layers in (False, False, True):
        model = tiny_model().train()
        engine = attach(model, device="cuda", compile_layers=compile_layers, device_layers=None)
        engine.runtime.compiled.backend = fails
        ids = token_batches(1, batch=4, length=512)[0].cuda()
        gc.collect()
        before = torch.cuda.memory_allocated(GPU)
        step_profile = engine.device_plan.foresee(model, {"input_ids": ids, "labels": ids})
        assert all(profile.forward_seconds is not None for profile in step_profile.profiles.values()), "it is measured"
        assert all(profile.recompute_seconds is None for profile in step_profile.profiles.values()), "it is a forward"
        gc.collect()
        left.append(torch.cuda.memory_allocated(GPU) - before)
        engine.close()
    assert left[1] == left[2]
