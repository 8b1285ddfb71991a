"""README.md and docs/: links lead somewhere; commands, files, settings and tests that are named exist."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from megatrain_accelerate.cli import main
from megatrain_accelerate.config import MegatrainConfig, PlacementSettings

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
DOCS = REPOSITORY / "docs"
PAGES = [
    *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")),
    *sorted(DOCS.glob("*.md")),
]
ELSEWHERE = {"architecture.md", "moments.md"}
"""Pages whose paths are those within the package's folders."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.M)
_PATH = re.compile(r"(?:recipes|plugin_tests|docs)/[\w./-]*\w")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    found: dict[str, int] = {}
    names = set()
    for heading in _HEADING.findall(prose(page)):
        shown = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        repeats = found.get(name, 0)
        found[name] = repeats + 1
        names.add(f"{name}-{repeats}" if repeats else name)
    return names


@every_page
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    targets = [target for target in _LINK.findall(prose(page)) if not target.startswith(("https://", "http://"))]
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        # The site has the pages of docs/ only.
        assert page.parent != DOCS or file.is_relative_to(DOCS), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = [page for group in navigation for entries in group.values() for entry in entries for page in entry.values()]
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@every_page
def test_settings_that_are_named_exist(page: Path) -> None:
    known = {field.name for field in dataclasses.fields(MegatrainConfig)}
    of_placement = {field.name for field in dataclasses.fields(PlacementSettings)}
    text = text_of(page)
    assert set(re.findall(r"megatrain_config\.(\w+)", text)) <= known
    assert set(re.findall(r"\bplacement\.(?!py\b)([a-z_]+)", text)) <= of_placement
    for key, value in re.findall(r"`(\w+): ([^`]+)`", text):
        if key in known:
            MegatrainConfig.from_mapping(yaml.safe_load(f"{key}: {value}"))
    for language, block in _FENCE.findall(text):
        if language == "yaml":
            MegatrainConfig.from_mapping(yaml.safe_load(block).get("megatrain_config"))


@every_page
def test_prose_names_no_commits(page: Path) -> None:
    assert [word for word in re.findall(r"\b[0-9a-f]{7,12}\b", prose(page)) if not word.isdecimal()] == []


def test_errors_that_are_quoted_are_raised() -> None:
    text = prose(DOCS / "troubleshooting.md").replace("**", "")
    quoted = [" ".join(quote.split()) for quote in re.findall(r"\*(\S[^*]*)\*", text)]
    assert len(quoted) > 30
    trees = [ast.parse(text_of(file)) for file in (REPOSITORY / "megatrain_accelerate").rglob("*.py")]
    strings = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    said = "\n".join(string for string in strings if isinstance(string, str))
    parts = [part.strip() for quote in quoted for part in quote.split("...")]
    assert [part for part in parts if part not in said] == []


@every_page
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", text_of(page)):
        (path,) = TESTS.rglob(file)
        assert re.search(rf"^ *def {name}\(", path.read_text(encoding="utf-8"), re.M), f"{file}::{name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: page.name)
def test_files_of_the_repository_that_are_named_exist(page: Path) -> None:
    code = re.findall(r"`([^`\n]+)`", prose(page))
    named = {path for text in code for path in _PATH.findall(text) if text.startswith(path) or f" {path}" in text}
    assert sorted(path for path in named if not (REPOSITORY / path).exists()) == []


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_files_of_the_package_that_are_named_exist(name: str) -> None:
    package = REPOSITORY / "megatrain_accelerate"
    folders = [folder.name for folder in package.iterdir() if folder.is_dir()]
    named = re.findall(rf"\b((?:{'|'.join(folders)})/[\w/]+\.\w+)", text_of(DOCS / name))
    assert named
    assert sorted({path for path in named if not (package / path).exists()}) == []


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in a page's ``console`` blocks."""
    for language, block in _FENCE.findall(text_of(page)):
        if language == "console":
            assert block.startswith("$ ")
            for command in re.split(r"^\$ ", block, flags=re.M)[1:]:
                if words := shlex.split(command.replace("\\\n", ""), comments=True):
                    yield words


def check_command(words: list[str], help_texts: dict[str, str]) -> None:
    """Fails where a command names an option, a file or a target that isn't there."""
    for word in words:
        assert not _PATH.fullmatch(word) or (REPOSITORY / word).exists(), word
    if words[0] == "make":
        makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        for word in words[1:]:
            name, is_variable, _ = word.partition("=")
            assert re.search(rf"^{name} \??=" if is_variable else rf"^{name}:", makefile, re.M), word
    elif words[:2] == ["accelerate", "launch"]:
        launch_command_parser().parse_args(words[2:])
    elif words[0] == "megatrain" and not words[1].startswith("--"):
        ours, _, training = (" ".join(words[2:])).partition(" -- ")
        options = set(re.findall(r"(?<!\S)--[\w-]+", help_texts[words[1]]))
        assert [word for word in ours.split() if word.startswith("--") and word not in options] == []
        if training:
            check_command(training.split(), help_texts)


@pytest.fixture
def help_texts(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What ``megatrain COMMAND --help`` prints."""
    texts = {}
    for command in ("estimate", "doctor", "trace", "config"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        texts[command] = re.sub(r"[\[\],]", " ", capsys.readouterr().out)
    return texts


@pytest.fixture
def folder_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The commands are read where ``megatrain.yaml`` and the recipes are. What reading them exports goes again."""
    shutil.copy(REPOSITORY / "recipes" / "megatrain.yaml", tmp_path)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@every_page
@pytest.mark.usefixtures("folder_of_a_user")
def test_commands_name_options_files_and_targets_that_exist(page: Path, help_texts: dict[str, str]) -> None:
    for words in commands(page):
        check_command(words, help_texts)


@pytest.mark.parametrize(
    "wrong",
    [
        "make nothing",
        "make test NOTHING=1",
        "accelerate launch --megatrian train.py",
        "accelerate launch --config recipes/nothing.yaml train.py",
        "megatrain estimate MODEL --nothing",
        "megatrain trace --out DIR -- accelerate launch --nothing train.py",
    ],
)
def test_a_command_that_names_what_is_not_there_is_found(wrong: str, help_texts: dict[str, str]) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check_command(wrong.split(), help_texts)
