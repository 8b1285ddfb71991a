"""The engine's figures under ``megatrain/`` in the Trainer's logs, and the trace of one step. A hook on the optimizer's steps
traces the Trainer and bare loops of Accelerate alike. torch's profiler doesn't follow the step worker's thread, whose spans
are therefore timed by the host's clock."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.hooks import ModelHook, weakly
from megatrain_accelerate.layers.policy import Placement
from megatrain_accelerate.plan.layer_discovery import active_parameters
from megatrain_accelerate.store.host_limits import process_bytes
from megatrain_accelerate.tracing import DEFAULT_STEP, ENV_TRACE_DIR, ENV_TRACE_STEP, LAUNCHER, NOTES, RAW_TRACE, WORKER
from megatrain_accelerate.transfer.meter import Cause, Counters
from megatrain_accelerate.units import GB, GIB

PREFIX = "megatrain/"
"""The prefix of the engine's entries in the Trainer's logs."""

_SHOWN = {"tokens_per_second": "tokens_per_second", "gpu_peak_gib": "gpu_gib", "host_peak_gib": "host_gib"}
"""The entries that are printed on the console, with their names there."""
_SETTLED_STEPS = 10
"""What bounds a step is said once it has been the same for so many steps in a row, none of them with planning."""


def is_training_log(logs: Mapping[str, Any]) -> bool:
    """Whether a log entry has a training loss, and isn't one of an evaluation or of the training's end."""
    names = list(_names(logs))
    is_of_else = any(name.startswith(("eval", "test")) or name.endswith("_runtime") for name in names)
    return not is_of_else and any(name.endswith("loss") for name in names)


def _names(logs: Mapping[str, Any]) -> Iterator[str]:
    for name, value in logs.items():
        yield name
        if isinstance(value, Mapping):
            yield from _names(value)


def counters_of(engine: Engine) -> Counters:
    """A copy of an engine's counters, in which all timing events that are over are counted."""
    engine.runtime.meter.harvest()
    return dataclasses.replace(engine.runtime.meter.counters)


def difference(now: Counters, before: Counters) -> Counters:
    """The counts between two states of the counters."""
    return Counters(**{name: count - getattr(before, name) for name, count in vars(now).items()})


def wait_ms_by_cause(counters: Counters) -> dict[str, float]:
    """Milliseconds for which the compute stream stood still, by :class:`.meter.Cause`."""
    return {cause.value: getattr(counters, f"{cause.value}_wait_ms") for cause in Cause}


def bound_shares(wait_ms: dict[str, float], step_ms: float) -> dict[str, float]:
    """The shares of a step in which the GPU worked (``compute``, which includes launching and the data loader) or stood still
    for each other resource. The end of backward counts as d2h. A wait is read once it is over, perhaps in the step after:
    waits that add up to more than ``step_ms`` (above 0) are scaled down to it."""
    waits = {"h2d": wait_ms["h2d"], "d2h": wait_ms["d2h"] + wait_ms["backward_end"], "host_step": wait_ms["host_step"]}
    whole = max(step_ms, sum(waits.values()))
    shares = {name: waited / whole for name, waited in waits.items()}
    return {"compute": 1.0 - sum(shares.values()), **shares}


def bound_by(shares: dict[str, float]) -> str:
    """The resource with the largest share of a step."""
    return max(shares, key=lambda name: shares[name])


def describe_bound(shares: dict[str, float]) -> str:
    """The shares in words: ``is bound by h2d (h2d 61%, compute 30%, d2h 9%)``."""
    ordered = sorted((name for name in shares if shares[name] >= 0.005), key=lambda name: -shares[name])
    return f"is bound by {bound_by(shares)} ({', '.join(f'{name} {shares[name]:.0%}' for name in ordered)})"


class Telemetry:
    """Turns an engine's counters into log entries, for the optimizer steps since the last entries. Sums are per step."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self.engine = engine
        """The model's current engine. A later one goes on counting where the one before it ended."""
        self._active_parameters = active_parameters(model)
        self._tokens: torch.Tensor | int = 0
        hook = ModelHook(weakly(self._count_tokens), with_arguments=True)
        self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        self._before = counters_of(engine)
        self._seconds = 0.0
        self._steps = 0
        self._mark: float | None = None
        self._logged_placement: Placement | None = None
        self._last_entries: dict[str, float] = {}
        self._steps_bound = 0
        self.shares: dict[str, float] = {}
        """:func:`bound_shares` of the steps of the last entries. Empty before the first."""
        self.is_within_step = False

    def _count_tokens(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts the tokens of a training forward on the device, without padding and without waiting. Needs a 2-D
        ``attention_mask``, ``input_ids`` or ``inputs_embeds``, by keyword or in a mapping that is the first argument."""
        if not (model.training and torch.is_grad_enabled()):
            return
        inputs = {**args[0], **kwargs} if args and isinstance(args[0], Mapping) else kwargs
        mask, ids, embeddings = (inputs.get(name) for name in ("attention_mask", "input_ids", "inputs_embeds"))
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self._tokens = self._tokens + mask.sum()
        elif isinstance(ids, torch.Tensor):
            self._tokens = self._tokens + ids.numel()
        elif isinstance(embeddings, torch.Tensor):
            self._tokens = self._tokens + embeddings.shape[0] * embeddings.shape[1]

    @property
    def bound_by(self) -> str | None:
        """What bounds a step, or None until it has been the same for :data:`_SETTLED_STEPS` steps."""
        return bound_by(self.shares) if self._steps_bound >= _SETTLED_STEPS else None

    def step_begins(self) -> None:
        """Starts the clock of training time. The time between two steps counts, too, unless :meth:`pause` was called."""
        self.is_within_step = True
        if self._mark is None:
            self._mark = time.perf_counter()

    def step_ends(self) -> None:
        now = time.perf_counter()
        if self._mark is not None:
            self._seconds += now - self._mark
        self._mark = now
        self._steps += 1
        self.is_within_step = False

    def pause(self) -> None:
        """Called at an evaluation or a save: the time until the next step begins isn't training time."""
        self._mark = None

    def entries(self) -> dict[str, float]:
        """The log entries of the steps since the last call; the last ones again if no step has ended since."""
        if self._steps == 0:
            return self._last_entries
        now = counters_of(self.engine)
        since, self._before = difference(now, self._before), now
        steps, self._steps = self._steps, 0
        seconds, self._seconds = self._seconds, 0.0
        tokens, self._tokens = int(self._tokens), 0  # waits for the device
        values = {
            "h2d_gb": since.h2d_bytes / GB / steps,
            "d2h_gb": since.d2h_bytes / GB / steps,
            "copy_wait_ms": (since.h2d_wait_ms + since.d2h_wait_ms) / steps,
            "optimizer_wait_ms": since.optimizer_wait_ms / steps,
            "skipped_steps": float(now.skipped_steps),
            "host_peak_gib": process_bytes("VmHWM") / GIB,  # the largest resident set so far, registered memory included
        }
        wait_ms = {name: waited / steps for name, waited in wait_ms_by_cause(since).items()}
        values |= {f"gpu_wait_{name}_ms": waited for name, waited in wait_ms.items()}
        for link in ("h2d", "d2h"):  # while it copied
            if (copy_ms := getattr(since, f"{link}_copy_ms")) > 0:
                values[f"{link}_gb_per_second"] = getattr(since, f"{link}_copied_bytes") / GB / (1e-3 * copy_ms)
        if since.step_seconds > 0:
            values["host_step_gparams_per_second"] = 1e-9 * since.stepped_parameters / since.step_seconds
        if is_planned := since.plan_seconds > 0:
            values["plan_seconds"] = since.plan_seconds
        if seconds > 0:
            earlier, self.shares = self.shares, bound_shares(wait_ms, 1e3 * seconds / steps)
            is_as_before = bool(earlier) and bound_by(earlier) == bound_by(self.shares)
            self._steps_bound = 0 if is_planned else steps + (self._steps_bound if is_as_before else 0)
            values |= {f"bound_share_{name}": share for name, share in self.shares.items()}
            if tokens > 0:  # there are none for images, and for inputs by unknown names
                values["tokens_per_second"] = tokens / seconds
                values["tflops"] = 6e-12 * self._active_parameters * tokens / seconds
        plan = self.engine.device_plan
        if (predicted := plan.current.predicted_time) is not None:
            values["predicted_step_ms"] = 1e3 * predicted.seconds
        placement = plan.current.placement
        if placement != self._logged_placement:  # once for each plan is enough
            self._logged_placement = placement
            values |= {f"host_{kind}_gib": count / GIB for kind, count in self.engine.host_bytes_by_kind().items()}
            values |= {f"gpu_{kind}_gib": count / GIB for kind, count in plan.budget.held_bytes_by_kind().items()}
            lists = {"kept": placement.kept, "offloaded": placement.offloaded, "device": placement.on_device}
            lists |= {"stepped_on_device": placement.on_device | placement.states_on_device}
            values |= {f"{name}_layers": float(len(layers)) for name, layers in lists.items()}
        if self.engine.device.type == "cuda":
            values["gpu_predicted_gib"] = plan.predicted_peak_bytes / GIB
            values["gpu_peak_gib"] = torch.cuda.max_memory_allocated(self.engine.device) / GIB
        self._last_entries = {f"{PREFIX}{name}": round(value, 4) for name, value in values.items()}
        return self._last_entries

    def close(self) -> None:
        self._handle.remove()


def on_log(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Passes a shorter copy of the logs to ``on_log`` of a callback that prints. Trackers and history keep all entries."""
    logs = kwargs.get("logs") or {}
    if any(name.startswith(PREFIX) for name in logs):
        short = {name: value for name, value in logs.items() if not name.startswith(PREFIX)}
        for name, shown in _SHOWN.items():
            if PREFIX + name in logs:
                short.setdefault(shown, logs[PREFIX + name])  # the script may log something of that name itself
        kwargs["logs"] = short
    original(*args, **kwargs)


_hook: RemovableHandle | None = None
"""The hook on the steps of the optimizer that is traced."""
_trace_began = False


def trace_if_asked(optimizer: Optimizer, engine: Engine) -> None:
    """Traces a step of this optimizer if the process was asked to. The optimizer that was prepared last is traced, on the
    first of several ranks."""
    global _hook
    folder, ranks = os.environ.get(ENV_TRACE_DIR), engine.runtime.ranks
    if not folder or (ranks is not None and ranks.rank) or _trace_began:
        return
    if _hook is not None:
        _hook.remove()
    trace = _trace(engine, Path(folder), int(os.environ.get(ENV_TRACE_STEP, DEFAULT_STEP)))
    _hook = optimizer.register_step_pre_hook(lambda *_: next(trace, None))


def _trace(engine: Engine, folder: Path, step: int) -> Iterator[None]:
    """Resumed when a step begins: profiles the period that ends when ``step`` (from 2) is submitted, and writes its trace. The
    period before, if any, is profiled too and thrown away, since a profiler's first events are slow."""
    global _trace_began
    for _ in range(step - 3):
        yield
    _trace_began = True
    has_gpu = engine.device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * has_gpu)
    profiler.start()
    worker_spans: list[tuple[str, int, int]] = []
    engine.runtime.worker.on_work_done = lambda *span: worker_spans.append(span)
    if step > 2:
        yield
    counters = counters_of(engine)
    begin_ns = time.perf_counter_ns()
    yield
    end_ns = time.perf_counter_ns()
    engine.runtime.worker.on_work_done = None
    if has_gpu:
        torch.cuda.synchronize(engine.device)
    wait_ms = wait_ms_by_cause(difference(counters_of(engine), counters))
    shares = bound_shares(wait_ms, (end_ns - begin_ns) / 1e6)
    notes = {
        "step": step,
        "device": torch.cuda.get_device_name(engine.device) if has_gpu else "the CPU",
        "pid": os.getpid(),
        "threads": {LAUNCHER: threading.get_native_id(), WORKER: engine.runtime.worker.thread.native_id},
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "clock_to_unix_ns": time.time_ns() - time.perf_counter_ns(),
        "worker_spans": worker_spans,
        "wait_ms": wait_ms,
        "shares": shares,
        "bound": describe_bound(shares),
    }
    profiler.add_metadata_json(NOTES, json.dumps(notes))
    profiler.stop()
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"partial_{RAW_TRACE}"
    profiler.export_chrome_trace(str(partial))
    partial.rename(folder / RAW_TRACE)
