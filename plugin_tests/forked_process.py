"""Test files run as scripts in forks of one process, which has imported what they begin with: in a new one each would take
seconds for it. What is imported first, and what an interpreter's start reads, is for :mod:`fresh_process`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fresh_process import clean_environment

IMPORTED = ("transformers.models.qwen2.modeling_qwen2", "engine_runs", "trainer_runs")


class _Parent:
    """The process that is forked. It ends with this one."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=clean_environment(PYTHONPATH=os.pathsep.join(filter(None, paths))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.end)

    def statuses(self, request: object, timeout_seconds: float) -> list[int]:
        """Of children, when all have ended; if they don't in time, or this process is interrupted, they are killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
            assert ready, f"not ended after {timeout_seconds} s: {request}"
            statuses: list[int] = json.loads(self._process.stdout.readline())
        except BaseException:
            self.end()
            _parent.cache_clear()
            raise
        return statuses

    def end(self) -> None:
        """Kills it and its children."""
        atexit.unregister(self.end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@functools.cache
def _parent() -> _Parent:
    return _Parent()


def run_in_forks(
    file: str | Path,
    *args: str | Path,
    environments: Sequence[Mapping[str, str]],
    cwd: Path | None = None,
    timeout_seconds: float = 300,
) -> list[tuple[int, str]]:
    """Runs a file as a script in as many processes at once as there are ``environments``; what each of these adds is added to
    :func:`clean_environment`. Returns the exit status and the output of each."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(place)) for place in range(len(environments))]
        children = [
            {"output": str(output), "environment": clean_environment(**environment)}
            for output, environment in zip(outputs, environments, strict=True)
        ]
        request = {"command": [*map(str, (file, *args))], "children": children, "cwd": str(cwd or Path.cwd())}
        statuses = _parent().statuses(request, timeout_seconds)
        return [(status, output.read_text()) for status, output in zip(statuses, outputs, strict=True)]


def run_forked(file: str | Path, *args: str | Path, cwd: Path | None = None, **env: str) -> str:
    """What a file prints that is run as a script, and ends well."""
    ((status, output),) = run_in_forks(file, *args, environments=[env], cwd=cwd)
    assert status == 0, f"{file} ended with {status}:\n{output}"
    return output


def _become(child: Mapping[str, str | dict[str, str]]) -> None:
    """Gives this process the output and the environment of a child."""
    output, environment = child["output"], child["environment"]
    assert isinstance(output, str)
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    for target, flags in (("/dev/null", os.O_RDONLY), (output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)):
        opened = os.open(target, flags, 0o600)
        for descriptor in (0,) if flags == os.O_RDONLY else (1, 2):
            os.dup2(opened, descriptor)
        os.close(opened)


def _fork_on_request() -> list[str]:
    """The command of a child, in which alone this returns; the parent forks until nobody asks any more."""
    for line in sys.stdin:
        request, children = json.loads(line), []
        for child in request["children"]:
            pid = os.fork()
            if pid == 0:
                _become(child)
                os.chdir(request["cwd"])
                command: list[str] = request["command"]
                return command
            children.append(pid)
        # In the order in which they end: one that has ended is gone while others run.
        statuses = dict(os.wait() for _ in children)
        print([os.waitstatus_to_exitcode(statuses[pid]) for pid in children], flush=True)
    sys.exit()


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy all that it shares with this process
    sys.argv = _fork_on_request()
    sys.path[0] = str(Path(sys.argv[0]).parent)
    # The child ends as any interpreter does, with what is to be done at its exit.
    runpy.run_path(sys.argv[0], run_name="__main__")
