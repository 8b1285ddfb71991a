"""One step of a training as lanes of named spans, made of the profiler's trace and of what the training process noted.

The step is drawn as one period: from one ``optimizer.step()`` to the next. In it lie the work that the first of the two
left to the host (it runs under the forward that follows), one forward, one backward, and clipping.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.tracing.request import CLOCK_MARK

Event = dict[str, Any]
Interval = tuple[float, float]

COMPUTE, H2D, D2H = "compute", "h2d", "d2h"
LAUNCHER, AUTOGRAD, WORKER = "launcher thread", "autograd thread", "megatrain-step-worker"
LANES = (COMPUTE, H2D, D2H, LAUNCHER, AUTOGRAD, WORKER)
"""In the order in which they are drawn; the first three are streams of a GPU."""

KINDS = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "offload_gradients": "backward",
    "prefetch": "copy of weights",
    "push_weights": "copy of weights",
    "copy_gradients": "copy of gradients",
    "step": "host step",
    "accumulate": "host step",
    "wait_for_step": "wait",
    "wait_for_gradients": "wait",
}
"""What the engine's spans show, by their name: ``megatrain::NAME (LAYER)``."""
OTHER = "outside the layers"
_SPAN_NAME = re.compile(r"megatrain::(\w+)(?: \((.*)\))?$")


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that a lane does, in microseconds since the period began."""

    start: float
    end: float
    kind: str
    unit: str
    """The layer or resident that it is about; empty if none."""

    @property
    def layer_number(self) -> str:
        """The layer's index as text, or nothing."""
        found = re.search(r"\.(\d+)$", self.unit)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One traced step.

    Attributes:
        info: what the training process noted: step, device, shares, waits.
        period_us: length of the period.
        lanes: spans by lane, sorted; lanes that don't exist are left out.
    """

    info: dict[str, Any]
    period_us: float
    lanes: dict[str, list[Span]]

    def busy(self, lane: str) -> list[Interval]:
        """When the lane worked: disjoint, sorted. Waiting isn't work."""
        return union((span.start, span.end) for span in self.lanes.get(lane, []) if span.kind != "wait")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals that cover the same points."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Summed length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(ours: Sequence[Interval], theirs: Sequence[Interval]) -> float:
    """Length of what two lists of sorted, disjoint intervals have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        total += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return total


def parse_name(name: str) -> tuple[str, str]:
    """(kind, unit) of an engine's span; other names are outside the layers."""
    found = _SPAN_NAME.match(name)
    return (KINDS.get(found.group(1), OTHER), found.group(2) or "") if found else (OTHER, "")


def clock_offset_us(events: Sequence[Event], marks_ns: Sequence[int]) -> float:
    """What is to be added to the host's clock (``perf_counter_ns``, in microseconds) to get the trace's.

    The clock was read within each mark's span, so that no span ends before its reading: the tightest counts.

    Raises:
        StateError: the trace hasn't as many marks as were made.
    """
    ends = sorted(event["ts"] + event["dur"] for event in events if event.get("name") == CLOCK_MARK and event.get("ph") == "X")
    if not marks_ns or len(ends) != len(marks_ns):
        raise StateError(
            f"the trace has {len(ends)} clock marks and not {len(marks_ns)}: the profiler dropped events; trace "
            "another step, or a smaller batch"
        )
    return min(end - mark / 1e3 for end, mark in zip(ends, sorted(marks_ns), strict=True))


class _Annotations:
    """The engine's spans by thread, to look up in which of them something was launched."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.by_thread: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            name = event.get("name", "")
            if event.get("cat") == "user_annotation" and name.startswith("megatrain::") and name != CLOCK_MARK:
                self.by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"], name))
        for spans in self.by_thread.values():
            spans.sort()

    def innermost(self, thread: int, time_us: float) -> str:
        """The name of the span that began last among those around the time; empty if there is none."""
        spans = self.by_thread.get(thread, [])
        position = bisect.bisect_right(spans, (time_us, float("inf"), ""))
        return next((name for start, end, name in reversed(spans[:position]) if end >= time_us), "")


def _device_work(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event.get("ph") == "X"]


def stream_names(work: Sequence[Event]) -> dict[tuple[Any, Any], str]:
    """(pid, tid) of each stream -> its name, told by what ran on it: most of the kernels, or of one direction's copies."""
    time_of: dict[str, dict[tuple[Any, Any], float]] = {COMPUTE: {}, H2D: {}, D2H: {}}
    for event in work:
        kind = (
            COMPUTE if event["cat"] == "kernel" else H2D if "HtoD" in event["name"] else D2H if "DtoH" in event["name"] else ""
        )
        if kind:
            stream = (event["pid"], event["tid"])
            time_of[kind][stream] = time_of[kind].get(stream, 0.0) + event["dur"]
    names: dict[tuple[Any, Any], str] = {}
    for kind, times in time_of.items():
        left = {stream: spent for stream, spent in times.items() if stream not in names}
        if left:
            names[max(left, key=lambda stream: left[stream])] = kind
    return names


def _device_lanes(events: Sequence[Event], annotations: _Annotations) -> dict[str, list[Event]]:
    """Engine spans' names for what the device ran, by lane; each as an event with ``name``, ``ts`` and ``dur``."""
    work = _device_work(events)
    names = stream_names(work)
    launches = {
        event["args"]["correlation"]: (event["tid"], event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    lanes: dict[str, list[Event]] = defaultdict(list)
    for event in work:
        lane = names.get((event["pid"], event["tid"]))
        if lane is not None:
            launch = launches.get(event.get("args", {}).get("correlation"))
            name = annotations.innermost(*launch) if launch else ""
            if not name and lane in (H2D, D2H):
                # Residents' weights are pushed by a thread that the profiler doesn't follow.
                name = "megatrain::push_weights" if lane == H2D else "megatrain::copy_gradients"
            lanes[lane].append({"name": name, "ts": event["ts"], "dur": event["dur"]})
    return lanes


def _thread_names(annotations: _Annotations, info: dict[str, Any]) -> dict[int, str]:
    names = {info["threads"][LAUNCHER]: LAUNCHER, info["threads"][WORKER]: WORKER}
    for thread, spans in annotations.by_thread.items():
        if thread not in names and any(parse_name(name)[0] == "backward" for _, _, name in spans):
            names[thread] = AUTOGRAD
    return names


def build(events: Sequence[Event], info: dict[str, Any]) -> tuple[Timeline, list[Event]]:
    """The timeline of the traced step, and the events for Perfetto: those of the period, streams and threads named.

    Args:
        events: ``traceEvents`` of the profiler.
        info: see :class:`~megatrain_accelerate.integrations.telemetry.StepTrace`.

    Raises:
        StateError: the trace and the notes don't belong together.
    """
    offset = clock_offset_us(events, info["marks_ns"])
    begin, end = info["begin_ns"] / 1e3 + offset, info["end_ns"] / 1e3 + offset
    worker_events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"megatrain::{name}",
            "pid": info["pid"],
            "tid": info["threads"][WORKER],
            "ts": start_ns / 1e3 + offset,
            "dur": (end_ns - start_ns) / 1e3,
        }
        for name, start_ns, end_ns in info["worker_spans"]
    ]
    annotations = _Annotations(events)
    threads = _thread_names(annotations, info)
    lanes = _device_lanes(events, annotations)
    for thread, name in threads.items():
        spans = annotations.by_thread.get(thread, [])
        lanes[name] += [{"name": label, "ts": start, "dur": stop - start} for start, stop, label in spans]
    lanes[WORKER] += worker_events

    found: dict[str, list[Span]] = {}
    for lane in LANES:
        drawn = [
            Span(max(0.0, event["ts"] - begin), min(end, event["ts"] + event["dur"]) - begin, *parse_name(event["name"]))
            for event in lanes.get(lane, [])
            if event["ts"] < end and event["ts"] + event["dur"] > begin
        ]
        if drawn:
            found[lane] = sorted(drawn, key=lambda span: (span.start, -span.end))
    kept = [event for event in [*events, *worker_events] if _in_period(event, begin, end)]
    named = _named(kept, threads, stream_names(_device_work(events)), info)
    return Timeline(info, end - begin, found), named


def _in_period(event: Event, begin: float, end: float) -> bool:
    if event.get("ph") == "M":
        return True
    if event.get("name") == CLOCK_MARK:
        return False
    return event.get("ts", 0.0) < end and event.get("ts", 0.0) + event.get("dur", 0.0) > begin


def _named(
    events: list[Event], threads: dict[int, str], streams: dict[tuple[Any, Any], str], info: dict[str, Any]
) -> list[Event]:
    names: dict[tuple[Any, Any], str] = {(info["pid"], thread): name for thread, name in threads.items()} | streams
    own = ("thread_name", "thread_sort_index")
    kept = [e for e in events if not (e.get("ph") == "M" and e["name"] in own and (e["pid"], e["tid"]) in names)]
    for (pid, tid), name in names.items():
        for key, value in (("name", name), ("sort_index", LANES.index(name))):
            kept.append({"ph": "M", "name": f"thread_{key}", "pid": pid, "tid": tid, "ts": 0, "args": {key: value}})
    return kept


def format_summary(timeline: Timeline) -> str:
    """A short table: what each lane did, what was hidden, and what bounded the step."""
    info, period_ms = timeline.info, timeline.period_us / 1e3
    lines = [
        f"step {info['step']} on {info['device']}: {period_ms:.2f} ms from one optimizer.step() to the next, profiled",
        f"{'lane':<24}{'busy, ms':>10}{'share':>8}",
    ]
    for lane in timeline.lanes:
        busy_ms = length(timeline.busy(lane)) / 1e3
        lines.append(f"{lane:<24}{busy_ms:>10.2f}{busy_ms / period_ms:>8.0%}")
    if COMPUTE in timeline.lanes:
        compute = timeline.busy(COMPUTE)
        idle_ms = period_ms - length(compute) / 1e3
        lines.append(f"{'GPU idle':<24}{idle_ms:>10.2f}{idle_ms / period_ms:>8.0%}")
        for lane in (H2D, D2H):
            copies = timeline.busy(lane)
            if copies:
                hidden = overlap(copies, compute)
                share = f"{hidden / length(copies):>8.0%} of the copies"
                lines.append(f"{f'{lane} under compute':<24}{hidden / 1e3:>10.2f}{share}")
    return "\n".join([*lines, f"the step {info['bound']}"])
