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
_NAME = re.compile(r"(?P<preset>[\w.]+)-(?P<batch>\d+)x(?P<length>\d+)(?:-(?P<gib>\d+(?:\.\d+)?)gib)?$")


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of work: ``PRESET-BATCHxLENGTH``, with ``-NNgib`` if the GPU's memory is capped."""

    preset: str
    batch: int
    length: int
    gpu_memory_gib: float | None = None

    @property
    def name(self) -> str:
        """As it is given to ``--cases``."""
        cap = f"-{self.gpu_memory_gib:g}gib" if self.gpu_memory_gib is not None else ""
        return f"{self.preset}-{self.batch}x{self.length}{cap}"

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step. There is no padding: `trainer_run.py` refuses any."""
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
                f"a case is PRESET-BATCHxLENGTH or PRESET-BATCHxLENGTH-NNgib, for example 3b-8x4096-24gib; got {name!r}"
            )
        gib = found["gib"]
        return cls(found["preset"], int(found["batch"]), int(found["length"]), float(gib) if gib else None)


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
TINY = [Case("tiny", 2, 32), Case("tiny", 4, 32)]
"""`--preset tiny`: for a look at the chain on any machine, and for its test."""


def chosen(names: list[str], preset: str | None, sweep: list[int]) -> list[Case]:
    """The cases to run, in order, each once.

    Args:
        names: of cases; the table's by default.
        preset: only those of this preset.
        sweep: batch sizes in which every case is measured besides its own.

    Raises:
        ValueError: a malformed name, an unknown preset, a batch or length of 0, or nothing is left.
    """
    cases = [Case.parse(name) for name in names] or (TINY if preset == "tiny" else TABLE)
    cases = [case for case in cases if preset in (None, case.preset)]
    if not cases:
        raise ValueError(f"no case has the preset {preset!r}; the table's are {', '.join(case.name for case in TABLE + TINY)}")
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
        raise ValueError(f"a setting is KEY=VALUE, for example slots=3; got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def training_command(
    case: Case,
    config: Path,
    settings: dict[str, Any],
    steps: int,
    warmup: int,
    result: Path | None,
    script_arguments: list[str],
) -> list[str]:
    """Our own job: the stock Trainer under ``accelerate launch``, in a process of its own."""
    given = dict(settings)
    if case.gpu_memory_gib is not None:
        given["gpu_memory_gib"] = case.gpu_memory_gib
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(config)]
    if given:
        command += ["--megatrain_config", json.dumps(given)]
    command += [
        str(HERE / "trainer_run.py"),
        "--preset",
        case.preset,
        "--batch",
        str(case.batch),
        "--length",
        str(case.length),
        "--without-weights",
    ]
    command += ["--steps", str(steps), "--warmup", str(warmup), *script_arguments]
    return command + (["--json", str(result)] if result is not None else [])


def peer_environment(shape: tuple[str, int, int], steps: int, warmup: int, limit: int, folder: Path) -> dict[str, str]:
    """The environment of a peer's ``run_suite.sh``; its results go to ``folder/peers.jsonl``."""
    preset, batch, length = shape
    values = {"PRESET": preset, "BATCH": batch, "SEQ": length, "STEPS": steps, "WARMUP": warmup, "LIMIT": limit, "OUT": folder}
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MEGATRAIN_", "ACCELERATE_"))}
    return {**plain, **{name: str(value) for name, value in values.items()}}
