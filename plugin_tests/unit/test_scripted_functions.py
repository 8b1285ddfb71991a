"""Functions under TorchScript in a run without data."""

from __future__ import annotations

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_accelerate.planning.scripted_functions import scripted_functions_as_python
from megatrain_accelerate.planning.step_outline import outline_step

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def doubled(x: torch.Tensor) -> torch.Tensor:
    # Two shapes tell who ran.
    if torch.jit.is_scripting():
        return x + x
    return torch.cat([x, x])


def test_scripted_functions_run_as_python_in_the_body_only() -> None:
    scripted = torch.jit.script(doubled)
    with FakeTensorMode(), scripted_functions_as_python():
        assert scripted(torch.empty(3)).shape == (6,)
    assert scripted(torch.empty(3)).shape == (3,)


def test_the_outline_of_a_step_runs_no_torchscript() -> None:
    scripted = torch.jit.script(doubled)
    seen = []

    class Scripting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(scripted(torch.zeros(3)).shape[0])
            return x

    model = tiny_model().train()
    model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, Scripting())
    engine = attach(model)
    ids = token_batches(1)[0]
    outline_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    assert set(seen) == {6}
    model(input_ids=ids, labels=ids)  # is planned for first
    seen.clear()
    model(input_ids=ids, labels=ids)
    assert set(seen) == {3}
    engine.close()
