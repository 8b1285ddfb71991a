"""Which layers of an engine left padding out, seen where they take a batch apart."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain_accelerate.layers.unpadded_layer import UnpaddedLayer


class UnpaddedCalls:
    """Notes for each layer whether its last call of a batch with padding left that out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._found: dict[UnpaddedLayer, bool] = {}
        in_a_row = UnpaddedLayer.in_a_row

        def noting(layer: UnpaddedLayer, real: Any, *given: Any) -> Any:
            made = in_a_row(layer, real, *given)
            if real is not None:
                self._found[layer] = made[0] is not None
            return made

        monkeypatch.setattr(UnpaddedLayer, "in_a_row", noting)

    def of(self, engine: Any) -> list[bool]:
        """By layer."""
        return [self._found.get(layer.unpadded, False) for layer in engine.runtime.layers]
