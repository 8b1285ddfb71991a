"""Writes ``docs/models.md``: trains a small model of every family with and without the plugin and says how they compare.

    PYTHONPATH=. python plugin_tests/make_model_table.py

Exits with an error, and leaves the file alone, if a family differs by more than its tolerance or isn't refused as it should.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from family_list import FAMILIES, KINDS
from family_parity import STEPS, Outcome, differences, optimizer_for, train_plainly, train_streamed
from family_registry import Family
from trainer_runs import plugin

from megatrain_accelerate.errors import UnsupportedError

TABLE = Path(__file__).parents[1] / "docs" / "models.md"

INTRODUCTION = """\
# Model families

Written by `plugin_tests/make_model_table.py`; a test checks that it lists every family of the tests. A small, randomly
initialised model of each family is trained for {steps} steps twice: by a stock Accelerate loop with the plugin, every layer
streaming, and in plain PyTorch (for bf16: bf16 weights and gradients under autocast, fp32 masters). AdamW, gradients clipped.
Compared element by element: losses, auxiliary losses and gradient norms of each step, every gradient of each step, every fp32
master after the last. "Absent" gradients are those of parameters that took no part in a step: absent in both, and such
weights aren't stepped.

What makes a family special is switched on and small enough to matter (windows shorter than the texts, dropout, experts with
their auxiliary loss). CPU, torch {torch}, transformers {transformers}, attention as transformers chooses it unless noted.

A family that isn't listed works in the same way if its repeated blocks are named in `_no_split_modules`, or stand in a
`ModuleList`, and hand tensors to each other by arguments, outputs or a `UserDict`. Layers that share weights, or that
write into lists or objects which they get, are refused with the reason.
"""

HEADER = ["| family | class | what is special about it | compared | result |", "|---|---|---|---|---|"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Differs(Exception):
    """A family isn't what the table would say."""


def class_of(family: Family) -> str:
    """The name of the model's class."""
    return type(family.build()).__name__


def row_of(family: Family) -> str:
    """Runs the family; its line of the table.

    Raises:
        Differs: it differs by more than its tolerance, or isn't refused.
    """
    compared, result = _refused(family) if family.refusal is not None else _trained(family)
    return f"| {family.title} | `{class_of(family)}` | {family.notes} | {compared} | {result} |"


def _trained(family: Family) -> tuple[str, str]:
    outcome = Outcome()
    results: dict[str, list[str]] = {}
    for name, dtype in DTYPES.items():
        outcome = train_plainly(family, dtype)
        found = [difference for _, _, difference in differences(train_streamed(family, dtype), outcome)]
        tolerance = family.tolerance.get(dtype, 0.0)
        if any(difference > tolerance for difference in found) or (found and tolerance == 0.0):
            raise Differs(f"{family.name} in {name}: {len(found)} values differ, by up to {max(found)}")
        results.setdefault(f"within {tolerance:.0e}" if found else "equal bit for bit", []).append(name)
    present = [gradient for gradient in outcome.gradients.values() if gradient is not None]
    absent = len(outcome.gradients) - len(present)
    compared = f"{len(outcome.losses)} losses and norms, {len(present)} gradients{f' ({absent} absent)' if absent else ''}"
    return (
        f"{compared}, {len(outcome.masters)} weights",
        "; ".join(f"{', '.join(names)}: {result}" for result, names in results.items()),
    )


def _refused(family: Family) -> tuple[str, str]:
    model = family.build()
    with plugin(**family.settings):
        accelerator = Accelerator(cpu=True)
        try:
            accelerator.prepare(
                model, optimizer_for([parameter for parameter in model.parameters() if parameter.requires_grad])
            )
        except UnsupportedError as error:
            return "the error of `prepare`", f"refused: {error}"
    raise Differs(f"{family.name} isn't refused")


def write_table(families: Iterable[Family], path: Path) -> None:
    """Runs all families and writes the document."""
    chosen = list(families)
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    lines = [INTRODUCTION.format(steps=STEPS, **versions)]
    for kind, title in KINDS.items():
        rows = []
        for family in chosen:
            if family.kind == kind:
                rows.append(row_of(family))
                print(rows[-1], flush=True)
        if rows:
            lines += [
                f"## {title}\n",
                "| family | class | what is special about it | compared | result |",
                "|---|---|---|---|---|",
            ]
            lines += [*rows, ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TABLE, help="where to write (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        write_table(FAMILIES, arguments.out)
    except Differs as error:
        print(f"not written: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
