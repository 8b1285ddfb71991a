"""``megatrain config``: its arguments, and the printing of a recipe, or of what another configuration is here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatrain_accelerate.configs.from_deepspeed import convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "recipe", nargs="?", default="megatrain", choices=sorted(recipes()), metavar="RECIPE", help="default %(default)s"
    )
    either.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="convert a configuration for DeepSpeed: FILE is its JSON, or the yaml that accelerate config wrote for it",
    )


def run(options: argparse.Namespace) -> int:
    """Prints a yaml with its comments. Of a converted one these are shown beside it too, where it goes to a file."""
    if options.source is None:
        sys.stdout.write(recipes()[options.recipe].read_text(encoding="utf-8"))
        return 0
    conversion = convert(options.source)
    sys.stdout.write(conversion.yaml(options.source.name))
    if not sys.stdout.isatty():
        print(*conversion.lines(), sep="\n", file=sys.stderr)
    return 0


def recipes() -> dict[str, Path]:
    """The yaml files that come with the package, by their names."""
    return {file.stem: file for file in Path(__file__).parent.glob("*.yaml")}
