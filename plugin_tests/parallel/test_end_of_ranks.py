"""When a rank's interpreter ends, gloo's threads have ended before: one that lives on may abort the process."""

from __future__ import annotations

import atexit
import os
import threading
from multiprocessing import util

import torch
from rank_runs import join_ranks, require_success, run_ranks

from megatrain_accelerate.parallel.lifeline import ranks_of_run


def threads() -> set[int]:
    """Those of this process that are neither the main thread nor one of Python's."""
    return {int(name) for name in os.listdir("/proc/self/task")} - {thread.native_id for thread in threading.enumerate()}


def main() -> None:
    """What each rank does."""
    before = threads()
    join_ranks()
    ranks = ranks_of_run()
    assert ranks is not None
    assert ranks.sum(torch.ones(8)).tolist() == [2.0] * 8
    of_gloo = threads() - before
    # What is registered first runs last, and importing torch registers multiprocessing's.
    atexit.unregister(util._exit_function)
    atexit.register(lambda: print(f"{len(of_gloo)} threads, of which {len(of_gloo & threads())} are left"))
    atexit.register(util._exit_function)


def test_gloos_threads_end_before_the_interpreter() -> None:
    results = run_ranks(__file__, 2, fresh=True)
    require_success(results)
    for _, output in results:
        assert "threads, of which 0 are left" in output
        assert not output.startswith("0 threads")


if __name__ == "__main__":
    main()
