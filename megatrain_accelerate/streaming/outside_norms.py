"""Norms outside the layers by tiles of tokens: a last norm makes, in fp32, several tensors twice as large as its input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from megatrain_accelerate.streaming.model_hook import ModelHook
from megatrain_accelerate.streaming.runtime import StreamingRuntime
from megatrain_accelerate.streaming.token_tiles import TokenTiles


def run_norms_by_tiles(model: nn.Module, runtime: StreamingRuntime, modules: Iterable[nn.Module]) -> list[Any]:
    """Norms run by tiles from now on, if layers do.

    Args:
        model: its calls have the tiles at work. Trial runs, which call its forward past hooks, have them by the runtime.
        runtime: its engine's.
        modules: outside the layers; those with weights but no matrix are taken. Of the others their output is what is large.

    Returns:
        The handles of hooks.
    """
    names = {module: name for name, module in model.named_modules()}
    parameters = {module: list(module.parameters()) for module in modules}
    norms = [module for module, own in parameters.items() if own and all(parameter.dim() == 1 for parameter in own)]
    tiles = TokenTiles((names[norm], norm) for norm in norms)
    tiles.tile_tokens = runtime.outside_tiles.tile_tokens
    runtime.outside_tiles = tiles
    at_work = contextlib.ExitStack()

    def end(*_: Any) -> None:
        at_work.close()

    def begin(*_: Any) -> None:
        at_work.close()  # of a call that was interrupted
        at_work.enter_context(tiles.at_work_anywhere())

    # With arguments, since a hook without any is called when the model is copied.
    return [
        model.register_forward_pre_hook(ModelHook(begin, with_arguments=True)),
        model.register_forward_hook(ModelHook(end, with_arguments=True), always_call=True),
    ]
