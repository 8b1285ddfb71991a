"""The console script ``megatrain``."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain_accelerate import __version__, tracing
from megatrain_accelerate.configs.from_deepspeed import convert
from megatrain_accelerate.errors import ConfigError, MegatrainError
from megatrain_accelerate.estimate import command as estimate
from megatrain_accelerate.tracing import DEFAULT_STEP, ENV_TRACE_DIR, ENV_TRACE_STEP, NOTES, PERFETTO_TRACE, PICTURE, RAW_TRACE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand in ``arguments``, by default the process's, and returns the exit status. A :class:`MegatrainError`
    is printed in one line. If the output's reader (``| head``) ends early, the status is that of a death by SIGPIPE."""
    parser = argparse.ArgumentParser(prog="megatrain", description="Tools around trainings with megatrain_accelerate.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    trace_parser = commands.add_parser(
        "trace",
        help="draw one optimizer step of a training: a picture, and a trace for ui.perfetto.dev",
        description="Runs a training command and traces the time between two calls of optimizer.step(). The second is that "
        "of --step, and the host's AdamW of the first runs meanwhile. The training isn't changed and runs to its end.",
        usage="megatrain trace --out DIR [--step N] -- accelerate launch --config megatrain.yaml train.py ...",
    )
    trace_parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for what is written")
    trace_parser.add_argument(
        "--step", type=int, default=DEFAULT_STEP, metavar="N", help="optimizer step, from 2; default %(default)s"
    )
    trace_parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the training")
    trace_parser.set_defaults(run=_trace, error=trace_parser.error)
    estimate_parser = commands.add_parser(
        "estimate",
        help="memory and speed of a training, from a model's configuration, on this machine or another",
        description="Predicts what training a model takes and how fast it goes. Only the configuration is read, nothing is "
        "allocated: layers run on tensors without data, and the plan's own search finds what lies where.",
    )
    estimate.add_arguments(estimate_parser)
    estimate_parser.set_defaults(run=estimate.run)
    doctor_parser = commands.add_parser(
        "doctor",
        help="check this machine: what keeps it from training, what will limit it, and how to mend that",
        description="Looks at versions, patches of other packages, limits and memory, and measures the link and the host. "
        "The exit status is 1 if something keeps training from running.",
    )
    doctor_parser.add_argument("--folder", type=Path, default=Path("."), metavar="DIR", help="where checkpoints will go")
    doctor_parser.add_argument("--no-speed", action="store_true", help="measure nothing: look only")
    doctor_parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor_parser.set_defaults(run=_doctor)
    recipes = {file.stem: file for file in (Path(__file__).parent / "configs").glob("*.yaml")}
    config_parser = commands.add_parser(
        "config",
        help="print the yaml to begin with, for accelerate launch --config; or that of a recipe",
        description="Prints a yaml with comments: megatrain config > megatrain.yaml. RECIPE is one of "
        f"{', '.join(sorted(recipes))}; the first lines of each say what it is for.",
    )
    either = config_parser.add_mutually_exclusive_group()
    either.add_argument(
        "recipe", nargs="?", default="megatrain", choices=sorted(recipes), metavar="RECIPE", help="default %(default)s"
    )
    either.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="convert a configuration for DeepSpeed: FILE is its JSON, or the yaml that accelerate config wrote for it",
    )
    config_parser.set_defaults(run=_config, recipes=recipes)
    options = parser.parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
    except MegatrainError as error:
        print(f"megatrain {options.subcommand}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Discard what is still buffered: flushing it at exit would fail, and the interpreter would print that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


class _Version(argparse.Action):
    """Prints the versions in one line. torch is imported only if they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import torch

        others = (f"{package} {importlib.metadata.version(package)}" for package in ("accelerate", "transformers"))
        # Unlike the metadata of torch, its own version always names the CUDA version that it is built for.
        print(", ".join((f"megatrain-accelerate {__version__}", f"torch {torch.__version__}", *others)))
        parser.exit()


def _trace(options: argparse.Namespace) -> int:
    """Runs a training, and writes the results once the step is traced. Returns its status, or 1 if no step was traced."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        options.error("the training's command is missing: megatrain trace --out DIR -- accelerate launch ... train.py")
    if options.step < 2:  # the first step's forward follows no step: there is no host step to show
        raise ConfigError(f"step {options.step} can't be traced: its trace would begin with the step before it; use 2 or more")
    folder, asked = options.out, {ENV_TRACE_DIR: str(options.out.absolute()), ENV_TRACE_STEP: str(options.step)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RAW_TRACE, f"partial_{RAW_TRACE}", PERFETTO_TRACE, PICTURE):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error}; name a folder that can be written to") from error
    try:
        process = subprocess.Popen(command, env={**os.environ, **asked})
    except OSError as error:
        raise ConfigError(f"the command can't be started: {error}; write it behind -- as in the shell") from error
    status = None
    try:
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.5)
            if (folder / RAW_TRACE).exists():
                write_results(folder)  # the training has renamed the file from partial_..., so that it is complete
    finally:
        if status is None:  # Ctrl-C, which the terminal sends to the command, too
            process.wait()
    if (folder / PERFETTO_TRACE).exists():
        return status
    print(
        f"megatrain trace: no step was traced. Did the training reach optimizer step {options.step} (--step), and is "
        "megatrain on in it (distributed_type: MEGATRAIN in the yaml, or --megatrain)?",
        file=sys.stderr,
    )
    return status or 1


def write_results(folder: Path) -> None:
    """Turns the raw trace in ``folder`` into the Perfetto file, picture and printed table, and deletes the raw trace."""
    with gzip.open(folder / RAW_TRACE, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    timeline, trace["traceEvents"] = tracing.build(trace)
    trace[NOTES] = {key: timeline.info[key] for key in ("step", "device", "wait_ms", "shares")}
    with gzip.open(folder / PERFETTO_TRACE, "wt", encoding="utf-8") as file:
        json.dump(trace, file)
    (folder / RAW_TRACE).unlink()
    lines = [tracing.format_summary(timeline), f"written: {folder / PERFETTO_TRACE} (open it at https://ui.perfetto.dev)"]
    try:
        tracing.draw(timeline, folder / PICTURE)
        lines.append(f"written: {folder / PICTURE}")
    except MegatrainError as error:
        print(f"megatrain trace: {error}", file=sys.stderr, flush=True)
    # One write, beginning on a new line: the training goes on, and draws its progress bars.
    print("\n" + "\n".join(lines), flush=True)


def _doctor(options: argparse.Namespace) -> int:
    """Prints the report. Returns 1 if something keeps training from running, else 0."""
    from megatrain_accelerate.doctor import checks  # imports torch, which the help doesn't need

    findings = list(checks.examine(options.folder, measures=not options.no_speed))
    fit = all(finding.state != "broken" for finding in findings)
    report = {"fit": fit, "findings": [vars(finding) for finding in findings]}
    print(json.dumps(report, indent=2) if options.json else checks.table(findings))
    return int(not fit)


def _config(options: argparse.Namespace) -> int:
    """Prints a recipe or a converted yaml. The remarks in a converted one go to stderr, too, unless stdout is a terminal."""
    if options.source is None:
        sys.stdout.write(options.recipes[options.recipe].read_text(encoding="utf-8"))
        return 0
    conversion = convert(options.source)
    sys.stdout.write(conversion.yaml(options.source.name))
    if not sys.stdout.isatty():
        print(*conversion.lines(), sep="\n", file=sys.stderr)
    return 0
