"""What becomes of the activations of each layer between its forward and its backward, and where units live."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """Sets of layer indices. A layer in none of them is streamed and recomputed."""

    kept: frozenset[int] = frozenset()
    """Activations stay on the device until backward."""
    offloaded: frozenset[int] = frozenset()
    """Activations wait in host memory until backward."""
    offload_spacing: int = 1
    """Layers from one offloaded layer to the next: while those between compute, the link has time for its copies."""
    attention_kept: frozenset[int] = frozenset()
    """Recomputed layers whose attention isn't computed again: its results wait until backward."""
    inputs_offloaded: frozenset[int] = frozenset()
    """Layers whose inputs wait in host memory until backward, if they are recomputed, and with them what else these save: kept
    results of attention, or what a compiled layer's memory budget spares of the recompute."""
    budgets: tuple[float, float] = (0.0, 1.0)
    """Memory budgets of compiled layers, from 0 (saves the inputs alone) to 1 (saves everything): of those that are neither
    kept nor offloaded, and of those that are."""
    on_device: frozenset[int] = frozenset()
    """Weights, masters and moments live on the device."""
    groups_on_device: bool = False
    """So do those of the parameters outside the layers."""
    states_on_device: frozenset[int] = frozenset()
    """Layers that live on the host and are stepped on the device, where each process has the masters and moments of its share.
    If there are any, so are the parameters outside the layers, unless all of these live on the device."""

    def is_recomputed(self, index: int) -> bool:
        """Whether the layer's activations neither stay nor wait in host memory."""
        return not (index in self.kept or index in self.offloaded)

    def offloads_inputs(self, index: int) -> bool:
        """Whether the layer is recomputed, and its inputs go to the host until then."""
        return index in self.inputs_offloaded and self.is_recomputed(index)
