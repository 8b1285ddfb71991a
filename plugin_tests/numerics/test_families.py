"""Small models of every family of text decoders train as plain PyTorch trains them: losses, auxiliary losses, norms, every
gradient, and every fp32 master after five clipped AdamW steps, bit for bit.

Forward, recompute and backward run the same kernels on the same values in both, so that nothing may differ, dropout and
experts included. The numbers of steps, rows and tokens are those of :mod:`family_parity` and :mod:`decoder_models`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from decoder_models import Decoder
from families import DECODERS, REFUSED
from family_parity import STREAMED, Outcome, assert_parity, differences, optimizer_for, train_plainly, train_streamed
from trainer_runs import plugin

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import UnsupportedError

pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
        reason="torch's baseline CPU kernels have no fused multiply-add and round AdamW differently from its others",
    ),
]

BF16, FP32 = torch.bfloat16, torch.float32
each_family = pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
BY_NAME = {family.name: family for family in DECODERS}


@functools.cache
def plain(name: str, dtype: torch.dtype, accumulation: int = 1) -> Outcome:
    return train_plainly(BY_NAME[name], dtype, accumulation)


def check(family: Decoder, dtype: torch.dtype, accumulation: int = 1, **settings: Any) -> None:
    ours = train_streamed(family, dtype, accumulation, **settings)
    assert_parity(ours, plain(family.name, dtype, accumulation), family.tolerance.get(dtype, 0.0))


HARD_TO_PLAN = ("deepseek_v3", "gemma4", "mixtral", "opt", "phi4")
"""Experts, keys and values shared by layers, auxiliary losses, layers left out, decisions by the batch's positions."""
SIMILAR = ("qwen3", "qwen3_5", "mistral", "gemma3", "gemma4", "cohere", "olmo3", "glm4", "glm4_moe", "mamba")
"""Others have their specialities too: Gemma 2, Qwen3-Next, Mixtral, Gemma 3n, Falcon, Qwen2, DeepSeek-V3, Mamba 2."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, id=each.name, marks=[pytest.mark.long] * (each.name in SIMILAR)) for each in DECODERS],
)
def test_five_steps_in_bf16_are_those_of_plain_pytorch(family: Decoder, request: pytest.FixtureRequest) -> None:
    if family.name not in HARD_TO_PLAN:
        request.getfixturevalue("without_predictions")
    check(family, BF16)


@pytest.mark.long
@each_family
def test_five_steps_in_fp32_are_those_of_plain_pytorch(family: Decoder) -> None:
    check(family, FP32)


@pytest.mark.long
@each_family
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_accumulated_gradients_are_the_fp32_sums_of_plain_pytorchs(family: Decoder, dtype: torch.dtype) -> None:
    check(family, dtype, accumulation=2)


@pytest.mark.long
@each_family
@pytest.mark.parametrize(
    "settings",
    [
        {"kept_layers": 2},
        {"offloaded_layers": 1},
        {"kept_layers": 1, "device_layers": 1},
        {"device_layers": -1},
        {"offloaded_inputs": True, "slots": 3},
        {"step_schedule": "serial"},
    ],
    ids=["kept", "offloaded", "mixed", "on_device", "inputs_offloaded", "serial"],
)
def test_placement_changes_no_bit(family: Decoder, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_accelerate.transfer.activation_offload.MIN_OFFLOADED_BYTES", 0)
    check(family, BF16, **settings)


@pytest.mark.parametrize("family", [family for family in DECODERS if family.plainer], ids=lambda family: family.name)
def test_what_is_special_about_a_family_is_at_work(family: Decoder) -> None:
    # Else a layer that ran with another one's window, or lost its auxiliary loss, would pass unseen.
    losses = []
    assert family.plainer is not None
    for build in (family.build, family.plainer):
        model = build()
        torch.manual_seed(1)
        losses.append(model(**family.batch(0)).loss.item())
    assert losses[0] != losses[1]


def test_dropped_layers_of_opt_get_no_gradient_and_keep_their_weights() -> None:
    outcome = plain("opt", BF16)
    without = {name.rsplit(" ", 1)[0] for name, gradient in outcome.gradients.items() if gradient is None}
    assert {name.split(".layers.")[1].split(".")[0] for name in without} > {"0"}
    assert any(gradient is not None for gradient in outcome.gradients.values())


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, id=f.name, marks=() if f.name in HARD_TO_PLAN else pytest.mark.long) for f in DECODERS],
)
def test_the_step_of_a_family_is_planned_for(family: Decoder) -> None:
    # A model that can't be profiled streams all the same, but its memory isn't predicted and nothing is kept on the GPU.
    with plugin(**{**STREAMED, **family.settings}):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = family.build()
        model, _ = accelerator.prepare(model, optimizer_for(list(model.parameters())))
        engine = engine_of(model)
        assert engine is not None
        model(**family.batch(0)).loss.backward()
        assert engine.device_plan.current.predicted_bytes > sum(engine.device_plan.budget.held_bytes_by_kind().values())
        engine.close()


def test_the_plan_follows_a_larger_batch_of_a_model_with_an_auxiliary_loss() -> None:
    # transformers installs its recording hooks at the first batch and not again; the plan's runs do without the model's hooks.
    family = BY_NAME["mixtral"]
    predicted = []
    with plugin(**STREAMED):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = family.build()
        model, _ = accelerator.prepare(model, optimizer_for(list(model.parameters())))
        engine = engine_of(model)
        assert engine is not None
        for times in (1, 40):
            batch = {name: tensor.repeat(times, 1) for name, tensor in family.batch(0).items()}
            output = model(**batch)
            assert len(output.router_logits) == 3
            output.loss.backward()
            predicted.append(engine.device_plan.current.predicted_bytes)
        engine.close()
    assert 0 < predicted[0] < predicted[1]


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_family_that_cannot_stream_is_refused_before_it_is_touched(family: Decoder) -> None:
    assert family.refusal is not None
    model = family.build()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with plugin(**family.settings):
        accelerator = Accelerator(cpu=True)
        with pytest.raises(UnsupportedError, match=family.refusal):
            accelerator.prepare(model, optimizer_for(list(model.parameters())))
    assert engine_of(model) is None
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert model(**family.batch(0)).loss.isfinite()


def test_the_comparison_sees_an_ulp_and_a_missing_gradient() -> None:
    one = Outcome({"loss": torch.tensor(4.0)}, {"a 0": torch.ones(2), "b 0": None}, {"a": torch.ones(2)})
    other = Outcome({"loss": torch.tensor(4.0)}, {"a 0": torch.ones(2), "b 0": None}, {"a": torch.ones(2)})
    assert not list(differences(one, other))
    other.masters["a"][1] += 2**-23
    other.gradients["b 0"] = torch.zeros(2)
    assert [name for _, name, _ in differences(one, other)] == ["b 0", "a"]
    with pytest.raises(AssertionError, match="2 values differ"):
        assert_parity(one, other, 0.0)
