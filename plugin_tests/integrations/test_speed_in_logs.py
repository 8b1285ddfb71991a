"""The logs' TFLOPS count the parameters that a token meets, whatever wraps the model and however its experts stream."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from engine_runs import attach
from part_models import tiny_experts
from peft import LoraConfig, get_peft_model
from plain_torch import tiny_model, token_batches
from torch import nn
from transformers import PretrainedConfig

from megatrain_accelerate.integrations import telemetry
from megatrain_accelerate.plan.layer_discovery import active_parameters

pytestmark = pytest.mark.usefixtures("profiled_once")

UNUSED = 3 * (6 - 2) * 3 * 64 * 32
"""Of the tiny model's parameters: three layers, six experts less the two that a token meets, three matrices."""
STEP_SECONDS = 1e-6
"""Short, so that a tiny model's TFLOPS have digits enough behind the point, of which the log has four."""


def with_adapters() -> nn.Module:
    return get_peft_model(tiny_experts(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize(
    ("build", "unused", "settings"),
    [
        pytest.param(tiny_model, 0, {}, id="dense"),
        pytest.param(tiny_experts, UNUSED, {}, id="experts"),
        pytest.param(tiny_experts, UNUSED, {"expert_parts": 3}, id="experts-in-parts"),
        pytest.param(tiny_experts, UNUSED, {"device_layers": -1}, id="experts-on-the-device"),
        pytest.param(with_adapters, UNUSED, {}, id="frozen-experts-and-adapters"),
    ],
)
def test_tflops_are_six_times_the_parameters_that_a_token_meets(
    build: Callable[[], nn.Module], unused: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(telemetry, "time", types.SimpleNamespace(perf_counter=lambda: now))
    model = build().train()
    total = sum(parameter.numel() for parameter in model.parameters())
    engine = attach(model, **settings)
    assert engine.parameter_count == total
    report = telemetry.Telemetry(engine, model)
    report.step_begins()
    (ids,) = token_batches(1)
    model(input_ids=ids, labels=ids).loss.backward()
    now = STEP_SECONDS
    report.step_ends()
    entries = report.entries()
    report.close()
    engine.close()
    assert entries["megatrain/tokens_per_second"] == pytest.approx(ids.numel() / STEP_SECONDS)
    # Four decimals of some tens.
    assert entries["megatrain/tflops"] == pytest.approx(6e-12 * (total - unused) * ids.numel() / STEP_SECONDS, rel=1e-5)


class Experts(nn.Module):
    """Twelve parameters: two of each of five experts, and two of a shared one."""

    def __init__(self) -> None:
        super().__init__()
        names = ("experts", "shared_experts")
        self.mlp = nn.ModuleDict({name: nn.Linear(2, size, bias=False) for name, size in zip(names, (5, 1), strict=True)})


class Composite(PretrainedConfig):
    """A text model's configuration inside that of a whole, and a second one that takes part."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


TEXT = PretrainedConfig(num_local_experts=5, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("config", "active"),
    [
        pytest.param(TEXT, 2 * 2 + 2, id="text"),
        pytest.param(PretrainedConfig(num_experts=5, top_k_experts=1), 2 + 2, id="gemma-4"),
        pytest.param(PretrainedConfig(moe_num_experts=5, moe_topk=3), 3 * 2 + 2, id="aria"),
        pytest.param(PretrainedConfig(n_routed_experts=5, num_experts_per_tok=None), 12, id="unknown-how-many"),
        pytest.param(PretrainedConfig(), 12, id="dense"),
        pytest.param(Composite(text_config=TEXT), 2 * 2 + 2, id="composite"),
        pytest.param(Composite(text_config=TEXT, decoder=TEXT), 12, id="several-texts"),
        pytest.param({"model_type": "custom"}, 12, id="peft-of-no-transformer"),
        pytest.param(None, 12, id="none"),
    ],
)
def test_what_a_token_meets_is_read_from_the_configuration(config: Any, active: int) -> None:
    model = Experts()
    model.config = config
    assert active_parameters(model) == active
