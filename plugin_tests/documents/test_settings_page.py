"""docs/settings.md lists every setting, and nothing else, as config.py has it."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import yaml

from megatrain_accelerate.config import CHOICES, MegatrainConfig, PlacementSettings

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "settings.md").read_text(encoding="utf-8")
ROWS: list[tuple[str, str, str]] = re.findall(r"^\| `([\w.]+)` \| `(.+?)` \| (.+) \|$", PAGE, re.M)


def test_the_page_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(DOCS / "make_settings.py"))["page"]()
    assert made == PAGE, "run `PYTHONPATH=. python docs/make_settings.py`"


def test_it_lists_every_setting_in_order_with_its_default() -> None:
    documented = [(key, yaml.safe_load(default)) for key, default, _ in ROWS if "." not in key]
    fields = [(field.name, field.default) for field in dataclasses.fields(MegatrainConfig)]
    expected = [(name, {"placement": {}, "layer_classes": []}.get(name, default)) for name, default in fields]
    assert documented == expected


def test_it_lists_every_key_of_placement_in_order_with_its_default() -> None:
    documented = [(key, yaml.safe_load(default)) for key, default, _ in ROWS if "." in key]
    expected = [(f"placement.{field.name}", field.default) for field in dataclasses.fields(PlacementSettings)]
    assert documented == expected


def test_defaults_of_the_page_are_the_defaults() -> None:
    shown = {key: yaml.safe_load(default) for key, default, _ in ROWS}
    assert MegatrainConfig.from_mapping(shown) == MegatrainConfig()


@pytest.mark.parametrize("key", [key for key, values in CHOICES.items() if True not in values])
def test_it_names_every_value_of_a_setting(key: str) -> None:
    (effect,) = (effect for name, _, effect in ROWS if name == key)
    assert [value for value in CHOICES[key] if f"`{value}`" not in effect] == []
