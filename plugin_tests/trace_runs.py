"""Scripts that `megatrain trace` runs in tests, and how its files are read. The scripts know nothing of the plugin."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from fresh_process import run_command

LAYERS = 3

_MODEL = f"""
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers={LAYERS}, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64)
model = LlamaForCausalLM(config)
rows = torch.randint(0, 128, (32, 16))
"""

TRAINER_SCRIPT = (
    _MODEL
    + """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(output_dir=sys.argv[1], report_to="none", disable_tqdm=True, save_strategy="no", max_steps=6,
                              per_device_train_batch_size=2, dataloader_pin_memory=False)
Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
print("trained to the end")
"""
)

LOOP_SCRIPT = (
    _MODEL
    + """
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for ids in rows[:6].to(accelerator.device).split(1):
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print("trained to the end")
"""
)


STREAMED = json.dumps({"placement": {"kept_layers": 0, "device_layers": 0}})
"""Left to itself the plan would put a model of this size on a GPU as a whole."""


def trace_script(folder: Path, code: str, step: int, config: Path, **env: str) -> tuple[str, dict[str, Any]]:
    """(what was printed, the Perfetto file's content) of tracing a script whose layers all stream."""
    script, out = folder / "train.py", folder / "trace"
    script.write_text(code)
    launch = (
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config",
        config,
        "--megatrain_config",
        STREAMED,
        script,
        folder / "output",
    )
    command = (sys.executable, "-m", "megatrain_accelerate", "trace", "--out", out, "--step", str(step), "--", *launch)
    printed = run_command(*command, **env)
    assert "trained to the end" in printed
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    return printed, json.loads(gzip.decompress((out / "trace.perfetto.json.gz").read_bytes()))


def spans_by_lane(trace: dict[str, Any]) -> dict[str, list[str]]:
    """Names of what ran, in order, by the name of its thread or stream."""
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found: dict[str, list[str]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        found.setdefault(names.get((event["pid"], event["tid"]), ""), []).append(event["name"])
    return found
