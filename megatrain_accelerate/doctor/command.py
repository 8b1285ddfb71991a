"""``megatrain doctor``: its arguments, the order of its checks, and the report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.doctor import checks
from megatrain_accelerate.doctor.checks import Finding, found_by

_WIDTH = 120
_MARKS = {"ok": "ok", "note": "note", "slow": "SLOW", "broken": "BROKEN"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("."), metavar="DIR", help="where checkpoints will go")
    parser.add_argument("--no-speed", action="store_true", help="measure nothing: look only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Prints the report; the exit status is 1 if something keeps training from running."""
    findings = list(examine(options.folder, measures=not options.no_speed))
    print(json.dumps(as_json(findings), indent=2) if options.json else table(findings))
    return int(any(finding.state == "broken" for finding in findings))


def examine(folder: Path, measures: bool) -> Iterator[Finding]:
    """All findings, in the order in which they are shown. To measure takes a few seconds."""
    device: torch.device | None = None
    error: Exception | None = None
    if torch.cuda.is_available():
        try:
            device = torch.device("cuda", torch.cuda.current_device())
        except RuntimeError as found:
            error = found
    yield from found_by("versions", checks.versions)
    yield from found_by("hooks", checks.hooks)
    yield from found_by("host kernels", checks.kernels)
    yield from found_by("GPU", functools.partial(checks.gpu, device, error))
    yield from found_by("layer compiler", checks.compilers)
    yield from found_by("cores", checks.cores)
    yield from found_by("NUMA", functools.partial(checks.numa, gpu_numa_node(device)))
    yield from found_by("host memory", checks.host_memory)
    yield from found_by("swap", checks.swap)
    yield from found_by("huge pages", checks.huge_pages)
    yield from found_by("locked memory", checks.locked_memory)
    yield from found_by("overcommit", checks.overcommit)
    yield from found_by("disk", functools.partial(checks.disk, folder))
    if measures:
        yield from found_by("host speed", functools.partial(checks.host_speeds, device is not None))
        if device is not None:
            yield from found_by("link", functools.partial(checks.link, device, MegatrainConfig()))


def gpu_numa_node(device: torch.device | None, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The memory node that the GPU is attached to; None if it isn't known."""
    if device is None:
        return None
    found: Any = torch.cuda.get_device_properties(device)
    node = -1
    with contextlib.suppress(AttributeError, OSError, ValueError):  # older versions of torch don't name the place
        place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int((root / place / "numa_node").read_text())
    return node if node >= 0 else None


def table(findings: Sequence[Finding]) -> str:
    """The report in lines of text, what has to be done last."""
    name_width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{_MARKS[finding.state]:<6}  {finding.name:<{name_width}}  "
        lines += textwrap.wrap(finding.text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    titles = {
        "broken": "Training won't run:",
        "slow": "Training will be slower than it could be:",
        "note": "Worth knowing:",
    }
    for state, title in titles.items():
        chosen = [f"{finding.name}: {finding.remedy}" for finding in findings if finding.state == state and finding.remedy]
        lines += ["", title] if chosen else []
        for text in chosen:
            lines += textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    if all(finding.state in ("ok", "note") for finding in findings):
        lines += ["", "Nothing keeps this machine from training."]
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "fit": not any(finding.state == "broken" for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
