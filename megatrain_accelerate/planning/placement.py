"""A placement: for each layer what becomes of its activations, where its weights are, and where its states live."""

from __future__ import annotations

import dataclasses

from megatrain_accelerate.errors import ConfigError

MOST_SPACING = 8
"""A layer's activations reach the host while this many others compute, on any link worth using."""


def require_layers(layer_count: int, keep_layers: int | str, offload_layers: int | str) -> None:
    """Refuses settings that name more layers than the model has.

    Raises:
        ConfigError: with the numbers.
    """
    kept = keep_layers if isinstance(keep_layers, int) else 0
    if kept > layer_count:
        raise ConfigError(f"megatrain_config.keep_layers is {kept}, but the model has {layer_count} layers; lower it")
    if isinstance(offload_layers, int) and offload_layers > layer_count - kept:
        raise ConfigError(
            f"megatrain_config.offload_layers is {offload_layers}, but {layer_count - kept} of the model's {layer_count} "
            f"layers aren't kept (megatrain_config.keep_layers is {keep_layers!r}); lower one of the two"
        )


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
    offload_spacing: int = 1
    """Layers from one offloaded layer to the next: while those between compute, the link has time for its copies."""
    attention_kept: frozenset[int] = frozenset()
    """Recomputed layers whose attention isn't computed again: its results wait until backward."""
    inputs_offloaded: frozenset[int] = frozenset()
    """Of those among them that are recomputed, the inputs wait in host memory until backward, and attention's results too."""
    resident: frozenset[int] = frozenset()
    """Weights stay on the device, states on the host."""
    on_device: frozenset[int] = frozenset()
    """Weights, masters and moments live on the device."""
    groups_on_device: bool = False
    """So do those of the parameters outside the layers."""
    budgets: tuple[float, float] = (0.0, 1.0)
    """Memory budgets of compiled layers: of those that are neither kept nor offloaded, and of those that are."""

    @classmethod
    def of_counts(
        cls,
        layers: int,
        *,
        kept: int = 0,
        offloaded: int = 0,
        inputs_offloaded: int = 0,
        attention_kept: int = 0,
        resident: int = 0,
        on_device: int = 0,
        groups_on_device: bool = False,
        budgets: tuple[float, float] = (0.0, 1.0),
    ) -> Placement:
        """The placement with these many layers of each sort, out of ``layers``; more than there are mean all.

        Args:
            layers: how many the model has.
            kept, offloaded, resident, on_device, groups_on_device, budgets: see the fields.
            attention_kept: counted from the last layer that isn't kept; offloaded ones among them need none.
            inputs_offloaded: counted from the model's start, since there they are away longest.
        """
        on_device = min(on_device, layers)
        kept = min(kept, layers)
        offloaded = min(offloaded, layers - kept)
        # Where recomputed layers' inputs leave there is no pause between copies.
        spacing = min(MOST_SPACING, (layers - kept) // offloaded) if offloaded and not inputs_offloaded else 1
        last = layers - kept - 1
        away = frozenset(last - i * spacing for i in range(offloaded))
        return cls(
            kept=frozenset(range(layers - kept, layers)),
            offloaded=away,
            offload_spacing=spacing,
            attention_kept=frozenset(range(max(0, layers - kept - attention_kept), layers - kept)) - away,
            inputs_offloaded=frozenset(range(min(inputs_offloaded, layers))),
            resident=frozenset(range(on_device, min(layers, on_device + resident))),
            on_device=frozenset(range(on_device)),
            groups_on_device=groups_on_device,
            budgets=budgets,
        )
