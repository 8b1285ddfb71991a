"""Recomputes a layer as a whole in backward, where its graph holds weights that can't be exchanged in it.

A custom autograd function may keep a weight as an attribute of its context, where no hook on saved tensors sees it. That
weight is a view of a slot, the GPU buffer that layers take turns in: when the function's backward runs, another layer's
weights are there. So the graph of the forward is dropped at once, and backward builds a new one while the layer is in a slot.
This is how reentrant activation checkpointing works (Chen et al., arXiv 1604.06174; ``torch/utils/checkpoint.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers import output_recorder
from megatrain_accelerate.layers.compiled_layer import without_saving
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.nested_tensors import taken_apart
from megatrain_accelerate.transfer.streams import WeightSlot


class WholeRun:
    """A call of a layer, by ``body``, that runs in forward and again in backward.

    The node requires grad as the engine's ``anchor`` does, so that backward comes to a layer with trained weights whatever its
    inputs are. While the body of ``pinned()`` runs no other layer can take the layer's slot; ``all_issued`` is called when all
    of the layer's backward has been issued.
    """

    def __init__(
        self,
        layer: StreamedLayer,
        body: Callable[..., Any],
        anchor: torch.Tensor,
        pinned: Callable[[], AbstractContextManager[WeightSlot]],
        all_issued: Callable[[], None],
    ) -> None:
        self.layer, self.pinned, self.all_issued = layer, pinned, all_issued
        self._body = body
        self._anchor = anchor if layer.has_trainable else anchor.detach()
        self._channels = output_recorder.channels()
        self._put_together: Callable[[Sequence[Any]], Any]

    def made(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the layer; returns the tensors of its output, followed by those that it recorded."""
        with output_recorder.apart(self._channels) as recorded:
            output = self._body(*inputs)
        tensors, self._put_together = taken_apart((output, recorded))
        return tensors

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        outputs = WholeRecompute.apply(self, self._anchor, *tensors)
        output, recorded = self._put_together(outputs)
        output_recorder.enter(recorded)
        return output


class WholeRecompute(torch.autograd.Function):
    """The autograd function of a :class:`WholeRun`."""

    @staticmethod
    def forward(ctx: Any, run: WholeRun, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the layer with gradients enabled, but saves nothing for its backward.

        Without gradients torch may choose other kernels than it does in the recompute.
        """
        ctx.run, ctx.anchor = run, anchor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with without_saving(), torch.enable_grad():
            made = run.made(_cut_off(tensors, ctx.needs_input_grad[2:]))
        outputs = [tensor.detach() for tensor in made]
        # What wouldn't require grad without this function mustn't here: attention picks its kernel by whether its mask does.
        ctx.mark_non_differentiable(*(out for out, tensor in zip(outputs, made, strict=True) if not tensor.requires_grad))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: torch.Tensor | None) -> Any:
        """Gradients of the inputs; those of the weights accumulate on the leaves of the slot's lease.

        An UnsupportedError in ``torch.autograd.grad()`` or with ``inputs=...``.
        """
        run: WholeRun = ctx.run
        if ctx.anchor.requires_grad and not torch.autograd._is_checkpoint_valid():
            raise UnsupportedError(
                "torch.autograd.grad() and backward(inputs=...) can't be used through layer "
                f"{run.layer.name}: one of its functions keeps a weight where autograd doesn't see it, and the weights' "
                "gradients would go to parameter.grad. Use loss.backward(), or let the function keep its weights with "
                "ctx.save_for_backward()"
            )
        with run.pinned():
            inputs = _cut_off(ctx.saved_tensors, ctx.needs_input_grad[2:])
            with torch.enable_grad():
                made = run.made(inputs)
            pairs = [pair for pair in zip(made, of_outputs, strict=True) if pair[0].requires_grad and pair[1] is not None]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            del made, pairs
        run.all_issued()
        return (None, None, *(tensor.grad for tensor in inputs))


def _cut_off(tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor]:
    """Returns the inputs detached from their graph, as leaves that require grad where it is needed."""
    return [
        tensor.detach().requires_grad_() if need else tensor.detach() for tensor, need in zip(tensors, needed, strict=True)
    ]
