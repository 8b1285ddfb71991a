"""Where each parameter of a unit is stored in the unit's flat buffers. Arithmetic only: it needs no memory and no device.

A *unit* is what is fetched and stepped as a whole: one streamed layer, or one group of resident parameters. Its parameters are
sorted into four regions, so that parameters that are handled alike are contiguous::

    weights    | trainable bf16 | trainable fp32 | frozen bf16 | frozen fp32 |      bytes of each dtype
    gradients  | trainable bf16 | trainable fp32 |                                  a prefix of the weights' offsets
    residuals  | trainable bf16 |                                                   int16, one per bf16 weight
    moments    | trainable bf16 | trainable fp32 |                                  fp32, bf16 or 8-bit codes, by state offset
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from megatrain_accelerate.units import round_up

ALIGNMENT_ELEMENTS = 128
"""Each parameter starts at a multiple of this many elements: 256 bytes in bf16, which suits vector loads and copies, and whole
blocks of :mod:`~megatrain_accelerate.kernels.moments`, so that no block has elements of two parameters."""

_PART_MULTIPLE = 512
"""A rank's range of a unit's bytes is a multiple of this many bytes, so that each range starts where copies are fast."""

_keys: dict[tuple[tuple[ParameterSpec, int], ...], int] = {}
"""Maps each layout of this process to a number, which is faster to look up than the layout itself."""


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """What the layout knows of one parameter: its name in the unit, shape, compute dtype, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class FlatEntry:
    """A parameter's offsets in its unit: in bytes in weights and gradients, in elements in moments and residuals."""

    spec: ParameterSpec
    weight_offset: int
    state_offset: int | None
    """None for a frozen parameter, which has neither moments nor residuals."""

    @property
    def has_residual(self) -> bool:
        """Whether the fp32 master is split into a bf16 weight and a 16-bit residual."""
        return self.state_offset is not None and self.spec.dtype == torch.bfloat16


class FlatLayout:
    """The flat layout of one unit. ``specs`` are its parameters in model order, in bf16 or fp32, with unique names."""

    def __init__(self, specs: Iterable[ParameterSpec]) -> None:
        specs = list(specs)
        places: dict[str, FlatEntry] = {}
        self.weight_bytes = self.state_elements = 0
        self.split_elements = 0
        """Number of elements with a residual, which is the length of the residual array."""
        self.gradient_bytes = 0
        for spec in sorted(specs, key=lambda spec: (not spec.trainable, spec.dtype != torch.bfloat16)):
            padded = round_up(spec.numel, ALIGNMENT_ELEMENTS)
            places[spec.name] = FlatEntry(spec, self.weight_bytes, self.state_elements if spec.trainable else None)
            self.weight_bytes += padded * spec.dtype.itemsize
            if spec.trainable:
                self.state_elements += padded
                self.gradient_bytes = self.weight_bytes
                if spec.dtype == torch.bfloat16:
                    self.split_elements = self.state_elements
        self.entries = tuple(places[spec.name] for spec in specs)
        """Entries in the order of ``specs``."""
        self.parameter_count = sum(spec.numel for spec in specs)
        """Number of elements of all parameters, without padding."""
        self.trainable_entries = [entry for entry in self.entries if entry.spec.trainable]
        self.key = _keys.setdefault(tuple((entry.spec, entry.weight_offset) for entry in self.entries), len(_keys))
        """Equal for units with equal layouts, which can share their views of a slot."""
        begin, end = 2 * self.split_elements, self.gradient_bytes
        runs = GradientRun(torch.bfloat16, 0, 0, begin), GradientRun(torch.float32, begin, begin, end - begin)
        self.gradient_runs = [run for run in runs if run.size_bytes]
        """The runs of the unit's gradients, at most one for each dtype."""

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, nn.Parameter]], dtypes: Mapping[int, torch.dtype]) -> FlatLayout:
        """The layout of named parameters. ``dtypes`` has the dtype in which each of them computes, by ``id``."""
        return cls(ParameterSpec(name, tuple(p.shape), dtypes[id(p)], p.requires_grad) for name, p in parameters)

    def share_of(self, rank: int, ranks: int) -> Share:
        """The states that one of several ranks steps: whole 128-element blocks, as evenly as possible. If all trained
        parameters have one dtype, the share has the bytes of :func:`part_of`, which the rank contributes to a gather."""
        if self.split_elements in (0, self.state_elements):
            part, size = part_of(self.gradient_bytes, rank, ranks), 2 if self.split_elements else 4
            begin, end = part.start // size, part.stop // size
        else:
            blocks = self.state_elements // ALIGNMENT_ELEMENTS
            begin, end = (ALIGNMENT_ELEMENTS * (place * blocks // ranks) for place in (rank, rank + 1))
        split = min(end, self.split_elements) - min(begin, self.split_elements)
        return Share(begin, end, self.byte_of(begin), self.byte_of(end), split)

    def byte_of(self, element: int) -> int:
        """The byte offset, in weights and in gradients, of an element of the states. Elements in bf16 come first."""
        return 4 * element - 2 * min(element, self.split_elements)

    def views(self, buffer: torch.Tensor, trainable_only: bool = False) -> list[torch.Tensor]:
        """Views of a flat uint8 ``buffer``, which holds the weights or (``trainable_only``) the gradients, as tensors."""
        views = []
        for entry in self.trainable_entries if trainable_only else self.entries:
            size = entry.spec.numel * entry.spec.dtype.itemsize
            flat = buffer[entry.weight_offset : entry.weight_offset + size]
            views.append(flat.view(entry.spec.dtype).view(entry.spec.shape))
        return views


def part_bytes(size_bytes: int, ranks: int) -> int:
    """Size of each of the ranks' equal ranges of ``size_bytes``. The last ranges may be partly filled, or empty."""
    return -(-size_bytes // (ranks * _PART_MULTIPLE)) * _PART_MULTIPLE


def part_of(size_bytes: int, rank: int, ranks: int) -> slice:
    """A rank's range of ``size_bytes``. Those of the last ranks may be short, or empty."""
    part = part_bytes(size_bytes, ranks)
    return slice(min(rank * part, size_bytes), min((rank + 1) * part, size_bytes))


@dataclasses.dataclass(frozen=True)
class Share:
    """A rank's share of a unit's flat states: elements ``begin`` to ``end - 1``, with their weights and gradients from
    ``begin_byte`` to ``end_byte - 1``."""

    begin: int
    end: int
    begin_byte: int
    end_byte: int
    split_elements: int
    """How many of the share's elements have residuals. They come first."""

    @property
    def bytes(self) -> slice:
        """The share's range of the unit's weights, and of its gradients."""
        return slice(self.begin_byte, self.end_byte)

    def of(self, entry: FlatEntry, tensor: torch.Tensor) -> torch.Tensor:
        """The share's elements of a parameter's contiguous tensor (a gradient or a residual), flat and possibly empty."""
        return tensor.reshape(-1)[self.among(entry, 0, entry.spec.numel)]

    def among(self, entry: FlatEntry, begin: int, end: int) -> slice:
        """Which of a parameter's elements ``begin`` to ``end - 1``, counted from its first element, are in the share."""
        first = entry.state_offset
        assert first is not None, "a frozen parameter has no states"
        return slice(*(min(max(place - first, begin), end) for place in (self.begin, self.end)))


@dataclasses.dataclass(frozen=True)
class GradientRun:
    """Contiguous gradients of one dtype: ``size_bytes`` that begin at byte ``slot_begin`` of a gradient slot, and at byte
    ``unit_begin`` of the gradients of the whole unit."""

    dtype: torch.dtype
    slot_begin: int
    unit_begin: int
    size_bytes: int

    def of(self, share: Share) -> GradientRun:
        """The run's gradients that are in a rank's share of the unit. It may have none."""
        begin, end = (min(max(at - self.unit_begin, 0), self.size_bytes) for at in (share.begin_byte, share.end_byte))
        return GradientRun(self.dtype, self.slot_begin + begin, self.unit_begin + begin, end - begin)

    @property
    def in_slot(self) -> slice:
        return slice(self.slot_begin, self.slot_begin + self.size_bytes)

    @property
    def in_unit(self) -> slice:
        return slice(self.unit_begin, self.unit_begin + self.size_bytes)

    def split(self, most_bytes: int) -> Iterator[GradientRun]:
        """Splits the run into runs of at most ``most_bytes``, which is a multiple of the element size."""
        for begin in range(0, self.size_bytes, most_bytes):
            size_bytes = min(most_bytes, self.size_bytes - begin)
            yield GradientRun(self.dtype, self.slot_begin + begin, self.unit_begin + begin, size_bytes)


@dataclasses.dataclass(frozen=True)
class ExpertRange:
    """Experts ``first`` to ``last - 1`` of ``count``."""

    first: int
    last: int
    count: int

    @property
    def experts(self) -> int:
        return self.last - self.first

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice of these experts of a tensor whose dimension 0 counts all experts."""
        return tensor[self.first : self.last]

    def elements(self, entry: FlatEntry) -> tuple[int, int]:
        """Begin and end of these experts' elements of a parameter."""
        of_one = entry.spec.numel // self.count
        return self.first * of_one, self.last * of_one

    def layout(self, whole: FlatLayout) -> FlatLayout:
        """The layout of these experts' slices of a unit's parameters."""
        specs = (entry.spec for entry in whole.entries)
        return FlatLayout(dataclasses.replace(spec, shape=(self.experts, *spec.shape[1:])) for spec in specs)


def expert_ranges(count: int, parts: int) -> list[ExpertRange]:
    """Divides ``count`` experts into ``parts`` ranges whose sizes differ by at most one, the larger ones first."""
    sizes = [count // parts + (place < count % parts) for place in range(parts)]
    return [ExpertRange(sum(sizes[:place]), sum(sizes[: place + 1]), count) for place in range(parts)]
