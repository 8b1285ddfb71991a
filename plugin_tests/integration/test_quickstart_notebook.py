"""The notebook runs as it is, from a file of texts to a sample of the trained model."""

from __future__ import annotations

import json
from pathlib import Path

from forked_process import run_forked

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "quickstart.ipynb"


def test_the_notebook_trains_and_samples(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), "it is kept without results"
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"{n} and 4 make {n + 4}."}) + "\n" for n in range(200)))
    shown = "print(json.dumps([losses, sample, trainer.state.log_history[0]['megatrain/h2d_gb']]))"
    (tmp_path / "cells.py").write_text("\n".join(["".join(cell["source"]) for cell in cells] + [shown]))
    output = run_forked(tmp_path / "cells.py", cwd=tmp_path)
    losses, sample, traffic = json.loads(output.splitlines()[-1])
    assert traffic > 0
    assert losses[-1] < losses[0] / 3
    assert sample.startswith("3 and 4 make")
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in (tmp_path / "quickstart").iterdir()}
