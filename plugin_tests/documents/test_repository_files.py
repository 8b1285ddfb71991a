"""Workflows, templates and metadata: they parse, what they name exists, and they agree on version and Pythons."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_docs import check_command

from megatrain_accelerate import __version__

REPOSITORY = Path(__file__).parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
METADATA = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    parsed = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(parsed, dict)
    return parsed


def commands(job: dict[str, Any]) -> Iterator[str]:
    """The commands of a job, once for each entry of its matrix."""
    axes = job.get("strategy", {}).get("matrix", {})
    for step in job.get("steps", []):
        for chosen in itertools.product(*axes.values()):
            text = step.get("run", "").replace("\\\n", "")
            for name, value in zip(axes, chosen, strict=True):
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            assert "${{" not in text
            yield from filter(None, text.splitlines())


@pytest.fixture
def folder_of_recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the yaml files are. What reading a launcher's command exports goes again."""
    monkeypatch.chdir(REPOSITORY / "recipes")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
@pytest.mark.usefixtures("folder_of_recipes")
def test_a_workflow_names_jobs_commands_and_files_that_exist(path: Path) -> None:
    workflow = read(path)
    # yaml reads the key `on` as true.
    assert {"name", True, "permissions", "jobs"} <= workflow.keys()
    for job in workflow["jobs"].values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= workflow["jobs"].keys()
        if local := job.get("uses"):
            assert (REPOSITORY / local).exists()
            continue
        assert job["timeout-minutes"] > 0
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        for command in commands(job):
            words = shlex.split(command)
            while "=" in words[0]:  # environment of the command
                del words[0]
            check_command(words, {})


def test_ci_runs_every_step_of_the_script_under_every_python() -> None:
    jobs = read(REPOSITORY / ".github" / "workflows" / "ci.yml")["jobs"]
    run = {shlex.join(shlex.split(command)) for job in jobs.values() for command in commands(job)}
    script = re.findall(r"^step (.+)$", (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    # `make lint` makes the environment.
    assert run == {shlex.join(["make", *shlex.split(step)]) for step in script if step != "venv"}
    pythons = set(re.findall(r'"?(3\.\d+)"', (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")))
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", METADATA))


def test_issue_templates_ask_something() -> None:
    templates = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    forms = [read(path) for path in templates if path.name != "config.yml"]
    assert forms
    assert all({"name", "description", "body"} <= form.keys() and form["body"] for form in forms)


def test_all_files_name_the_same_version() -> None:
    citation = read(REPOSITORY / "CITATION.cff")
    assert citation["version"] == __version__
    assert f"version = {{{__version__}}}" in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}] - {citation['date-released']}" in changelog
