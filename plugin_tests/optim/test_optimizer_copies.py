"""Copies and pickles of an optimizer that works on the host store are plain optimizers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_runs import streamed
from plain_torch import token_batches
from torch.optim import AdamW, Optimizer, RMSprop

pytestmark = pytest.mark.usefixtures("profiled_once")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize(
    ("kind", "settings"), [(AdamW, {}), (AdamW, {"bf16": True}), (AdamW, {"moments_dtype": "int8"}), (RMSprop, {})]
)
def test_a_copy_is_a_plain_optimizer_with_the_states_of_the_last_step(
    kind: type[Optimizer], settings: dict[str, Any], copied: Callable[[Optimizer], Optimizer]
) -> None:
    run, still = (streamed(lambda model: kind(model.parameters(), lr=1e-2), **settings) for _ in range(2))
    batches = token_batches(2)
    for training in (run, still):
        training.step(batches[0])
    made = copied(run.optimizer)
    assert type(made) is kind
    assert {key: value for key, value in made.param_groups[0].items() if key != "params"} == {
        key: value for key, value in run.optimizer.param_groups[0].items() if key != "params"
    }
    ours, theirs = made.state_dict()["state"], run.optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    assert len(ours) == len(list(run.model.parameters()))
    for index, entry in ours.items():
        assert entry.keys() == theirs[index].keys() - {"master_residual"}
        for key, value in entry.items():
            assert torch.equal(value, theirs[index][key]), (index, key)
    for parameter, own in zip(made.param_groups[0]["params"], run.model.parameters(), strict=True):
        assert torch.equal(parameter, own)
        assert parameter.data_ptr() != own.data_ptr()
        parameter.grad = torch.ones_like(parameter)
    if not settings.get("bf16"):  # torch's own steps want states of the weights' dtype
        made.step()
    assert run.step(batches[1]) == still.step(batches[1])
