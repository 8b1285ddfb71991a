"""Functions under TorchScript and under torch.compile in a run without data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.plan.fake_runs import compiled_functions_as_python
from megatrain_accelerate.plan.fake_step import profile_step
from megatrain_accelerate.plan.step_memory import LiveBytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def doubled(x: torch.Tensor) -> torch.Tensor:
    # Two shapes tell who ran.
    if torch.jit.is_scripting():
        return x + x
    return torch.cat([x, x])


def test_scripted_functions_run_as_python_in_the_body_only() -> None:
    scripted = torch.jit.script(doubled)
    with FakeTensorMode(), compiled_functions_as_python():
        assert scripted(torch.empty(3)).shape == (6,)
    assert scripted(torch.empty(3)).shape == (3,)


def test_the_profile_of_a_step_runs_no_torchscript() -> None:
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
    profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    assert set(seen) == {6}
    model(input_ids=ids, labels=ids)  # is planned for first
    seen.clear()
    model(input_ids=ids, labels=ids)
    assert set(seen) == {3}
    engine.close()


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch can't switch its compiler off for a while")
def test_a_function_under_torch_compile_can_be_traced_after_a_run_without_data() -> None:
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    query = torch.randn(1, 2, 8, 16)
    with FakeTensorMode() as mode, LiveBytes() as live, compiled_functions_as_python():
        fake = mode.from_tensor(query)
        assert compiled(fake, fake, fake).shape == query.shape
    assert counter.frame_count == 0
    assert live.costs.flops == 2 * 2 * query.numel() * query.shape[-2]
    torch.testing.assert_close(compiled(query, query, query), scaled_dot_product_attention(query, query, query))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
def test_a_step_with_flex_attention_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which refuses to train on a CPU; without data it can't tell.
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    model = tiny_model(hidden_size=128, attn_implementation="flex_attention").train()
    engine = attach(model)
    ids = token_batches(1)[0]
    step_profile = profile_step(model, engine.runtime, {"input_ids": ids, "labels": ids}, engine.device)
    (profile,) = step_profile.profiles.values()
    assert profile.forward.flops > 0
    assert profile.attention_bytes == 0  # it isn't kept for a recompute
    engine.close()
    with pytest.raises(UnsupportedError, match="kept_attention is 2"):
        attach(tiny_model(attn_implementation="flex_attention"), kept_attention=2)
