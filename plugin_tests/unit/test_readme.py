"""README.md says what the code says."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from megatrain_accelerate.config import CHOICES, MegatrainConfig, PlacementSettings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def settings_table() -> dict[str, tuple[str, str]]:
    """Key -> (default, effect), in the README's order."""
    table = README.split("<!-- settings:")[1].split("<!-- end of settings -->")[0]
    return {key: (default, effect) for key, default, effect in re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", table, re.M)}


def test_settings_table_lists_every_setting_in_order_with_its_default(
    settings_table: dict[str, tuple[str, str]],
) -> None:
    documented = [(key, ast.literal_eval(default)) for key, (default, _) in settings_table.items()]
    fields = [(field.name, field.default) for field in dataclasses.fields(MegatrainConfig)]
    assert documented == [(name, {} if name == "placement" else default) for name, default in fields]


def test_placement_table_lists_every_key_in_order_with_its_default() -> None:
    table = README.split("<!-- end of settings -->")[1]
    documented = re.findall(r"^\| `placement\.(\w+)` \| `(.+?)` \|", table, re.M)
    expected = [(field.name, repr(field.default)) for field in dataclasses.fields(PlacementSettings)]
    assert documented == expected


def test_settings_table_names_every_step_schedule(settings_table: dict[str, tuple[str, str]]) -> None:
    _, effect = settings_table["step_schedule"]
    assert [name for name in CHOICES["step_schedule"] if f"`{name}`" not in effect] == []
