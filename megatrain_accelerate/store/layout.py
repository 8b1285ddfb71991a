"""Where each parameter of a unit lies in the unit's flat buffers. Arithmetic only: no memory, no device.

A *unit* is what is fetched and stepped as a whole: one streamed layer, or one group of resident parameters. Its
parameters are in four regions, so that everything that shares a fate is contiguous::

    weights    | trainable bf16 | trainable fp32 | frozen bf16 | frozen fp32 |      bytes of each dtype
    gradients  | trainable bf16 | trainable fp32 |                                  the same offsets: a prefix
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
"""Elements to which each parameter's start is rounded up: 256 bytes in bf16, what vector loads and copies like;
and a whole number of the blocks of :mod:`~megatrain_accelerate.kernels.moments`, so that each parameter begins one."""

_PART_MULTIPLE = 512
"""Bytes of which a rank's part is a multiple, so that each begins where copies are fast."""

_keys: dict[tuple[tuple[ParameterSpec, int], ...], int] = {}
"""A number for each layout that a unit of this process has: quicker to look up than the layout itself."""


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """One parameter as the layout sees it: name in its unit, shape, dtype in which it computes, trained or frozen."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class FlatEntry:
    """A parameter's place: bytes into weights (and gradients), elements into moments (and residuals)."""

    spec: ParameterSpec
    weight_offset: int
    state_offset: int | None
    """None for a frozen parameter, which has neither moments nor residuals."""

    @property
    def has_residual(self) -> bool:
        """Whether the fp32 master is split in a bf16 half and a 16-bit residual."""
        return self.state_offset is not None and self.spec.dtype == torch.bfloat16


class FlatLayout:
    """The flat layout of one unit, whose parameters ``specs`` are in model order: in bf16 or fp32, with unique names."""

    def __init__(self, specs: Iterable[ParameterSpec]) -> None:
        specs = list(specs)
        places: dict[str, FlatEntry] = {}
        self.weight_bytes = self.state_elements = 0
        self.split_elements = 0
        """Elements with a residual: the length of the residual array."""
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
        """Entries in the order of the given specs (model order)."""
        self.parameter_count = sum(spec.numel for spec in specs)
        """Without padding."""
        self.trainable_entries = [entry for entry in self.entries if entry.spec.trainable]
        self.key = _keys.setdefault(tuple((entry.spec, entry.weight_offset) for entry in self.entries), len(_keys))
        """Equal for units of equal layout, whose views of a slot can be shared."""
        begin, end = 2 * self.split_elements, self.gradient_bytes
        runs = GradientRun(torch.bfloat16, 0, 0, begin), GradientRun(torch.float32, begin, begin, end - begin)
        self.gradient_runs = [run for run in runs if run.size_bytes]
        """Its gradients in a slot of their own."""

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, nn.Parameter]], dtypes: Mapping[int, torch.dtype]) -> FlatLayout:
        """That of named parameters, of which each computes in its one of ``dtypes``, by ``id``."""
        return cls(ParameterSpec(name, tuple(p.shape), dtypes[id(p)], p.requires_grad) for name, p in parameters)

    def share_of(self, rank: int, ranks: int) -> Share:
        """What of the trained parameters one of several ranks steps: whole 128-element blocks, as equally as they go. Of one
        dtype they are its part (:func:`part_of`) of the bytes, which gathers find with its states."""
        if self.split_elements in (0, self.state_elements):
            part, size = part_of(self.gradient_bytes, rank, ranks), 2 if self.split_elements else 4
            begin, end = part.start // size, part.stop // size
        else:
            blocks = self.state_elements // ALIGNMENT_ELEMENTS
            begin, end = (ALIGNMENT_ELEMENTS * (place * blocks // ranks) for place in (rank, rank + 1))
        split = min(end, self.split_elements) - min(begin, self.split_elements)
        return Share(begin, end, self.byte_of(begin), self.byte_of(end), split)

    def byte_of(self, element: int) -> int:
        """Where in the weights, and in the gradients, an element of the states begins: those in bf16 come first."""
        return 4 * element - 2 * min(element, self.split_elements)

    def views(self, buffer: torch.Tensor, trainable_only: bool = False) -> list[torch.Tensor]:
        """Views of ``buffer`` (uint8, one dimension, at least ``weight_bytes`` long) as the entries' tensors."""
        views = []
        for entry in self.trainable_entries if trainable_only else self.entries:
            size = entry.spec.numel * entry.spec.dtype.itemsize
            flat = buffer[entry.weight_offset : entry.weight_offset + size]
            views.append(flat.view(entry.spec.dtype).view(entry.spec.shape))
        return views


def part_bytes(size_bytes: int, ranks: int) -> int:
    """Of so many bytes in equal parts, of which the last ones may not be filled."""
    return -(-size_bytes // (ranks * _PART_MULTIPLE)) * _PART_MULTIPLE


def part_of(size_bytes: int, rank: int, ranks: int) -> slice:
    """Where a rank's part of so many bytes lies. That of the last ranks may be short, or empty."""
    part = part_bytes(size_bytes, ranks)
    return slice(min(rank * part, size_bytes), min((rank + 1) * part, size_bytes))


@dataclasses.dataclass(frozen=True)
class Share:
    """A rank's share of a unit's flat states: elements ``begin`` to ``end - 1``, whose gradients begin at ``begin_byte``."""

    begin: int
    end: int
    begin_byte: int
    end_byte: int
    split_elements: int
    """How many of its elements, the first ones, have residuals."""

    @property
    def bytes(self) -> slice:
        """Its gradients' place in the unit's gradients."""
        return slice(self.begin_byte, self.end_byte)

    def of(self, entry: FlatEntry, tensor: torch.Tensor) -> torch.Tensor:
        """Its part, of one dimension and maybe empty, of a parameter's contiguous tensor, a gradient or a residual."""
        return tensor.reshape(-1)[self.among(entry, 0, entry.spec.numel)]

    def among(self, entry: FlatEntry, begin: int, end: int) -> slice:
        """Which of a parameter's elements from ``begin`` to ``end - 1`` are the share's; counted from its first."""
        first = entry.state_offset
        assert first is not None, "a frozen parameter has no states"
        return slice(*(min(max(place - first, begin), end) for place in (self.begin, self.end)))


@dataclasses.dataclass(frozen=True)
class GradientRun:
    """Gradients of one dtype, one behind the other: ``size_bytes`` of them from ``slot_begin`` on in a gradient slot, and from
    ``unit_begin`` on in the gradients of the whole unit."""

    dtype: torch.dtype
    slot_begin: int
    unit_begin: int
    size_bytes: int

    def of(self, share: Share) -> GradientRun:
        """Those of a rank's share of the unit; maybe none."""
        begin, end = (min(max(at - self.unit_begin, 0), self.size_bytes) for at in (share.begin_byte, share.end_byte))
        return GradientRun(self.dtype, self.slot_begin + begin, self.unit_begin + begin, end - begin)

    @property
    def in_slot(self) -> slice:
        return slice(self.slot_begin, self.slot_begin + self.size_bytes)

    @property
    def in_unit(self) -> slice:
        return slice(self.unit_begin, self.unit_begin + self.size_bytes)

    def split(self, most_bytes: int) -> Iterator[GradientRun]:
        """Runs of at most so many bytes, which are a multiple of the elements'."""
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
        """Their part of a tensor whose dimension 0 is that of all experts."""
        return tensor[self.first : self.last]

    def elements(self, entry: FlatEntry) -> tuple[int, int]:
        """Begin and end of their part of a parameter, in elements of it."""
        of_one = entry.spec.numel // self.count
        return self.first * of_one, self.last * of_one

    def layout(self, whole: FlatLayout) -> FlatLayout:
        """The layout of their parts of a unit's parameters."""
        specs = (entry.spec for entry in whole.entries)
        return FlatLayout(dataclasses.replace(spec, shape=(self.experts, *spec.shape[1:])) for spec in specs)


def expert_ranges(count: int, parts: int) -> list[ExpertRange]:
    """``count`` experts in ``parts`` ranges whose sizes differ by one at most, the larger ones first."""
    sizes = [count // parts + (place < count % parts) for place in range(parts)]
    return [ExpertRange(sum(sizes[:place]), sum(sizes[: place + 1]), count) for place in range(parts)]
