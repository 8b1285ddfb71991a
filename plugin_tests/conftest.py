"""Environment of every test and of the processes that tests start: no network, no trackers, no surprises."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("WANDB_MODE", "disabled")
for name in ("MEGATRAIN_ACTIVE", "MEGATRAIN_CONFIG", "MEGATRAIN_DISABLE", "WANDB_API_KEY"):
    os.environ.pop(name, None)

# What the plugin measures of this machine stays out of the user's cache.
_CACHE = tempfile.mkdtemp(prefix="megatrain_tests_")
os.environ["XDG_CACHE_HOME"] = _CACHE
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)

# Models here are tiny: one thread is faster than two that wait for each other, in tests and in what they start.
os.environ["OMP_NUM_THREADS"] = "1"

# Asserts of the helpers say what differs, as those of the tests do.
pytest.register_assert_rewrite("checkpoint_runs", "engine_runs", "loop_runs", "rank_ends", "refusals", "trainer_runs")


SLOW_COLLECTION_SECONDS = 0.02

_began = 0.0
_is_slow = False


def _time_collection(phase: str, info: dict[str, int]) -> None:
    """Notes that a full collection went through many objects."""
    global _began, _is_slow
    if info["generation"] == 2:
        if phase == "start":
            _began = time.thread_time()
        elif time.thread_time() - _began > SLOW_COLLECTION_SECONDS:
            _is_slow = True


gc.callbacks.append(_time_collection)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import is no garbage: each training collects, and would go through all of it for 0.3 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """What tests leave in caches and import later (torch's compiler) is none either, as soon as it is much."""
    global _is_slow
    try:
        return (yield)
    finally:
        if _is_slow:
            gc.collect()
            gc.freeze()
            _is_slow = False


@pytest.fixture(autouse=True)
def no_engine_outlives_its_test() -> Iterator[None]:
    """A model that a traceback keeps alive would be drained by the next test's ``drain()``, with its failure."""
    yield
    engine = sys.modules.get("megatrain_accelerate.engine")
    for left in engine.all_engines() if engine is not None else []:
        left.close()


@pytest.fixture(scope="module")
def profiles_of_the_file() -> dict[Any, Any]:
    """Those that :func:`profiled_once` made."""
    return {}


@pytest.fixture
def profiled_once(monkeypatch: pytest.MonkeyPatch, profiles_of_the_file: dict[Any, Any]) -> None:
    """Equal steps are profiled once in a test file."""
    from profile_cache import remembering

    from megatrain_accelerate.plan import device_plan

    monkeypatch.setattr(device_plan, "profile_step", remembering(device_plan.profile_step, profiles_of_the_file))


@pytest.fixture
def without_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run without data before the first forward, which takes most of the time of a few steps: for given placements."""
    from megatrain_accelerate.errors import UnsupportedError
    from megatrain_accelerate.plan import device_plan

    def not_profiled(*arguments: Any) -> None:
        raise UnsupportedError("not in these tests")

    monkeypatch.setattr(device_plan, "profile_step", not_profiled)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiled loss at work on tests' tiny models: tiles of 12 tokens, strips of 5 for a vocabulary of 128."""
    from megatrain_accelerate.loss import products, tiled_cross_entropy

    monkeypatch.setattr(tiled_cross_entropy, "TILE_BYTES", 0)
    monkeypatch.setattr(tiled_cross_entropy, "MIN_TILE_TOKENS", 12)
    monkeypatch.setattr(tiled_cross_entropy, "STRIP_BYTES", 4 * 128 * 5)
    monkeypatch.setattr(products, "PART_BYTES", 4 * 32 * 50)


@pytest.fixture
def exact_torch_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Tensor.sqrt`` correctly rounded: torch's own comes from MKL and is off by an ulp for some floats."""
    import plain_torch
    import torch

    monkeypatch.setattr(torch.Tensor, "sqrt", plain_torch.ieee_sqrt)
