"""A plan as plain data in a checkpoint, from which a training that is resumed goes on.

One that is made anew, from the first batch after a checkpoint, could differ: compiled layers would give other bits.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.plan.other_batches import BatchExtent
from megatrain_accelerate.plan.step_simulation import StepTime

RESUMED_SHARE_OF_DEVICE = 0.95
"""Share of the free memory that a resumed plan may take. A new plan takes less: a few MiB more or less are free each time."""


def made_for(model: nn.Module, runtime: StreamingRuntime, config: MegatrainConfig, micro_batches: int) -> str:
    """What must be the same for a recorded plan to be taken over: GPU, torch, settings, model and way of stepping."""
    device = runtime.streams.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    layouts = [(at.weight_bytes, at.gradient_bytes, at.parameter_count) for at in (unit.layout for unit in runtime.units)]
    configs = (getattr(module, "config", None) for module in model.modules())
    attention = sorted({str(getattr(config, "_attn_implementation", None)) for config in configs})
    way = (runtime.batch_cut.asked, micro_batches, runtime.states_may_move)
    return repr((gpu, torch.__version__, config, layouts, attention, way))


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """The last plan of a :class:`~megatrain_accelerate.plan.device_plan.DevicePlan`, and what it goes on from."""

    made_for: str = ""
    """What must be the same where it is taken over."""
    offloaded_bytes: int = 0
    """Host memory that activations take."""
    seen: BatchExtent = dataclasses.field(default_factory=BatchExtent)
    """The batches so far."""
    planned: BatchExtent = dataclasses.field(default_factory=BatchExtent)
    """Those that the plan covers."""
    row_sizes: tuple[int, ...] = ()
    """Those that tell whether sizes vary (:mod:`.other_batches`): compiled layers have a graph for one size, or for all."""
    plans: int = 0
    forwards_at_once: int = 1
    """Forwards that may wait for their backward at a time."""
    samples: int | None = None
    """Of a piece of the batch (:mod:`.step_ways`)."""
    token_tile: int = 0
    """Tokens of a tile in the layers; 0 for none."""
    placement: Placement = dataclasses.field(default_factory=Placement)
    """For the largest of those batches."""
    predicted_bytes: int = 0
    """0 before the first plan, or if unknown; so is the time None."""
    predicted_time: StepTime | None = None
    """Of the usual batch where there is one, else of the largest."""
    batches: int = 0
    """Number of batches so far."""
    tokens: int = 0
    """Of all of them together, as :attr:`BatchExtent.real` counts them."""
    usual_share: float = 1.0
    """Tokens of a batch of the mean size, the *usual* one, over those of the largest that the plan covers."""
    usual_placement: Placement = dataclasses.field(default_factory=Placement)
    """For batches up to the usual one. Units live where :attr:`placement` has them."""
    usual_bytes: int = 0
    """Predicted of the usual batch."""
    is_linear: bool = False
    """Whether the two placements differ in the number of kept layers alone, and what is between them may be reckoned."""

    def at(self, share: float) -> tuple[Placement, int]:
        """For a batch with that share of the largest one's tokens, and the bytes that it is predicted to take, at most. One of
        ``t`` tokens with ``k`` kept layers takes ``a + (b + c k) t`` bytes, where each layer keeps ``c`` a token, ``b`` are
        needed beside them, and ``a`` in any case. So the most layers that fit fall on a line over ``1 / t``, and with these
        the bytes on one over ``t``."""
        if share <= self.usual_share < 1.0:
            return self.usual_placement, self.usual_bytes
        if share >= 1.0 or not self.is_linear:
            return self.placement, self.predicted_bytes
        count, last_kept = len(self.placement.kept), max(self.usual_placement.kept, default=0)
        more = (len(self.usual_placement.kept) - count) * (1 / share - 1) / (1 / self.usual_share - 1)
        kept = frozenset(range(last_kept + 1 - count - int(more), last_kept + 1))
        above = (share - self.usual_share) / (1.0 - self.usual_share)
        predicted = round(self.usual_bytes + above * (self.predicted_bytes - self.usual_bytes))
        return dataclasses.replace(self.placement, kept=kept), predicted

    def as_data(self) -> dict[str, Any]:
        """Numbers, texts, lists and dicts alone, as JSON has them."""
        data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=sorted))  # of sets
        return data

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> PlanRecord | None:
        """Reverse of :meth:`as_data`; None for data with other names, which another version of this package made."""
        placements = dict.fromkeys(("placement", "usual_placement"), Placement)
        kinds = {"seen": BatchExtent, "planned": BatchExtent, "predicted_time": StepTime, **placements}
        pairs = [(cls, data), *((kind, data.get(name, {})) for name, kind in kinds.items())]
        if any({field.name for field in dataclasses.fields(kind)} != found.keys() for kind, found in pairs):
            return None
        data = {**data, "row_sizes": tuple(data["row_sizes"])}
        for name in placements:
            at = data[name]
            sets = {key: frozenset(value) for key, value in at.items() if isinstance(value, list)}
            data[name] = {**at, **sets, "budgets": tuple(at["budgets"])}
        return cls(**{**data, **{name: kind(**data[name]) for name, kind in kinds.items()}})
