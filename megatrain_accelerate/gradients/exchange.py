"""Means of the ranks' gradients: each rank gets its run of all parts, and adds them in fp32 in the order of ranks.

So G ranks give the bits that one process gives which adds the same G parts in the same order, and a bf16 gradient is rounded
once. It costs the bytes of a reduce-scatter in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatrain_accelerate.store.layout import FlatLayout
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.shared_store import SharedStore
from megatrain_accelerate.units import MIB

_BUCKET_BYTES = 64 * MIB
"""Of gradients that are exchanged together, unless one alone is larger."""


class Exchange:
    """The collectives of gradients, which every rank issues in the same order: that of its backward.

    Args:
        largest_bytes: of the gradients of one layer.
    """

    def __init__(self, shared: SharedStore, device: torch.device, largest_bytes: int) -> None:
        self._ranks, self._order = shared.ranks, shared.order
        ranks = shared.ranks
        self._found: set[int] = set()
        """Rows of the parameters of which this rank has found a gradient since they last had none."""
        self._in_parts: set[int] = set()
        """Rows whose norm is that of this rank's run alone."""
        self._received = torch.empty(largest_bytes + ranks.size * 1024, dtype=torch.uint8, device=device)

    @property
    def device_bytes(self) -> int:
        """Of the buffer for what the other ranks send."""
        return self._received.numel()

    def note_found(self, states: Iterable[ParameterState]) -> None:
        """A backward found gradients of these on this rank."""
        self._found.update(row for state in states if (row := state.row) is not None)

    def begin(self, states: Iterable[ParameterState]) -> None:
        """A backward brings gradients of some of these; those that have none yet were dropped since the last time."""
        self._found.difference_update(state.row for state in states if state.parameter.grad is None)

    def tell(self, accumulated: Iterable[int | None]) -> tuple[set[int], set[int]]:
        """Called by all ranks when a backward is over. Returns the rows in which any rank's autograd ``accumulated`` itself,
        and those of which any has found a gradient since they last had none."""
        self._order.enter("the end of a backward")
        told = self._ranks.gather((set(accumulated), self._found))
        return set().union(*(own for own, _ in told)), set().union(*(found for _, found in told))

    def note_part_of_norm(self, state: ParameterState) -> None:
        """The table has, or will have, the norm of what this rank steps of a gradient."""
        assert state.row is not None
        self._in_parts.add(state.row)

    def add_up_norms(self, norms: torch.Tensor) -> None:
        """The ranks' parts of norms, which have arrived in the table ``norms``, become whole: the same bits on all ranks."""
        rows = torch.tensor(sorted(self._in_parts), dtype=torch.long)
        norms[rows] = self._ranks.sum(norms[rows].double().square()).sqrt().float()
        self._in_parts.clear()

    def mean_of_run(self, buffer: torch.Tensor, layout: FlatLayout, name: str) -> None:
        """Of a unit's flat gradients (uint8) this rank's run becomes the mean of all ranks'; the rest stays as it was.

        Issued on the current stream. The received parts are used again by the next call, on the same stream.
        """
        self._order.enter(name)
        ranks = self._ranks
        runs = [layout.run_of(rank, ranks.size) for rank in range(ranks.size)]
        own = runs[ranks.rank]
        size = own.end_byte - own.begin_byte
        received = self._received[: ranks.size * size]
        sizes = [run.end_byte - run.begin_byte for run in runs]
        dist.all_to_all_single(received, buffer[: layout.gradient_bytes], [size] * ranks.size, sizes)
        parts = received.view(ranks.size, size)
        in_bf16 = 2 * (min(own.end, layout.split_elements) - min(own.begin, layout.split_elements))
        target = buffer[own.bytes]
        for place, dtype in ((slice(0, in_bf16), torch.bfloat16), (slice(in_bf16, size), torch.float32)):
            if place.start < place.stop:
                target[place].view(dtype).copy_(_mean([part[place].view(dtype) for part in parts]))

    def make_means(self, gradients: Sequence[torch.Tensor], name: str) -> None:
        """Each of these contiguous gradients becomes the mean of all ranks', in place, on each rank."""
        self._order.enter(name)
        bucket: list[torch.Tensor] = []
        for gradient in gradients:
            is_full = sum(other.nbytes for other in bucket) + gradient.nbytes > _BUCKET_BYTES
            if bucket and (is_full or gradient.dtype != bucket[0].dtype):
                self._make_means(bucket)
                bucket = []
            bucket.append(gradient)
        if bucket:
            self._make_means(bucket)

    def _make_means(self, gradients: Sequence[torch.Tensor]) -> None:
        ranks, flat = self._ranks, torch.cat([gradient.reshape(-1) for gradient in gradients])
        sizes = [flat.numel() * (rank + 1) // ranks.size - flat.numel() * rank // ranks.size for rank in range(ranks.size)]
        own = sizes[ranks.rank]
        received = flat.new_empty(own * ranks.size)
        dist.all_to_all_single(received, flat, [own] * ranks.size, sizes)
        mean = _mean(list(received.view(ranks.size, own))).to(flat.dtype)
        dist.all_to_all_single(flat, mean.repeat(ranks.size), sizes, [own] * ranks.size)
        for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(total.view(gradient.shape))


def _mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In fp32, added in the order of the parts."""
    total = parts[0].float() if parts[0].dtype != torch.float32 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.mul_(1 / len(parts))
