"""Runs another project's own tests twice, stock and with the plugin switched on from outside, and says where they differ.

    python recipes/peer_tests.py --cwd CHECKOUT tests/trainer/test_trainer.py -k "train and not deepspeed"

What comes after the options goes to pytest. docs/peer_tests.md says how to get a checkout and what is known to differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPORT = "MEGATRAIN_PEER_REPORT"
REFUSALS = ("UnsupportedError", "ConfigError", "StateError", "HostMemoryError")


class Recorder:
    """The pytest plugin: notes each test's outcome, and in how many preparations a model was streamed.

    Args:
        path: the file that gets one JSON object a test.
        active: whether the plugin under test is on.
    """

    def __init__(self, path: Path, active: bool) -> None:
        self._file = path.open("a")
        self._active = active
        self._adopted = 0
        self._environment = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
        if active:
            self._count_adoptions()

    def _count_adoptions(self) -> None:
        from megatrain_accelerate.engine import Engine

        adopt = Engine.__init__

        def count(engine: Any, *args: Any, **kwargs: Any) -> None:
            adopt(engine, *args, **kwargs)
            self._adopted += 1

        Engine.__init__ = count

    def pytest_runtest_setup(self) -> None:
        """Transformers' tests end by deleting what the environment asked of Accelerate, the CPU for one."""
        os.environ.update(self._environment)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A phase of a test is over: a test's outcome is that of its body, or of what broke around it."""
        if report.when != "call" and report.outcome == "passed":
            return
        text = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or str(report.longrepr or "")
        error = text.strip().splitlines()[0] if text.strip() else ""
        entry = {"test": report.nodeid, "outcome": report.outcome, "streamed": self._adopted, "error": error}
        entry["refused"] = any(f"megatrain_accelerate.errors.{name}" in str(report.longrepr) for name in REFUSALS)
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self._adopted = 0

    def pytest_runtest_teardown(self) -> None:
        """Models of one test must not be drained by the next."""
        if self._active:
            from megatrain_accelerate.engine import all_engines

            for engine in all_engines():
                engine.close()


def pytest_configure(config: Any) -> None:
    """Called by pytest, which is told to load this file as a plugin."""
    if REPORT in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ[REPORT]), bool(os.environ.get("MEGATRAIN_ACTIVE"))))


def run(arguments: list[str], cwd: Path, active: bool, report: Path) -> dict[str, dict[str, Any]]:
    """Runs the tests in a process of its own; returns what was noted, by test."""
    environment = {**os.environ, REPORT: str(report)}
    environment.pop("MEGATRAIN_ACTIVE", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    if active:
        # As the launcher does; processes that the tests start get it too.
        environment["MEGATRAIN_ACTIVE"] = "1"
    else:
        environment["MEGATRAIN_DISABLE"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "peer_tests", "-q", "--tb=short", "--no-header"]
    subprocess.run([*command, *arguments], cwd=cwd, env=environment, check=False)
    entries = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return {entry["test"]: entry for entry in entries}


def verdict(stock: dict[str, Any], ours: dict[str, Any] | None) -> str:
    """One of: not comparable, passes, passes streamed, refused, differs."""
    if stock["outcome"] != "passed":
        return "not comparable"
    if ours is not None and ours["outcome"] == "passed":
        return "passes streamed" if ours["streamed"] else "passes"
    if ours is not None and ours["refused"]:
        return "refused"
    return "differs"


def main() -> None:
    """Prints a table of the verdicts and what differs; ends with 1 where something does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cwd", type=Path, default=Path(), help="the checkout: where pytest runs")
    args, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        stock = run(pytest_arguments, args.cwd, False, Path(folder) / "stock")
        ours = run(pytest_arguments, args.cwd, True, Path(folder) / "streamed")
    if not stock:
        raise SystemExit("no test ran")
    verdicts = {test: verdict(entry, ours.get(test)) for test, entry in stock.items()}
    print("\n| verdict | tests |\n| --- | --- |")
    for kind in ("passes streamed", "passes", "refused", "differs", "not comparable"):
        print(f"| {kind} | {sum(found == kind for found in verdicts.values())} |")
    for kind in ("refused", "differs"):
        for test in (test for test, found in verdicts.items() if found == kind):
            print(f"{kind}: {test}: {ours[test]['error'] if test in ours else 'did not run'}")
    raise SystemExit(1 if "differs" in verdicts.values() else 0)


if __name__ == "__main__":
    main()
