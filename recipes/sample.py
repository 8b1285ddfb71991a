"""Continues a prompt with a saved model, by plain `transformers`: `sample.py --model DIR --prompt "def "`."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed


def main() -> None:
    """Prints the prompt and its continuation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a saved model and its tokenizer")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token every time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    set_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).to(device).eval()
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    choice = {"do_sample": True, "temperature": args.temperature} if args.temperature > 0 else {"do_sample": False}
    tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **choice)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
