"""``megatrain config`` prints the yaml files of ``recipes/`` as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatrain_accelerate.cli import main

RECIPES = Path(__file__).parents[2] / "recipes"


def test_it_prints_the_yaml_of_a_fresh_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    printed = capsys.readouterr().out
    assert printed == (RECIPES / "megatrain.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(printed)["distributed_type"] == "MEGATRAIN"


@pytest.mark.parametrize("recipe", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_every_recipes_yaml_comes_with_the_package(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", recipe]) == 0
    assert capsys.readouterr().out == (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")


def test_a_recipe_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "nothing"])
    assert "'nothing'" in capsys.readouterr().err
