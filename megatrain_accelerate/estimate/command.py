"""``megatrain estimate``: its arguments, and the estimate that they ask for."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError, MegatrainError
from megatrain_accelerate.estimate import report
from megatrain_accelerate.estimate.forecast import Forecaster
from megatrain_accelerate.estimate.machine_description import MachineOptions, describe_machine
from megatrain_accelerate.estimate.meta_engine import PositionTable, load_config, model_on_meta
from megatrain_accelerate.estimate.report import Estimate, Limits
from megatrain_accelerate.integrations.accelerate_backend import require_steps_in_backward_possible
from megatrain_accelerate.planning.fake_runs import replaced
from megatrain_accelerate.units import GB, GIB, KIB, MIB

logger = logging.getLogger(__name__)
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")

MOST_BATCH = 1 << 14
"""Sequences of a batch that are tried."""
MOST_TOKENS = (1 << 22) - 1024
"""Of one sequence that is tried. Without data, positions of more tokens have no values (planning/known_values.py), and the
model makes a mask of all pairs of them, which it leaves out otherwise."""
_STEPS_OF_TOKENS = (1024, 64, 1)
_TOLERANCE = 0.02
"""Share of a limit by which it may be too small."""
_MOST_ROWS = 7
_USUAL_LENGTH = 4096
_UNITS = {"": GIB, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB, "mb": 10**6, "gb": GB, "tb": 1000 * GB}


def parse_size(text: str) -> int:
    """A memory in bytes: ``1.5TiB``, ``80GB``, or a number of GiB; argparse.ArgumentTypeError for another form, or none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS or not 0 < float(found[1]) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size such as 1.5TiB, 125GiB or 80GB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _speed(unit: float) -> Callable[[str], float]:
    def speed(text: str) -> float:
        value = 0.0
        with contextlib.suppress(ValueError):
            value = float(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} isn't a finite number above 0")
        return unit * value

    return speed


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number above 0")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} isn't KEY=VALUE, for example placement.kept_layers=0")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an id of the Hub, a local folder, or a config.json; only that is read")
    parser.add_argument(
        "--length",
        type=_count,
        metavar="TOKENS",
        help=f"of each sequence; default {_USUAL_LENGTH}, or the rows of the model's table of positions if these are fewer",
    )
    many: dict[str, Any] = {"nargs": "+", "action": "extend"}
    batch_help = "sequences in a batch; default: up to the largest"
    parser.add_argument("--batch", type=_count, **many, metavar="N", help=batch_help)
    parser.add_argument(
        "--no-limits", action="store_true", help="leave out the largest batch and the longest context: faster, with --batch"
    )
    parser.add_argument("--accumulation", type=_count, default=1, metavar="N", help="gradient_accumulation_steps")
    parser.add_argument("--set", type=_setting, **many, default=[], metavar="KEY=VALUE", help="settings of megatrain_config")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the configuration")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens a second against batch")
    machine = parser.add_argument_group("machine", "by default this one, as measured; --gpu describes another")
    machine.add_argument("--gpu", metavar="NAME", help="a known GPU: H200, H100, A100-80, GH200, RTX4090, ...")
    for option, name, kind, metavar, text in (
        ("--gpu-memory", "gpu_memory_bytes", parse_size, "SIZE", "of the GPU, for example 24GiB"),
        ("--host-memory", "host_memory_bytes", parse_size, "SIZE", "for example 1.5TiB"),
        ("--cores", "cores", _count, "N", "of the host; default: usual for the GPU"),
        ("--link", "link_bytes", _speed(GB), "GB/S", "between host and GPU, sustained, each way"),
        ("--host-gb-per-second", "host_dram_bytes", _speed(GB), "X", "of the host's memory, sustained"),
        ("--host-step", "host_step_parameters", _speed(1e9), "X", "G parameters a second that the host's AdamW steps"),
        ("--tflops", "dense_flops", _speed(1e12), "X", "of bf16 products, sustained"),
        ("--gpu-bandwidth", "device_bytes", _speed(GB), "GB/S", "of the GPU's memory, sustained"),
    ):
        machine.add_argument(option, dest=name, type=kind, metavar=metavar, help=text)


def run(options: argparse.Namespace) -> int:
    """Prints the estimate. The exit status is 1 if it doesn't fit or the arguments are wrong."""
    try:
        found = estimate(options)
        print(json.dumps(report.as_json(found), indent=2) if options.json else report.table(found))
        if options.plot is not None:
            report.plot(found, options.plot)
        return 0 if found.fits else 1
    except MegatrainError as error:
        print(f"megatrain estimate: {error}", file=sys.stderr)
        return 1


def estimate(options: argparse.Namespace) -> Estimate:
    """The estimate that the arguments ask for.

    Raises:
        MegatrainError: a wrong argument, no configuration, or a model that can't stream; the message says what to do.
    """
    config = MegatrainConfig.from_mapping(dict(options.set))
    if config.step_schedule == "serial":
        raise ConfigError(
            "megatrain_config.step_schedule is 'serial', and the plan's cost model, which the estimate is made by, knows only "
            "steps that hide under forward or backward: leave it out, or take deferred or backward"
        )
    require_steps_in_backward_possible(config, options.accumulation)
    described = MachineOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(MachineOptions)})
    machine = describe_machine(described, config)
    settings = load_config(options.model, options.trust_remote_code)
    model = model_on_meta(settings, options.trust_remote_code)
    sizes = (machine.gpu_bytes, machine.host_bytes)
    forecaster = Forecaster(model, config, machine.machine, *sizes, micro_batches=options.accumulation)
    asked: int | None = options.length
    if options.no_limits and not options.batch:
        raise ConfigError("--no-limits needs --batch: without limits it isn't known which batches to look at")
    with _without_data(forecaster.model, asked or _USUAL_LENGTH):
        table = forecaster.positions()
    if table is not None and asked is not None and asked > table.positions:
        raise ConfigError(
            f"--length {asked} is more than the {table.positions:,} positions that the model has ({table.name}); lower it"
        )
    length = asked or min(_USUAL_LENGTH, table.positions if table is not None else _USUAL_LENGTH)
    with _without_data(forecaster.model, length):
        least = forecaster.least_gpu_bytes(1, length)
        # Asked only where it is told: a run without data takes a while.
        of_a_token = forecaster.least_gpu_bytes(1, 1) if least > machine.gpu_bytes else None
        limits = None if options.no_limits else _limits(forecaster, machine.gpu_bytes, length, table)
        batches = options.batch or _batches(limits.batch if limits else 1)
        rows = [forecaster.forecast(count, length) for count in batches]
    text = settings.get_text_config() if hasattr(settings, "get_text_config") else settings
    stated: int | None = getattr(text, "max_position_embeddings", None)
    return Estimate(options.model, forecaster, stated, table, machine, length, least, of_a_token, limits, rows)


@contextlib.contextmanager
def _without_data(model: nn.Module, length: int) -> Iterator[None]:
    """Says which length the model failed at, and what to do."""
    try:
        yield
    except MegatrainError:
        raise
    except Exception as error:  # the model's own code, on tensors without data
        raise ConfigError(
            f"{type(model).__name__} can't be run without data on token ids of {length:,} tokens and labels of the same "
            f"shape ({type(error).__name__}: {error}); name a language model, or another --length"
        ) from error


def _limits(forecaster: Forecaster, gpu_bytes: int, length: int, table: PositionTable | None) -> Limits:
    if forecaster.host_store_bytes > forecaster.host_bytes:
        return Limits(0, 0, None)  # without room for its states the model has no largest batch
    most_tokens = MOST_TOKENS if table is None else min(MOST_TOKENS, table.positions)

    def needs_of_one(tokens: int) -> int:
        try:
            with replaced(_TORCH_LOG, "disabled", tokens > length):  # it prints a traceback of what fails
                return forecaster.least_gpu_bytes(1, tokens)
        except MegatrainError:
            raise
        except Exception as error:  # the model's own code: it may take no longer sequences
            if tokens <= length:
                raise
            logger.debug("%s tokens are too many for the model's code: %s", tokens, error)
            return sys.maxsize

    batch = largest(lambda count: forecaster.least_gpu_bytes(count, length), gpu_bytes, MOST_BATCH, _TOLERANCE)
    context = longest_context(needs_of_one, gpu_bytes, most_tokens)
    longest = forecaster.forecast(1, context) if context else None
    return Limits(batch, context, longest, batch_is_least=batch == MOST_BATCH, context_is_least=context == MOST_TOKENS)


def longest_context(needs: Callable[[int], int], budget: int, most: int) -> int:
    """Tokens of the longest sequence that fits: a multiple of 1,024, or of 64, or ``most``."""
    for step in _STEPS_OF_TOKENS:
        if most < step:
            continue
        steps = largest(lambda count, step=step: needs(count * step), budget, most // step, _TOLERANCE)  # type: ignore[misc]
        if steps == most // step and needs(most) <= budget:
            return most
        if steps:
            return steps * step
    return 0


def largest(needs: Callable[[int], int], budget: int, most: int, tolerance: float = 0.0) -> int:
    """The largest number from 1 to ``most`` whose need is within the budget; 0 if that of 1 isn't. Needs grow with the
    number, nearly in proportion for most models, so that the next to be tried is interpolated: each is a run without data.
    The result may be too small by the share ``tolerance``."""
    low, low_needs = 1, needs(1)
    if low_needs > budget or most == 1:
        return int(low_needs <= budget)
    high = 2
    while (high_needs := needs(high)) <= budget:
        if high == most:
            return most
        slope = (high_needs - low_needs) / (high - low)
        low, low_needs = high, high_needs
        further = low + int((budget - low_needs) / slope) + 1 if slope > 0 else most
        high = min(most, max(further, low + 1))
    interpolates = True
    while high - low > max(1, int(tolerance * low)):
        guess = low + int((high - low) * (budget - low_needs) / (high_needs - low_needs))
        middle = min(max(guess, low + 1), high - 1) if interpolates else (low + high) // 2
        before, taken = high - low, needs(middle)
        if taken <= budget:
            low, low_needs = middle, taken
        else:
            high, high_needs = middle, taken
        # Where needs bend, a line between the two ends moves one of them by little.
        interpolates = 2 * (high - low) <= before
    return low


def _batches(most: int) -> Sequence[int]:
    """Powers of two up to the largest batch, and that itself; 1 where nothing fits."""
    if most < 1:
        return [1]
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1.5 * (1 << exponent) < most]
    step = max(1, -(-len(powers) // _MOST_ROWS))
    return [*powers[::step], most]
