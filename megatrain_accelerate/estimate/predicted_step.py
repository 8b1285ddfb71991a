"""What a forecast says of a training step: a row of an estimate."""

from __future__ import annotations

import dataclasses

from megatrain_accelerate.planning.placement_search import Candidate


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A predicted step. Bytes are peaks, rates are of one GPU."""

    batch: int
    length: int
    micro_batches: int
    seconds: float
    candidate: Candidate
    gpu_bytes: int
    gpu_budget_bytes: int
    host_bytes: int
    host_budget_bytes: int
    kept_bytes: int
    """Activations that stay on the GPU, and those that go to the host."""
    offloaded_bytes: int
    layers: int
    active_parameters: int
    fits: bool
    """In both memories."""
    joined: bool
    """Whether the micro-batches run as one batch (``join_micro_batches``)."""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.length * self.micro_batches

    @property
    def tokens_per_second(self) -> float:
        """Of the whole step, the optimizer's included."""
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """6 x active parameters x tokens: what is recomputed doesn't count, nor does attention."""
        return 6e-12 * self.active_parameters * self.tokens_per_second
