"""Means of the ranks' gradients: each rank gets its run of all parts, and adds them in fp32 in the order of ranks.

So G ranks give the bits that one process gives which adds the same G parts in the same order, and a bf16 gradient is rounded
once. It costs the bytes of a reduce-scatter in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatrain_accelerate.gradients.fp32_sums import Fp32Sums
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
        """Rows of the parameters of which a backward found a gradient on this rank, since the ranks last told each other."""
        self._shared: set[int] = set()
        """Rows of those of which any rank had found one then."""
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

    def note_part_of_norm(self, state: ParameterState) -> None:
        """The table has, or will have, the norm of what this rank steps of a gradient."""
        assert state.row is not None
        self._in_parts.add(state.row)

    def found_by_any(self) -> set[int]:
        """The rows of parameters of which any rank has a gradient, since they were last there and were dropped. All ranks
        call it when the last backward before a step is over."""
        self._order.enter("the end of a backward")
        self._shared = set().union(*self._ranks.gather(self._found | self._shared))
        self._found.clear()
        return self._shared

    def forget(self, rows: Iterable[int]) -> None:
        """The gradients of these rows were dropped."""
        self._shared.difference_update(rows)

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

    def mean_of_whole(self, states: Sequence[ParameterState], sums: Fp32Sums) -> None:
        """``parameter.grad`` of these, which is autograd's own, becomes the mean of all ranks' on each of them."""
        bucket: list[ParameterState] = []
        bucket_bytes = 0
        for state in states:
            size = 4 * state.parameter.numel()
            if bucket and (bucket_bytes + size > _BUCKET_BYTES or _kind(state) != _kind(bucket[0])):
                self._exchange(bucket, sums)
                bucket, bucket_bytes = [], 0
            bucket.append(state)
            bucket_bytes += size
        if bucket:
            self._exchange(bucket, sums)

    def _exchange(self, states: Sequence[ParameterState], sums: Fp32Sums) -> None:
        ranks, gradients = self._ranks, [sums.whole(state).reshape(-1) for state in states]
        flat = torch.cat(gradients)
        sizes = [flat.numel() * (rank + 1) // ranks.size - flat.numel() * rank // ranks.size for rank in range(ranks.size)]
        own = sizes[ranks.rank]
        received = flat.new_empty(own * ranks.size)
        dist.all_to_all_single(received, flat, [own] * ranks.size, sizes)
        mean = _mean(list(received.view(ranks.size, own))).to(flat.dtype)
        dist.all_to_all_single(flat, mean.repeat(ranks.size), sizes, [own] * ranks.size)
        for state, total in zip(states, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            sums.set_whole(state, total.view(state.parameter.shape))


def _kind(state: ParameterState) -> tuple[torch.dtype | None, bool]:
    return state.parameter.dtype, state.handle.has_fp32_sum


def _mean(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In fp32, added in the order of the parts."""
    total = parts[0].float() if parts[0].dtype != torch.float32 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.mul_(1 / len(parts))
