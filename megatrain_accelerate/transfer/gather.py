"""Fetches that several ranks make together: each copies a part of a layer's weights over its own link, and all gather the
parts between their devices. Host memory is read once for all of them, and a link carries one part; none where a layer's states
are on the devices, which have the parts already.

A rank waits for ever in a gather that another one doesn't join. So all gather the same layers in the same order, by rules
that use nothing but what all ranks have alike:

- **Which calls.** Those that have a graph, of training forwards of the whole model, which all ranks make; and their backwards.
  A rank copies whole layers for all else, which it may do alone: evaluations, generations, trials of the plan. Nothing is
  gathered for a model with a frozen layer, since a rank may leave it out (that of pictures, say). No rank may leave out one
  that is trained: its gradients are exchanged.
- **What is expected.** These passes have a :class:`~megatrain_accelerate.transfer.call_order.CallOrder` of their own.
- **What is there.** A slot notes what was gathered into it last, and when a gathered layer was last used there. Whether a
  layer is there, and which slot is overwritten, these notes decide, which nothing that a rank does alone changes. A rank that
  has copied something else over what was gathered copies that layer again, whole and alone.
- **Residents**, whose states are on the devices, are gathered into their own memory at two places that all ranks pass: those
  before the layers when the forward begins, the others when the last layer is called. A rank that needs their weights for
  something else before copies them whole, and gathers them all the same.
- **Which slots.** Layers that one rank holds for its evaluations, in slots of their own, are let go of before. When a plan was
  made, by which layers may have moved, nothing counts as gathered.
- **When.** A step may be applied for one rank and not yet for another. So slots are chosen whether it is or not, and gathers
  are issued in the order of the choices: when their steps are applied, or, waiting for that, when the layer is needed or the
  forward ends. A backward fetches what its forward had, of which no step is under way.

Where scripts break the rules (a layer is repeated more often on one rank, say), names are compared before each gather.
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

# The name of torch 2.13, which warns of the older one.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Gather:
    """The parts into which weights are cut, and the collective that puts them together. All ranks make it."""

    def __init__(self, file: SharedFile, ranks: Ranks) -> None:
        self._ranks = ranks
        # With a communicator of its own: in the exchange's, it would wait for gradients that are still computed.
        self._group = dist.new_group(timeout=ranks.timeout)
        self._order = OrderCheck(file, ranks, "weights")

    def slot_bytes(self, size_bytes: int) -> int:
        """What a slot needs for weights of this size: equal parts, of which the last may not be filled."""
        return self._ranks.size * part_bytes(size_bytes, self._ranks.size)

    def fetch(self, unit: HostUnit, buffer: torch.Tensor, name: str, meter: Meter, stream: Any) -> None:
        """Issues the copies of this rank's part of a unit's weights to a flat buffer, and what makes it all parts, on the
        ``stream``, which is current."""
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
