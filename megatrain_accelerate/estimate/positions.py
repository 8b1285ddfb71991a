"""Tables of positions: a sequence longer than one has rows can't be trained, and without data nothing says so."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_TABLES = frozenset(
    (
        "wpe",
        "embed_positions",
        "pos_embed",
        "pos_emb",
        "pos_embedding",
        "pos_embeddings",
        "position_embedding",
        "position_embeddings",
        "position_embeds_layer",
        "positional_embedding",
        "positional_embeddings",
        "positions_embed",
    )
)
"""What models of transformers call them. Relative positions and those in two dimensions have other names."""

_BUFFER = "embed_positions"
"""What GPT-J and CodeGen call theirs, which aren't learned: sines and cosines in each attention."""


@dataclasses.dataclass(frozen=True)
class PositionTable:
    """A table with a row for each position."""

    name: str
    """In the model."""
    positions: int
    """Tokens of the longest sequence."""


def shortest_table(model: nn.Module, run: Callable[[], object]) -> PositionTable | None:
    """The table with the fewest positions, of embeddings among those that a run looks into; None if there is none.

    Args:
        model: any.
        run: a run of the model on tokens: towers for images and sounds have tables of their own, which it leaves out.
    """
    tables = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    }
    found = [
        PositionTable(name, len(buffer))
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] == _BUFFER and buffer.dim() == 2
    ]
    found += [PositionTable(name, _positions(tables[name])) for name in _used(tables, run)] if tables else []
    return min(found, key=lambda table: table.positions, default=None)


def _used(tables: Mapping[str, nn.Embedding], run: Callable[[], object]) -> list[str]:
    """Those that the run calls."""
    used: set[nn.Module] = set()
    for module in tables.values():
        # No hook: runs without data leave hooks out.
        module.forward = functools.partial(_noted, used, module, module.forward)  # type: ignore[method-assign]
    try:
        run()
    finally:
        for module in tables.values():
            del module.forward
    return [name for name, module in tables.items() if module in used]


def _noted(used: set[nn.Module], module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    used.add(module)
    return forward(*args, **kwargs)


def _positions(table: nn.Embedding) -> int:
    """The rows without those before the first position: BART's and OPT's offset, or RoBERTa's padding."""
    if table.padding_idx is not None:
        return table.num_embeddings - table.padding_idx - 1
    offset = getattr(table, "offset", 0)
    return table.num_embeddings - (offset if isinstance(offset, int) else 0)
