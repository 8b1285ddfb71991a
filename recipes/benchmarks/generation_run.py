"""Compares the speed of `generate` under Accelerate with plain transformers, on a model with random weights.

    accelerate launch --config recipes/megatrain.yaml recipes/benchmarks/generation_run.py --preset 7b

One process measures both: first the model as plain transformers runs it on the GPU, then the same model after
``Accelerator().prepare(model)``, under the plugin if the launcher switched it on. Both decode greedily and begin with a
generation that isn't timed; after it the plugin keeps all weights that fit on the GPU (`evaluation_weights`). One JSON line
goes to stdout and to --json: tokens a second of both, their ratio, and whether the tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
from accelerate import Accelerator
from model_shapes import PRESETS, build_model

GIB = 2**30


def measure(model: Any, prompts: torch.Tensor, new_tokens: int, rounds: int) -> tuple[dict[str, float], torch.Tensor]:
    """Runs one generation that isn't timed, then times ``rounds`` more.

    Args:
        model: the model.
        prompts: token ids, prompts x tokens, on the model's device.
        new_tokens: number of tokens to generate for each prompt.
        rounds: number of timed generations, of which the median counts.

    Returns:
        Tokens a second, seconds of a generation, and the GPU's peak where there is one; and the new tokens, on the CPU.
    """
    seconds = []
    on_gpu = prompts.device.type == "cuda"
    for _ in range(1 + rounds):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        texts = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )[:, prompts.shape[1] :].cpu()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:])
    found = {"tokens_per_second": round(texts.numel() / median, 1), "seconds": round(median, 4)}
    return found | ({"gpu_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2)} if on_gpu else {}), texts


def main() -> None:
    """Measures both and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="7b")
    parser.add_argument("--layers", type=int, default=None, help="fewer or more layers than the preset has")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens that each prompt gets")
    parser.add_argument("--rounds", type=int, default=3, help="generations of which the median counts")
    parser.add_argument("--json", default="", help="append the result to this file")
    args = parser.parse_args()
    model = build_model(args.preset, args.prompt_length + args.new_tokens, args.layers).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, model.config.vocab_size, (args.prompts, args.prompt_length), generator=generator)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompts = prompts.to(device)
    plain, plain_texts = measure(model.to(device), prompts, args.new_tokens, args.rounds)
    model.to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    prepared, texts = measure(Accelerator().prepare(model), prompts, args.new_tokens, args.rounds)
    result = {
        "preset": args.preset,
        "layers": model.config.num_hidden_layers,
        "prompts": args.prompts,
        "prompt_length": args.prompt_length,
        "new_tokens": args.new_tokens,
        "plain": plain,
        "prepared": prepared,
        "ratio": round(prepared["tokens_per_second"] / plain["tokens_per_second"], 3),
        "same_tokens": torch.equal(texts, plain_texts),
    }
    print(json.dumps(result), flush=True)
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(result) + "\n")
    os._exit(0)  # as in trainer_run.py: giving back registered memory takes longer than the benchmark


if __name__ == "__main__":
    main()
