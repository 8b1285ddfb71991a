"""A placement: for each layer what becomes of its activations, where its weights are, and where its states live."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """Sets of layer indices. A layer in none of them is streamed and recomputed.

    Layers on the device come first in the model, since the forward can begin with them while the host still steps the others;
    kept ones last, since backward begins with them.
    """

    kept: frozenset[int] = frozenset()
    """Activations stay on the device until backward."""
    offloaded: frozenset[int] = frozenset()
    """Activations wait in host memory until backward."""
    resident: frozenset[int] = frozenset()
    """Weights stay on the device, states on the host."""
    on_device: frozenset[int] = frozenset()
    """Weights, masters and moments live on the device."""
    groups_on_device: bool = False
    """So do those of the parameters outside the layers."""

    @classmethod
    def of_counts(
        cls,
        layers: int,
        *,
        kept: int = 0,
        offloaded: int = 0,
        resident: int = 0,
        on_device: int = 0,
        groups_on_device: bool = False,
    ) -> Placement:
        """The placement with these many layers of each sort, out of ``layers``; more than there are mean all."""
        on_device = min(on_device, layers)
        kept = min(kept, layers)
        return cls(
            kept=frozenset(range(layers - kept, layers)),
            offloaded=frozenset(range(max(0, layers - kept - offloaded), layers - kept)),
            resident=frozenset(range(on_device, min(layers, on_device + resident))),
            on_device=frozenset(range(on_device)),
            groups_on_device=groups_on_device,
        )
