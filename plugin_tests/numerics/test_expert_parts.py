"""Experts that stream in parts: losses, norms, gradients and masters of plain PyTorch, and of layers that stream whole.

Each pair of a token and an expert is computed by the kernels of the whole layer. Three sums go another way: hidden states'
gradients of a token's experts are added in fp32 and rounded once; norms of a parameter are put together from those of its
parts; and a product of all experts at once (``grouped_mm``) may block its rows otherwise. So fp32 agrees to some units in the
last place, 1e-5 with AdamW's divisions behind five steps, and bf16 to some of its own, 2**-7 relative to the largest element.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Training, assert_equal_states, attach, train_streamed
from family_parity import Outcome, assert_parity, train_plainly
from family_parity import train_streamed as train_family_streamed
from part_models import EXPERTS, family_with, tiny_experts
from plain_torch import PlainRun, token_batches, train_bf16_with_masters
from torch import nn
from trainer_runs import examples, make_arguments, plugin
from transformers import Trainer

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer

pytestmark = pytest.mark.usefixtures("profiled_once")

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 2.0**-7, FP32: 2e-5}
NAMES = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3")
UNCLIPPED: dict[str, Any] = {"max_norm": None}
"""Norms of parts are added up otherwise than those of whole parameters: without them nothing may differ between parts."""


@functools.cache
def plain(name: str, implementation: str, dtype: torch.dtype, accumulation: int = 1) -> Outcome:
    return train_plainly(family_with(name, implementation), dtype, accumulation)


def check(name: str, implementation: str, dtype: torch.dtype, parts: int, accumulation: int = 1) -> None:
    family = family_with(name, implementation)
    ours = train_family_streamed(family, dtype, accumulation, expert_parts=parts)
    tolerance = TOLERANCE[dtype]
    if (name, implementation, dtype) == ("gpt_oss", "grouped_mm", BF16):
        # Biases' gradients are sums over tokens that are rounded to bf16 at each addition, in the order of a sort of the
        # experts' numbers that isn't stable.
        tolerance *= 4
    assert_parity(ours, plain(name, implementation, dtype, accumulation), tolerance)


@pytest.mark.parametrize(
    ("name", "implementation", "parts"),
    [("qwen3_moe", "grouped_mm", 3), ("gpt_oss", "eager", 3), ("mixtral", "batched_mm", 2), ("deepseek_v3", "eager", 2)],
)
def test_five_clipped_steps_in_bf16_are_those_of_plain_pytorch(name: str, implementation: str, parts: int) -> None:
    check(name, implementation, BF16, parts)


@pytest.mark.long
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", NAMES)
def test_every_family_trains_as_in_plain_pytorch(name: str, implementation: str, dtype: torch.dtype, parts: int) -> None:
    check(name, implementation, dtype, parts)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP32, marks=pytest.mark.long)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_accumulated_gradients_are_the_fp32_sums_of_plain_pytorchs(name: str, dtype: torch.dtype) -> None:
    check(name, "eager", dtype, parts=3, accumulation=2)


def assert_same(ours: PlainRun, theirs: PlainRun) -> None:
    assert ours.losses == theirs.losses
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name
        assert torch.equal(ours.weights[name], theirs.weights[name]), name


def assert_close(ours: PlainRun, theirs: PlainRun, tolerance: float) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert ours.norms == pytest.approx(theirs.norms, rel=tolerance)
    for name, master in theirs.masters.items():
        scale = max(1.0, float(master.abs().max()))
        assert float((ours.masters[name] - master).abs().max()) <= tolerance * scale, name


@functools.cache
def in_parts(parts: int, bf16: bool, **settings: Any) -> PlainRun:
    return train_streamed(tiny_experts(), token_batches(4), bf16=bf16, **UNCLIPPED, expert_parts=parts, **settings)


@pytest.mark.parametrize("bf16", [True, False])
def test_neither_the_number_of_parts_nor_their_sizes_change_a_bit(bf16: bool) -> None:
    assert_same(in_parts(4, bf16), in_parts(2, bf16))


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "backward"},
        {"schedule": "backward", "host_gradients": "passing"},
        {"kept_layers": 2},
        pytest.param({"offloaded_layers": 1}, marks=pytest.mark.long),
        pytest.param({"schedule": "serial"}, marks=pytest.mark.long),
        pytest.param({"slots": 4}, marks=pytest.mark.long),
        {"offloaded_inputs": True},
        pytest.param({"kept_attention": 3}, marks=pytest.mark.long),
        pytest.param({"compile_layers": True}, marks=pytest.mark.long),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_neither_schedule_nor_what_becomes_of_activations_changes_a_bit(settings: dict[str, Any]) -> None:
    assert_same(in_parts(4, True, **settings), in_parts(4, True))


@pytest.mark.parametrize("moments", ["int8", "bf16"])
def test_smaller_moments_are_stepped_part_by_part_to_the_bit(moments: str) -> None:
    # Of 72 numbers an expert, 6 experts don't begin with blocks of 128: such a parameter is stepped whole.
    model = tiny_experts(moe_intermediate_size=36, num_hidden_layers=1)
    runs = [
        train_streamed(model, token_batches(3), **UNCLIPPED, expert_parts=parts, moments_dtype=moments) for parts in (2, 4)
    ]
    assert_same(*runs)


@pytest.mark.parametrize("bf16", [True, False])
def test_whole_layers_are_trained_alike(bf16: bool) -> None:
    whole = train_streamed(tiny_experts(), token_batches(4), bf16=bf16)
    ours = train_streamed(tiny_experts(), token_batches(4), bf16=bf16, expert_parts=4)
    assert_close(ours, whole, TOLERANCE[BF16 if bf16 else FP32])


def test_pieces_of_a_batch_add_up_to_the_whole() -> None:
    batches = token_batches(3, batch=3)
    # In fp32, where the sum of pieces isn't rounded to bf16 on one side and kept exactly on the other.
    for schedule in ("deferred", "backward"):
        norm = None if schedule == "backward" else 1.0
        whole = train_streamed(tiny_experts(), batches, bf16=False, max_norm=norm)
        pieces = {"bf16": False, "max_norm": norm, "micro_batch_size": 2, "schedule": schedule}
        assert_close(train_streamed(tiny_experts(), batches, expert_parts=3, **pieces), whole, TOLERANCE[FP32])


def test_a_part_without_tokens_has_zero_gradients_and_is_stepped_as_in_plain_pytorch() -> None:
    # Two tokens with two choices each meet 4 of 6 experts at most.
    model, batches = tiny_experts(), token_batches(3, batch=1, length=2)
    engine = attach(streamed := copy.deepcopy(model), expert_parts=EXPERTS)
    streamed(input_ids=batches[0], labels=batches[0]).loss.backward()
    for layer in streamed.model.layers:
        for parameter in layer.mlp.experts.parameters():
            untouched = [bool((of_expert == 0).all()) for of_expert in parameter.grad]
            assert 2 <= sum(untouched) < EXPERTS
    engine.close()
    # Momentum and weight decay go on where gradients are zero.
    theirs = train_bf16_with_masters(model, batches, max_norm=None)
    assert_close(train_streamed(model, batches, **UNCLIPPED, expert_parts=EXPERTS), theirs, TOLERANCE[BF16])


def frozen(model: nn.Module, keep: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(keep in name)
    return model


@pytest.mark.parametrize("trained", ["self_attn", "mlp.experts", "mlp.experts.down_proj", "mlp.gate"])
def test_what_is_frozen_stays_and_the_rest_trains_as_in_plain_pytorch(trained: str) -> None:
    make = functools.partial(tiny_experts, num_hidden_layers=2)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)
    batches = token_batches(3)
    theirs = frozen(make(), trained)
    plain_optimizer = optimizer([p for p in theirs.parameters() if p.requires_grad])
    for ids in batches:
        theirs(input_ids=ids, labels=ids).loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    ours = frozen(make(), trained)
    engine = attach(ours, bf16=False, expert_parts=3)
    streamed_optimizer = optimizer([p for p in ours.parameters() if p.requires_grad])
    adopt_optimizer(streamed_optimizer, engine.runtime, "deferred")
    for ids in batches:
        ours(input_ids=ids, labels=ids).loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in ours.parameters())
        streamed_optimizer.step()
        streamed_optimizer.zero_grad()
    engine.close()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6), name


class Twice(nn.Module):
    """Experts that are called twice, on other inputs."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.inner = experts

    def forward(self, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.inner(hidden, *routing)
        return first + self.inner(hidden + first, *routing)


@pytest.mark.parametrize("schedule", ["deferred", "backward"])
def test_experts_that_their_layer_calls_twice_train_as_in_whole_layers(schedule: str) -> None:
    model = tiny_experts(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.experts = Twice(layer.mlp.experts)
    settings = {"bf16": False, "max_norm": None, "schedule": schedule}
    whole, ours = (train_streamed(model, token_batches(3), expert_parts=parts, **settings) for parts in (1, 3))
    assert_close(ours, whole, TOLERANCE[FP32])


def test_the_rest_of_a_layer_may_live_on_the_device() -> None:
    states = []
    for on_device in ((), (0, 1)):
        model = tiny_experts()
        engine = attach(model, expert_parts=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        driver = adopt_optimizer(optimizer, engine.runtime, "deferred")
        engine.runtime.place(on_device, groups_on_device=bool(on_device))
        training = Training(model, engine, optimizer, driver)
        for ids in token_batches(3):
            training.step(ids)
        states.append(training.state())
        engine.close()
    assert_equal_states(*states)


@pytest.mark.parametrize("kept_layers", [0, 3])
def test_a_second_backward_through_the_same_graph_doubles_the_gradients(kept_layers: int) -> None:
    model = tiny_experts()
    engine = attach(model, bf16=False, expert_parts=3, kept_layers=kept_layers)
    ids = token_batches(1)[0]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, 2 * once[name], rtol=1e-5, atol=1e-8), name
    engine.close()


@pytest.mark.parametrize("kept_layers", [0, 3])
def test_a_backward_through_experts_whose_weights_were_written_since_the_forward_is_an_error(kept_layers: int) -> None:
    model = tiny_experts()
    engine = attach(model, bf16=False, expert_parts=3, kept_layers=kept_layers)
    ids = token_batches(1)[0]
    loss = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(2)
    with pytest.raises(StateError, match="changed between forward and backward"):
        loss.backward()
    engine.close()


def test_evaluation_gives_what_a_forward_with_gradients_gives() -> None:
    model = tiny_experts("grouped_mm")
    ids = token_batches(1)[0]
    expected = model(input_ids=ids).logits
    engine = attach(model, bf16=False, expert_parts=4)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)
        generated = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False, use_cache=True)
    engine.close()
    assert torch.equal(generated, model.generate(ids[:, :4], max_new_tokens=4, do_sample=False, use_cache=True))


@pytest.mark.parametrize(("first", "then"), [(3, 1), pytest.param(1, 3, marks=pytest.mark.long)])
def test_a_checkpoint_resumes_with_other_parts(tmp_path: Path, first: int, then: int) -> None:
    def run(folder: Path, parts: int, resume: str | None = None) -> dict[str, torch.Tensor]:
        with plugin(expert_parts=parts):
            arguments = make_arguments(folder, save_strategy="steps", save_steps=2, max_steps=4)
            # Of other models transformers saves each expert for itself, and its Trainer doesn't find them again.
            trainer = Trainer(family_with("gpt_oss", "eager").build(), arguments, train_dataset=examples(vocabulary=96))
            trainer.train(resume_from_checkpoint=resume)
            return {name: p.detach().float().cpu().clone() for name, p in trainer.model.named_parameters()}

    through = run(tmp_path / "through", first)
    resumed = run(tmp_path / "resumed", then, str(tmp_path / "through" / "checkpoint-2"))
    for name, weight in through.items():
        assert torch.allclose(resumed[name], weight, rtol=1e-4, atol=2e-6), name
