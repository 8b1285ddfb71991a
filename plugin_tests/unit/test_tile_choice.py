"""What the plan does when a step by whole layers turns out to be larger than it was predicted to be, or can't be predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_accelerate.planning.step_memory import OpCosts
from megatrain_accelerate.planning.step_profile import LayerProfile, StepOutline
from megatrain_accelerate.planning.tile_choice import measured_to_fit, outline_with_tiles
from megatrain_accelerate.streaming.token_tiles import AUTO_TILE_TOKENS

PROFILE = LayerProfile(OpCosts(), OpCosts(), 0, 0, 0, 0, 0, 0, 0, ())


def outline_of(recomputed_bytes: int, tile: int = 0) -> StepOutline:
    profile = dataclasses.replace(PROFILE, recomputed_bytes=recomputed_bytes)
    return StepOutline((), 0, OpCosts(), {"layer": profile}, tile)


WHOLE, TILED = outline_of(100), outline_of(30, AUTO_TILE_TOKENS)
NO_SMALLER = outline_of(100, AUTO_TILE_TOKENS)


def run_out_of_memory(outline: StepOutline) -> StepOutline:
    if not outline.token_tile:
        raise torch.OutOfMemoryError("one layer is too large")
    return outline


def fitted(
    measure: Callable[[StepOutline], StepOutline], fits: bool, setting: int | str = "auto", tiled: StepOutline = TILED
) -> tuple[StepOutline, int]:
    runtime: Any = SimpleNamespace(token_tile=0)
    search: Any = lambda outline: SimpleNamespace(something_fits=fits)  # noqa: E731
    return measured_to_fit(runtime, WHOLE, setting, lambda: tiled, measure, search), runtime.token_tile


def test_layers_that_fit_stay_whole() -> None:
    assert fitted(lambda outline: outline, fits=True) == (WHOLE, 0)


def test_layers_that_were_measured_to_be_too_large_run_by_tiles() -> None:
    assert fitted(lambda outline: outline, fits=False) == (TILED, AUTO_TILE_TOKENS)
    assert fitted(run_out_of_memory, fits=True) == (TILED, AUTO_TILE_TOKENS)


def test_tiles_that_make_no_layer_smaller_are_not_taken() -> None:
    # A short sequence on a GPU that is too small for it: tiles would only cost the compiled layers.
    assert fitted(lambda outline: outline, fits=False, tiled=NO_SMALLER) == (WHOLE, 0)


def test_what_the_user_fixed_is_kept_and_its_error_surfaces() -> None:
    assert fitted(lambda outline: outline, fits=False, setting=0) == (WHOLE, 0)
    with pytest.raises(torch.OutOfMemoryError):
        fitted(run_out_of_memory, fits=True, setting=0)


@pytest.mark.parametrize("failing", [0, AUTO_TILE_TOKENS], ids=["whole", "by tiles"])
def test_a_step_that_cannot_be_outlined_leaves_the_tiles_that_an_earlier_batch_needed(failing: int) -> None:
    runtime: Any = SimpleNamespace(token_tile=AUTO_TILE_TOKENS)

    def outline() -> StepOutline:
        if runtime.token_tile == failing:
            raise ValueError("it looks at its data")
        return WHOLE

    search: Any = lambda outline: SimpleNamespace(something_fits=False)  # noqa: E731
    with pytest.raises(ValueError, match="looks at its data"):
        outline_with_tiles(runtime, "auto", outline, search)
    assert runtime.token_tile == AUTO_TILE_TOKENS
