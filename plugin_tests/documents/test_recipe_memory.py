"""The table in docs/host_memory.md is what `recipes/memory.py` computes, and that is what the engine computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from engine_runs import attach
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES
from megatrain_accelerate.units import GIB

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "recipes"))

import memory  # noqa: E402


def test_table_in_the_docs_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "host_memory.md").read_text(encoding="utf-8")
    shown = page.split("<!-- needs:")[1].split("-->\n", 1)[1].split("\n<!-- end of needs")[0]
    assert shown == memory.table(), "run `python recipes/memory.py` and put what it prints into docs/host_memory.md"


@pytest.mark.parametrize(("trains", "bytes_each"), [("all", 14), ("nothing", 2), ("lora", 2)])
def test_host_memory_is_14_bytes_a_trained_parameter_16_of_an_adapter_and_2_a_frozen_one(trains: str, bytes_each: int) -> None:
    need = memory.needs(memory.Case("any", "Llama 3.1 8B", 1, 1024, trains=trains))
    count = sum(parameter.numel() for parameter in memory.make_model(memory.MODELS["Llama 3.1 8B"]).parameters())
    adapters = 16 * need.trained if trains == "lora" else 0
    # Buffers begin at multiples of 256 bytes.
    assert need.host_bytes == pytest.approx(bytes_each * count + adapters + CONSTANT_OVERHEAD_BYTES, rel=1e-4)
    assert need.trained == {"all": count, "nothing": 0}.get(trains, need.trained)
    assert trains != "lora" or 0 < need.trained < 0.01 * count


def test_a_reference_takes_the_frozen_weights_more() -> None:
    alone, both = (memory.needs(memory.Case("any", "Llama 3.1 8B", 1, 1024, has_reference=flag)) for flag in (False, True))
    assert both.host_bytes - alone.host_bytes == pytest.approx(2 * alone.trained, rel=1e-4)


def test_gpu_memory_is_the_engines_prediction_where_every_layer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**shape, **heads, attn_implementation="sdpa")
    monkeypatch.setitem(memory.MODELS, "small", config)
    monkeypatch.setattr(memory, "LIBRARY_WORKSPACE_BYTES", 0)
    monkeypatch.setattr("megatrain_accelerate.plan.device_plan.LIBRARY_WORKSPACE_BYTES", 0)
    need = memory.needs(memory.Case("any", "small", 4, 512, whole_logits=True))
    nothing = {"kept_layers": 0, "offloaded_layers": 0, "device_layers": 0}
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    engine = attach(model, **nothing)
    ids = torch.zeros((4, 512), dtype=torch.long)
    engine.device_plan.follow(model, {"input_ids": ids, "labels": ids})
    predicted = engine.device_plan.current.predicted_bytes
    engine.close()
    # Logits and their gradient are the largest part, and the loss makes an fp32 copy of some of them.
    assert need.gpu_bytes == pytest.approx(predicted, rel=0.35)
    assert predicted < GIB
