"""Predicts what an unmeasured layer costs from what a fake run counts: operations, bytes moved and bytes saved. Times take
shares of the speeds that ``plan/machine.py`` measures, since a training doesn't reach these. The shares were fitted to a few
measured trainings on one H200 (docs/estimate_method.md lists them)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.step_memory import OpCosts
from megatrain_accelerate.plan.step_profile import SECONDS, LayerProfile, SavedInForward

PRODUCTS = 0.98
"""Share of the GPU's sustained speed in a large matrix product that the products of layers reach."""
ATTENTION = 0.74
"""Share of the same speed that attention kernels reach. The half that causal attention skips isn't counted."""
SINGLE = 0.70
"""Share of the speed of a copy within device memory that uncompiled operations reach, except products and attention. Their
kernels reduce, broadcast, or read slices and rows that aren't aligned."""
FUSED = 0.5
"""Share of the bytes moved by single operations that compiled kernels still move. These are as fast as a copy."""
OUTSIDE = 0.955
"""Share of a large product's speed, and of a copy's, that is reached outside the layers, above all by the loss."""
_DROPOUT_PLACES = {scaled_dot_product_attention: 4, multi_head_attention_forward: 10}
"""Position of the argument ``dropout_p`` in each of torch's attention functions."""


class WithoutAttentionDropout(TorchFunctionMode):
    """Sets dropout to 0 in calls of torch's attention while the body runs. A GPU's kernels apply dropout on the fly and keep
    no scores. The CPU's, which stand for them, would use products and a softmax, with scores of all pairs of tokens."""

    has_dropped = False
    """Whether a call asked for dropout."""

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
    """Returns the profile of a call with times and, if the call ``compiles``, with the memory of compiled code. It saves what
    products and attention read or made, and recomputes the rest from that and from the residual stream. Its forward has two
    more tensors of the output's size in memory. A recompute stops at the last saved tensor, and the backward that follows
    takes the place of what was recomputed (:mod:`megatrain_accelerate.layers.inductor_memory`)."""

    def seconds(costs: OpCosts) -> float:
        products = (costs.flops - costs.attention_flops) / PRODUCTS + costs.attention_flops / ATTENTION
        moved_bytes = costs.traffic_bytes * (FUSED if compiles else 1 / SINGLE)
        return products / machine.device_flops + moved_bytes / machine.device_bytes

    times: dict[str, Any] = {name: seconds(getattr(profile, costs)) for name, costs in SECONDS.items()}
    profile = dataclasses.replace(profile, **times)
    if not compiles:
        return profile
    kept_bytes = saved.operand_bytes + saved.score_bytes + saved.output_bytes
    forward_bytes = kept_bytes + 2 * saved.output_bytes
    return profile.keeping(
        kept_bytes,
        forward_bytes=forward_bytes,
        kept_forward_bytes=forward_bytes,
        kept_backward_bytes=profile.kept_backward_bytes + saved.score_bytes,
        recomputed_bytes=forward_bytes + saved.score_bytes,
        recompute_seconds=seconds(saved.costs),
    )
