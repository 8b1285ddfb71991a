"""``megatrain estimate``: its arguments, and the estimate that they ask for."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError, MegatrainError
from megatrain_accelerate.estimate import report
from megatrain_accelerate.estimate.forecast import Forecaster
from megatrain_accelerate.estimate.limits import MOST_BATCH, MOST_TOKENS, largest_batch, longest_context
from megatrain_accelerate.estimate.machine_description import MachineDescription, MachineOptions, describe_machine
from megatrain_accelerate.estimate.meta_model import load_config, model_on_meta
from megatrain_accelerate.estimate.positions import PositionTable
from megatrain_accelerate.estimate.report import Estimate, Limits
from megatrain_accelerate.integrations.accelerate_backend import require_steps_in_backward_possible
from megatrain_accelerate.integrations.output_recording import CapturedOutputs
from megatrain_accelerate.planning.layer_discovery import active_parameters
from megatrain_accelerate.planning.plan_table import experts_text
from megatrain_accelerate.units import GB, GIB, KIB, MIB

logger = logging.getLogger(__name__)
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")

_MOST_ROWS = 7
_USUAL_LENGTH = 4096
_UNITS = {"": GIB, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB, "mb": 10**6, "gb": GB, "tb": 1000 * GB}


def parse_size(text: str) -> int:
    """A memory in bytes: ``1.5TiB``, ``80GB``, or a number of GiB.

    Raises:
        argparse.ArgumentTypeError: it has another form, or isn't above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS or not 0 < float(found[1]) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size such as 1.5TiB, 125GiB or 80GB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a finite number above 0")
    return value


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number above 0")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} isn't KEY=VALUE, for example keep_layers=0")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="an id of the Hub, a local folder, or a config.json; only that is read")
    parser.add_argument(
        "--length",
        type=_count,
        metavar="TOKENS",
        help=f"of each sequence; default {_USUAL_LENGTH}, or the rows of the model's table of positions if these are fewer",
    )
    parser.add_argument(
        "--batch",
        type=_count,
        nargs="+",
        action="extend",
        metavar="N",
        help="sequences in a batch; default: up to the largest",
    )
    parser.add_argument(
        "--no-limits", action="store_true", help="leave out the largest batch and the longest context: faster, with --batch"
    )
    parser.add_argument("--accumulation", type=_count, default=1, metavar="N", help="gradient_accumulation_steps")
    parser.add_argument(
        "--set",
        type=_setting,
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="settings of megatrain_config",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the configuration")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens a second against batch")
    machine = parser.add_argument_group("machine", "by default this one, as measured; --gpu describes another")
    machine.add_argument("--gpu", metavar="NAME", help="a known GPU: H200, H100, A100-80, GH200, RTX4090, ...")
    machine.add_argument("--gpu-memory", type=parse_size, metavar="SIZE", help="of the GPU, for example 24GiB")
    machine.add_argument("--host-memory", type=parse_size, metavar="SIZE", help="for example 1.5TiB")
    machine.add_argument("--cores", type=_count, metavar="N", help="of the host; default: usual for the GPU")
    machine.add_argument("--link-gb-per-second", type=_positive, metavar="X", help="between host and GPU, sustained, each way")
    machine.add_argument("--host-gb-per-second", type=_positive, metavar="X", help="of the host's memory, sustained")
    machine.add_argument("--host-step", type=_positive, metavar="X", help="G parameters a second that the host's AdamW steps")
    machine.add_argument("--dense-tflops", type=_positive, metavar="X", help="of bf16 products, sustained")
    machine.add_argument("--memory-gb-per-second", type=_positive, metavar="X", help="of the GPU's memory, sustained")


def run(options: argparse.Namespace) -> int:
    """Prints the estimate.

    Returns:
        The exit status: 1 if the model doesn't fit or the arguments are wrong.
    """
    try:
        found = estimate(options)
        print(json.dumps(report.as_json(found), indent=2) if options.json else report.table(found))
        if options.plot is not None:
            report.plot(found, options.plot)
    except MegatrainError as error:
        print(f"megatrain estimate: {error}", file=sys.stderr)
        return 1
    return 0 if found.fits else 1


def machine_options(options: argparse.Namespace) -> MachineOptions:
    """What the arguments say of the machine."""

    def scaled(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    return MachineOptions(
        gpu=options.gpu,
        gpu_memory_bytes=options.gpu_memory,
        host_memory_bytes=options.host_memory,
        cores=options.cores,
        link_bytes=scaled(options.link_gb_per_second, GB),
        host_dram_bytes=scaled(options.host_gb_per_second, GB),
        host_step_parameters=scaled(options.host_step, 1e9),
        dense_flops=scaled(options.dense_tflops, 1e12),
        device_bytes=scaled(options.memory_gb_per_second, GB),
    )


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
    machine = describe_machine(machine_options(options), config)
    settings = load_config(options.model, options.trust_remote_code)
    model = model_on_meta(settings, options.trust_remote_code)
    forecaster = Forecaster(
        model,
        config,
        machine.machine,
        machine.gpu_bytes,
        machine.host_bytes,
        micro_batches=options.accumulation,
        active_parameters=active_parameters(model, settings),
        recorder=CapturedOutputs.for_installed_transformers(),
    )
    return _estimated(options, forecaster, machine, settings)


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


def _length(asked: int | None, table: PositionTable | None) -> int:
    """Tokens of each sequence: as many as asked for, else usual ones, or the model's positions if these are fewer."""
    if table is None:
        return asked or _USUAL_LENGTH
    if asked is not None and asked > table.positions:
        raise ConfigError(
            f"--length {asked} is more than the {table.positions:,} positions that the model has ({table.name}); lower it"
        )
    return asked or min(_USUAL_LENGTH, table.positions)


def _estimated(options: argparse.Namespace, forecaster: Forecaster, machine: MachineDescription, settings: Any) -> Estimate:
    if options.no_limits and not options.batch:
        raise ConfigError("--no-limits needs --batch: without limits it isn't known which batches to look at")
    with _without_data(forecaster.model, options.length or _USUAL_LENGTH):
        table = forecaster.positions()
    length = _length(options.length, table)
    with _without_data(forecaster.model, length):
        least = forecaster.least_gpu_bytes(1, length)
        # Asked only where it is told: a run without data takes a while.
        of_a_token = forecaster.least_gpu_bytes(1, 1) if least > machine.gpu_bytes else None
        limits = None if options.no_limits else _limits(forecaster, machine.gpu_bytes, length, table)
        batches = options.batch or _batches(limits.batch if limits else 1)
        rows = [forecaster.forecast(count, length) for count in batches]
    text = settings.get_text_config() if hasattr(settings, "get_text_config") else settings
    return Estimate(
        model=options.model,
        model_class=type(forecaster.model).__name__,
        parameters=forecaster.parameters,
        active_parameters=forecaster.active_parameters,
        layers=len(forecaster.engine.runtime.layers),
        layer_parameters=max(layer.parameter_count for layer in forecaster.engine.runtime.layers),
        experts=experts_text(forecaster.engine.runtime) if forecaster.engine.runtime.experts else None,
        stated_positions=getattr(text, "max_position_embeddings", None),
        table=table,
        machine=machine,
        length=length,
        host_store_bytes=forecaster.host_store_bytes,
        host_budget_bytes=forecaster.host_bytes,
        least_gpu_bytes=least,
        token_gpu_bytes=of_a_token,
        config=forecaster.config,
        limits=limits,
        rows=rows,
    )


def _limits(forecaster: Forecaster, gpu_bytes: int, length: int, table: PositionTable | None) -> Limits:
    if forecaster.host_store_bytes > forecaster.host_bytes:
        return Limits(0, 0, None)  # without room for its states the model has no largest batch
    most_tokens = MOST_TOKENS if table is None else min(MOST_TOKENS, table.positions)

    def needs_of_one(tokens: int) -> int:
        _TORCH_LOG.disabled = tokens > length  # it prints a traceback of what fails
        try:
            return forecaster.least_gpu_bytes(1, tokens)
        except MegatrainError:
            raise
        except Exception as error:  # the model's own code: it may take no longer sequences
            if tokens <= length:
                raise
            logger.debug("%s tokens are too many for the model's code: %s", tokens, error)
            return sys.maxsize
        finally:
            _TORCH_LOG.disabled = False

    batch = largest_batch(lambda count: forecaster.least_gpu_bytes(count, length), gpu_bytes)
    context = longest_context(needs_of_one, gpu_bytes, most_tokens)
    longest = forecaster.forecast(1, context) if context else None
    return Limits(batch, context, longest, batch_is_least=batch == MOST_BATCH, context_is_least=context == MOST_TOKENS)


def _batches(most: int) -> Sequence[int]:
    """Powers of two up to the largest batch, and that itself; 1 where nothing fits."""
    if most < 1:
        return [1]
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1.5 * (1 << exponent) < most]
    step = max(1, -(-len(powers) // _MOST_ROWS))
    return [*powers[::step], most]
