"""How a step runs: the whole batch where it fits, else pieces of it, else tiles; also where measuring shows another size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers.token_tiles import AUTO_TILE_TOKENS
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_profile import LayerProfile, StepProfile
from megatrain_accelerate.plan.step_ways import LONG_TOKENS, WayChoice, may_cut

PROFILE = LayerProfile(OpCosts(), OpCosts(), 0, 0, 0, 0, 0, 0, 0, ())
Way = tuple[int | None, int]
WHOLE: Way = (None, 0)
TILED: Way = (None, AUTO_TILE_TOKENS)


class Step:
    """A step whose layers take so many bytes by each way; a piece's are in proportion. What isn't given can't be profiled.

    ``seconds`` are those of each way that fits; ``measured`` the bytes that measuring finds, by default the same.
    """

    def __init__(
        self,
        *,
        budget: int,
        samples: int = 1,
        whole: int = 100,
        tiled: int = 30,
        seconds: dict[Way, float] | None = None,
        measured: Callable[[StepProfile], int] | None = None,
        length: int = 8,
        **settings: Any,
    ) -> None:
        self.budget, self.samples, self.sizes = budget, samples, {0: whole, AUTO_TILE_TOKENS: tiled}
        self.seconds = seconds or {}
        self.measured_bytes = measured or (lambda step_profile: step_profile.largest_layer_bytes)
        self.length = length
        self.profiled: list[Way] = []
        self.measured: list[Way] = []
        self.runtime: Any = SimpleNamespace(
            batch_cut=SimpleNamespace(chosen=None, asked=None), token_tile=0, layers=[], experts=[]
        )
        self.choice = WayChoice(self.runtime, MegatrainConfig(**settings), samples, self.step_profile, self.search)

    @property
    def way(self) -> Way:
        return self.runtime.batch_cut.chosen, self.runtime.token_tile

    def step_profile(self) -> StepProfile:
        self.profiled.append(self.way)
        piece, tile = self.way
        return self.step_profile_of(self.sizes[tile] * (piece or self.samples) // self.samples, self.way)

    def step_profile_of(self, size: int, way: Way) -> StepProfile:
        profile = dataclasses.replace(PROFILE, recomputed_bytes=size, length=self.length)
        return StepProfile((), 0, OpCosts(), {"layer": profile}, way[1], way[0])

    def search(self, step_profile: StepProfile) -> Any:
        way = (step_profile.samples, step_profile.token_tile)
        fits = step_profile.largest_layer_bytes <= self.budget
        seconds = self.seconds.get(way, 1.0)
        time = SimpleNamespace(seconds=seconds)
        candidate = SimpleNamespace(time=time, is_worth_it=lambda other: seconds < 0.995 * other.time.seconds)
        return SimpleNamespace(something_fits=fits, best=lambda: candidate if fits else None)

    def measure(self, step_profile: StepProfile) -> StepProfile:
        self.measured.append(self.way)
        assert self.way == (step_profile.samples, step_profile.token_tile), "measured by another way"
        size = self.measured_bytes(step_profile)
        if size > 1000:
            raise torch.OutOfMemoryError("one layer is too large")
        return self.step_profile_of(size, (step_profile.samples, step_profile.token_tile))

    def best(self) -> Way:
        before, step_profile = self.way, self.choice.best()
        assert self.way == before
        return step_profile.samples, step_profile.token_tile

    def best_measured(self) -> Way:
        before = self.way
        found, measured = self.choice.measured(self.choice.best(), self.measure)
        assert self.way == before
        assert (found.samples, found.token_tile) == (measured.samples, measured.token_tile)
        return found.samples, found.token_tile


def test_a_batch_that_fits_stays_whole_and_nothing_else_is_looked_at() -> None:
    step = Step(budget=100, samples=8)
    assert step.best_measured() == WHOLE
    assert (step.profiled, step.measured) == ([WHOLE], [WHOLE])


def test_a_batch_that_does_not_fit_runs_in_the_largest_pieces_that_do() -> None:
    step = Step(budget=60, samples=8)
    assert step.best() == (4, 0)
    assert TILED not in step.profiled, "tiles were looked at, though layers that are compiled fit"


def test_no_predicted_time_has_a_say_in_the_size_of_pieces() -> None:
    # Other pieces give other bits, and measured speeds differ from process to process.
    assert Step(budget=60, samples=8, seconds={(4, 0): 1.0, (2, 0): 0.5}).best() == (4, 0)


def test_each_way_is_measured_as_it_was_profiled() -> None:
    step = Step(budget=60, samples=4, whole=60, tiled=12, measured=lambda step_profile: 10 * step_profile.largest_layer_bytes)
    assert step.best_measured() == (2, AUTO_TILE_TOKENS)
    assert step.measured == [WHOLE, (2, 0), (1, 0), TILED, (2, AUTO_TILE_TOKENS)]


def test_pieces_of_an_odd_batch_are_about_as_large() -> None:
    assert Step(budget=60, samples=7).best() == (4, 0)
    assert Step(budget=60, samples=30).best() == (15, 0)


def test_a_sequence_that_does_not_fit_runs_by_tiles() -> None:
    assert Step(budget=60).best() == TILED
    assert Step(budget=20, samples=2, whole=200, tiled=40).best() == (1, AUTO_TILE_TOKENS)


def test_a_long_sequence_runs_by_tiles_only_if_that_is_faster() -> None:
    assert Step(budget=100, length=LONG_TOKENS, seconds={TILED: 0.9}).best() == TILED
    assert Step(budget=100, length=LONG_TOKENS, seconds={TILED: 1.1}).best() == WHOLE


def test_tiles_that_make_no_layer_smaller_are_not_taken() -> None:
    # A short sequence on a GPU that is too small for it: tiles would only cost the compiled layers.
    assert Step(budget=20, tiled=100).best_measured() == WHOLE


@pytest.mark.parametrize("size", [90, 2000], ids=["does not fit", "out of memory"])
def test_layers_that_were_measured_to_be_too_large_run_in_pieces_or_by_tiles(size: int) -> None:
    step = Step(budget=80, samples=4, whole=70, measured=lambda step_profile: size if step_profile.samples is None else 10)
    assert step.best_measured() == (2, 0)
    assert step.measured == [WHOLE, (2, 0)]
    assert (
        Step(budget=80, whole=70, measured=lambda step_profile: 10 if step_profile.token_tile else size).best_measured()
        == TILED
    )


def test_what_the_user_fixed_is_kept_and_its_error_surfaces() -> None:
    fixed: dict[str, Any] = {"micro_batch_size": 2, "token_tile": 0}
    assert Step(budget=60, samples=8, **fixed).best_measured() == WHOLE
    step = Step(budget=60, samples=8, measured=lambda step_profile: 2000, **fixed)
    with pytest.raises(torch.OutOfMemoryError, match="one layer is too large"):
        step.best_measured()


def test_a_batch_that_cannot_be_cut_stays_whole() -> None:
    step = Step(budget=60, samples=8, token_tile=0)
    step_profile = step.step_profile

    def refuse_pieces() -> StepProfile:
        if step.runtime.batch_cut.chosen is not None:
            raise UnsupportedError("it isn't certain which dimension is the batch")
        return step_profile()

    step.choice = WayChoice(step.runtime, MegatrainConfig(token_tile=0), 8, refuse_pieces, step.search)
    assert step.best() == WHOLE


@pytest.mark.parametrize("failing", [WHOLE, TILED], ids=["whole", "by tiles"])
def test_a_step_that_cannot_be_profiled_leaves_the_way_of_an_earlier_batch(failing: Way) -> None:
    step = Step(budget=20)
    step_profile = step.step_profile

    def fail() -> StepProfile:
        if step.way == failing:
            raise ValueError("it looks at its data")
        return step_profile()

    step.runtime.batch_cut.chosen, step.runtime.token_tile = 3, AUTO_TILE_TOKENS
    with pytest.raises(ValueError, match="looks at its data"):
        WayChoice(step.runtime, MegatrainConfig(), 1, fail, step.search).best()
    assert step.way == (3, AUTO_TILE_TOKENS)


class Unknown(nn.Module):
    """A layer of the user's own, which may do anything with a batch."""


class WithCapacity(nn.Linear):
    """Stands for experts of transformers' that take so many tokens of a batch."""

    expert_capacity = 8


WithCapacity.__module__ = "transformers.models.stand_in"


@pytest.mark.parametrize(
    ("module", "cuts"), [(nn.Linear(1, 1), True), (Unknown(), False), (WithCapacity(1, 1), False)], ids=lambda one: str(one)
)
def test_only_layers_that_are_known_to_keep_samples_apart_run_in_pieces_of_their_own_accord(
    module: nn.Module, cuts: bool
) -> None:
    layers = [SimpleNamespace(module=nn.Sequential(module))]
    runtime: Any = SimpleNamespace(layers=layers, experts=[])
    assert may_cut(runtime, MegatrainConfig()) is cuts
    assert not may_cut(runtime, MegatrainConfig(micro_batch_size=2))
    assert not may_cut(SimpleNamespace(layers=layers, experts=[object()]), MegatrainConfig())  # type: ignore[arg-type]
