"""docs/models.md is what the tests' families give."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import make_model_table
import pytest
import torch
from families import DECODERS
from family_list import FAMILIES, KINDS
from make_model_table import TABLE, Differs, class_of, row_of, write_table

TEXT = TABLE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.+?) \| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", re.M)
BY_NAME = {family.name: family for family in FAMILIES}


def test_it_lists_every_family_of_the_tests_in_order() -> None:
    listed = [row[:3] for row in ROW.findall(TEXT)]
    order = sorted(FAMILIES, key=lambda family: list(KINDS).index(family.kind))
    assert listed == [(family.title, class_of(family), family.notes) for family in order]
    assert re.findall(r"^## (.+)$", TEXT, re.M) == [
        title for kind, title in KINDS.items() if any(f.kind == kind for f in order)
    ]


def test_names_of_families_are_unique() -> None:
    assert len(BY_NAME) == len(FAMILIES)


@pytest.mark.parametrize("name", ["opt", "zamba2_whole"])
def test_a_row_is_what_its_run_gives(name: str) -> None:
    assert row_of(BY_NAME[name]) in TEXT.splitlines()


def test_a_family_that_differs_is_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plainer = BY_NAME["mistral"].plainer  # type: ignore[attr-defined]
    train_plainly = make_model_table.train_plainly

    def without_window(family: object, dtype: torch.dtype) -> object:
        return train_plainly(dataclasses.replace(BY_NAME["mistral"], build=plainer), dtype)

    monkeypatch.setattr(make_model_table, "train_plainly", without_window)
    with pytest.raises(Differs, match=r"mistral in bf16: \d+ values differ"):
        write_table([family for family in DECODERS if family.name == "mistral"], tmp_path / "models.md")
    assert not (tmp_path / "models.md").exists()
