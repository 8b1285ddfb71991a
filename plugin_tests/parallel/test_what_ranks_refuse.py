"""What a script may not do with several ranks: each rank's write would fall upon what all share, or on its own copy alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_runs import Training, attach
from part_models import tiny_experts
from plain_torch import tiny_model, token_batches
from rank_runs import join_ranks, require_success, run_ranks
from transformers import Trainer, TrainingArguments

import megatrain_accelerate
from megatrain_accelerate.errors import ConfigError, HostMemoryError, UnsupportedError
from megatrain_accelerate.integrations.accelerate_backend import _adopt
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.store import host_limits


def training(extra: list[torch.nn.Parameter] | None = None, model: Any = None, **settings: Any) -> Training:
    model = model or tiny_model()
    optimizer = torch.optim.AdamW([*model.parameters(), *(extra or [])], lr=1e-3)
    engine = attach(model, **settings)
    return Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))


def refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        act()


def gradients_that_are_written_to(rank: int) -> None:
    run, (ids,) = training(), token_batches(1)
    run.model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    refused(run.optimizer.step, "the gradient of model.layers.0.*accelerator.clip_grad_norm_")


def gradients_that_are_assigned(rank: int) -> None:
    run, (ids,) = training(), token_batches(1)
    run.model(input_ids=ids, labels=ids).loss.backward()
    weight = run.model.model.layers[1].mlp.up_proj.weight
    weight.grad = torch.full_like(weight, float(rank))
    refused(run.optimizer.step, "the gradient of model.layers.1.mlp.up_proj.weight was written to or assigned")


def gradients_of_experts_in_parts(rank: int) -> None:
    run, (ids,) = training(model=tiny_experts(), expert_parts=2), token_batches(1)
    run.model(input_ids=ids, labels=ids).loss.backward()
    run.model.model.layers[0].mlp.experts.down_proj.grad.mul_(0.5)
    refused(run.optimizer.step, "the gradient of model.layers.0.mlp.experts.down_proj was written to")


def pieces_of_experts_in_parts(rank: int) -> None:
    refused(
        lambda: training(model=tiny_experts(), expert_parts=2, micro_batch_size=1),
        "micro_batch_size is 1, and with several processes it can't be combined with experts in parts",
    )


def weights_of_a_layer_on_the_device(rank: int) -> None:
    run, (ids,) = training(device_layers=4), token_batches(1)
    run.step(ids)
    with torch.no_grad():
        run.model.model.layers[0].mlp.up_proj.weight.mul_(2)
    refused(lambda: run.model(input_ids=ids), "a script wrote to weights of model.layers.0. ")


def weights_outside_the_layers(rank: int) -> None:
    run, (ids,) = training(), token_batches(1)
    run.step(ids)
    with torch.no_grad():
        run.model.model.embed_tokens.weight.mul_(2)
    refused(lambda: run.model(input_ids=ids), "a script wrote to weights of model.embed_tokens. ")


def parameters_whose_gradients_nobody_averages(rank: int) -> None:
    temperature = torch.nn.Parameter(torch.ones(3))
    run, (ids,) = training([temperature]), token_batches(1)
    (run.model(input_ids=ids, labels=ids).loss + (temperature * (rank + 1)).sum()).backward()
    refused(run.optimizer.step, "norm differs from process to process")


def loaded_weights_are_taken_over(rank: int) -> None:
    run, ids = training(), token_batches(1)[0]
    other = tiny_model(seed=1)
    run.step(ids)
    run.model.load_state_dict(other.state_dict())
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids, labels=ids).loss.item() for model in (run.model, other.bfloat16()))
    assert ours == pytest.approx(theirs, abs=2e-2)
    run.step(ids)


def steps_in_backward(rank: int) -> None:
    for settings in ({"step_schedule": "backward"}, {"host_gradients": "passing"}):
        run = training(**settings)
        with pytest.raises(ConfigError, match="are for a single process; leave both out"):
            _adopt(run.optimizer, run.engine)


def optimizers_without_a_kernel(rank: int) -> None:
    for make in (torch.optim.SGD, torch.optim.Adafactor):
        model = tiny_model()
        adopt = functools.partial(adopt_optimizer, make(model.parameters(), lr=1e-3), attach(model).runtime, "deferred")
        refused(adopt, f"{make.__name__} has no fused host kernel; use AdamW or Adam, or set num_processes: 1")


def values_that_are_clipped(rank: int) -> None:
    megatrain_accelerate.enable()
    accelerator, model, (ids,) = Accelerator(cpu=True), tiny_model(), token_batches(1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    refused(optimizer.step, "the gradient of model.layers.0.* was written to .*accelerator.clip_grad_norm_")


def batches_that_are_tried_again(rank: int) -> None:
    data = [{"input_ids": ids[0], "labels": ids[0]} for ids in token_batches(8, batch=1)]
    arguments = TrainingArguments(auto_find_batch_size=True, use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match="the others would wait for it; leave it off"):
        Trainer(model=tiny_model(), args=arguments, train_dataset=data).train()


def room_for_one_store_is_room_for_its_sums(rank: int) -> None:
    run = training()
    store = sum(run.engine.host_bytes_by_kind().values())
    host_limits.available_host_bytes = lambda figure=None: host_limits.CONSTANT_OVERHEAD_BYTES + store
    run.engine.expect_accumulation(2)  # takes as much again, of which each rank has half
    host_limits.available_host_bytes = lambda figure=None: host_limits.CONSTANT_OVERHEAD_BYTES
    with pytest.raises(HostMemoryError, match="of host memory in each of 2 processes"):
        attach(tiny_model())


CASES = (
    gradients_that_are_written_to,
    gradients_that_are_assigned,
    gradients_of_experts_in_parts,
    pieces_of_experts_in_parts,
    weights_of_a_layer_on_the_device,
    weights_outside_the_layers,
    parameters_whose_gradients_nobody_averages,
    loaded_weights_are_taken_over,
    steps_in_backward,
    optimizers_without_a_kernel,
    values_that_are_clipped,
    batches_that_are_tried_again,
    room_for_one_store_is_room_for_its_sums,
)


def main() -> None:
    """What each rank does."""
    rank = join_ranks()
    for case in CASES:
        print(case.__name__, flush=True)
        case(rank)
        torch.distributed.barrier()


def test_ranks_refuse_what_they_cannot_share() -> None:
    require_success(run_ranks(__file__, 2, ACCELERATE_USE_CPU="true"))


if __name__ == "__main__":
    main()
