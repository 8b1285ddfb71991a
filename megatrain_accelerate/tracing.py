"""A traced step: how ``megatrain trace`` asks for it, its lanes of named spans, table and picture. Lanes are made from the
profiler's trace and the process's own notes. They cover one period, from one ``optimizer.step()`` to the next: the host work
of the first (during the forward that follows), one forward, one backward, and clipping."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_accelerate.errors import UnsupportedError

ENV_TRACE_DIR = "MEGATRAIN_TRACE_DIR"
"""Environment variable with the folder for the trace. A process without it isn't traced."""
ENV_TRACE_STEP = "MEGATRAIN_TRACE_STEP"
"""Environment variable with the optimizer step to trace, counted from 1."""
DEFAULT_STEP = 5
RAW_TRACE = "raw_trace.json.gz"
"""The profiler's own trace. It appears when it is complete, and is deleted once the Perfetto file is made from it."""
NOTES = "megatrain"
"""The key in the raw trace of what the profiler doesn't know."""
PERFETTO_TRACE = "trace.perfetto.json.gz"
PICTURE = "timeline.png"

Event = dict[str, Any]
Interval = tuple[float, float]
_Named = tuple[float, float, str]
"""Start, end and name of something that an engine's thread or the device did."""
_Place = tuple[Any, Any]
"""Process and thread, or process and stream."""

COMPUTE, H2D, D2H = "compute", "h2d", "d2h"
LAUNCHER, AUTOGRAD, WORKER = "launcher thread", "autograd thread", "megatrain-step-worker"
LANES = (COMPUTE, H2D, D2H, LAUNCHER, AUTOGRAD, WORKER)
"""The lanes in drawing order. The first three are streams of a GPU."""

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
    "loss_tile": "loss",
}
"""The kind of each of the engine's spans, by NAME of ``megatrain::NAME (LAYER)``."""
LOSS = "loss"
OTHER = "outside the layers"
COLOURS = {
    "forward": "#4c9be8",
    "recompute": "#9fc9f2",
    "backward": "#f08c3c",
    "copy of weights": "#57b36a",
    "copy of gradients": "#b06fc4",
    "host step": "#c9463d",
    "wait": "#e4e4e4",
    LOSS: "#e3c446",
    OTHER: "#a08d7a",
}
ROOM_FOR_A_LABEL = 0.011
"""Share of the period below which a run of spans of one kind and layer is too narrow for a label."""
_SPAN_NAME = re.compile(r"megatrain::(\w+)(?: \((.*)\))?$")


class Span(NamedTuple):
    """One activity of a lane. Times are in microseconds since the period began."""

    start: float
    end: float
    kind: str
    unit: str
    """The layer or resident that it is about; empty if none."""

    @property
    def label(self) -> str:
        """The text in the span, if it fits: the number of its layer, or ``loss``."""
        last = self.unit.rpartition(".")[2]
        return LOSS if self.kind == LOSS else (last if last.isdecimal() else "")


class Timeline(NamedTuple):
    info: dict[str, Any]
    """Notes of the training process: step, device, shares, waits."""
    period_us: float
    lanes: dict[str, list[Span]]
    """Sorted spans by lane, without empty lanes."""

    def busy(self, lane: str) -> list[Interval]:
        """The disjoint, sorted intervals in which the lane worked. Waits don't count."""
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
    """Length of the intersection of two lists of disjoint intervals."""
    return length(ours) + length(theirs) - length(union([*ours, *theirs]))


def parse_name(name: str) -> tuple[str, str]:
    """(kind, unit) of a span, by its name. Names that aren't the engine's are outside the layers."""
    found = _SPAN_NAME.match(name)
    return (KINDS.get(found.group(1), OTHER), found.group(2) or "") if found else (OTHER, "")


def _annotations(events: Sequence[Event]) -> dict[int, list[_Named]]:
    found: dict[int, list[_Named]] = defaultdict(list)
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "user_annotation" and name.startswith("megatrain::"):
            found[event["tid"]].append((event["ts"], event["ts"] + event["dur"], name))
    return {thread: sorted(spans) for thread, spans in found.items()}


def _innermost(spans: Sequence[_Named], time_us: float) -> str:
    """The name of the innermost span around a time, which is the one that began last. Empty if there is none."""
    position = bisect.bisect_right(spans, (time_us, float("inf"), ""))
    return next((name for start, end, name in reversed(spans[:position]) if end >= time_us), "")


def _stream_names(work: Sequence[Event]) -> dict[_Place, str]:
    """The lane of each stream: the stream with most time in kernels, and those with most in copies of each direction."""
    time_of: dict[str, dict[_Place, float]] = {lane: defaultdict(float) for lane in (COMPUTE, H2D, D2H)}
    for event in work:
        copies = [lane for lane, way in ((H2D, "HtoD"), (D2H, "DtoH")) if way in event["name"]]
        for lane in [COMPUTE] if event["cat"] == "kernel" else copies:
            time_of[lane][event["pid"], event["tid"]] += event["dur"]
    names: dict[_Place, str] = {}
    for lane, times in time_of.items():
        if left := [stream for stream in times if stream not in names]:
            names[max(left, key=times.__getitem__)] = lane
    return names


def _device_lanes(
    events: Sequence[Event], work: Sequence[Event], streams: dict[_Place, str], annotations: dict[int, list[_Named]]
) -> dict[str, list[_Named]]:
    """What the device ran, by lane. Each item is named by the engine's span in which it was launched."""
    launches = {
        event["args"]["correlation"]: (event["tid"], event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    lanes: dict[str, list[_Named]] = defaultdict(list)
    for event in work:
        if (lane := streams.get((event["pid"], event["tid"]))) is not None:
            thread, launched = launches.get(event.get("args", {}).get("correlation"), (-1, 0.0))
            name = _innermost(annotations.get(thread, []), launched)
            # Weights of residents are pushed by the step worker, a thread that the profiler doesn't follow.
            name = name or {H2D: "megatrain::push_weights", D2H: "megatrain::copy_gradients"}.get(lane, "")
            lanes[lane].append((event["ts"], event["ts"] + event["dur"], name))
    return lanes


def build(trace: dict[str, Any]) -> tuple[Timeline, list[Event]]:
    """The timeline of the traced step, and the period's events for Perfetto, with names for streams and threads. ``trace`` is
    the profiler's trace, with the notes of :mod:`~megatrain_accelerate.integrations.telemetry`."""
    events, info = trace["traceEvents"], trace[NOTES]
    # The profiler's times count from its base time, which is Unix time.
    offset = (info["clock_to_unix_ns"] - trace["baseTimeNanoseconds"]) / 1e3
    begin, end = info["begin_ns"] / 1e3 + offset, info["end_ns"] / 1e3 + offset
    pid, launcher, worker = info["pid"], info["threads"][LAUNCHER], info["threads"][WORKER]
    of_worker = {"ph": "X", "cat": "user_annotation", "pid": pid, "tid": worker}
    worker_events = [
        {**of_worker, "name": f"megatrain::{name}", "ts": start_ns / 1e3 + offset, "dur": (end_ns - start_ns) / 1e3}
        for name, start_ns, end_ns in info["worker_spans"]
    ]
    annotations = _annotations(events)
    threads = {launcher: LAUNCHER, worker: WORKER}
    for thread, spans in annotations.items():
        if any(parse_name(name)[0] == "backward" for _, _, name in spans):
            threads.setdefault(thread, AUTOGRAD)
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event.get("ph") == "X"]
    streams = _stream_names(work)
    lanes = _device_lanes(events, work, streams, annotations)
    for thread, spans in (annotations | _annotations(worker_events)).items():
        if thread in threads:
            lanes[threads[thread]] += spans

    found: dict[str, list[Span]] = {}
    for lane in LANES:
        drawn = [
            Span(max(0.0, start - begin), min(end, stop) - begin, *parse_name(name))
            for start, stop, name in lanes.get(lane, [])
            if start < end and stop > begin
        ]
        if drawn:
            found[lane] = sorted(drawn, key=lambda span: (span.start, -span.end))
    names: dict[_Place, str] = {(pid, thread): name for thread, name in threads.items()} | streams

    def is_shown(event: Event) -> bool:
        if event.get("ph") == "M":
            return event["name"] not in ("thread_name", "thread_sort_index") or (event["pid"], event["tid"]) not in names
        start = event.get("ts", 0.0)
        return start < end and start + event.get("dur", 0.0) > begin

    shown = [event for event in [*events, *worker_events] if is_shown(event)]
    for (process, thread), name in names.items():
        for key, value in (("name", name), ("sort_index", LANES.index(name))):
            place = {"pid": process, "tid": thread, "ts": 0}
            shown.append({"ph": "M", "name": f"thread_{key}", **place, "args": {key: value}})
    return Timeline(info, end - begin, found), shown


def format_summary(timeline: Timeline) -> str:
    info, period_ms = timeline.info, timeline.period_us / 1e3
    lines = [
        f"step {info['step']} on {info['device']}: {period_ms:.2f} ms from one optimizer.step() to the next, profiled",
        f"{'lane':<24}{'busy, ms':>10}{'share':>8}",
    ]
    times_ms = {lane: length(timeline.busy(lane)) / 1e3 for lane in timeline.lanes}
    if COMPUTE in times_ms:
        times_ms["GPU idle"] = period_ms - times_ms[COMPUTE]
    lines += [f"{name:<24}{time_ms:>10.2f}{time_ms / period_ms:>8.0%}" for name, time_ms in times_ms.items()]
    for lane in (H2D, D2H) if COMPUTE in times_ms else ():
        if copies := timeline.busy(lane):
            hidden = overlap(copies, timeline.busy(COMPUTE))
            share = f"{hidden / length(copies):>8.0%} of the copies"
            lines.append(f"{f'{lane} under compute':<24}{hidden / 1e3:>10.2f}{share}")
    return "\n".join([*lines, f"the step {info['bound']}"])


def empty_figure(size: tuple[float, float], needs: str, remedy: str) -> Any:
    """An empty matplotlib figure. Not made by pyplot, which would choose a backend, and keep the figure. Without matplotlib
    raises an ``UnsupportedError`` that says what ``needs`` it, and the other ``remedy``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(f"{needs} needs matplotlib ({error}): pip install matplotlib, or {remedy}") from error
    return Figure(figsize=size, layout="constrained")


def draw(timeline: Timeline, path: Path) -> None:
    """Draws the picture into a file. Raises as :func:`empty_figure` does."""
    size = (16, 1.6 + 0.75 * len(timeline.lanes))
    figure = empty_figure(size, "the picture", "open the Perfetto file at ui.perfetto.dev")
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    info, period_us = timeline.info, timeline.period_us
    title = f"Step {info['step']} on {info['device']}: {period_us / 1e3:.1f} ms (profiled), {info['bound']}"
    for row, spans in enumerate(timeline.lanes.values()):
        times = [(span.start / 1e3, (span.end - span.start) / 1e3) for span in spans]
        axes.broken_barh(times, (row - 0.4, 0.8), facecolors=[COLOURS[span.kind] for span in spans])
        for _, group in itertools.groupby(spans, key=lambda span: (span.kind, span.unit)):
            first, *others = group
            start, end = first.start, max(span.end for span in (first, *others))
            if first.label and end - start >= ROOM_FOR_A_LABEL * period_us:
                axes.text((start + end) / 2e3, row, first.label, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(timeline.lanes)), list(timeline.lanes))
    axes.invert_yaxis()
    axes.set_xlim(0, period_us / 1e3)
    axes.set_xlabel("ms since optimizer.step() of the step before was called")
    axes.set_title(title, fontsize=10)
    used = {span.kind for spans in timeline.lanes.values() for span in spans}
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=8)
    figure.savefig(path, dpi=130)
