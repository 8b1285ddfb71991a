"""What the engine did since the last log, as numbers under ``megatrain/`` in the Trainer's own logs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.integrations.console import PREFIX
from megatrain_accelerate.planning.layer_discovery import active_parameters
from megatrain_accelerate.planning.placement import Placement
from megatrain_accelerate.streaming.meter import Cause, Counters
from megatrain_accelerate.units import GB, GIB, KIB

_A_PLAN_SECONDS = 0.01
"""Less isn't a plan, but the sum of looks at batches that need none."""
_SETTLED_STEPS = 10
"""So many steps in a row, none of them with a plan, are bound by the same resource before that is said."""


def is_training_log(logs: Mapping[str, Any]) -> bool:
    """Whether a log entry is about training steps: it holds a loss, by whatever name, and isn't of an evaluation or of the
    training's end."""
    names = list(_names(logs))
    is_of_else = any(name.startswith(("eval", "test")) or name.endswith("_runtime") for name in names)
    return not is_of_else and any(name.endswith("loss") for name in names)


def _names(logs: Mapping[str, Any]) -> Iterator[str]:
    for name, value in logs.items():
        yield name
        if isinstance(value, Mapping):
            yield from _names(value)


def host_peak_bytes() -> int:
    """Largest resident set of this process so far, registered memory included."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KIB
    return 0


class TokenCounter:
    """Counts the tokens of training forwards on the device, without padding and without waiting.

    Args:
        model: the prepared model; counted where it is called with a 2-D ``attention_mask``, ``input_ids`` or
            ``inputs_embeds``, by keyword or in a mapping that is its first argument.
    """

    def __init__(self, model: nn.Module) -> None:
        self._count_so_far: torch.Tensor | int = 0
        self.handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        inputs = {**args[0], **kwargs} if args and isinstance(args[0], Mapping) else kwargs
        mask, ids, embeddings = (inputs.get(name) for name in ("attention_mask", "input_ids", "inputs_embeds"))
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self._count_so_far = self._count_so_far + mask.sum()
        elif isinstance(ids, torch.Tensor):
            self._count_so_far = self._count_so_far + ids.numel()
        elif isinstance(embeddings, torch.Tensor):
            self._count_so_far = self._count_so_far + embeddings.shape[0] * embeddings.shape[1]

    def take(self) -> int:
        """Tokens since the last call. Waits for the device."""
        count, self._count_so_far = self._count_so_far, 0
        return int(count)


RESOURCES = ("compute", "h2d", "d2h", "host_step")
"""What can bound a step. The rest of a step, launching and the data loader among it, counts as compute."""


def bound_shares(wait_ms: dict[str, float], step_ms: float) -> dict[str, float]:
    """Shares of a step in which the GPU worked (``compute``) and in which it stood still for each other resource.

    Args:
        wait_ms: by what the GPU stood still for; the end of backward is the d2h link's.
        step_ms: the whole step, above 0. Waits are read when they are over, so that those of a step may be counted in the
            next: a sum above the step is scaled down to it.
    """
    waits = {
        "h2d": wait_ms["h2d"],
        "d2h": wait_ms["d2h"] + wait_ms["backward_end"],
        "host_step": wait_ms["host_step"],
    }
    whole = max(step_ms, sum(waits.values()))
    shares = {name: waited / whole for name, waited in waits.items()}
    return {"compute": 1.0 - sum(shares.values()), **shares}


def bound_by(shares: dict[str, float]) -> str:
    """The resource with the largest share of a step."""
    return max(RESOURCES, key=lambda name: shares[name])


def describe_bound(shares: dict[str, float]) -> str:
    """The shares in words: ``is bound by h2d (h2d 61%, compute 30%, d2h 9%)``."""
    ordered = sorted((name for name in RESOURCES if shares[name] >= 0.005), key=lambda name: -shares[name])
    return f"is bound by {bound_by(shares)} ({', '.join(f'{name} {shares[name]:.0%}' for name in ordered)})"


class Telemetry:
    """Turns an engine's counters into log entries. Rates and sums are per optimizer step since the entry before.

    Args:
        engine: the engine to report on.
        model: its model.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._active_parameters = active_parameters(model, getattr(model, "config", None))
        self._tokens = TokenCounter(model)
        self._before = dataclasses.replace(engine.runtime.meter.counters)
        self._seconds = 0.0
        self._steps = 0
        self._plan_seconds = engine.plan_seconds
        self._mark: float | None = None
        self._logged_placement: Placement | None = None
        self._last_entries: dict[str, float] = {}
        self._steps_bound = 0
        self.shares: dict[str, float] = {}
        """:func:`bound_shares` of the steps of the last entries; empty before."""
        self.is_within_step = False

    @property
    def bound_by(self) -> str | None:
        """What bounds a step; None until it has been the same for :data:`_SETTLED_STEPS` steps."""
        return bound_by(self.shares) if self._steps_bound >= _SETTLED_STEPS else None

    def step_begins(self) -> None:
        """Training time runs from here; what lay between two steps counts unless :meth:`pause` was called."""
        self.is_within_step = True
        if self._mark is None:
            self._mark = time.perf_counter()

    def step_ends(self) -> None:
        """An optimizer step is over."""
        now = time.perf_counter()
        if self._mark is not None:
            self._seconds += now - self._mark
        self._mark = now
        self._steps += 1
        self.is_within_step = False

    def follow(self, engine: Engine) -> None:
        """Reports on the engine that the model has by now, which goes on counting where the one before it ended."""
        self._engine = engine

    def pause(self) -> None:
        """Evaluation or saving: the time until the next step begins isn't training."""
        self._mark = None

    def entries(self) -> dict[str, float]:
        """The log entries since the last call; those of that call again if no step has ended since."""
        if self._steps == 0:
            return self._last_entries
        meter = self._engine.runtime.meter
        meter.harvest()
        now: Counters = dataclasses.replace(meter.counters)
        before, self._before = self._before, now
        steps, self._steps = self._steps, 0
        seconds, self._seconds = self._seconds, 0.0
        tokens = self._tokens.take()
        values = {
            "h2d_gb": (now.h2d_bytes - before.h2d_bytes) / GB / steps,
            "d2h_gb": (now.d2h_bytes - before.d2h_bytes) / GB / steps,
            "copy_wait_ms": (now.copy_wait_ms - before.copy_wait_ms) / steps,
            "optimizer_wait_ms": (now.optimizer_wait_ms - before.optimizer_wait_ms) / steps,
            "skipped_steps": float(now.skipped_steps),
            "host_peak_gib": host_peak_bytes() / GIB,
        }
        wait_ms = {
            cause.value: (getattr(now, f"{cause.value}_wait_ms") - getattr(before, f"{cause.value}_wait_ms")) / steps
            for cause in Cause
        }
        values |= {f"gpu_wait_{name}_ms": waited for name, waited in wait_ms.items()}
        values |= self._rates(now, before)
        planned, self._plan_seconds = self._engine.plan_seconds - self._plan_seconds, self._engine.plan_seconds
        if planned > _A_PLAN_SECONDS:
            values["plan_seconds"] = planned
        if seconds > 0:
            earlier, self.shares = self.shares, bound_shares(wait_ms, 1e3 * seconds / steps)
            if planned > _A_PLAN_SECONDS or not earlier or bound_by(earlier) != bound_by(self.shares):
                self._steps_bound = 0
            if planned <= _A_PLAN_SECONDS:
                self._steps_bound += steps
            values |= {f"bound_share_{name}": share for name, share in self.shares.items()}
            if tokens > 0:  # images have none, and so have inputs by names that aren't known
                values["tokens_per_second"] = tokens / seconds
                values["tflops"] = 6e-12 * self._active_parameters * tokens / seconds
        predicted_seconds = self._engine.predicted_step_seconds
        if predicted_seconds is not None:
            values["predicted_step_ms"] = 1e3 * predicted_seconds
        placement = self._engine.device_plan.placement
        if placement != self._logged_placement:  # once for each plan is enough
            self._logged_placement = placement
            for kind, count in self._engine.host_bytes_by_kind().items():
                values[f"host_{kind}_gib"] = count / GIB
            for kind, count in self._engine.device_bytes_by_kind().items():
                values[f"gpu_{kind}_gib"] = count / GIB
            for name in ("kept", "offloaded", "resident"):
                values[f"{name}_layers"] = float(len(getattr(placement, name)))
            values["device_layers"] = float(len(placement.on_device))
        if self._engine.device.type == "cuda":
            values["gpu_predicted_gib"] = self._engine.predicted_device_bytes / GIB
            values["gpu_peak_gib"] = torch.cuda.max_memory_allocated(self._engine.device) / GIB
        self._last_entries = {f"{PREFIX}{name}": round(value, 4) for name, value in values.items()}
        return self._last_entries

    @staticmethod
    def _rates(now: Counters, before: Counters) -> dict[str, float]:
        """GB/s of the link while it copied and G parameters/s of the host step while it computed, where they did."""
        rates = {}
        for direction in ("h2d", "d2h"):
            copied_bytes = getattr(now, f"{direction}_copied_bytes") - getattr(before, f"{direction}_copied_bytes")
            copy_ms = getattr(now, f"{direction}_copy_ms") - getattr(before, f"{direction}_copy_ms")
            if copy_ms > 0:
                rates[f"{direction}_gb_per_second"] = copied_bytes / GB / (1e-3 * copy_ms)
        step_seconds = now.step_seconds - before.step_seconds
        if step_seconds > 0:
            parameters = now.stepped_parameters - before.stepped_parameters
            rates["host_step_gparams_per_second"] = 1e-9 * parameters / step_seconds
        return rates

    def close(self) -> None:
        """Stops counting tokens."""
        self._tokens.handle.remove()
