"""With one process nothing is at work that several would share: no store file, no exchange, no thread that watches others."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from engine_runs import Training, attach
from plain_torch import tiny_model, token_batches
from rank_runs import join_ranks, require_success, run_ranks
from tqdm import tqdm

from megatrain_accelerate import parallel
from megatrain_accelerate.gradients import exchange
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.store import shared_store
from megatrain_accelerate.transfer import gather

OF_PARALLEL = [
    importlib.import_module(f"{parallel.__name__}.{found.name}") for found in pkgutil.iter_modules(parallel.__path__)
]


def not_with_one_process(*_: Any, **__: Any) -> None:
    raise AssertionError("this is for several processes")


def forbid_what_is_for_several() -> int:
    """No class of these modules can be made from now on. Returns how many there are."""
    modules = [*OF_PARALLEL, exchange, shared_store, gather]
    found = {kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)}
    own = [kind for kind in found if kind.__module__ in {module.__name__ for module in modules}]
    for kind in own:
        kind.__init__ = not_with_one_process
    return len(own)


def held() -> dict[str, Counter[str]]:
    """Threads, open files, and memory that other processes could map, of this process."""
    files: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            files[os.readlink(descriptor)] += 1
    files = Counter({name: count for name, count in files.items() if not name.startswith("/proc/")})
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    threads = Counter({"all but the kernels'": sum(name != "megatrain-host" for name in names)})
    threads += Counter(thread.name for thread in threading.enumerate())
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {"threads": threads, "files": files, "shared": Counter(" ".join(at[5:]) for at in mappings if at[1][3] == "s")}


def trained() -> Training:
    """After two steps."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = attach(model)
    run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    for ids in token_batches(2):
        run.step(ids, max_norm=1.0)
    engine.drain()
    return run


def main() -> None:
    """What the process does, first without a process group, then with one of its own."""
    assert forbid_what_is_for_several() >= 8
    tqdm.get_lock()  # which lies in shared memory
    tqdm.monitor_interval = 0  # else tqdm starts a thread
    (ids,) = token_batches(1)
    tiny_model()(input_ids=ids, labels=ids).loss.backward()  # and torch some
    for joins in (False, True):
        if joins:
            join_ranks()
        before = held()
        run = trained()
        now = held()
        assert now["threads"] - before["threads"] == Counter({"all but the kernels'": 1, "megatrain-step-worker": 1})
        assert now["files"] == before["files"]
        assert now["shared"] == before["shared"]
        run.engine.close()


def test_one_process_has_nothing_of_several() -> None:
    require_success(run_ranks(__file__, 1))


if __name__ == "__main__":
    main()
