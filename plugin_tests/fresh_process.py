"""Code in a new interpreter: what is imported first, and the environment, can't be tested in this one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def clean_environment(**env: str) -> dict[str, str]:
    """This process's environment without the settings of Accelerate and of the plugin, and with ``env``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEGATRAIN_", "ACCELERATE_"))}
    # No GPU, and no config file of the person who runs the tests.
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "HF_HOME": "/nonexistent", **env}


def run_command(*command: str | Path, check: bool = True, cwd: Path | None = None, **env: str) -> str:
    """Output and errors of a command; ``check`` demands that it succeeds, and otherwise that it fails."""
    result = subprocess.run(
        [str(part) for part in command],
        env=clean_environment(**env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert (result.returncode == 0) is check, f"{command} ended with {result.returncode}:\n{result.stdout}"
    return result.stdout


def run_python(code: str, *args: str, check: bool = True, cwd: Path | None = None, **env: str) -> str:
    """As :func:`run_command`, for Python code."""
    return run_command(sys.executable, "-c", textwrap.dedent(code), *args, check=check, cwd=cwd, **env)


def script(name: str) -> Path:
    """A console script of this environment."""
    return Path(sys.executable).parent / name
