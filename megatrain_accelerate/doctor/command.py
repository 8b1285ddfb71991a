"""``megatrain doctor``: its arguments and the report. torch isn't imported for the help."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain_accelerate.doctor.checks import Finding

_WIDTH = 120
_MARKS = {"ok": "ok", "note": "note", "slow": "SLOW", "broken": "BROKEN"}
_TITLES = {"broken": "Training won't run:", "slow": "Training will be slower than it could be:", "note": "Worth knowing:"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("."), metavar="DIR", help="where checkpoints will go")
    parser.add_argument("--no-speed", action="store_true", help="measure nothing: look only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Prints the report; the exit status is 1 if something keeps training from running."""
    from megatrain_accelerate.doctor import checks

    findings = list(checks.examine(options.folder, measures=not options.no_speed))
    fit = all(finding.state != "broken" for finding in findings)
    report = {"fit": fit, "findings": [dataclasses.asdict(finding) for finding in findings]}
    print(json.dumps(report, indent=2) if options.json else table(findings))
    return int(not fit)


def table(findings: Sequence[Finding]) -> str:
    """The report in lines of text, what has to be done last."""
    name_width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{_MARKS[finding.state]:<6}  {finding.name:<{name_width}}  "
        lines += textwrap.wrap(finding.text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    for state, title in _TITLES.items():
        chosen = [f"{finding.name}: {finding.remedy}" for finding in findings if finding.state == state and finding.remedy]
        lines += ["", title] if chosen else []
        for text in chosen:
            lines += textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    if all(finding.state in ("ok", "note") for finding in findings):
        lines += ["", "Nothing keeps this machine from training."]
    return "\n".join(lines)
