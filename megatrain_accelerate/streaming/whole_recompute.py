"""A layer that backward runs again as a whole: one whose graph can't be separated from its weights.

A function that keeps a weight in an attribute of its context, where no hook on saved tensors sees it, holds a view of the
slot. When its backward comes another layer lies there. So the graph of the forward is dropped at once, and backward makes a
new one while the layer is in a slot. The scheme is that of reentrant activation checkpointing (Chen et al., arXiv 1604.06174;
``torch/utils/checkpoint.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.streaming.compiled_layer import without_saving
from megatrain_accelerate.streaming.nested_tensors import taken_apart
from megatrain_accelerate.streaming.output_recorder import OutputRecorder


class WholeRun:
    """A call of a layer that runs in forward and again in backward.

    Args:
        name: the layer's.
        in_backward: a context manager in which the layer's weights stay in their slot.
        is_over: called when nothing is left of the layer's backward; the weights' gradients are those of the leaves.
        recorder: see :class:`OutputRecorder`.
    """

    def __init__(
        self,
        name: str,
        in_backward: Callable[[], contextlib.AbstractContextManager[Any]],
        is_over: Callable[[], None],
        recorder: OutputRecorder,
    ) -> None:
        self.name, self.in_backward, self.is_over = name, in_backward, is_over
        self.body: Callable[..., Any]
        """Runs the layer with the input tensors that it is given."""
        self.leaves: list[torch.Tensor] = []
        """The weights with which the body runs in backward."""
        self._recorder = recorder
        self._channels = recorder.channels()
        self._put_together: Callable[[Sequence[Any]], Any]

    def made(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the layer; returns its output tensors, then what it recorded."""
        with self._recorder.apart(self._channels) as recorded:
            output = self.body(*inputs)
        tensors, self._put_together = taken_apart((output, recorded))
        return tensors

    def output(self, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
        """Runs the layer forward; returns its output.

        Args:
            anchor: requires grad if the layer trains.
            tensors: the layer's inputs.
        """
        outputs = WholeRecompute.apply(self, anchor, *tensors)
        output, recorded = self._put_together(outputs)
        self._recorder.enter(recorded)
        return output


class WholeRecompute(torch.autograd.Function):
    """The node of such a call."""

    @staticmethod
    def forward(ctx: Any, run: WholeRun, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the layer with a graph that saves nothing: without a graph its kernels may be others than in backward."""
        ctx.run, ctx.anchor = run, anchor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with without_saving(), torch.enable_grad():
            made = run.made(_cut_off(tensors, ctx.needs_input_grad[2:]))
        outputs = [tensor.detach() for tensor in made]
        # A tensor that wouldn't require grad in a plain run mustn't here: attention picks its kernel by that of its mask.
        ctx.mark_non_differentiable(*(out for out, tensor in zip(outputs, made, strict=True) if not tensor.requires_grad))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_outputs: torch.Tensor | None) -> Any:
        """Gradients of the inputs; those of the weights accumulate on the leaves.

        Raises:
            UnsupportedError: only some gradients were asked for.
        """
        run: WholeRun = ctx.run
        if ctx.anchor.requires_grad and not torch.autograd._is_checkpoint_valid():
            raise UnsupportedError(
                f"torch.autograd.grad() and backward(inputs=...) can't be used through layer {run.name}: one of its functions "
                "keeps a weight where autograd doesn't see it, and the weights' gradients would go to parameter.grad. Use "
                "loss.backward(), or let the function keep its weights with ctx.save_for_backward()"
            )
        with run.in_backward():
            inputs = _cut_off(ctx.saved_tensors, ctx.needs_input_grad[2:])
            with torch.enable_grad():
                made = run.made(inputs)
            pairs = [pair for pair in zip(made, of_outputs, strict=True) if pair[0].requires_grad and pair[1] is not None]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            # What nothing flowed to isn't waited for.
            del made, pairs
            run.leaves = [leaf for leaf in run.leaves if leaf.grad is not None]
        run.is_over()
        run.leaves = []
        return (None, None, *(tensor.grad for tensor in inputs))


def _cut_off(tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor]:
    """The layer's inputs as leaves of a graph of its own."""
    return [
        tensor.detach().requires_grad_() if need else tensor.detach() for tensor, need in zip(tensors, needed, strict=True)
    ]
