"""What becomes of each layer's activations between its forward and its backward, and where units live."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """Sets of layer indices. A layer in none of them is streamed and recomputed."""

    kept: frozenset[int] = frozenset()
    """Layers whose activations stay on the device until backward."""
    offloaded: frozenset[int] = frozenset()
    """Layers whose activations wait in host memory until backward."""
    offload_spacing: int = 1
    """Distance from one offloaded layer to the next: while the layers in between compute, the link has time for its copies."""
    attention_kept: frozenset[int] = frozenset()
    """Recomputed layers that don't run attention again: its results are kept until backward."""
    inputs_offloaded: frozenset[int] = frozenset()
    """Recomputed layers whose inputs wait in host memory until backward, and with them what else these layers save: kept
    results of attention, or what a compiled layer's memory budget saves. Layers that aren't recomputed don't count."""
    budgets: tuple[float, float] = (0.0, 1.0)
    """Memory budgets of compiled layers, from 0 (saves the inputs alone) to 1 (saves everything): first that of recomputed
    layers, then that of kept and offloaded ones."""
    on_device: frozenset[int] = frozenset()
    """Layers whose weights, masters and moments live on the device."""
    groups_on_device: bool = False
    """Whether those of the parameters outside the layers live there, too."""
    states_on_device: frozenset[int] = frozenset()
    """Layers that live on the host and are stepped on the device, where each process has the masters and moments of its share.
    If there are any, parameters outside the layers are stepped there, too, unless these live on the device."""

    def is_recomputed(self, index: int) -> bool:
        """Whether the layer's activations are neither kept nor offloaded."""
        return not (index in self.kept or index in self.offloaded)

    def offloads_inputs(self, index: int) -> bool:
        """Whether the layer is recomputed, and its inputs are offloaded until then."""
        return index in self.inputs_offloaded and self.is_recomputed(index)
