"""Memory that ranks share is held by their mappings alone: it goes with them, and a mapping takes no descriptor."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_runs import attach
from fresh_process import run_python
from plain_torch import tiny_model, token_batches
from rank_ends import note_cause, require_prompt_end
from rank_runs import join_ranks, run_ranks

from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.pages import map_pages
from megatrain_accelerate.parallel.shared_file import SharedFile
from megatrain_accelerate.store.host_limits import available_host_bytes
from megatrain_accelerate.units import MIB

QUICK = 4


class SlowData(torch.utils.data.Dataset[torch.Tensor]):
    """Its first rows come at once, the others after minutes."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0 if index < QUICK else 600)
        return token_batches(1, batch=1)[0][0]


def main() -> None:
    """What each rank does: it is killed in its third step, while its data loader's workers make rows."""
    rank, folder = join_ranks(), Path(sys.argv[1])
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model)
    adopt_optimizer(optimizer, engine.runtime, "deferred")
    batches: Any = iter(torch.utils.data.DataLoader(SlowData(), batch_size=2, num_workers=2))
    (folder / f"workers{rank}").write_text(" ".join(str(worker.pid) for worker in batches._workers))
    for _ in range(QUICK // 2):
        ids = next(batches)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        note_cause(folder / "cause")
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_data_loaders_that_outlive_all_ranks_hold_nothing_of_the_store(tmp_path: Path) -> None:
    results = run_ranks(__file__, 2, tmp_path)
    workers = [int(worker) for rank in range(2) for worker in (tmp_path / f"workers{rank}").read_text().split()]
    try:
        assert [status for status, _ in results] == [-signal.SIGKILL] * 2, results
        for worker in workers:
            os.kill(worker, 0)  # it is still there
        require_prompt_end(tmp_path / "cause")
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def file_of_one(ranks: int = 1) -> SharedFile:
    """As of a training by one process, or by the first of several."""
    alone: Any = SimpleNamespace(rank=0, size=ranks, broadcast=lambda value: value, meet=lambda where: None)
    return SharedFile(alone)


def test_mappings_take_no_descriptors() -> None:
    file = file_of_one()
    before = len(os.listdir("/proc/self/fd"))
    mappings = [file.map(file.reserve(1), 1) for _ in range(1200)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(mappings) == 1200


def test_a_mapping_lasts_as_long_as_a_tensor_over_it_and_shows_what_others_wrote() -> None:
    def is_mapped() -> bool:
        return f"{address:x}-" in Path("/proc/self/maps").read_text()

    file = file_of_one()
    offset = file.reserve(1 << 20)
    first, second = (torch.frombuffer(file.map(offset, 1 << 20), dtype=torch.uint8) for _ in range(2))
    address, part = first.data_ptr(), first[4096:]
    first.fill_(7)
    assert second.sum() == 7 << 20
    del file, first
    gc.collect()
    assert is_mapped()
    assert part[0] == 7
    del part
    assert not is_mapped()
    assert second[0] == 7


def test_of_the_shared_store_a_rank_counts_an_equal_share_whichever_pages_it_has_used() -> None:
    def taken_mib() -> int:
        return round((before - available_host_bytes(1000.0)) / MIB)

    file = file_of_one(ranks=4)
    before = available_host_bytes(1000.0)
    os.pwrite(file._descriptor, b"1" * 64 * MIB, file.reserve(64 * MIB))
    assert taken_mib() == pytest.approx(16, abs=2), "written by another rank"
    pages = torch.frombuffer(file.map(0, 64 * MIB), dtype=torch.uint8)
    assert pages.sum() == ord("1") * 64 * MIB
    assert taken_mib() == pytest.approx(16, abs=2), "used by this rank, as if it had locked them"
    own = torch.frombuffer(mmap.mmap(-1, 96 * MIB), dtype=torch.uint8).fill_(1)
    assert taken_mib() == pytest.approx(112, abs=2), "memory that other code shares"
    del file, pages
    gc.collect()
    assert taken_mib() == pytest.approx(own.nbytes // MIB, abs=2)


def test_memory_that_the_kernel_refuses_is_an_error_with_size_and_remedy() -> None:
    with pytest.raises(HostMemoryError, match=r"refused .* of host memory \(Cannot allocate memory\); check"):
        map_pages(1 << 60)


def test_a_forked_process_that_drops_pages_it_never_had_keeps_its_own_at_their_address() -> None:
    run_python("""
        import gc, mmap, os
        from megatrain_accelerate.pages import map_pages

        gc.disable()
        pages = [map_pages(256 << 20)]
        pages.append(pages)  # garbage that only a collection finds
        del pages
        if (child := os.fork()) == 0:
            own = mmap.mmap(-1, 256 << 20)
            own[:4] = own[-4:] = b"mine"
            gc.collect()
            os._exit(own[:4] != own[-4:])
        assert os.waitpid(child, 0)[1] == 0
    """)


if __name__ == "__main__":
    main()
