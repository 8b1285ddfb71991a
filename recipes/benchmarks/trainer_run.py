"""Speed and memory of one stock Trainer job on a Qwen-shaped model with random weights.

It trains on random tokens without padding, or with `--data real` on documents of their own lengths. The script knows nothing
of the plugin: launch it with `accelerate launch --config recipes/megatrain.yaml` to measure the plugin, or plainly with
`--weights fp32` to measure the stock Trainer, which trains the weights that it is given. One JSON line goes to stdout and to
--json.
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
from bench_data import Collator, PaddingCollator, RandomTokens, SourceTexts
from emulation import emulate
from model_shapes import PRESETS, active_parameters, build_model, step_flops
from transformers import Trainer, TrainerCallback, TrainingArguments

GIB = 2**30
RUNNING_PEAKS = ("megatrain/gpu_peak_gib", "megatrain/gpu_predicted_gib", "megatrain/host_peak_gib")
"""Logged as the largest so far: the last counts, and no median."""
PLAN_SECONDS = "megatrain/plan_seconds"
"""Logged where plans were made since the log before."""
LATE_STEPS = 40
"""Of so many last steps the median is told too: nothing is compiled or planned any more by then."""


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
    """Notes time and memory at the end of every step. Waits for the GPU after the first step and the last one only."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ends: list[float] = []
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is prepared."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the row of this step."""
        if torch.cuda.is_available() and state.global_step in (1, state.max_steps):
            torch.cuda.synchronize()
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
    parser.add_argument("--weights", choices=("bf16", "fp32"), default="bf16", help="in what the model is built")
    parser.add_argument("--data", choices=("random", "real"), default="random", help="real: documents of their own lengths")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="of a sequence; of real data: the longest")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="first steps that don't count: compilation")
    parser.add_argument("--sdpa", choices=("default", "flash", "cudnn"), default="default", help="attention's kernel")
    parser.add_argument("--liger", action="store_true", help="with use_liger_kernel")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument(
        "--emulate", nargs=2, type=float, metavar=("CORES", "GB/S"), help="a machine with so many cores, and such a link"
    )
    parser.add_argument("--json", default="", help="append the result to this file")
    args = parser.parse_args()
    if not 0 <= args.warmup < args.steps:
        parser.error(f"--warmup must be 0 or more and below --steps; got {args.warmup} of {args.steps}")
    if args.data == "real" and args.steps < 2:
        parser.error("--data real takes 2 --steps or more: its speed is that of the steps after the first")
    if args.sdpa != "default":
        # The one that is left, but for torch's own products, whose memory grows with the square of the length.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_flash_sdp(args.sdpa == "flash")
        torch.backends.cuda.enable_cudnn_sdp(args.sdpa == "cudnn")
    if args.emulate is not None:
        emulate(int(args.emulate[0]), args.emulate[1])
    start = time.perf_counter()
    dtype = torch.float32 if args.weights == "fp32" else torch.bfloat16
    model = build_model(args.preset, args.length, args.layers, args.without_weights, dtype)
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
    processes, vocabulary = training.world_size, model.config.vocab_size
    count = args.batch * args.accumulation * args.steps * processes
    if args.data == "real":
        data, collator = SourceTexts(count, args.length, vocabulary), PaddingCollator()
    else:
        data, collator = RandomTokens(count, args.length, vocabulary), Collator(args.length)
    trainer = Trainer(model=model, args=training, train_dataset=data, data_collator=collator, callbacks=[recorder])
    called = time.perf_counter()
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    # The first step plans first, if the plugin is there.
    ends = [recorder.began + logs[0].get(PLAN_SECONDS, 0.0), *recorder.ends][args.warmup :]
    times = [after - before for before, after in itertools.pairwise(ends)]
    step_seconds = statistics.median(times)
    plans = [entry[PLAN_SECONDS] for entry in logs if PLAN_SECONDS in entry]
    later = [after - before for before, after in itertools.pairwise(recorder.ends)]
    lengths = list(itertools.chain.from_iterable(collator.lengths))
    in_a_step = args.batch * args.accumulation
    # Steps of random tokens are alike, so that their median is the speed; of other steps only the sum tells it.
    counted, seconds = (lengths[in_a_step:], sum(later)) if args.data == "real" else (lengths[:in_a_step], step_seconds)
    if training.process_index:
        return
    active = active_parameters(model)
    of_weights, with_attention = map(sum, zip(*(step_flops(model.config, active, 1, n) for n in counted), strict=True))
    result = {
        "preset": args.preset,
        "parameters": parameter_count,
        "active_parameters": active,
        "batch": args.batch,
        "length": args.length,
        "layers": model.config.num_hidden_layers,
        "sdpa": args.sdpa,
        "liger": args.liger,
        "emulated": args.emulate,
        "accumulation": args.accumulation,
        "max_grad_norm": args.max_grad_norm,
        "steps": args.steps,
        "warmup": args.warmup,
        "weights": args.weights,
        "data": args.data,
        "processes": processes,
        "tokens": round(sum(counted) * in_a_step / len(counted) * processes),
        "first_step_seconds": round(recorder.ends[0] - called, 3),
        "mean_step_seconds": round(statistics.mean(later), 4) if later else None,
        "late_step_seconds": round(statistics.median(later[-LATE_STEPS:]), 4) if later else None,
        "step_seconds": round(step_seconds, 4),
        "step_seconds_all": [round(seconds, 3) for seconds in times],
        "tokens_per_second": round(processes * sum(counted) / seconds, 1),
        "tflops_6n": round(1e-12 * processes * of_weights / seconds, 1),
        "tflops_with_attention": round(1e-12 * processes * with_attention / seconds, 1),
        "losses": [round(entry["loss"], 4) for entry in logs],
        "host_peak_gib": round(resident_bytes("VmHWM") / GIB, 2),
        "host_bytes_per_parameter_limit_gib": round(14.5 * parameter_count / GIB + 4, 2),
        "rows": recorder.rows[4::5] + recorder.rows[-1:],
        "build_seconds": round(built - start, 1),
        "prepare_seconds": round(recorder.began - built, 1),
        "plan_seconds": logs[0].get(PLAN_SECONDS),
        "plans": len(plans),
        "all_plans_seconds": round(sum(plans), 1),
        "total_seconds": round(time.perf_counter() - start, 1),
        "log_medians": medians(logs[args.warmup :]) | {key: logs[-1][key] for key in RUNNING_PEAKS if key in logs[-1]},
        "last_log": logs[-1],
    }
    print(json.dumps(result), flush=True)
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(result) + "\n")
    if processes == 1:
        os._exit(0)  # giving back 100 GiB of registered memory takes longer than the benchmark


if __name__ == "__main__":
    main()
