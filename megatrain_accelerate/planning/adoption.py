"""Adoption: a model's parameters move to the store one unit at a time, and what they leave is given back as they go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.memory.expandable_segments import expand_segments
from megatrain_accelerate.memory.file_mappings import FileMappings, page_out, read_ahead, trim_heap
from megatrain_accelerate.memory.host_limits import unused_host_bytes
from megatrain_accelerate.memory.host_store import HostUnit
from megatrain_accelerate.planning.layer_discovery import Discovery, ExpertsSpec
from megatrain_accelerate.planning.meta_weights import MetaWeights, is_without_weights
from megatrain_accelerate.streaming.expert_parts import StreamedExperts
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.proxy import install_proxy
from megatrain_accelerate.units import MIB

TRIM_BYTES = 64 * MIB
"""Memory that left the model before the C library's heap is trimmed. That of small tensors stays with the process otherwise,
and such a model would be there twice."""


class Adoption:
    """Makes the store's units from a model's parameters, so that the host never holds the model twice.

    Weights in mapped files are read ahead by one unit. Their cache is given back, unit by unit, where the store would
    otherwise have to be made in memory that the cache takes: the system would give it back by itself, but not in huge pages.

    Args:
        model: if it was built without weights, it gets them here, unit by unit.
        discovery: the model's layers and resident parameters; units are asked for in this order.
        make_unit: makes a unit from its name, its parameters and their dtypes.
        device: where the model computes.
        store_bytes: what the store will take in all.
    """

    def __init__(
        self,
        model: nn.Module,
        discovery: Discovery,
        make_unit: Callable[..., HostUnit],
        *,
        device: torch.device,
        store_bytes: int,
    ) -> None:
        expand_segments(device)  # before the first of the engine's tensors there
        self._make_unit = make_unit
        self._meta_weights = MetaWeights(model, discovery, device) if is_without_weights(model) else None
        groups = [[parameter for _, parameter in group] for group in discovery.parameter_groups()]
        files = FileMappings()
        self._pages = [files.pages(group) for group in groups]
        mapped = sum(end - start for ranges in self._pages for start, end in ranges)
        self._gives_cache_back = unused_host_bytes() < store_bytes + mapped
        self._made = 0
        self._freed_bytes = 0

    def unit(self, name: str, parameters: Sequence[tuple[str, nn.Parameter]], dtypes: Sequence[torch.dtype]) -> HostUnit:
        """The next unit, with the parameters' values. The caller makes them show the store's."""
        if self._freed_bytes >= TRIM_BYTES:
            self._trim()
        if self._made == 0:
            read_ahead(self._pages[0])
        for following in self._pages[self._made + 1 : self._made + 2]:
            read_ahead(following)
        if self._meta_weights is not None:
            self._meta_weights.fill_unit(self._made, (parameter for _, parameter in parameters))
        unit = self._make_unit(name, parameters, dtypes)
        if self._gives_cache_back:
            page_out(self._pages[self._made])
        self._made += 1
        self._freed_bytes += sum(parameter.nbytes for _, parameter in parameters)
        return unit

    def __enter__(self) -> Adoption:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._trim()
        if kind is None and self._meta_weights is not None:
            self._meta_weights.finish()

    def _trim(self) -> None:
        trim_heap()
        self._freed_bytes = 0


def adopt_experts(
    specs: Iterable[ExpertsSpec],
    adoption: Adoption,
    dtypes: Mapping[int, torch.dtype],
    layers: Sequence[StreamedLayer],
    run: Callable[[int, tuple[Any, ...], dict[str, Any]], Any],
    before_copy: Callable[[], None],
) -> None:
    """Makes the units of the last layer's experts that stream in parts, and proxies of their modules; the layer gets them.

    Args:
        specs: the experts of the last of ``layers``.
        adoption: whose next units theirs are.
        dtypes: in which parameters compute, by ``id``.
        layers: the model's so far.
        run: what a proxy's forward does, with the number of the experts among the model's.
        before_copy: see :func:`install_proxy`.
    """
    for spec in specs:
        earlier = [experts for layer in layers for experts in layer.experts]
        parameters = list(spec.module.named_parameters())
        unit = adoption.unit(spec.name, parameters, [dtypes[id(parameter)] for _, parameter in parameters])
        forward = install_proxy(spec.module, functools.partial(run, len(earlier)), before_copy)
        first = sum(len(experts.parts) for experts in earlier)
        at = (spec.layer, spec.name, spec.module, forward, unit)
        layers[-1].leave_to(StreamedExperts(*at, parts=spec.parts, first_part=first))
