"""What an unmeasured layer costs, from what a run without data counts: operations, bytes moved, bytes saved. Seconds take
shares of the machine's speeds, fitted to a few measured trainings on one H200 (docs/estimate_method.md lists them): how far a
training stays behind what ``plan/machine.py`` measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_profile import LayerProfile, SavedInForward

PRODUCTS = 0.98
"""What matrix products of layers reach of the speed that the GPU keeps up in a large one."""
ATTENTION = 0.74
"""What attention kernels reach of it; the half that a causal one skips isn't counted."""
SINGLE = 0.70
"""What uncompiled operations, except products and attention, reach of the speed of a copy within device memory. Kernels of one
operation each reduce, broadcast, or read slices and rows that aren't aligned."""
FUSED = 0.5
"""Of the bytes that single operations read and write, what compiled kernels still move, as fast as a copy."""
OUTSIDE = 0.955
"""What all that runs outside the layers reaches, the loss above all: of a large product's speed, and of a copy's."""
_DROPOUT_PLACES = {scaled_dot_product_attention: 4, multi_head_attention_forward: 10}
"""Of the argument ``dropout_p``, for each function of torch's attention."""


class WithoutAttentionDropout(TorchFunctionMode):
    """Calls of torch's attention drop nothing out while the body runs. A GPU's kernels apply dropout on the fly and keep no
    scores; the CPU's, which stand for them, take products and a softmax then, with all pairs of tokens in memory."""

    has_dropped = False
    """Whether a call would have dropped something."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, place = dict(kwargs or {}), _DROPOUT_PLACES.get(func)
        if place is not None and len(args) > place:
            self.has_dropped |= bool(args[place])
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            self.has_dropped |= bool(kwargs.get("dropout_p"))
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def with_times(profile: LayerProfile, saved: SavedInForward, compiles: bool, machine: Machine) -> LayerProfile:
    """The profile of a call with seconds, and, if it ``compiles``, with the memory that it takes then. Compiled code saves
    what products and attention read or made, and recomputes the rest from that and from the residual stream; its forward has
    two more tensors of the output's size in memory. A recompute stops at the last saved tensor."""

    def seconds(costs: OpCosts) -> float:
        products = (costs.flops - costs.attention_flops) / PRODUCTS + costs.attention_flops / ATTENTION
        moved_bytes = costs.traffic_bytes * (FUSED if compiles else 1 / SINGLE)
        return products / machine.device_flops + moved_bytes / machine.device_bytes

    forward = seconds(profile.forward)
    profile = dataclasses.replace(
        profile,
        forward_seconds=forward,
        kept_forward_seconds=forward,
        backward_seconds=seconds(profile.backward),
        attention_seconds=seconds(profile.attention),
    )
    if not compiles:
        return profile
    kept_bytes = saved.operand_bytes + saved.score_bytes + saved.output_bytes
    forward_bytes = kept_bytes + 2 * saved.output_bytes
    backward_bytes = profile.kept_backward_bytes + saved.score_bytes
    return profile.keeping(
        kept_bytes,
        forward_bytes=forward_bytes,
        kept_forward_bytes=forward_bytes,
        kept_backward_bytes=backward_bytes,
        recomputed_bytes=max(forward_bytes, kept_bytes + backward_bytes),
        recompute_seconds=seconds(saved.costs),
    )
