"""Finds the fastest placement that fits. Counts of layers are varied one or two kinds at a time, and each candidate's step is
simulated. If most batches are smaller than the largest that a plan covers, each of these two sizes has its placement."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.placement import Counts, Model, held_bytes, sent_bytes, step_bytes
from megatrain_accelerate.plan.plan_record import PlanRecord
from megatrain_accelerate.plan.step_profile import StepProfile
from megatrain_accelerate.plan.step_simulation import StepTime, simulate_step

WORTH_IT = 0.005
"""Share of a step's time that a change of the placement must gain. Less isn't worth the memory."""

INPUTS_WORTH_IT = 0.01
"""Share that offloading inputs must gain if a step fits without it, since the first step page-locks host memory for them. The
simulation doesn't promise too much: with 24 GiB and 8 x 4,096 tokens (3B) it predicted 3.0 % on an H100, where 3.0 % were
measured, and 2.2 % on an H200, where 5 % were, while the host's step was slower than planned."""

NO_SLOWER = 0.001
"""Share of a step's time by which the simulation may misjudge two placements that differ little."""

_WHOLE = (0.0, 1.0)
"""The memory budgets of recomputed layers (0.0 saves inputs alone) and of kept ones (1.0 saves everything). Layers are only
offloaded with this pair: with others, offloading nearly all was predicted to gain 2 % and lost 6 %, since the copies share the
host's memory with AdamW (3B, 8 x 4,096 tokens, 24 GiB of an H200)."""

_FEW_ON_DEVICE = 4
"""How many numbers of layers on the device, from none to a quarter of all, are tried with each number of offloaded layers."""

MOST_USUAL_SHARE = 0.9
"""If a batch of the mean size has more than this share of the largest one's tokens, all are planned for as the largest."""

LINEAR_SHARE = 0.98
"""Kept bytes count as equal, or as proportional, from this share of the expected bytes on: sizes are rounded."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A placement with what it is predicted to take."""

    counts: Counts = dataclasses.field(compare=False, repr=False)
    """From which the search made the placement. It may have more kept layers than these say."""
    placement: Placement
    peak_bytes: int
    time: StepTime

    def is_worth_it(self, other: Candidate | None) -> bool:
        """Whether this takes clearly less time than ``other``, the simpler way (None if that doesn't fit)."""
        return other is None or self.time.seconds <= (1 - WORTH_IT) * other.time.seconds


def _leaving_what_counts(placement: Placement) -> Placement:
    """The placement without offloaded inputs of layers that aren't recomputed, which have no effect. Caches use it as key."""
    leaving = frozenset(filter(placement.is_recomputed, placement.inputs_offloaded))
    return dataclasses.replace(placement, inputs_offloaded=leaving)


class PlacementSearch:
    """Finds the fastest placement of a step within two budgets. ``budget_bytes`` is device memory for the step, besides what
    the engine holds under any placement. ``host_budget_bytes`` is host memory for activations if all units live on the host,
    to which a unit on the device adds what it frees there. ``fixed`` has the :class:`.Counts`, by name, that settings decide.
    If layers can be compiled with several memory budgets, all pairs of neighbouring ones are tried, unless the settings fix
    how many layers are kept, or that some are offloaded."""

    def __init__(
        self,
        step_profile: StepProfile,
        model: Model,
        machine: Machine,
        budget_bytes: int,
        fixed: Mapping[str, Any],
        host_budget_bytes: int = 0,
    ) -> None:
        self._step_profile, self._model, self._fixed = step_profile, model, fixed
        self._budget, self._host_budget = budget_bytes, host_budget_bytes
        self._count = len(model.layers)
        self._try = functools.cache(self._evaluate)
        at = functools.cache(step_profile.at)
        self._time = functools.cache(lambda placement: simulate_step(at(*placement.budgets), model, placement, machine))
        self._step_bytes = functools.cache(lambda placement: step_bytes(at(*placement.budgets), model, placement))
        is_free = "kept" not in fixed and not fixed.get("offloaded")
        budgets = {budget.value for profile in step_profile.profiles.values() for budget in profile.budgets if is_free}
        self._budget_pairs = dict.fromkeys([*itertools.pairwise(sorted({*budgets, *_WHOLE})), _WHOLE])

    @property
    def something_fits(self) -> bool:
        """Whether any placement fits. With the first pair of memory budgets, which has the lowest, a step takes the least."""
        return self.everything() is not None or self._first_that_fits(next(iter(self._budget_pairs))) is not None

    def fits(self, placement: Placement) -> bool:
        """Whether a step with this placement fits the device."""
        return self._peak_bytes(placement) <= self._budget

    def best(self) -> Candidate | None:
        """The fastest placement that fits, or None. If everything fits on the device, nothing streams: letting the host step
        some layers would save the device a little time, and cost the thread that launches kernels more."""
        if (everything := self.everything()) is not None:
            return everything
        found = [candidate for pair in self._budget_pairs if (candidate := self.best_with(pair)) is not None]
        return min(found, key=lambda candidate: candidate.time.seconds, default=None)

    def everything(self) -> Candidate | None:
        """All states and activations on the device. None if that doesn't fit, or the settings ask for something else."""
        every = Counts(kept=self._count, on_device=self._count, groups_on_device=True)
        is_open = all(getattr(every, name) == count for name, count in self._fixed.items())
        found = self._try(every) if is_open and not self._model.parts else None
        return found if found is not None and len(found.placement.kept) == self._count else None

    def best_with(self, budgets: tuple[float, float]) -> Candidate | None:
        """The fastest placement that fits with these memory budgets, or None."""
        if (first := self._first_that_fits(budgets)) is None:
            return None
        # Offloaded inputs gain the most together with what takes their place, so that this way is searched to the end.
        few = self._climbed(first, first.counts.inputs_offloaded)
        many = self._climbed(few, self._count)
        return self._filled(many if many.time.seconds < (1 - INPUTS_WORTH_IT) * few.time.seconds else few)

    def _climbed(self, found: Candidate, most_inputs: int) -> Candidate:
        """What no variation improves, found step by step, with inputs of so many layers offloaded at most."""
        for _ in range(3):
            before = found.counts
            for variation in self._variations(before.budgets):
                for counts in variation(found.counts):
                    candidate = self._try(counts) if counts.inputs_offloaded <= most_inputs else None
                    if candidate is not None and candidate.is_worth_it(found):
                        found = candidate
            if found.counts == before:
                break
        return found

    def _first_that_fits(self, budgets: tuple[float, float]) -> Candidate | None:
        """The placement with the fewest offloaded inputs with which a step fits; the host may lack memory for one more."""
        varied = self._varied(Counts(**self._fixed, budgets=budgets), inputs_offloaded=range(self._count + 1))
        return next((found for counts in varied if (found := self._try(counts)) is not None), None)

    def leanest(self) -> Candidate:
        """The placement for a step that fits in no way: what settings fix, and, where they leave that open, the number of
        offloaded inputs that fits the host and gives the lowest peak."""
        counts = Counts(**self._fixed)
        settled = counts.placement(self._count)
        tried = range(1, 1 if "inputs_offloaded" in self._fixed else self._count + 1)
        leaving = [dataclasses.replace(settled, inputs_offloaded=frozenset(range(at)), offload_spacing=1) for at in tried]
        leanest = min([settled, *filter(self._has_host_room, leaving)], key=self._peak_bytes)
        return self._candidate(counts, leanest, self._peak_bytes(leanest))

    def _filled(self, found: Candidate) -> Candidate:
        """The candidate with as much more on the device as fits without costing time or kept layers: host and link do less."""
        fillings: list[dict[str, Iterable[int]]] = [
            {"states_on_device": range(self._count, found.counts.states_on_device, -1)},
            {"groups_on_device": [True], "on_device": range(self._count, found.counts.on_device, -1)},
        ]
        for values in fillings if self._model.ranks > 1 else fillings[1:]:
            seconds, kept = (1 + NO_SLOWER) * found.time.seconds, len(found.placement.kept)
            for candidate in map(self._try, self._varied(found.counts, **values)):
                if candidate is not None and candidate.time.seconds <= seconds and len(candidate.placement.kept) >= kept:
                    found = candidate
                    break
        return found

    def _varied(self, at: Counts, **values: Iterable[int]) -> Iterator[Counts]:
        """Yields the counts with each combination of values, the last varying fastest. Fixed counts aren't varied."""
        # A user who fixes the number of layers on the device doesn't thereby ask for groups there.
        fixed = {*self._fixed, "groups_on_device"} if "on_device" in self._fixed else self._fixed
        free = {name: tried for name, tried in values.items() if name not in fixed}
        for combination in itertools.product(*free.values()):
            changes: dict[str, Any] = dict(zip(free, combination, strict=True))
            yield dataclasses.replace(at, **changes)

    def _variations(self, budgets: tuple[float, float]) -> Iterator[Callable[[Counts], Iterable[Counts]]]:
        """Yields functions that list variations of given counts. Some vary two counts at once, where one gains nothing without
        the other: offloaded inputs make room for kept attention, and whole layers on the host for activations or states."""
        vary, both = self._varied, (False, True)
        some = sorted({round(i * self._count / 12) for i in range(13)})  # from none to all

        def near(count: int, reach: int, others: Iterable[int] = some) -> list[int]:
            """Numbers of layers within ``reach`` of the count, and the others."""
            return sorted({*others, *range(max(0, count - reach), min(self._count, count + reach) + 1)})

        yield lambda at: vary(at, inputs_offloaded=near(at.inputs_offloaded, 2))
        # Not without tiles: layers are then compiled, and attention is part of their graph.
        if self._step_profile.token_tile and "attention_kept" not in self._fixed:
            yield lambda at: vary(at, attention_kept=near(at.attention_kept, 2), inputs_offloaded=near(at.inputs_offloaded, 2))
        yield lambda at: vary(at, groups_on_device=[not at.groups_on_device])
        yield lambda at: vary(at, groups_on_device=(at.groups_on_device, not at.groups_on_device), on_device=some)
        yield lambda at: vary(at, on_device=near(at.on_device, 3, ()), groups_on_device=both)
        # In one process a whole layer on the device takes little more memory than its states alone, and isn't fetched.
        moves_states = self._model.ranks > 1 and "states_on_device" not in self._fixed
        if moves_states:
            yield lambda at: vary(
                at, on_device={0, at.on_device}, groups_on_device=both, states_on_device=near(at.states_on_device, 3)
            )
        if "offloaded" in self._fixed or budgets != _WHOLE:
            return
        yield lambda at: vary(at, offloaded=near(at.offloaded, 3))
        if "on_device" not in self._fixed:
            yield lambda at: (
                counts
                for counts in vary(at, offloaded=near(at.offloaded, 3), on_device=some[:_FEW_ON_DEVICE], groups_on_device=both)
                if counts.groups_on_device in (at.groups_on_device, counts.on_device > 0)
            )
        if moves_states:
            yield lambda at: vary(at, offloaded=near(at.offloaded, 3), on_device={0, at.on_device}, states_on_device=some[::2])

    def _evaluate(self, counts: Counts) -> Candidate | None:
        """The candidate with as many kept layers as fit, unless that number is fixed. None if no number fits."""
        count = self._count

        def placement(kept: int) -> Placement:
            return dataclasses.replace(counts, kept=kept).placement(count)

        kept = self._fixed.get("kept")
        if kept is None:
            # If some number of kept layers fits, so do smaller ones: bisect for the fewest that aren't kept. Those that a
            # setting has offloaded aren't.
            most = count - min(count, self._fixed.get("offloaded", 0))
            kept = most - bisect.bisect_left(range(most + 1), True, key=lambda others: self.fits(placement(most - others)))
        chosen = placement(max(0, kept))
        taken_bytes = self._peak_bytes(chosen)
        fits = taken_bytes <= self._budget and self._has_host_room(chosen)
        return self._candidate(counts, chosen, taken_bytes) if fits else None

    def _candidate(self, counts: Counts, placement: Placement, peak: int) -> Candidate:
        return Candidate(counts, placement, peak, self._time(_leaving_what_counts(placement)))

    def _peak_bytes(self, placement: Placement) -> int:
        """The peak of a step. Its part :func:`step_bytes` doesn't depend on where groups live, and is cached without that."""
        step = dataclasses.replace(_leaving_what_counts(placement), groups_on_device=False)
        return held_bytes(self._model, placement) + self._step_bytes(step)

    def _has_host_room(self, placement: Placement) -> bool:
        return sum(sent_bytes(self._step_profile, placement)) <= max(0, self._host_budget + self._model.moved_bytes(placement))


def place_both(
    plan: PlanRecord,
    share: float,
    step_at: Callable[[float], StepProfile | None],
    largest: StepProfile,
    search_for: Callable[..., PlacementSearch],
) -> tuple[PlanRecord, bool] | None:
    """The plan with two placements that have units in the same places: for the *usual* batch, with ``share`` of the largest
    one's tokens, and for the largest. None if there are no such two. Units live where the usual batch wants them, as far as
    the largest fits with fewer kept layers. So a few long batches recompute more, instead of moving weights and states to the
    host for all batches. Says also whether this costs nothing: units live where the usual batch alone would have them, and
    batches between the two keep as many layers as fit. ``step_at`` returns the profile of a batch with a share of the largest
    one's tokens, None if unknown. ``search_for`` makes the search for a step's placement with some :class:`.Counts` fixed."""
    usual = step_at(share)
    if usual is None or (best := search_for(usual).best()) is None:
        return None
    if (most := _largest_beside(best, largest, search_for)) is None:
        return None
    there = {name: getattr(most.counts, name) for name in ("groups_on_device", "on_device", "states_on_device")}
    moves = any(getattr(most.placement, name) != getattr(best.placement, name) for name in ("on_device", "states_on_device"))
    if moves and (best := search_for(usual, **there).best()) is None:
        return None
    fewer_kept = len(best.placement.kept) - len(most.placement.kept)
    differ_in_kept = dataclasses.replace(most.placement, kept=best.placement.kept) == best.placement and fewer_kept >= 0
    both = dataclasses.replace(
        plan,
        placement=most.placement,
        predicted_time=None if usual.surely_fits else best.time,
        offloaded_bytes=max(sum(sent_bytes(step, at.placement)) for step, at in ((usual, best), (largest, most))),
        usual_share=share,
        usual_placement=best.placement,
        usual_bytes=best.peak_bytes,
        is_linear=differ_in_kept and _keeps_in_proportion(share, usual, largest),
    )
    if both.is_linear and fewer_kept:
        # Bytes besides kept ones may grow more slowly than tokens (the loss runs by tiles), so a batch in between is tried.
        step = step_at(share**0.5)
        fits = step is not None and search_for(step, **there).fits(both.at(share**0.5)[0])
        both = dataclasses.replace(both, is_linear=fits)
    return both, both.is_linear and not moves


def _largest_beside(best: Candidate, largest: StepProfile, search_for: Callable[..., PlacementSearch]) -> Candidate | None:
    """The placement of the largest batch with as many layers on the device, and layers stepped there, as ``best`` has, or as
    many of them as fit (unless settings fix that). None if it doesn't fit."""
    layers, states = len(best.placement.on_device), len(best.placement.states_on_device)
    fewer_states = [(layers, count) for count in range(states, -1, -1)]
    for on_device, stepped in fewer_states + [(count, 0) for count in range(layers - 1, -1, -1)]:
        groups = best.placement.groups_on_device
        search = search_for(largest, groups_on_device=groups, on_device=on_device, states_on_device=stepped)
        if search.something_fits:
            # The same memory budgets first: each has graphs of its own, which take time to compile.
            return search.best_with(best.placement.budgets) or search.best()
    return None


def _keeps_in_proportion(share: float, usual: StepProfile, largest: StepProfile) -> bool:
    """Whether all layers keep equally many bytes, which grow at most in proportion to the tokens."""
    less, more = ([step.profiles[call.kind].kept_bytes for call in step.forward_calls] for step in (usual, largest))
    if len(less) != len(more) or min(more) < LINEAR_SHARE * max(more):
        return False
    return all(own >= LINEAR_SHARE * share * of_largest for own, of_largest in zip(less, more, strict=True))
