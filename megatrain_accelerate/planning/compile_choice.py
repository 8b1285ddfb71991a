"""Decides whether compiling the layers saves time over a whole training.

Compiling changes the numbers that a training gives. So the decision uses fixed estimates and never measured times: the same
training always decides in the same way.
"""

from __future__ import annotations

from megatrain_accelerate.planning.step_profile import StepOutline

COMPILE_SECONDS = 30.0
"""Seconds to compile one kind of layer. Measured: 10 s for a fixed sequence length, up to 36 s with dynamic shapes, and less
with a warm cache."""

SAVED_SHARE = 0.25
"""Share of the uncompiled layers' time that compiling saves. Measured on an H200 (3B model, 8 sequences of 4,096 tokens):
24,000 tokens a second instead of 17,500."""

EAGER_FLOPS = 3.5e14
"""FLOPs per second of uncompiled layers on an H200. A slower GPU would save more seconds than this estimate says; its users
can compile in any case with ``compile_layers: true``."""


def compilation_pays(outline: StepOutline, backward_passes: int) -> bool:
    """Whether compiling saves a training more time than it costs.

    Args:
        outline: of a step on the training's first batch.
        backward_passes: their number in the whole training.
    """
    # Backward takes twice the FLOPs of forward.
    step_flops = 3 * sum(outline.profiles[call.kind].forward.flops for call in outline.forward_calls)
    saved_seconds = backward_passes * SAVED_SHARE * step_flops / EAGER_FLOPS
    return saved_seconds >= COMPILE_SECONDS * len(outline.profiles)
