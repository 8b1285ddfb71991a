"""Machines for estimates: options of the command that describe one, and descriptions."""

from __future__ import annotations

import argparse
import math

from megatrain_accelerate.estimate import command
from megatrain_accelerate.estimate.machine_description import MachineDescription
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.units import GIB


def machine_options(before: argparse.Namespace | None = None, **options: object) -> argparse.Namespace:
    """These options, by the names under which the parser puts them, with those ``before`` or the parser's defaults."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    known = vars(parser.parse_args([]) if before is None else before)
    assert options.keys() <= known.keys()
    return argparse.Namespace(**known | options)


def machine_with(
    speeds: Machine, gpu_bytes: int = GIB, host_bytes: int | None = 4 * GIB, *, gpus: int = 1, exchange_bytes: float = math.inf
) -> MachineDescription:
    """A machine of these speeds, where a step may take all of the GPU's memory."""
    return MachineDescription("GPU", speeds, gpu_bytes, gpu_bytes, host_bytes, [], gpus=gpus, exchange_bytes=exchange_bytes)
