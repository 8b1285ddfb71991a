"""What the calls of layers in autograd's graph share: the parts of the engine that they work with, and who reads a slot."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.gradients.call_gradients import Backward, GradientSums
from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.layers.compiled_layer import CompiledLayers
from megatrain_accelerate.layers.micro_batches import BatchCut
from megatrain_accelerate.layers.output_recorder import OutputRecorder
from megatrain_accelerate.layers.passes import Passes
from megatrain_accelerate.layers.policy import ActivationPolicy
from megatrain_accelerate.layers.saved_tensors import SavedTensors, SlotReader
from megatrain_accelerate.transfer.activation_offload import ActivationOffloader, Recording
from megatrain_accelerate.transfer.prefetch import Prefetcher
from megatrain_accelerate.transfer.streams import WeightSlot


class CallContext:
    """One object for each engine; the arguments are its parts."""

    def __init__(
        self,
        *,
        device: torch.device,
        passes: Passes,
        prefetcher: Prefetcher,
        offloader: GradientOffloader,
        gradient_sums: GradientSums,
        activations: ActivationOffloader,
        batch_cut: BatchCut,
        compiled: CompiledLayers,
        recorder: OutputRecorder,
    ) -> None:
        self.device, self.passes, self.prefetcher = device, passes, prefetcher
        self.offloader, self.activations = offloader, activations
        self.batch_cut, self.compiled, self.recorder = batch_cut, compiled, recorder
        self.policy = ActivationPolicy()
        """Of the layers' activations; set by the plan."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """A number that requires grad. It keeps nodes in the graph where no input of theirs requires grad: a frozen embedding
        below trained layers."""
        self.backwards = collections.defaultdict[int, Backward](lambda: Backward(offloader, gradient_sums))
        """Those that are under way, by autograd's number."""
        self._readers: dict[int, SlotReader | None] = {}
        """The calls that compute, by the address of their slots."""

    @contextlib.contextmanager
    def reading(self, call: SlotReader, slot: WeightSlot) -> Iterator[None]:
        """The call computes with the slot while the body runs."""
        before = self._readers.get(slot.address)
        self._readers[slot.address] = call
        try:
            yield
        finally:
            self._readers[slot.address] = before

    def saving(self, offloaded: Recording | None = None) -> saved_tensors_hooks:
        """The hooks under which a run saves what its backward needs; see :class:`SavedTensors`."""
        return SavedTensors(self.reader_at, offloaded, self.prefetcher.at_address).recording()

    def reader_at(self, address: int) -> SlotReader | None:
        """The call that computes with the slot at this address; None for other memory.

        Raises a StateError if none does: another layer's weights may soon lie there.
        """
        call = self._readers.get(address)
        if call is None and address in self.prefetcher.at_address:
            raise StateError(
                "a weight of a streamed layer is used outside the layer's forward, where another layer's may lie in its "
                "place; use the parameter itself, or set megatrain_config.layer_classes to larger blocks"
            )
        return call
