"""Measures our own Trainer job, and the stock Trainer or peers if asked for, in one run: a table, a JSON file and plots.

    python recipes/benchmarks/run.py --out outputs/bench --cases 3b-8x4096 3b-8x4096-24gib --peers FOLDER
    python recipes/benchmarks/run.py --out outputs/bench --cases 1.5b-real-8x2048 --stock --steps 60
    python recipes/benchmarks/run.py --out outputs/bench --cases 3b-2x4096 --beside /tmp/0da90fc

Each case is a process of its own: `trainer_run.py` under `accelerate launch`, and with `--stock` one without it before. With
`--beside` the plugin of another commit, installed by `pip install --no-deps --target FOLDER`, runs each case before ours.
FOLDER holds a `run_suite.sh` that runs the peers that it is given by name, with PRESET, BATCH, SEQ, STEPS, WARMUP, LIMIT and
OUT in its environment, and appends JSON lines (`tag`, `ok`, `tokens_per_s`, `step_s`, ...) to `$OUT/peers.jsonl`. A case that
fails is a row of the table and the others go on; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench_cases import (
    HERE,
    Case,
    chosen,
    environment_with,
    launch_command,
    parse_setting,
    peer_environment,
    script_command,
    stock_environment,
)
from bench_report import OURS, STOCK, Row, add_ratios, draw, facts, format_stock_table, format_table, peer_row, trainer_row

PEER_SETUP_SECONDS = 300
"""What a suite may take besides its benches: installing, compiling, growing the host memory."""


def run_logged(command: list[str], log: Path, limit: float, environment: dict[str, str] | None = None) -> str | None:
    """Runs a command with its output in a file; returns what went wrong, or None.

    The command and all that it started are ended when ``limit`` seconds have passed.
    """
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"not over after {limit:.0f} s; see {log}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return None if status == 0 else f"exit status {status}; see {log}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; none if it isn't there."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


class Bench:
    """One run of the benchmarks.

    Args:
        options: the command line's.
        settings: the plugin's, for all cases.
    """

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any]) -> None:
        self._options = options
        self._settings = settings
        self._peers_ready = False
        self.rows: list[Row] = []
        self.raw: list[dict[str, Any]] = []

    def run_ours(self, case: Case) -> None:
        """Measures a case, and traces a step of it in a run of its own if that was asked for."""
        options = self._options
        launch = launch_command(case, options.config, self._settings)
        folder = self._run_trainer(case, OURS, launch)
        if options.trace and "error" not in self.rows[-1]:
            steps = options.warmup + 2
            command = [*launch, *script_command(case, steps, options.warmup, None, self._script_arguments())]
            trace = [sys.executable, "-m", "megatrain_accelerate", "trace", "--out", str(folder), "--step", str(steps), "--"]
            error = run_logged([*trace, *command], folder / "trace_log.txt", options.time_limit)
            print(f"{case.name}: trace {'in ' + str(folder) if error is None else 'failed: ' + error}", flush=True)

    def run_stock(self, case: Case) -> None:
        """Measures the stock Trainer on a case, by the same script without the plugin."""
        self._run_trainer(case, STOCK, [sys.executable], stock_environment())

    def run_beside(self, case: Case) -> None:
        """Measures the plugin in the folder that ``--beside`` names on a case, by the same script."""
        installed: Path = self._options.beside.absolute()
        launch = launch_command(case, self._options.config, self._settings)
        self._run_trainer(case, installed.name, launch, environment_with(installed))
        self.rows[-1]["has_settings"] = True

    def _run_trainer(self, case: Case, system: str, launch: list[str], environment: dict[str, str] | None = None) -> Path:
        """Runs `trainer_run.py` on a case and adds its row; returns the folder of its results."""
        options = self._options
        folder: Path = options.out / (case.name if system == OURS else f"{case.name}-{system}")
        folder.mkdir(parents=True, exist_ok=True)
        result, log = folder / "result.jsonl", folder / "log.txt"
        for path in (result, log):
            path.unlink(missing_ok=True)
        script = script_command(case, options.steps, options.warmup, result, self._script_arguments())
        error = run_logged([*launch, *script], log, options.time_limit, environment)
        found = read_lines(result)
        if error is None and not found:
            error = f"no result; see {log}"
        if error is not None:
            self._add(
                {
                    "case": case.name,
                    "system": system,
                    "shape": list(case.shape),
                    "data": case.data,
                    "tokens": case.tokens,
                    "error": error,
                }
            )
        else:
            self.raw.append({"case": case.name, "system": system, "command": [*launch, *script], **found[-1]})
            self._add(trainer_row(case.name, case.shape, system, found[-1]))
        return folder

    def _script_arguments(self) -> list[str]:
        """Both systems get the same job: beside the stock Trainer, which needs fp32 weights, ours begins with them too."""
        options = self._options
        weights = ["--weights", "fp32"] if options.stock else ["--without-weights"]
        emulated = ["--emulate", *map(str, options.emulate)] if options.emulate else []
        return [
            "--accumulation",
            str(options.accumulation),
            "--max-grad-norm",
            str(options.max_grad_norm),
            *weights,
            *emulated,
        ]

    def run_peers(self, case: Case) -> None:
        """Measures the peers in a case's shape."""
        options = self._options
        folder = (options.out / f"peers-{case.preset}-{case.batch}x{case.length}").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        results = folder / "peers.jsonl"
        results.unlink(missing_ok=True)
        names = [*(() if self._peers_ready else options.peer_setup), *options.peer_benches]
        limit = PEER_SETUP_SECONDS + options.time_limit * len(options.peer_benches)
        environment = peer_environment(
            case.shape, options.steps - options.warmup, options.warmup, int(options.time_limit), folder
        )
        command = ["bash", str(options.peers.absolute() / "run_suite.sh"), *names]
        error = run_logged(command, folder / "log.txt", limit, environment)
        self._peers_ready = True
        found = {line.get("tag") or line.get("bench"): line for line in read_lines(results)}
        name = f"{case.preset}-{case.batch}x{case.length}"
        for bench in options.peer_benches:
            line = found.get(bench, {"ok": False, "error": error or f"no result; see {folder / 'log.txt'}"})
            self.raw.append({"case": name, "system": bench, **line})
            self._add(peer_row(name, case.shape, bench, line))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        speed = f"{row['tokens_per_second']:,.0f} tokens/s" if "error" not in row else f"failed: {row['error']}"
        print(f"{row['case']}, {row['system']}: {speed}", flush=True)


def parse() -> tuple[argparse.Namespace, list[Case], dict[str, Any]]:
    """The command line: options, cases, the plugin's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder for results, logs and plots")
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="CASE", help="PRESET[-real]-BATCHxLENGTH[-NNgib]; default: the table"
    )
    parser.add_argument("--preset", help="only the cases of this preset; `tiny` has cases for any machine")
    parser.add_argument("--sweep", nargs="+", type=int, default=[], metavar="BATCH", help="every case in these batches too")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the plugin (megatrain_config)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of a case, warm-up among them")
    parser.add_argument("--warmup", type=int, default=4, help="first steps that don't count (compilation, the plan's own)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step, of our job")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="of our job; 0: no clipping")
    parser.add_argument(
        "--emulate",
        nargs=2,
        type=float,
        metavar=("CORES", "GB/S"),
        help="our job as if the machine were smaller (emulation.py)",
    )
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="of each case and each peer")
    parser.add_argument("--config", type=Path, help="yaml for accelerate launch; default: that of recipes/ for this machine")
    parser.add_argument("--trace", action="store_true", help="draw a step of each case too, in a run of its own")
    parser.add_argument(
        "--stock", action="store_true", help="measure each shape with the stock Trainer too, whose model must fit"
    )
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="measure each case with the plugin installed there too")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="folder with a run_suite.sh")
    parser.add_argument("--peer-benches", nargs="+", default=["ds3"], metavar="NAME", help="benches of the suite to measure")
    parser.add_argument("--peer-setup", nargs="*", default=["warm"], metavar="NAME", help="run once before the first of them")
    options = parser.parse_args()
    if options.config is None:
        options.config = HERE.parent / ("megatrain.yaml" if torch.cuda.is_available() else "megatrain_cpu.yaml")
    if options.beside is not None and not (options.beside / "megatrain_accelerate").is_dir():
        parser.error(f"--beside: no megatrain_accelerate in {options.beside}; pip install --no-deps --target makes it")
    if options.beside is not None and Path("megatrain_accelerate").is_dir():
        parser.error("--beside: `python -m accelerate` takes the package of the current folder first; start from another one")
    if options.peers is not None and not (options.peers / "run_suite.sh").is_file():
        parser.error(f"--peers: there is no run_suite.sh in {options.peers}")
    if options.emulate and (options.peers is not None or options.stock):
        parser.error("--emulate slows the plugin's copies alone: leave out --peers and --stock")
    if options.peers is not None and options.accumulation > 1:
        parser.error("--accumulation can't be compared with --peers, which take one batch a step")
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup must be 0 or more and below --steps; got {options.warmup} of {options.steps}")
    try:
        cases = chosen(options.cases, options.preset, options.sweep, options.stock)
        settings = dict(map(parse_setting, options.set))
    except ValueError as error:
        parser.error(str(error))
    if options.peers is not None and any(case.real for case in cases):
        parser.error("--peers train on random tokens: leave out the cases with -real")
    return options, cases, settings


def main() -> int:
    """Runs everything, prints the table, writes the JSON and the plots; returns the exit status."""
    options, cases, settings = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, settings)
    others_done: set[tuple[tuple[str, int, int], bool]] = set()
    for case in cases:
        # Beside each other in time: machines drift.
        if (case.shape, case.real) not in others_done:
            others_done.add((case.shape, case.real))
            if options.peers is not None:
                bench.run_peers(case)
            if options.stock:
                bench.run_stock(case)
        if options.beside is not None:
            bench.run_beside(case)
        bench.run_ours(case)
    add_ratios(bench.rows)
    table = format_table(bench.rows)
    if options.stock:
        table += f"\n\n{format_stock_table(bench.rows)}"
    print(f"\n{table}\n")
    document = {
        **facts(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": settings,
        "steps": options.steps,
        "warmup": options.warmup,
        "rows": bench.rows,
        "results": bench.raw,
    }
    (options.out / "results.json").write_text(json.dumps(document, indent=2))
    (options.out / "table.txt").write_text(table + "\n")
    try:
        pictures = draw([document], options.out)
    except ImportError as error:
        pictures = []
        print(f"no plots: matplotlib can't be imported ({error}); pip install matplotlib", file=sys.stderr)
    for path in (options.out / "results.json", *pictures):
        print(f"written: {path}")
    return 1 if any("error" in row for row in bench.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
