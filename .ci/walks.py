"""Prints the package's files that a weight and a gradient pass in one step of a small Llama, by the Python stacks there.

A weight: from ``prepare()`` into the store, from there into a slot, and to the matrix product that reads it. A gradient: from
autograd into a gradient slot, to the host, and to the AdamW kernel. Run it on the CPU, where all is the same but the streams.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_accelerate
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.store.step_worker import StepWorker

PACKAGE = Path(megatrain_accelerate.__file__).parent


def files_on_the_stack(inner: Any) -> list[str]:
    """The package's files on the caller's caller's stack, outermost first, each once, with that of the function ``inner``."""
    frame, paths = sys._getframe(2), [getattr(getattr(inner, "__code__", None), "co_filename", "")]
    while frame is not None:
        paths.append(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    ours = [str(Path(path).relative_to(PACKAGE)) for path in paths if Path(path).is_relative_to(PACKAGE)]
    return list(dict.fromkeys(reversed(ours)))


class Walk:
    """The places that something passes, each with the files on the stack when it was there first."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[str, list[str]] = {}

    def watch(self, owner: Any, function: str, place: str, when: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Notes the first call of the owner's function for which ``when`` holds."""
        original = getattr(owner, function)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if place not in self.places and when(*args, **kwargs):
                self.places[place] = files_on_the_stack(original)
            return original(*args, **kwargs)

        setattr(owner, function, watched)

    def show(self) -> None:
        files = dict.fromkeys(file for stack in self.places.values() for file in stack)
        print(f"{self.name}: {len(files)} files")
        for place, stack in self.places.items():
            print(f"  {place}: {' > '.join(stack)}")


def main() -> None:
    weight, gradient = Walk("a weight"), Walk("a gradient")
    main_thread = threading.current_thread()
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, use_cache=False
    )
    model = LlamaForCausalLM(config)
    shape = model.model.layers[0].mlp.gate_proj.weight.shape
    weight.watch(HostKernels, "split", "into the store", lambda _, value, *__: value.shape == shape)
    megatrain_accelerate.enable(placement={"device_layers": 0, "kept_layers": 0})
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def flat(target: Any, source: Any, **_: Any) -> bool:
        return bool(target.dtype == torch.uint8 and target.numel() > shape.numel())

    ids = torch.randint(64, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()  # the plan is made
    optimizer.zero_grad()
    weight.watch(torch.Tensor, "copy_", "into a slot", flat)
    weight.watch(torch.nn.functional, "linear", "to its matrix product", lambda _, value, *__: value.shape == shape)
    loss = model(input_ids=ids, labels=ids).loss
    gradient.watch(torch, "_foreach_copy_", "into a gradient slot")
    gradient.watch(torch.Tensor, "copy_", "to the host", flat)
    gradient.watch(StepWorker, "submit", "to the step worker", lambda _, name, *__: name.startswith("step"))
    gradient.watch(HostKernels, "adamw", "to AdamW", lambda *_, **__: threading.current_thread() is not main_thread)
    accelerator.backward(loss)
    optimizer.step()
    megatrain_accelerate.drain()
    weight.show()
    gradient.show()


if __name__ == "__main__":
    main()
