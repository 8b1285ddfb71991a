"""Speed and memory of one stock Trainer job on a Qwen-shaped model with random weights and random tokens.

The script knows nothing of the plugin: launch it with `accelerate launch --config recipes/megatrain.yaml` to measure the
plugin, or plainly to measure the stock Trainer. One JSON line goes to stdout and to --json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

# vocabulary, hidden, intermediate, layers, heads, key-value heads, tied head: the published Qwen2.5 configurations.
PRESETS = {
    "tiny": (512, 64, 176, 4, 4, 2, True),
    "0.5b": (151936, 896, 4864, 24, 14, 2, True),
    "1.5b": (151936, 1536, 8960, 28, 12, 2, True),
    "3b": (151936, 2048, 11008, 36, 16, 2, True),
    "7b": (152064, 3584, 18944, 28, 28, 4, False),
    "14b": (152064, 5120, 13824, 48, 40, 8, False),
    "32b": (152064, 5120, 27648, 64, 40, 8, False),
}
MOE_PRESETS = {"tiny_moe": (512, 64, 4, 4, 2, 16, 4, 2, 48), "30b_a3b": (151936, 2048, 48, 32, 4, 128, 128, 8, 768)}
"""Vocabulary, hidden, layers, heads, key-value heads, their size, experts, experts of a token, intermediate size of one: the
published configuration of Qwen3-30B-A3B."""
GIB = 2**30
RUNNING_PEAKS = ("megatrain/gpu_peak_gib", "megatrain/host_peak_gib")
"""Logged as the largest so far: the last counts, and no median."""


def step_flops(config: PreTrainedConfig, parameters: int, batch: int, length: int) -> tuple[float, float]:
    """Useful FLOPs of a step: of the weights alone, and with causal attention. Nothing recomputed counts.

    6 N a token for N parameters that a token meets. Attention's two products take 2 x 2 x T^2 / 2 x H for one sequence of T
    tokens and a layer whose heads have H elements, half of all pairs of tokens; backward twice as much: 6 T^2 H.
    """
    weights = 6.0 * parameters * batch * length
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads * head_size
    return weights, weights + 6.0 * batch * length**2 * heads * config.num_hidden_layers


def build_model(preset: str, length: int, layers: int | None = None, without_weights: bool = False) -> PreTrainedModel:
    """The preset's model in bf16, filled with random values on the GPU where there is one.

    Args:
        preset: a name in :data:`PRESETS` or :data:`MOE_PRESETS`.
        length: of the sequences.
        layers: the preset's by default.
        without_weights: leave the filling to whoever prepares the model.
    """
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    common: dict[str, Any] = {
        "max_position_embeddings": max(32768, length),
        "use_cache": False,
        "rope_parameters": rope,
    }
    if preset in MOE_PRESETS:
        vocabulary, hidden, preset_layers, heads, kv_heads, head_dim, experts, used, expert_size = MOE_PRESETS[preset]
        config: Any = Qwen3MoeConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers or preset_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            num_experts=experts,
            num_experts_per_tok=used,
            moe_intermediate_size=expert_size,
            norm_topk_prob=True,
            output_router_logits=True,  # the auxiliary loss, weighted by 0.001
            **common,
        )
        model_class: Any = Qwen3MoeForCausalLM
    else:
        vocabulary, hidden, intermediate, preset_layers, heads, kv_heads, tied = PRESETS[preset]
        config = Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers or preset_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            **common,
        )
        model_class = Qwen2ForCausalLM
    with torch.device("meta"):
        model = model_class(config).to(torch.bfloat16)
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary
    return model if without_weights else _filled(model)


def _filled(model: Any) -> PreTrainedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        owner_name, _, attribute = name.rpartition(".")
        value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if parameter.dim() > 1:
            value.normal_(0.0, 0.02, generator=generator)
        else:
            value.fill_(0.0 if attribute == "bias" else 1.0)
        setattr(model.get_submodule(owner_name), attribute, torch.nn.Parameter(value.to("cpu")))
    model.tie_weights()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def active_parameters(model: PreTrainedModel) -> int:
    """Parameters that one token is multiplied with: of the experts, only those that it is sent to."""
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = sum(parameter.numel() for parameter in model.parameters())
    if not experts:
        return total
    return total - experts + experts * model.config.num_experts_per_tok // model.config.num_experts


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
    parser.add_argument("--preset", choices=[*PRESETS, *MOE_PRESETS], default="7b")
    parser.add_argument("--layers", type=int, default=None, help="fewer or more layers than the preset has")
    parser.add_argument(
        "--without-weights",
        action="store_true",
        help="build the model empty; the plugin initialises it in its store",
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="first steps that don't count: compilation, the plan's own")
    parser.add_argument("--sdpa", choices=("default", "flash", "cudnn"), default="default", help="attention's kernel")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--json", default="", help="append the result to this file")
    args = parser.parse_args()
    if not 1 <= args.warmup < args.steps:
        parser.error(f"--warmup must be 1 or more and below --steps; got {args.warmup} of {args.steps}")
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
    times = [
        after - before for before, after in zip(recorder.ends[args.warmup - 1 :], recorder.ends[args.warmup :], strict=False)
    ]
    step_seconds = statistics.median(times)
    tokens = args.batch * args.accumulation * args.length
    active = active_parameters(model)
    of_weights, with_attention = step_flops(model.config, active, args.batch * args.accumulation, args.length)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "preset": args.preset,
        "parameters": parameter_count,
        "active_parameters": active,
        "batch": args.batch,
        "length": args.length,
        "layers": model.config.num_hidden_layers,
        "sdpa": args.sdpa,
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
