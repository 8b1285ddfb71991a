"""``megatrain doctor``: its arguments, the order of its checks, and the report."""

from __future__ import annotations

import argparse
import functools
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.doctor import software_checks, speed_checks, system_checks
from megatrain_accelerate.doctor.finding import Finding, found_by

_WIDTH = 120
_MARKS = {"ok": "ok", "note": "note", "slow": "SLOW", "broken": "BROKEN"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--folder", type=Path, default=Path("."), metavar="DIR", help="where checkpoints will go")
    parser.add_argument("--no-speed", action="store_true", help="measure nothing: look only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Prints the report.

    Returns:
        The exit status: 1 if something keeps training from running.
    """
    findings = list(examine(options.folder, measures=not options.no_speed))
    is_fit = not any(finding.state == "broken" for finding in findings)
    print(json.dumps(as_json(findings), indent=2) if options.json else table(findings))
    return 0 if is_fit else 1


def examine(folder: Path, measures: bool) -> Iterator[Finding]:
    """All findings, in the order in which they are shown.

    Args:
        folder: where checkpoints will go.
        measures: whether speeds are measured, which takes a few seconds.
    """
    device, of_gpu = None, speed_checks.no_gpu
    if torch.cuda.is_available():
        try:
            device = torch.device("cuda", torch.cuda.current_device())
            of_gpu = functools.partial(speed_checks.gpu, device)
        except RuntimeError as error:  # busy, or its fabric isn't up
            of_gpu = functools.partial(speed_checks.unusable_gpu, error)
    yield from found_by("versions", software_checks.versions)
    yield from found_by("hooks", software_checks.hooks)
    yield from found_by("host kernels", software_checks.kernels)
    yield from found_by("GPU", of_gpu)
    yield from found_by("layer compiler", software_checks.compilers)
    yield from found_by("cores", system_checks.cores)
    yield from found_by("NUMA", functools.partial(system_checks.numa, gpu_numa_node(device)))
    yield from found_by("host memory", system_checks.host_memory)
    yield from found_by("swap", system_checks.swap)
    yield from found_by("huge pages", system_checks.huge_pages)
    yield from found_by("locked memory", system_checks.locked_memory)
    yield from found_by("overcommit", system_checks.overcommit)
    yield from found_by("disk", functools.partial(system_checks.disk, folder))
    if measures:
        yield from found_by("host speed", functools.partial(speed_checks.host_speeds, device is not None))
        if device is not None:
            yield from found_by("link", functools.partial(speed_checks.link, device, MegatrainConfig()))


def gpu_numa_node(device: torch.device | None, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The memory node that the GPU is attached to; None if it isn't known."""
    if device is None:
        return None
    found = torch.cuda.get_device_properties(device)
    places = [getattr(found, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in places:
        return None
    domain, bus, number = places
    try:
        node = int((root / f"{domain:04x}:{bus:02x}:{number:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def table(findings: Sequence[Finding]) -> str:
    """The report in lines of text, what has to be done last."""
    name_width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{_MARKS[finding.state]:<6}  {finding.name:<{name_width}}  "
        lines += textwrap.wrap(finding.text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    for state, title in (
        ("broken", "Training won't run:"),
        ("slow", "Training will be slower than it could be:"),
        ("note", "Worth knowing:"),
    ):
        chosen = [finding for finding in findings if finding.state == state and finding.remedy]
        if chosen:
            lines += ["", title]
            for finding in chosen:
                lines += textwrap.wrap(
                    f"{finding.name}: {finding.remedy}", _WIDTH, initial_indent="- ", subsequent_indent="  "
                )
    if all(finding.state in ("ok", "note") for finding in findings):
        lines += ["", "Nothing keeps this machine from training."]
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The report as plain data."""
    return {
        "fit": not any(finding.state == "broken" for finding in findings),
        "findings": [
            {"name": f.name, "state": f.state, "text": f.text, "remedy": f.remedy, "values": f.values} for f in findings
        ],
    }
