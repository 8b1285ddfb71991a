"""What a runtime asks and tells the optimizers of its parameters."""

from __future__ import annotations

from collections.abc import Callable

from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.parts import Streamed


class UnitStepper:
    """What steps parameters of a model, one of its runtime's ``steppers``.

    By default one that runs within ``optimizer.step()``, on the host.
    """

    schedule = "serial"
    """When the arithmetic runs: after ``step()`` (``deferred``), in ``backward``, or within ``step()`` (``serial``)."""

    works_on_host = True
    """Whether it needs the states of all units on the host."""

    def unit_moved(self, unit: HostUnit) -> None:
        """The unit moved to or from the device: its views are other tensors now."""

    def layer_done(self, layer: Streamed, wait: Callable[[], None]) -> bool:
        """A layer's gradients are on their way to the host; ``wait`` blocks until they are there.

        Tells whether the layer is stepped now, in backward.
        """
        return False
