"""The cases that `run.py` measures, and the commands that measure them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from model_shapes import PRESETS

HERE = Path(__file__).resolve().parent
_NAME = re.compile(r"(?P<preset>[\w.]+)(?P<real>-real)?-(?P<batch>\d+)x(?P<length>\d+)(?:-(?P<gib>\d+(?:\.\d+)?)gib)?$")


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of work: ``PRESET-BATCHxLENGTH``, with ``-NNgib`` if the GPU's memory is capped.

    ``PRESET-real-BATCHxLENGTH`` trains on documents of their own lengths up to LENGTH instead of random tokens.
    """

    preset: str
    batch: int
    length: int
    gpu_memory_gib: float | None = None
    real: bool = False

    @property
    def name(self) -> str:
        """As it is given to ``--cases``."""
        cap = f"-{self.gpu_memory_gib:g}gib" if self.gpu_memory_gib is not None else ""
        return f"{self.preset}{'-real' if self.real else ''}-{self.batch}x{self.length}{cap}"

    @property
    def data(self) -> str:
        """As it is given to `trainer_run.py`."""
        return "real" if self.real else "random"

    @property
    def tokens(self) -> int:
        """Tokens of one batch; of real documents the most that there can be, padding among them."""
        return self.batch * self.length

    @property
    def shape(self) -> tuple[str, int, int]:
        """What a peer is told; it knows no cap."""
        return self.preset, self.batch, self.length

    @classmethod
    def parse(cls, name: str) -> Case:
        """Reverse of :attr:`name`.

        Raises:
            ValueError: the name has another form.
        """
        found = _NAME.match(name)
        if found is None:
            raise ValueError(
                "a case is PRESET-BATCHxLENGTH or PRESET-BATCHxLENGTH-NNgib, for example 3b-8x4096-24gib, and "
                f"PRESET-real-... for documents of their own lengths; got {name!r}"
            )
        gib = found["gib"]
        cap = float(gib) if gib else None
        return cls(found["preset"], int(found["batch"]), int(found["length"]), cap, found["real"] is not None)


TABLE = [
    Case("3b", 8, 4096),
    Case("3b", 2, 4096),
    Case("3b", 8, 4096, 24.0),
    Case("3b", 2, 4096, 24.0),
    Case("7b", 32, 1024),
    Case("7b", 8, 1024),
    Case("14b", 8, 4096),
]
"""What is measured by default."""
STOCK_TABLE = [Case("1.5b", 8, 2048, real=True), Case("0.5b", 4, 1024), Case("1.5b", 4, 2048)]
"""What is measured by default beside the stock Trainer: models that fit a GPU with their states."""
TINY = [Case("tiny", 2, 32), Case("tiny", 4, 32)]
"""`--preset tiny`: for a look at the chain on any machine, and for its test."""


def chosen(names: list[str], preset: str | None, sweep: list[int], stock: bool = False) -> list[Case]:
    """The cases to run, in order, each once.

    Args:
        names: of cases; the table's by default.
        preset: only those of this preset.
        sweep: batch sizes in which every case is measured besides its own.
        stock: they are measured with the stock Trainer too, which has a table of its own.

    Raises:
        ValueError: a malformed name, an unknown preset, a batch or length of 0, or nothing is left.
    """
    table = STOCK_TABLE if stock else TABLE
    cases = [Case.parse(name) for name in names] or (TINY if preset == "tiny" else table)
    cases = [case for case in cases if preset in (None, case.preset)]
    if not cases:
        raise ValueError(f"no case has the preset {preset!r}; the table's are {', '.join(case.name for case in table + TINY)}")
    cases += [dataclasses.replace(case, batch=batch) for case in cases for batch in sweep]
    for case in cases:
        if case.preset not in PRESETS:
            raise ValueError(f"{case.name}: there is no preset {case.preset!r}, but {', '.join(PRESETS)}")
        if min(case.batch, case.length) < 1:
            raise ValueError(f"{case.name}: a batch and its length are 1 or more")
    return list(dict.fromkeys(cases))


def parse_setting(text: str) -> tuple[str, Any]:
    """``key=value`` of the plugin's settings; the value is JSON, or else the text itself.

    Raises:
        ValueError: there is no ``=``.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a setting is KEY=VALUE, for example placement.slots=3; got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def script_command(case: Case, steps: int, warmup: int, result: Path | None, script_arguments: list[str]) -> list[str]:
    """`trainer_run.py` with its arguments, as a launcher or an interpreter takes it."""
    values = {"--preset": case.preset, "--data": case.data, "--batch": case.batch, "--length": case.length}
    values |= {"--steps": steps, "--warmup": warmup}
    command = [str(HERE / "trainer_run.py"), *(str(word) for pair in values.items() for word in pair), *script_arguments]
    return command + (["--json", str(result)] if result is not None else [])


def launch_command(case: Case, config: Path, settings: dict[str, Any]) -> list[str]:
    """What stands before :func:`script_command` to measure our own job: ``accelerate launch`` with the plugin's settings.

    A few steps of random tokens stand for a long training, whose layers are compiled, but for the tiny model, which tries the
    chain; documents are trained on as a user's job would.
    """
    given = dict(settings) if case.real or case.preset == "tiny" else {"compile_layers": True, **settings}
    if case.gpu_memory_gib is not None:
        given["gpu_memory_gib"] = case.gpu_memory_gib
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(config)]
    return command + (["--megatrain_config", json.dumps(given)] if given else [])


def plain_environment() -> dict[str, str]:
    """This process's environment without what Accelerate and the plugin were told."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MEGATRAIN_", "ACCELERATE_"))}


def stock_environment() -> dict[str, str]:
    """The environment of the stock Trainer's job: no plugin, and as many threads as Accelerate's launcher gives ours."""
    return {"OMP_NUM_THREADS": "1", **plain_environment(), "MEGATRAIN_DISABLE": "1"}


def environment_with(installed: Path) -> dict[str, str]:
    """This process's environment, in which the packages in a folder come before all others."""
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def peer_environment(shape: tuple[str, int, int], steps: int, warmup: int, limit: int, folder: Path) -> dict[str, str]:
    """The environment of a peer's ``run_suite.sh``; its results go to ``folder/peers.jsonl``."""
    preset, batch, length = shape
    values = {"PRESET": preset, "BATCH": batch, "SEQ": length, "STEPS": steps, "WARMUP": warmup, "LIMIT": limit, "OUT": folder}
    return {**plain_environment(), **{name: str(value) for name, value in values.items()}}
