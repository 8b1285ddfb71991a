"""``micro_batch_size`` under the stock Trainer and in loops, against the whole batch, accumulated batches and experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, both, gradients, prepared
from plain_torch import token_batches
from torch import nn
from trainer_runs import Padding, assert_same_run, ragged_examples, run_trainer, tiny_llama
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.usefixtures("profiled_once")

TOLERANCE = 1e-5
"""fp32 sums over samples in another order, through AdamW: its first steps move a weight by lr = 1e-3 whatever the gradient's
size, so that a relative error of 1e-4 in a tiny gradient shows as 1e-7."""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_train_as_the_whole_batch_and_as_accumulated_batches_under_the_trainer(tmp_path: Path, size: int) -> None:
    stock = run_trainer(tiny_llama, tmp_path / "stock", streamed=False, per_device_train_batch_size=6)
    runs = {
        "pieces": ({"micro_batch_size": size}, {"per_device_train_batch_size": 6}),
        "accumulated": ({}, {"per_device_train_batch_size": size, "gradient_accumulation_steps": 6 // size}),
        "kept pieces": ({"micro_batch_size": size, "kept_layers": 2}, {"per_device_train_batch_size": 6}),
    }
    for name, (settings, arguments) in runs.items():
        run = run_trainer(tiny_llama, tmp_path / name, streamed=True, settings=settings, **arguments)
        assert_same_run(run, stock, TOLERANCE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padded_batches_run_in_pieces(tmp_path: Path, attention: str) -> None:
    arguments = {
        "dataset": ragged_examples(),
        "options": lambda model: {"data_collator": Padding("left")},
        "per_device_train_batch_size": 5,
    }
    make = lambda: tiny_llama(attn_implementation=attention)  # noqa: E731
    stock = run_trainer(make, tmp_path / "stock", streamed=False, **arguments)
    pieces = run_trainer(make, tmp_path / "pieces", streamed=True, settings={"micro_batch_size": 2}, **arguments)
    assert_same_run(pieces, stock, TOLERANCE)


MOE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
}


def tiny_mixtral() -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=4))


def tiny_qwen3_moe() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE, num_experts=4, moe_intermediate_size=32, head_dim=8))


@pytest.mark.parametrize("make", [tiny_mixtral, tiny_qwen3_moe])
@pytest.mark.parametrize("kept_layers", [0, 3])
def test_router_logits_of_pieces_are_those_of_the_batch_in_order(make: Callable[[], nn.Module], kept_layers: int) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, optimizer = prepared(accelerator, make)
        observed: Observed = []
        for ids in token_batches(3, batch=3):
            output = model(input_ids=ids, labels=ids, output_router_logits=True)
            observed.append(len(output.router_logits))
            observed += [logits.detach().clone() for logits in output.router_logits]
            weights = torch.arange(float(output.router_logits[0].shape[0]))[:, None]  # sees the tokens' order
            own = sum((weights * logits).square().mean() for logits in output.router_logits)
            accelerator.backward(output.loss + 1e-4 * own)
            observed += [output.loss.item(), output.aux_loss.item(), *gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script, tolerance=5e-5, settings={"micro_batch_size": 2, "kept_layers": kept_layers})


def test_hidden_states_and_attentions_that_are_asked_for_are_those_of_the_batch() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, _ = prepared(accelerator, lambda: tiny_llama(attn_implementation="eager"))
        ids = token_batches(1, batch=3)[0]
        output = model(input_ids=ids, labels=ids, output_hidden_states=True, output_attentions=True)
        accelerator.backward(output.loss)
        observed: Observed = [len(output.hidden_states), len(output.attentions)]
        observed += [tensor.detach().clone() for tensor in (*output.hidden_states, *output.attentions)]
        return model, [*observed, *gradients(model)]

    both(script, tolerance=1e-5, settings={"micro_batch_size": 2})
