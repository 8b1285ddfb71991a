"""The arguments of ``megatrain estimate``, and its main function. Its help imports neither torch nor a model's code."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from megatrain_accelerate.estimate import USUAL_LENGTH
from megatrain_accelerate.units import GB, GIB, KIB, MIB

_UNITS = {"": GIB, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB, "mb": 10**6, "gb": GB, "tb": 1000 * GB}


def parse_size(text: str) -> int:
    """Converts ``1.5TiB``, ``80GB`` or a number of GiB to bytes. Raises argparse.ArgumentTypeError for other text or 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS or not 0 < float(found[1]) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size such as 1.5TiB, 125GiB or 80GB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _speed(text: str, unit: float = GB) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return unit * float(text)
    raise argparse.ArgumentTypeError(f"{text!r} isn't a finite number above 0")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number above 0")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} isn't KEY=VALUE, for example placement.kept_layers=0")
    with contextlib.suppress(json.JSONDecodeError):
        return key, json.loads(value)
    return key, value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_help = "an id of the Hub, a local folder, or a config.json; only that is read. Without one: models from 0.5B to 120B"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=model_help)
    parser.add_argument(
        "--length",
        type=_count,
        metavar="TOKENS",
        help=f"of each sequence; default {USUAL_LENGTH}, or the rows of the model's table of positions if these are fewer",
    )
    many: dict[str, Any] = {"nargs": "+", "action": "extend"}
    batch_help = "sequences in a batch, of each GPU (per_device_train_batch_size); default: up to the largest"
    parser.add_argument("--batch", type=_count, **many, metavar="N", help=batch_help)
    parser.add_argument(
        "--no-limits", action="store_true", help="leave out the largest batch and the longest context: faster, with --batch"
    )
    parser.add_argument("--accumulation", type=_count, default=1, metavar="N", help="gradient_accumulation_steps")
    parser.add_argument("--set", type=_setting, **many, default=[], metavar="KEY=VALUE", help="settings of megatrain_config")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the configuration")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens a second against batch, or of all models")
    machine = parser.add_argument_group("machine", "by default this one, as measured; --gpu describes another")
    machine.add_argument("--gpu", metavar="NAME", help="a known GPU: H200, H100, A100-80, GH200, RTX4090, ...")
    machine.add_argument("--gpus", type=_count, default=1, metavar="G", help="equal GPUs of the machine, of a process each")
    machines_help = "such machines: a forecast, since training on several is refused"
    machine.add_argument("--machines", type=_count, default=1, metavar="H", help=machines_help)
    for option, name, kind, metavar, text in (
        ("--gpu-memory", "gpu_memory_bytes", parse_size, "SIZE", "of a GPU, for example 24GiB"),
        ("--host-memory", "host_memory_bytes", parse_size, "SIZE", "of the machine, for example 1.5TiB"),
        ("--cores", "cores", _count, "N", "of the machine; default: usual for the GPUs"),
        ("--link", "link_bytes", _speed, "GB/S", "between host and GPU, sustained, each way"),
        ("--peer-link", "peer_bytes", _speed, "GB/S", "of gradients that several GPUs exchange, sustained, each way"),
        ("--network", "network_bytes", _speed, "GB/S", "of one of several machines to the others, sustained, each way"),
        ("--host-step", "host_step_parameters", _speed, "X", "G parameters a second that the machine's AdamW steps"),
        ("--tflops", "dense_flops", functools.partial(_speed, unit=1e12), "X", "of bf16 products, sustained"),
        ("--gpu-bandwidth", "device_bytes", _speed, "GB/S", "of the GPU's memory, sustained"),
    ):
        machine.add_argument(option, dest=name, type=kind, metavar=metavar, help=text)


def run(options: argparse.Namespace) -> int:
    """Prints the estimate, each row as soon as it is known. Returns 1 if nothing fits. Raises as :class:`.Estimate` does."""
    # Imports create a million objects. Garbage collection among them takes a fifth of the time to the first row.
    gc.disable()
    try:
        from megatrain_accelerate.estimate import report
        from megatrain_accelerate.estimate.findings import Estimate, ladder_estimates

        one = None if options.model is None else Estimate(options)
        shown, drawn, asked = itertools.tee([one] if one else ladder_estimates(options), 3)
        if options.json:
            print(json.dumps(report.as_json(one) if one else [report.as_json(found) for found in shown], indent=2))
        else:
            for line in report.table(one) if one else report.ladder_table(shown):
                print(line, flush=True)
        if options.plot is not None:
            report.plot(list(drawn), options.plot)
        return 0 if any(found.fits for found in asked) else 1
    finally:
        gc.enable()
