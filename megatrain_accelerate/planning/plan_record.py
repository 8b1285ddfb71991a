"""A plan as plain data in a checkpoint, from which a training that is resumed goes on.

Compiled layers have other bits where other layers are kept or run in other pieces, and a plan is made for the batches so far:
one that is made for the first batch after a checkpoint could be another.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatrain_accelerate.planning.other_batches import BatchExtent
from megatrain_accelerate.planning.placement import Placement
from megatrain_accelerate.planning.step_simulation import StepTime


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """What a :class:`~megatrain_accelerate.planning.device_plan.DevicePlan` goes on from."""

    made_for: str
    """What must be the same where it is taken over."""
    seen: BatchExtent
    planned: BatchExtent
    """The batches so far, and those that the plan covers."""
    plans: int
    forwards_at_once: int
    samples: int | None
    token_tile: int
    """In which pieces and tiles layers run (:mod:`.step_ways`)."""
    placement: Placement
    predicted_bytes: int
    predicted_time: StepTime

    def as_data(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts alone, as JSON has them."""
        data = dataclasses.asdict(self)
        data["placement"] = {
            key: sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple) else value
            for key, value in data["placement"].items()
        }
        return data

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> PlanRecord | None:
        """Reverse of :meth:`as_data`; None for data that another version of this package made otherwise."""
        kinds = {"seen": BatchExtent, "planned": BatchExtent, "placement": Placement, "predicted_time": StepTime}
        pairs = [(cls, data), *((kind, data.get(name, {})) for name, kind in kinds.items())]
        if any({field.name for field in dataclasses.fields(kind)} != found.keys() for kind, found in pairs):
            return None
        placement: dict[str, Any] = {
            key: frozenset(value) if isinstance(value, list) else value for key, value in data["placement"].items()
        }
        placement["budgets"] = tuple(data["placement"]["budgets"])
        made = {name: kind(**data[name]) for name, kind in kinds.items() if kind is not Placement}
        return cls(**{**data, **made, "placement": Placement(**placement)})
