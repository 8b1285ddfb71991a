"""Means of the ranks' gradients. Each rank receives its share (a range of the elements) of the gradients of all ranks, and
adds them in fp32, in the order of ranks. So G ranks give the bits of one process that adds the same G gradients in that order,
and a mean in bf16 is rounded once. For gradients that go to the host (:meth:`Exchange.mean_of_share`) this costs the bytes of
a reduce-scatter, for those that stay on the devices (:meth:`Exchange.make_means`) also those of an all-gather."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.gradients.fp32_sums import Fp32Sums
from megatrain_accelerate.kernels.device import mean_of_rows
from megatrain_accelerate.store.layout import FlatLayout, GradientRun
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.shared_store import SharedStore
from megatrain_accelerate.transfer.gather import all_gather
from megatrain_accelerate.transfer.meter import named_range
from megatrain_accelerate.transfer.parts import Streamed
from megatrain_accelerate.transfer.streams import Streams
from megatrain_accelerate.units import MIB

_BUCKET_BYTES = 64 * MIB
"""Limit of a bucket: gradients that stay on the device and are exchanged at a time."""
_CHUNK_MULTIPLE = 512
"""A run that doesn't fit the receive buffer is exchanged in chunks, each a multiple of so many bytes."""


class Exchange:
    """The collectives of gradients. All ranks must issue the same ones in the same order, which is that of their backwards.
    Before each one :meth:`.OrderCheck.enter` compares names. ``layouts``: those of the layers, which use gradient slots."""

    def __init__(self, shared: SharedStore, streams: Streams, layouts: Iterable[FlatLayout]) -> None:
        self._ranks, self._order, self._streams = shared.ranks, shared.order, streams
        self._found: set[int] = set()
        """Rows (in the table of norms) of the parameters that got a gradient on this rank since it was last dropped."""
        self.rows_of_shares: set[int | None] = set()
        """Rows whose norm in the table is, or will be, that of this rank's share alone. :class:`.UnitGradients` adds them."""
        sizes = self.buffer_bytes(layouts, shared.ranks.size)
        self.device_bytes = sum(sizes)
        self._sent, self._received = (torch.zeros(size, dtype=torch.uint8, device=streams.device) for size in sizes)
        self._made_event, self._means_event = streams.event(), streams.event()

    def close(self) -> None:
        """Drops the buffers. Nothing may be exchanged afterwards."""
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def buffer_bytes(layouts: Iterable[FlatLayout], ranks: int) -> tuple[int, int]:
        """Bytes of the send buffer, which holds a bucket, and of the receive buffer, which holds a bucket or the largest share
        of any of these layouts from each rank. They are equal on all ranks, so that all cut larger runs alike."""
        of_bucket = _BUCKET_BYTES + 4 * ranks  # padding to equal shares takes at most one fp32 number a rank
        shares = [layout.share_of(rank, ranks) for layout in layouts for rank in range(ranks)]
        return of_bucket, max([of_bucket, *(ranks * (share.end_byte - share.begin_byte) for share in shares)])

    def trial(self) -> int:
        """Makes the means of zeros, to be timed. All ranks call it together. Returns the number of bytes exchanged."""
        zeros = torch.zeros(_BUCKET_BYTES // 2, dtype=torch.bfloat16, device=self._streams.device)
        self._make_means([zeros])
        return 2 * zeros.nbytes  # as gradients, and then as means

    def note_found(self, states: Iterable[ParameterState], among: Iterable[ParameterState] = ()) -> None:
        """Notes that these parameters got a gradient on this rank in a backward. Before that it forgets those parameters of
        ``among``, which could have got one in this backward, whose gradient has been dropped."""
        self._found.difference_update(state.row for state in among if state.parameter.grad is None)
        self._found.update(row for state in states if (row := state.row) is not None)

    def exchange_accumulated(self, sums: Fp32Sums, trained: Sequence[ParameterState], drops: bool) -> None:
        """Replaces the gradients that autograd itself accumulated in a backward by the ranks' means, and adds each mean to the
        parameter's earlier gradient. Called by all ranks when the backward is over. ``trained``: the states of all trained
        parameters, in one order on all ranks. If only some ranks have a gradient of a parameter, the others contribute zeros.
        With ``drops`` a gradient, which is zero, is set to None if no rank has found one since it was last dropped."""
        own = {state.row: state for state in sums.fresh.values() if state.parameter.grad is not None}
        sums.fresh.clear()
        self.note_found(own.values())
        self._order.enter("parameters outside the layers (which of them have one)")
        of_ranks = self._ranks.gather((set(own), self._found))
        accumulated, found = (set[int | None]().union(*rows) for rows in zip(*of_ranks, strict=True))
        states = [state for state in trained if state.row in accumulated]
        with torch.no_grad():
            for state in states:
                if state.row not in own:
                    sums.stash(state)  # for ``own`` this was done before autograd accumulated
                    state.handle.set_gradient(torch.zeros_like(state.parameter))
            gradients = [state.parameter.grad for state in states]
            self.make_means([gradient for gradient in gradients if gradient is not None], "parameters outside the layers")
            self.wait_for_means()
            for state in states:
                sums.unstash(state)
        for state in trained if drops else ():
            if state.row not in found:
                state.handle.set_gradient(None)

    def add_up_norms(self, norms: torch.Tensor) -> None:
        """Combines the norms of the ranks' shares to those of whole gradients, with the same bits on all ranks. ``norms`` is
        the table of norms, in which the norms of this rank's shares must have arrived."""
        self._order.enter("a whole backward (their norms)")
        rows = torch.tensor(sorted(self.rows_of_shares), dtype=torch.long)
        norms[rows] = self._ranks.sum(norms[rows].double().square()).sqrt().float()
        self.rows_of_shares.clear()

    def require_equal(self, norm: float) -> None:
        """Raises an ``UnsupportedError`` if ranks have different values of a norm that includes gradients of other modules."""
        if len(found := set(map(repr, self._ranks.gather(norm)))) > 1:
            raise UnsupportedError(
                f"the gradients' norm differs from process to process ({', '.join(sorted(found))}): the optimizer holds "
                "parameters outside the model whose gradients nobody has averaged. Give their module to accelerator.prepare()"
            )

    @staticmethod
    def refuse_rewritten(layers: Iterable[Streamed]) -> None:
        """Raises an ``UnsupportedError`` if a script wrote to or assigned a gradient of a layer on the host."""
        for layer in layers:
            for state in () if layer.unit.is_on_device else layer.trainable:
                has_changed = state.normed is not None and not state.has_norm  # since its norm was taken
                if state.parameter.grad is not None and (has_changed or state.has_foreign_gradient):
                    raise UnsupportedError(
                        f"the gradient of {layer.name}.{state.name} was written to or assigned by the script, and several "
                        "processes share it: each would change what another one has changed. Clip by "
                        "accelerator.clip_grad_norm_() (torch.nn.utils' own writes to gradients), scale the loss instead of "
                        "gradients, or set num_processes: 1"
                    )

    def mean_of_share(self, buffer: torch.Tensor, layout: FlatLayout, runs: Iterable[GradientRun], name: str) -> None:
        """Replaces this rank's share of the gradients in ``buffer`` (uint8) by the mean over all ranks, and leaves the rest of
        the buffer as it is. ``runs`` tells which gradients of a unit of this layout the buffer holds. Issued on the current
        stream, which must be the d2h stream, since all calls share one receive buffer."""
        self._order.enter(name)
        ranks = self._ranks
        shares = [layout.share_of(rank, ranks.size) for rank in range(ranks.size)]
        most_bytes = self._received.numel() // ranks.size
        for whole in runs:
            # One rank's share may have all of a run of some experts. That rank receives the whole run from each rank.
            fits = max(whole.of(share).size_bytes for share in shares) <= most_bytes
            for run in (whole,) if fits else whole.split(most_bytes // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE):
                sizes = [run.of(share).size_bytes for share in shares]
                own, size = run.of(shares[ranks.rank]), sizes[ranks.rank]
                received = self._received[: ranks.size * size]
                dist.all_to_all_single(received, buffer[run.in_slot], [size] * ranks.size, sizes)
                if size:
                    mean_of_rows(received.view(run.dtype).view(ranks.size, -1), buffer[own.in_slot].view(run.dtype))

    def make_means(self, gradients: Sequence[torch.Tensor], name: str) -> None:
        """Replaces each of these contiguous gradients by the mean over all ranks, in place, on each rank. This overlaps what
        the compute stream does next: call :meth:`wait_for_means` before anybody reads or frees the gradients."""
        streams = self._streams
        self._order.enter(name)
        # RAW: the other ranks must see finished gradients.
        self._made_event.record(streams.compute_stream)
        with streams.on(streams.d2h_stream), named_range(f"megatrain::exchange_gradients ({name})"):
            streams.d2h_stream.wait_event(self._made_event)
            flat = [chunk for at in gradients for chunk in at.view(-1).split(_BUCKET_BYTES // at.itemsize)]
            for bucket in torch._utils._take_tensors(flat, _BUCKET_BYTES):  # buckets of one dtype
                self._make_means(bucket)
            self._means_event.record(streams.d2h_stream)

    def wait_for_means(self) -> None:
        """Makes the compute stream wait for all means."""
        self._streams.compute_stream.wait_event(self._means_event)

    def _make_means(self, chunks: Sequence[torch.Tensor]) -> None:
        """Makes the means of one bucket of one dtype: each rank makes those of its share, and all ranks gather them."""
        ranks, dtype = self._ranks, chunks[0].dtype
        count = sum(chunk.numel() for chunk in chunks)
        share_count = -(-count // ranks.size)
        size_bytes = ranks.size * share_count * dtype.itemsize
        sent, received = (buffer[:size_bytes].view(dtype) for buffer in (self._sent, self._received))
        torch.cat(list(chunks), out=sent[:count])
        dist.all_to_all_single(received, sent)
        mean = torch.empty(share_count, dtype=dtype, device=received.device)
        mean_of_rows(received.view(ranks.size, share_count), mean)
        all_gather(sent, mean)
        torch._foreach_copy_(list(chunks), list(sent[:count].split([chunk.numel() for chunk in chunks])))
