"""Whether compiling the layers pays for itself within a training. It changes numbers, so no clock has a say in it."""

from __future__ import annotations

from megatrain_accelerate.planning.step_profile import StepOutline

COMPILE_SECONDS = 30.0
"""To compile one kind of layers: 10 s for a graph of one length, up to 36 s for one of all lengths, less if it was cached."""

SAVED_SHARE = 0.25
"""Of the time of uncompiled layers. Measured on an H200: 17,500 tokens a second become 24,000 (3B, 8 x 4,096)."""

EAGER_FLOPS = 3.5e14
"""FLOP a second of uncompiled layers there. A slower GPU saves more than is counted: ``compile_layers: true`` decides then."""


def compilation_pays(outline: StepOutline, backwards: int) -> bool:
    """Whether a training saves the time that it spends on compiling.

    Args:
        outline: of a step on its first batch.
        backwards: of the whole training.
    """
    # Backward computes twice what forward does.
    flops = 3 * sum(outline.profiles[call.kind].forward.flops for call in outline.forward_calls)
    return backwards * SAVED_SHARE * flops / EAGER_FLOPS >= COMPILE_SECONDS * len(outline.profiles)
