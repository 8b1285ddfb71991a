"""All-gathers of weights: each rank copies a range of a layer's weights over its own link, and the ranks gather the ranges
between their devices. So host memory is read once for all of them, and a link carries one range. Where a layer's states are on
the devices, these have the ranges already, and links carry nothing.

A rank hangs in an all-gather that another one doesn't join. So all ranks gather the same layers in the same order, by rules
that use only what is the same on all ranks:

- **Which calls.** Those with a graph, in training forwards of the whole model, which all ranks make, and their backwards. For
  all else, which a rank may do alone (evaluations, generations, trials of the plan), it copies whole layers. A model with a
  frozen layer gathers nothing, since a rank may skip that layer (of an image encoder, say). No rank may skip a layer that is
  trained: its gradients are exchanged.
- **What is expected.** These passes have a :class:`~megatrain_accelerate.transfer.call_order.CallOrder` of their own.
- **What slots hold.** A slot notes what was last gathered into it, and when a gathered layer was last used in it. Nothing that
  a rank does alone changes these notes, and they alone decide whether a layer is in a slot, and which slot is overwritten. A
  rank that has copied something else over a gathered layer copies that layer again, whole and alone.
- **Residents** whose states are on the devices are gathered into their own memory at two points that all ranks pass: those
  before the layers when the forward begins, the others when the last layer is called. A rank that needs their weights earlier,
  for something else, copies them whole, and takes part in the gather all the same.
- **Which slots.** Slots in which one rank holds layers for its evaluations are given up before. After a plan, which may have
  moved layers, nothing counts as gathered.
- **When.** A step may be applied on one rank and not yet on another. So slots are chosen whether it is or not, and gathers are
  issued in the order of the choices: once their steps are applied, or, with a wait for that, when the layer is needed or the
  forward ends. A backward fetches what its forward had, of which no step is pending.

Scripts may break the rules (a layer runs more often on one rank, say), so ranks compare names before each gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.parallel.shared_file import OrderCheck, SharedFile
from megatrain_accelerate.store.layout import part_bytes, part_of
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.meter import Cause, Meter

# torch 2.13 warns of the older name.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Gather:
    """Divides weights into ranges and gathers them. All ranks make this object."""

    def __init__(self, file: SharedFile, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = ranks.weights_group
        self._order = OrderCheck(file, ranks, "weights")

    def slot_bytes(self, size_bytes: int) -> int:
        """Size of a slot for weights of ``size_bytes``: equal ranges, of which the last may be partly filled."""
        return self._ranks.size * part_bytes(size_bytes, self._ranks.size)

    def fetch(self, unit: HostUnit, buffer: torch.Tensor, name: str, meter: Meter, stream: Any) -> None:
        """Issues the copies of this rank's range of a unit's weights to a flat buffer, and the all-gather of all ranges.
        ``stream`` is the current stream."""
        size_bytes, ranks = unit.layout.weight_bytes, self._ranks
        own_part = part_of(size_bytes, ranks.rank, ranks.size)
        copies, copied_bytes = unit.copies_of_part(own_part, buffer)
        with meter.copying(Cause.H2D, copied_bytes):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        if unit.device_states is not None:
            unit.device_states.read_event.record(stream)
        self._order.enter(name)
        part = part_bytes(size_bytes, ranks.size)
        own = buffer[ranks.rank * part : (ranks.rank + 1) * part]
        all_gather(buffer[: ranks.size * part], own, group=self._group)
