"""Recomputes a layer as a whole in backward, where its graph holds weights that can't be exchanged in it.

A custom autograd function may keep a weight as an attribute of its context, where no hook on saved tensors sees it: a view of
a slot, in which another layer's weights lie when the function's backward runs. So the graph of the forward is dropped at once,
and backward builds a new one while the layer is in a slot, as reentrant activation checkpointing does (Chen et al., arXiv
1604.06174; ``torch/utils/checkpoint.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.layers import output_recorder
from megatrain_accelerate.layers.compiled_layer import without_saving
from megatrain_accelerate.layers.nested_tensors import taken_apart


def run_whole(call: Any, body: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
    """A layer's :class:`GraphCall <megatrain_accelerate.layers.graph_call.GraphCall>`, which ``body(*inputs)`` runs in forward
    and again in backward."""
    channels = tuple(output_recorder.channels())
    put_together: Callable[[Any], Any]

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the layer; returns the tensors of its output, followed by those that it recorded."""
        nonlocal put_together
        with output_recorder.apart(channels) as recorded:
            output = body(*inputs)
        tensors, put_together = taken_apart((output, recorded))
        return tensors

    # So that backward comes to a layer with trained weights whatever its inputs are.
    anchor = call.calls.anchor if call.layer.has_trainable else call.calls.anchor.detach()
    outputs = _WholeRecompute.apply(run, call, anchor, *inputs)
    output, recorded = put_together(outputs)
    output_recorder.enter(recorded)
    return output


class _WholeRecompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, call: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the layer with gradients enabled, but saves nothing for its backward.

        Without gradients torch may choose other kernels than it does in the recompute.
        """
        ctx.run, ctx.call = run, call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with without_saving(), torch.enable_grad():
            made = run(_cut_off(tensors, ctx.needs_input_grad[3:]))
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
        if ctx.needs_input_grad[2] and not torch.autograd._is_checkpoint_valid():
            raise UnsupportedError(
                "torch.autograd.grad() and backward(inputs=...) can't be used through layer "
                f"{ctx.call.layer.name}: one of its functions keeps a weight where autograd doesn't see it, and the weights' "
                "gradients would go to parameter.grad. Use loss.backward(), or let the function keep its weights with "
                "ctx.save_for_backward()"
            )
        with ctx.call.pinned():
            inputs = _cut_off(ctx.saved_tensors, ctx.needs_input_grad[3:])
            with torch.enable_grad():
                made = ctx.run(inputs)
            pairs = [pair for pair in zip(made, of_outputs, strict=True) if pair[0].requires_grad and pair[1] is not None]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            del made, pairs
        ctx.call.all_issued()
        return (None, None, None, *(tensor.grad for tensor in inputs))


def _cut_off(tensors: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor]:
    """Returns the inputs detached from their graph, as leaves that require grad where it is needed."""
    return [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
