"""Whether layers run by tiles of tokens, and what the plan's table says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from megatrain_accelerate.planning.placement_search import PlacementSearch
from megatrain_accelerate.planning.step_profile import StepOutline
from megatrain_accelerate.streaming.runtime import StreamingRuntime
from megatrain_accelerate.streaming.token_tiles import AUTO_TILE_TOKENS

LONG_TOKENS = 65536
"""From a sequence of this length on tiles are weighed against whole sequences where both fit: what a layer keeps by tiles is
little, so that more layers need no recompute. Of shorter ones a layer is compiled and faster whole."""


@contextlib.contextmanager
def _tiles_put_back_on_failure(runtime: StreamingRuntime) -> Iterator[None]:
    before = runtime.token_tile
    try:
        yield
    except BaseException:
        runtime.token_tile = before
        raise


def outline_with_tiles(
    runtime: StreamingRuntime,
    setting: int | str,
    outline: Callable[[], StepOutline],
    search: Callable[[StepOutline], PlacementSearch] | None,
) -> StepOutline:
    """The outline of a step, with the tiles that it should have; the runtime is left with them. ``setting`` is
    ``megatrain_config.token_tile``; ``outline`` makes the outline of a step as the runtime would run it now. What it raises
    leaves the runtime with the tiles that it had. There is no ``search`` where there is no budget to fit."""
    with _tiles_put_back_on_failure(runtime):
        runtime.token_tile = 0 if setting == "auto" else int(setting)
        whole = outline()
        if setting != "auto" or search is None:
            return whole
        whole_search = search(whole)
        longest = max((profile.length for profile in whole.profiles.values()), default=0)
        if longest < LONG_TOKENS and whole_search.something_fits:
            return whole
        runtime.token_tile = AUTO_TILE_TOKENS
        tiled = outline()
        by_tiles, by_whole = search(tiled).best(), whole_search.best()
        is_better = by_tiles is not None or tiled.largest_layer_bytes < whole.largest_layer_bytes
        if by_whole is not None:
            is_better = by_tiles is not None and by_tiles.time.seconds < by_whole.time.seconds
        if is_better:
            return tiled
        runtime.token_tile = 0
        return whole


def measured_to_fit(
    runtime: StreamingRuntime,
    outline: StepOutline,
    setting: int | str,
    again: Callable[[], StepOutline],
    measure: Callable[[StepOutline], StepOutline],
    search: Callable[[StepOutline], PlacementSearch],
) -> StepOutline:
    """The measured outline; by tiles if whole layers turn out to take more than they were predicted to, and don't fit.

    Kernels have workspaces that a run without data doesn't see; those of attention's backward are several times the hidden
    states. The runtime has the tiles of ``outline``; ``again`` makes one of the step as it would run now.

    Raises:
        torch.OutOfMemoryError: a layer's working set doesn't fit, nor by tiles if there is a choice.
    """
    may_change = setting == "auto" and not runtime.token_tile
    measured = None
    try:
        measured = measure(outline)
    except torch.OutOfMemoryError:
        if not may_change:
            raise
    if measured is not None and (not may_change or search(measured).something_fits):
        return measured
    # The error's frames hold nothing any more.
    with _tiles_put_back_on_failure(runtime):
        runtime.token_tile = AUTO_TILE_TOKENS
        tiled = again()
        if measured is None or tiled.largest_layer_bytes < outline.largest_layer_bytes:
            return measure(tiled)
    # Nothing to gain: no part is longer than a tile, or none is token-wise. Layers with tiles aren't compiled.
    runtime.token_tile = 0
    return measured


def tiles_text(runtime: StreamingRuntime) -> str:
    """What runs by tiles, and which layers have nothing that does, for each class of layers."""
    tiled: dict[str, list[str]] = {}
    for layer in runtime.layers:
        names = tiled.setdefault(type(layer.module).__name__, [])
        names += [name for name in layer.tiles.tiled_names if name not in names]
    parts = [f"{', '.join(names)} of {kind}" if names else f"nothing of {kind}, whole" for kind, names in tiled.items()]
    outside = runtime.outside_tiles.tiled_names
    parts += [f"{', '.join(outside)} outside the layers"] if outside else []
    return f"{runtime.token_tile} tokens: {'; '.join(parts)}"
