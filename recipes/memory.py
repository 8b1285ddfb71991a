"""What the recipes need on models of real sizes: `python recipes/memory.py` prints the table in docs/host_memory.md.

Host memory is what the run asks for when it starts. GPU memory is the least with which it trains: every layer streams and is
recomputed. What the GPU has more is used, for speed. Nothing is allocated: models are made on the meta device, and one layer's
forward and backward run on tensors without data.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    XLMRobertaXLConfig,
)

from megatrain_accelerate.config import PlacementSettings
from megatrain_accelerate.gradients.offload import GRADIENT_SLOTS
from megatrain_accelerate.plan.device_plan import LIBRARY_WORKSPACE_BYTES
from megatrain_accelerate.plan.layer_discovery import discover_layers
from megatrain_accelerate.plan.step_memory import fake_model
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES
from megatrain_accelerate.store.layout import FlatLayout, ParameterSpec
from megatrain_accelerate.store.unit import planned_host_bytes
from megatrain_accelerate.units import GIB

LORA_RANK = 16
QWEN = functools.partial(Qwen2Config, vocab_size=152_064, num_key_value_heads=8, max_position_embeddings=32_768)
LLAMA = functools.partial(LlamaConfig, vocab_size=128_256, num_key_value_heads=8, max_position_embeddings=131_072)

MODELS: dict[str, PretrainedConfig] = {
    "Llama 3.1 8B": LLAMA(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32),
    "Llama 3.1 70B": LLAMA(hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64),
    "Llama 3.1 405B": LLAMA(hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126, num_attention_heads=128),
    "Qwen2.5 14B": QWEN(hidden_size=5120, intermediate_size=13_824, num_hidden_layers=48, num_attention_heads=40),
    "Qwen2.5 32B": QWEN(hidden_size=5120, intermediate_size=27_648, num_hidden_layers=64, num_attention_heads=40),
    "XLM-R XXL 11B": XLMRobertaXLConfig(
        hidden_size=4096, intermediate_size=16_384, num_hidden_layers=48, num_attention_heads=32, num_labels=2
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a recipe on a model, with the batch of one step."""

    recipe: str
    model: str
    sequences: int
    tokens: int
    """Of one sequence."""
    trains: str = "all"
    """``all`` parameters, a ``lora`` adapter on a frozen base, or ``nothing``."""
    has_reference: bool = False
    """A frozen copy of the model beside it."""
    whole_logits: bool = False
    """Whether the trainer reads the logits of all tokens, so that they are made."""


CASES = (
    Case("full SFT", "Llama 3.1 8B", 4, 4096),
    Case("full SFT", "Llama 3.1 70B", 4, 4096),
    Case("continued pretraining", "Qwen2.5 14B", 16, 2048),
    Case("LoRA", "Qwen2.5 32B", 4, 4096, trains="lora"),
    Case("LoRA", "Llama 3.1 70B", 4, 4096, trains="lora"),
    Case("DPO", "Llama 3.1 8B", 8, 2048, has_reference=True, whole_logits=True),
    Case("GRPO", "Llama 3.1 8B", 32, 512, whole_logits=True),
    Case("classification", "XLM-R XXL 11B", 64, 512),
    Case("evaluation only", "Llama 3.1 70B", 4, 4096, trains="nothing"),
    Case("evaluation only", "Llama 3.1 405B", 4, 4096, trains="nothing"),
)


@dataclasses.dataclass(frozen=True)
class Needs:
    """Of one row; counts of parameters, and bytes."""

    trained: int
    frozen: int
    host_bytes: int
    gpu_bytes: int


def make_model(config: PretrainedConfig) -> nn.Module:
    """The model without data, bf16; with its head."""
    is_encoder = isinstance(config, XLMRobertaXLConfig)
    kind = AutoModelForSequenceClassification if is_encoder else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)


def layer_peak_bytes(config: PretrainedConfig, sequences: int, tokens: int, trains: bool) -> int:
    """The most that is alive while one layer computes forward, and backward if it ``trains``, bf16."""
    one = type(config)(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    with torch.device("meta"):
        trunk = AutoModel.from_config(one, attn_implementation="sdpa", dtype=torch.bfloat16)
    trunk.requires_grad_(False)
    ((_, layer),) = _outermost_layers(trunk)
    layer.requires_grad_(trains)
    hidden = torch.empty((sequences, tokens, config.hidden_size), dtype=torch.bfloat16, device="meta")
    with fake_model(trunk, {"inputs_embeds": hidden}, torch.device("cpu")) as (inputs, mode), mode:
        embedded = torch.empty(hidden.shape, dtype=hidden.dtype, requires_grad=trains)
        with torch.set_grad_enabled(trains):
            output = trunk(inputs_embeds=embedded)[0]
        if trains:
            output.sum().backward()
        del inputs
        return mode.take_peak()


def _outermost_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    classes = [name for name in model._no_split_modules if "Layer" in name]
    return list(discover_layers(model, classes).layers)


def adapter_parameters(layer: nn.Module) -> int:
    """Parameters of a LoRA adapter on every linear module of one layer."""
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    return sum(LORA_RANK * (linear.in_features + linear.out_features) for linear in linears)


def needs(case: Case) -> Needs:
    """What a row needs, with the default settings, without gradient accumulation."""
    config, slots = MODELS[case.model], PlacementSettings().slots
    model = make_model(config).requires_grad_(case.trains == "all")
    discovery = discover_layers(model)
    in_layers = [[p for _, p in module.named_parameters()] for _, module in discovery.layers]
    outside = [parameter for spec in discovery.residents for _, parameter in spec.parameters]
    layouts = [layout(parameters, case.trains == "all") for parameters in [*in_layers, outside]]
    # PEFT makes adapters in fp32, whatever the base is.
    adapter = adapter_parameters(discovery.layers[0][1]) if case.trains == "lora" else 0
    adapters = [FlatLayout([ParameterSpec("adapter", (adapter,), torch.float32, True)])] * (len(in_layers) if adapter else 0)
    host = planned_host_bytes([*layouts, *adapters], torch.float32, training=case.trains != "nothing")
    weights, gradients = layouts[0].weight_bytes + 4 * adapter, layouts[0].gradient_bytes + 4 * adapter
    copies = 2 if case.has_reference else 1
    held = copies * (slots * weights + layouts[-1].weight_bytes)
    held += GRADIENT_SLOTS * gradients + layouts[-1].gradient_bytes
    # Each layer's input waits for backward; without one, a layer's input dies when its output is there.
    waiting = len(in_layers) if case.trains != "nothing" else 0
    held += waiting * 2 * case.sequences * case.tokens * config.hidden_size
    # Logits and their gradient, bf16; otherwise the loss is computed by tiles.
    held += 2 * 2 * case.sequences * case.tokens * config.vocab_size if case.whole_logits else 0
    frozen_copy = sum(layout(parameters, False).weight_bytes for parameters in [*in_layers, outside])
    return Needs(
        trained=sum(entry.spec.numel for each in [*layouts, *adapters] for entry in each.entries if entry.spec.trainable),
        frozen=sum(entry.spec.numel for each in layouts for entry in each.entries if not entry.spec.trainable),
        host_bytes=sum(host.values()) + (copies - 1) * frozen_copy + CONSTANT_OVERHEAD_BYTES,
        gpu_bytes=held
        + LIBRARY_WORKSPACE_BYTES
        + layer_peak_bytes(config, case.sequences, case.tokens, case.trains != "nothing"),
    )


def layout(parameters: list[nn.Parameter], trainable: bool) -> FlatLayout:
    """The store's layout of these parameters in bf16."""
    return FlatLayout(
        ParameterSpec(str(number), tuple(parameter.shape), torch.bfloat16, trainable)
        for number, parameter in enumerate(parameters)
    )


def table() -> str:
    """All rows, in Markdown."""
    rows = ["| recipe | model | trained | sequences x tokens | host memory | GPU memory, from |", "|---|---|---|---|---|---|"]
    for case in CASES:
        need = needs(case)
        trained = f"{need.trained / 1e9:.2f}B" if need.trained else "nothing"
        rows.append(
            f"| {case.recipe} | {case.model} | {trained} | {case.sequences} x {case.tokens:,} | "
            f"{need.host_bytes / GIB:,.0f} GiB | {need.gpu_bytes / GIB:,.0f} GiB |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
