"""``megatrain config``: its arguments, and the printing of a recipe."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_FRESH_START = "megatrain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", default=_FRESH_START, choices=sorted(recipes()), metavar="RECIPE", help="default %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Prints a yaml as it is, with its comments."""
    sys.stdout.write(recipes()[options.recipe].read_text(encoding="utf-8"))
    return 0


def recipes() -> dict[str, Path]:
    """The yaml files that come with the package, by their names."""
    return {file.stem: file for file in Path(__file__).parent.glob("*.yaml")}
