"""The fastest placement that fits: what lives where is varied one or two kinds at a time, each candidate is simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.planning.machine import Machine
from megatrain_accelerate.planning.peak_memory import peak_bytes
from megatrain_accelerate.planning.placement import Placement
from megatrain_accelerate.planning.step_profile import StepOutline
from megatrain_accelerate.planning.step_simulation import Model, StepTime, sent_bytes, simulate_step

WORTH_IT = 0.005
"""Share of a step that a move of weights or states must gain; less isn't worth the memory."""

INPUTS_WORTH_IT = 0.03
"""Share that must be gained where the first inputs leave though a step fits with them: host memory is registered for them in
the first step, and their copies leave those of offloaded layers no pause."""

NO_SLOWER = 0.001
"""Share of a step by which the simulation may be wrong about two placements that differ little."""

_FEW_ON_DEVICE = 4
"""Numbers of layers on the device, up to a quarter of all, that are tried with each number of offloaded ones."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the settings leave open: a number where the user fixed one, None where the plan chooses."""

    kept: int | None = None
    offloaded: int | None = None
    resident: int | None = None
    on_device: int | None = None
    """-1: all layers and the groups."""
    inputs_offloaded: int | None = None
    attention_kept: int | None = None

    @classmethod
    def of_settings(cls, config: MegatrainConfig, layers: int) -> Choices:
        """What the settings of a run leave open for a model of ``layers`` layers."""

        def fixed(setting: int | str) -> int | None:
            return setting if isinstance(setting, int) else None

        return cls(
            kept=fixed(config.keep_layers),
            offloaded=fixed(config.offload_layers),
            resident=fixed(config.resident_layers),
            on_device=fixed(config.device_layers),
            attention_kept=fixed(config.keep_attention),
            inputs_offloaded=None if config.offload_inputs == "auto" else layers * bool(config.offload_inputs),
        )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A placement with what it is predicted to take."""

    placement: Placement
    peak_bytes: int
    time: StepTime

    def is_worth_it(self, other: Candidate | None) -> bool:
        """Whether this takes clearly less time than ``other``, the simpler way; None if that doesn't fit."""
        return other is None or self.time.seconds <= (1 - WORTH_IT) * other.time.seconds


@dataclasses.dataclass(frozen=True)
class _Counts:
    attention_kept: int
    inputs_offloaded: int
    offloaded: int
    resident: int
    on_device: int
    groups_on_device: bool
    budgets: tuple[float, float]


def _spread(count: int, most: int = 13) -> list[int]:
    """0 to ``count``, at most ``most`` of them."""
    if count < most:
        return list(range(count + 1))
    return sorted({round(i * count / (most - 1)) for i in range(most)})


def _around(count: int, reach: int, most: int) -> range:
    """Numbers from 0 to ``most`` that are off by up to ``reach``."""
    return range(max(0, count - reach), min(most, count + reach) + 1)


class PlacementSearch:
    """Finds the fastest placement within a budget.

    Args:
        outline: of the step on the batch to plan for. Where its layers can be compiled with several memory budgets, all
            neighbouring pairs are tried, unless the settings say how many layers are kept or offloaded.
        model: the engine's sizes.
        machine: its speeds.
        budget_bytes: device memory that the step may take besides what the engine holds in any case.
        choices: what is fixed.
        host_budget_bytes: host memory that offloaded activations could take if all units lived on the host; what moves to
            the device makes room.
    """

    def __init__(
        self,
        outline: StepOutline,
        model: Model,
        machine: Machine,
        budget_bytes: int,
        choices: Choices,
        host_budget_bytes: int = 0,
    ) -> None:
        self._outline, self._model, self._machine = outline, model, machine
        self._budget, self._choices = budget_bytes, choices
        self._host_budget = host_budget_bytes
        self._count = len(model.layers)
        self._seen: dict[_Counts, Candidate | None] = {}
        is_free = choices.kept is None and not choices.offloaded
        self._budget_pairs = outline.budget_pairs if is_free else [(0.0, 1.0)]

    @property
    def something_fits(self) -> bool:
        """Whether there is any placement within the budget; less work than finding the best."""
        return self._first_that_fits(self._budget_pairs[0]) is not None

    def _start(self, budgets: tuple[float, float]) -> _Counts:
        """The placement that takes the least, but for inputs, which may leave."""
        choices = self._choices
        start = _Counts(
            attention_kept=choices.attention_kept or 0,
            inputs_offloaded=choices.inputs_offloaded or 0,
            offloaded=choices.offloaded or 0,
            resident=choices.resident or 0,
            on_device=0,
            groups_on_device=False,
            budgets=budgets,
        )
        if choices.on_device is not None:
            every = choices.on_device < 0
            start = dataclasses.replace(start, on_device=self._count if every else choices.on_device, groups_on_device=every)
        return start

    def best(self) -> Candidate | None:
        """The fastest placement that fits; None if none does."""
        found = [candidate for pair in self._budget_pairs if (candidate := self._best_with(pair)) is not None]
        return min(found, key=lambda candidate: candidate.time.seconds, default=None)

    def _best_with(self, budgets: tuple[float, float]) -> Candidate | None:
        best = self._first_that_fits(budgets)
        if best is None:
            return None
        found = self._try(best)
        assert found is not None
        for _ in range(3):
            before = best
            for variations in (
                self._inputs,
                self._attention,
                self._groups,
                self._on_device,
                self._near,
                self._resident,
                self._offloaded,
                self._offloaded_for_layers,
            ):
                for counts in variations(best):
                    candidate = self._try(counts)
                    gain = INPUTS_WORTH_IT if counts.inputs_offloaded and not best.inputs_offloaded else WORTH_IT
                    if candidate is not None and candidate.time.seconds < (1 - gain) * found.time.seconds:
                        best, found = counts, candidate
            if best == before:
                break
        return self._filled(best, found)

    def _first_that_fits(self, budgets: tuple[float, float]) -> _Counts | None:
        """The start with as few inputs away as it must; one more may be too many for the host, one less for the device."""
        start = self._start(budgets)
        more = range(1, self._count + 1) if self._choices.inputs_offloaded is None else ()
        every = [start, *(dataclasses.replace(start, inputs_offloaded=count) for count in more)]
        return next((counts for counts in every if self._try(counts) is not None), None)

    def leanest(self, settled: Placement) -> Candidate:
        """For a step that fits in no way: ``settled``, without the inputs that the host has room for if they may leave."""
        placements = [settled]
        if self._choices.inputs_offloaded is None:
            away = [frozenset(range(count)) for count in range(1, self._count + 1)]
            leaving = [dataclasses.replace(settled, inputs_offloaded=layers, offload_spacing=1) for layers in away]
            placements += [placement for placement in leaving if self._has_host_room(placement)]
        peaks = {placement: peak_bytes(self._outline, self._model, placement) for placement in placements}
        chosen = min(placements, key=peaks.__getitem__)
        return Candidate(chosen, peaks[chosen], simulate_step(self._outline, self._model, chosen, self._machine))

    def _filled(self, at: _Counts, found: Candidate) -> Candidate:
        """The same with as much on the device as there is room for: it takes load off the host and the link."""
        if self._choices.on_device is not None:
            return found
        for count in range(self._count, at.on_device, -1):
            resident = self._choices.resident or 0
            candidate = self._try(dataclasses.replace(at, on_device=count, resident=resident, groups_on_device=True))
            if (
                candidate is not None
                and candidate.time.seconds <= (1 + NO_SLOWER) * found.time.seconds
                and len(candidate.placement.kept) >= len(found.placement.kept)
            ):
                return candidate
        return found

    def _inputs(self, at: _Counts) -> Iterable[_Counts]:
        if self._choices.inputs_offloaded is not None:
            return ()
        return [dataclasses.replace(at, inputs_offloaded=count) for count in self._near_inputs(at)]

    def _near_inputs(self, at: _Counts) -> list[int]:
        return sorted({*_spread(self._count), *_around(at.inputs_offloaded, 2, self._count)})

    def _attention(self, at: _Counts) -> Iterable[_Counts]:
        # Layers without tiles are compiled, and attention is part of their graph.
        if self._choices.attention_kept is not None or not self._outline.token_tile:
            return ()
        near = _around(at.attention_kept, 2, self._count)
        # Inputs that leave make room for it: each of the two may be worth nothing without the other.
        away = self._near_inputs(at) if self._choices.inputs_offloaded is None else [at.inputs_offloaded]
        return [
            dataclasses.replace(at, attention_kept=count, inputs_offloaded=inputs)
            for count in sorted({*_spread(self._count), *near})
            for inputs in away
        ]

    def _groups(self, at: _Counts) -> Iterable[_Counts]:
        if self._choices.on_device is not None:
            return ()
        return [dataclasses.replace(at, groups_on_device=not at.groups_on_device)]

    def _on_device(self, at: _Counts) -> Iterable[_Counts]:
        if self._choices.on_device is not None:
            return ()
        return [
            dataclasses.replace(at, on_device=count, groups_on_device=groups)
            for groups in (at.groups_on_device, not at.groups_on_device)
            for count in _spread(self._count)
        ]

    def _near(self, at: _Counts) -> Iterable[_Counts]:
        if self._choices.on_device is not None:
            return ()
        near = _around(at.on_device, 3, self._count)
        residents = (lambda count: {at.resident, 0, self._count - count}) if self._choices.resident is None else None
        return [
            dataclasses.replace(at, on_device=count, resident=resident, groups_on_device=groups)
            for count in near
            for resident in (residents(count) if residents else {at.resident})
            for groups in (False, True)
        ]

    def _resident(self, at: _Counts) -> Iterable[_Counts]:
        if self._choices.resident is not None:
            return ()
        return [dataclasses.replace(at, resident=count) for count in _spread(self._count - at.on_device)]

    def _offloaded(self, at: _Counts) -> Iterable[_Counts]:
        if self._choices.offloaded is not None:
            return ()
        near = _around(at.offloaded, 3, self._count)
        return [dataclasses.replace(at, offloaded=count) for count in sorted({*_spread(self._count), *near})]

    def _offloaded_for_layers(self, at: _Counts) -> Iterable[_Counts]:
        # Activations that leave make room for layers, layers that leave for activations: one may be worth nothing by itself.
        if self._choices.on_device is not None:
            return ()
        few = _spread(self._count)[:_FEW_ON_DEVICE]
        return [
            dataclasses.replace(counts, on_device=count, groups_on_device=groups)
            for counts in self._offloaded(at)
            for count in few
            for groups in {at.groups_on_device, count > 0}
        ]

    def _try(self, counts: _Counts) -> Candidate | None:
        if counts not in self._seen:
            self._seen[counts] = self._evaluate(counts)
        return self._seen[counts]

    def _evaluate(self, counts: _Counts) -> Candidate | None:
        """The candidate with as many kept layers as fit."""

        def placement(kept: int) -> Placement:
            return Placement.of_counts(
                self._count,
                kept=kept,
                offloaded=counts.offloaded,
                inputs_offloaded=counts.inputs_offloaded,
                attention_kept=counts.attention_kept,
                resident=counts.resident,
                on_device=counts.on_device,
                groups_on_device=counts.groups_on_device,
                budgets=counts.budgets,
            )

        def peak(kept: int) -> int:
            return peak_bytes(self._outline, self._model, placement(kept))

        kept = self._choices.kept
        if kept is None:
            kept = _most(self._count, lambda k: peak(k) <= self._budget)
        chosen = placement(max(0, kept))
        taken = peak_bytes(self._outline, self._model, chosen)
        if taken > self._budget or not self._has_host_room(chosen):
            return None
        return Candidate(chosen, taken, simulate_step(self._outline, self._model, chosen, self._machine))

    def _has_host_room(self, placement: Placement) -> bool:
        model = self._model
        moved = sum(model.layers[i].host_bytes for i in placement.on_device)
        if placement.groups_on_device:
            moved += sum(unit.host_bytes for unit in [*model.groups_before, *model.groups_after])
        return sum(sent_bytes(self._outline, placement)) <= max(0, self._host_budget + moved)


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``count`` that fits, if smaller ones do too; -1 if none."""
    low, high = -1, count
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
