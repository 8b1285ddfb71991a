"""docs/tutorial.md works as it stands: its files are written, and its commands run, on the CPU with a small model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import clean_environment
from recipe_files import write_decoder
from safetensors.torch import load_file

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"[Ss]ave this as `([\w.]+)`.*?\n\n```python\n(.*?)^```", PAGE, re.M | re.S))
COMMANDS = [
    line for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.M | re.S) for line in re.findall(r"^\$ (.+)", block, re.M)
]
NOT_RUN = ("pip install", "megatrain doctor", "export MODEL=")
"""The package is there, this machine has no GPU to be checked, and the model is a folder of the test's."""
ON_CPU = "use_cpu=True, bf16=False, "
FEWER = "range(400)", "range(160)"
"""Rows, of which the test takes seconds fewer, and 20 steps in 2 epochs."""


def test_the_page_has_all_that_is_run() -> None:
    assert sorted(FILES) == ["ask.py", "make_data.py", "train.py"]
    assert [command.split()[:2] for command in COMMANDS if not command.startswith(NOT_RUN)] == [
        ["python", "make_data.py"],
        ["megatrain", "estimate"],
        ["accelerate", "launch"],
        ["python", "ask.py"],
    ]
    assert FEWER[0] in FILES["make_data.py"]


@pytest.mark.slow
def test_it_leads_from_a_file_of_lines_to_an_answer(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "small")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("SFTConfig(", f"SFTConfig({ON_CPU}").replace(*FEWER))
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment(PATH=binaries, MODEL=str(model), OMP_NUM_THREADS="1")
    environment["HF_HOME"] = str(tmp_path / "hf")
    printed = {}
    for command in COMMANDS:
        if command.startswith(NOT_RUN):
            continue
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
        printed[" ".join(command.split()[:2])] = result.stdout + result.stderr
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    shown = re.search(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    assert shown is not None
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in rows)
    assert {key for line in shown[1].splitlines() for key in json.loads(line)} == set(rows[0])
    assert "megatrain: adopting 3 layers" in printed["accelerate launch"]
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed["accelerate launch"])]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "my-model"))
    # Vectors are ones, which so small a step doesn't move in bf16.
    assert all(not after[name].equal(before[name]) for name in before if before[name].dim() > 1)
    assert printed["python ask.py"].strip()
