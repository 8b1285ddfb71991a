"""The traced step as a picture: one lane a stream or thread, coloured by what it does, layers numbered where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.tracing.timeline import COMPUTE, OTHER, Span, Timeline, length

COLOURS = {
    "forward": "#4c9be8",
    "recompute": "#9fc9f2",
    "backward": "#f08c3c",
    "copy of weights": "#57b36a",
    "copy of gradients": "#b06fc4",
    "host step": "#c9463d",
    "wait": "#e4e4e4",
    OTHER: "#a08d7a",
}
SMALLEST_GAP = 1e-3
"""Spans of one kind and layer that are less than this share of the period apart are drawn as one."""
ROOM_FOR_A_NUMBER = 0.011
"""Share of the period below which a span is too narrow for its layer's number."""


def merged(spans: Sequence[Span], gap_us: float) -> list[Span]:
    """Neighbours of one kind and layer as one span."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.unit) == (span.kind, span.unit) and span.start - last.end <= gap_us:
            joined[-1] = Span(last.start, max(last.end, span.end), span.kind, span.unit)
        else:
            joined.append(span)
    return joined


def title(timeline: Timeline) -> str:
    """Step, its time, and what share of it each lane worked."""
    shares = ", ".join(f"{lane} {length(timeline.busy(lane)) / timeline.period_us:.0%}" for lane in timeline.lanes)
    info = timeline.info
    idle = f"; GPU idle {1 - length(timeline.busy(COMPUTE)) / timeline.period_us:.0%}" if COMPUTE in timeline.lanes else ""
    period_ms = timeline.period_us / 1e3
    return f"Step {info['step']} on {info['device']}: {period_ms:.1f} ms (profiled), {info['bound']}\n{shares}{idle}"


def draw(timeline: Timeline, path: Path) -> None:
    """Writes the picture.

    Raises:
        UnsupportedError: matplotlib isn't installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UnsupportedError(
            f"the picture needs matplotlib, which can't be imported ({error}): pip install matplotlib, or open the Perfetto "
            "file at ui.perfetto.dev"
        ) from error
    # Not pyplot: that would choose a backend, and keep the figure.
    figure = Figure(figsize=(16, 1.6 + 0.75 * len(timeline.lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    used = []
    for row, spans in enumerate(timeline.lanes.values()):
        for span in merged(spans, SMALLEST_GAP * timeline.period_us):
            axes.broken_barh(
                [(span.start / 1e3, (span.end - span.start) / 1e3)], (row - 0.4, 0.8), facecolors=COLOURS[span.kind]
            )
            if span.kind not in used:
                used.append(span.kind)
            if span.layer_number and span.end - span.start >= ROOM_FOR_A_NUMBER * timeline.period_us:
                middle = (span.start + span.end) / 2e3
                axes.text(middle, row, span.layer_number, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(timeline.lanes)), list(timeline.lanes))
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.period_us / 1e3)
    axes.set_xlabel("ms since optimizer.step() of the step before was called")
    axes.set_title(title(timeline), fontsize=10)
    figure.legend(
        handles=[Patch(color=COLOURS[k], label=k) for k in COLOURS if k in used], loc="outside lower center", ncols=8
    )
    figure.savefig(path, dpi=130)
