"""How much of the copy time in a Chrome trace lies under compute: `python trace_overlap.py TRACE.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals that cover the same points."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(interval: Interval, cover: list[Interval]) -> float:
    """Length of the part of ``interval`` that lies in ``cover``."""
    return sum(max(0.0, min(interval[1], end) - max(interval[0], start)) for start, end in cover)


def summarise(events: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of kernels and of copies over the link, and the share of each copy direction under kernels."""
    kernels, copies = [], {"HtoD": [], "DtoH": []}  # type: ignore[var-annotated]
    for event in events:
        if event.get("ph") != "X":
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy":
            for direction in copies:
                if direction in event["name"]:
                    copies[direction].append(span)
    cover = union(kernels)
    result = {"kernel_ms": sum(end - start for start, end in cover) / 1e3}
    if kernels:
        result["kernel_span_ms"] = (cover[-1][1] - cover[0][0]) / 1e3
    total = under = 0.0
    for direction, spans in copies.items():
        length = sum(end - start for start, end in spans)
        hidden = sum(covered(span, cover) for span in spans)
        total, under = total + length, under + hidden
        result[f"{direction}_ms"] = length / 1e3
        result[f"{direction}_hidden_share"] = hidden / length if length else 1.0
    result["hidden_share"] = under / total if total else 1.0
    return {name: round(value, 4) for name, value in result.items()}


def main() -> None:
    """Reads a trace and prints the summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    print(json.dumps(summarise(json.loads(parser.parse_args().trace.read_text())["traceEvents"])))


if __name__ == "__main__":
    main()
