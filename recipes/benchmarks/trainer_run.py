"""Speed and memory of one stock Trainer job on a Qwen-shaped model with random weights and random tokens.

The script knows nothing of the plugin: launch it with `accelerate launch --config recipes/megatrain.yaml` to measure the
plugin, or plainly to measure the stock Trainer. One JSON line goes to stdout and to --json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from model_shapes import PRESETS, active_parameters, build_model, step_flops
from transformers import Trainer, TrainerCallback, TrainingArguments

GIB = 2**30
RUNNING_PEAKS = ("megatrain/gpu_peak_gib", "megatrain/host_peak_gib")
"""Logged as the largest so far: the last counts, and no median."""


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random token ids without padding; the labels are the ids."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._shape, self._vocabulary = (count, length), vocabulary

    def __len__(self) -> int:
        """Number of sequences."""
        return self._shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sequence; the same for the same index."""
        ids = torch.randint(0, self._vocabulary, (self._shape[1],), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Collator:
    """Stacks sequences, and makes sure that every token that is counted was trained on.

    Args:
        length: of every sequence.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A batch.

        Raises:
            ValueError: a sequence is shorter or longer, or has tokens without a label: they would count as speed.
        """
        batch = {key: torch.stack([record[key] for record in records]) for key in ("input_ids", "labels")}
        if batch["input_ids"].shape != (len(records), self._length) or bool((batch["labels"] != batch["input_ids"]).any()):
            raise ValueError(f"a batch has padding, or not {self._length} tokens in each sequence: its speed would be wrong")
        return batch


def medians(logs: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each number that the plugin logged, over the logs that have it."""
    keys = {key for entry in logs for key, value in entry.items() if key.startswith("megatrain/") and isinstance(value, float)}
    return {key: round(statistics.median(entry[key] for entry in logs if key in entry), 4) for key in sorted(keys)}


def resident_bytes(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


class Recorder(TrainerCallback):
    """Notes time and memory at the end of every step."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ends: list[float] = []
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is prepared."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the row of this step."""
        self.ends.append(time.perf_counter())
        row = {"step": float(state.global_step), "rss_gib": resident_bytes("VmRSS") / GIB}
        if torch.cuda.is_available():
            row["gpu_allocated_gib"] = torch.cuda.memory_allocated() / GIB
            row["gpu_reserved_gib"] = torch.cuda.memory_reserved() / GIB
            row["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        self.rows.append(row)


def main() -> None:
    """Runs the job and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="7b")
    parser.add_argument("--layers", type=int, default=None, help="fewer or more layers than the preset has")
    parser.add_argument(
        "--without-weights",
        action="store_true",
        help="build the model empty; the plugin initialises it in its store",
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="first steps that don't count: compilation")
    parser.add_argument("--sdpa", choices=("default", "flash", "cudnn"), default="default", help="attention's kernel")
    parser.add_argument("--liger", action="store_true", help="with use_liger_kernel")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--json", default="", help="append the result to this file")
    args = parser.parse_args()
    if not 0 <= args.warmup < args.steps:
        parser.error(f"--warmup must be 0 or more and below --steps; got {args.warmup} of {args.steps}")
    if args.sdpa != "default":
        # The one that is left, but for torch's own products, whose memory grows with the square of the length.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_flash_sdp(args.sdpa == "flash")
        torch.backends.cuda.enable_cudnn_sdp(args.sdpa == "cudnn")
    start = time.perf_counter()
    model = build_model(args.preset, args.length, args.layers, args.without_weights)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    built = time.perf_counter()
    recorder = Recorder()
    training = TrainingArguments(
        output_dir=os.environ.get("TMPDIR", "/tmp") + "/trainer_run",
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        max_steps=args.steps,
        max_grad_norm=args.max_grad_norm,
        learning_rate=1e-5,
        lr_scheduler_type="cosine",
        bf16=torch.cuda.is_available(),  # only some CPUs compute in it at speed
        use_liger_kernel=args.liger,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    data = RandomTokens(args.batch * args.accumulation * args.steps, args.length, model.config.vocab_size)
    collator = Collator(args.length)
    trainer = Trainer(model=model, args=training, train_dataset=data, data_collator=collator, callbacks=[recorder])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    # The first step plans first, if the plugin is there.
    ends = [recorder.began + logs[0].get("megatrain/plan_seconds", 0.0), *recorder.ends][args.warmup :]
    times = [after - before for before, after in itertools.pairwise(ends)]
    step_seconds = statistics.median(times)
    tokens = args.batch * args.accumulation * args.length
    active = active_parameters(model)
    of_weights, with_attention = step_flops(model.config, active, args.batch * args.accumulation, args.length)
    result = {
        "preset": args.preset,
        "parameters": parameter_count,
        "active_parameters": active,
        "batch": args.batch,
        "length": args.length,
        "layers": model.config.num_hidden_layers,
        "sdpa": args.sdpa,
        "liger": args.liger,
        "accumulation": args.accumulation,
        "max_grad_norm": args.max_grad_norm,
        "steps": args.steps,
        "warmup": args.warmup,
        "tokens": tokens,
        "step_seconds": round(step_seconds, 4),
        "step_seconds_all": [round(seconds, 3) for seconds in times],
        "tokens_per_second": round(tokens / step_seconds, 1),
        "tflops_6n": round(1e-12 * of_weights / step_seconds, 1),
        "tflops_with_attention": round(1e-12 * with_attention / step_seconds, 1),
        "losses": [round(entry["loss"], 4) for entry in logs],
        "host_peak_gib": round(resident_bytes("VmHWM") / GIB, 2),
        "host_bytes_per_parameter_limit_gib": round(14.5 * parameter_count / GIB + 4, 2),
        "rows": recorder.rows[4::5] + recorder.rows[-1:],
        "build_seconds": round(built - start, 1),
        "prepare_seconds": round(recorder.began - built, 1),
        "plan_seconds": logs[0].get("megatrain/plan_seconds"),
        "total_seconds": round(time.perf_counter() - start, 1),
        "log_medians": medians(logs[args.warmup :]) | {key: logs[-1][key] for key in RUNNING_PEAKS if key in logs[-1]},
        "last_log": logs[-1],
    }
    print(json.dumps(result), flush=True)
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(result) + "\n")
    os._exit(0)  # giving back 100 GiB of registered memory takes longer than the benchmark


if __name__ == "__main__":
    main()
