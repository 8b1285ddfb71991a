"""Compiled layers of experts on a GPU: grouped products in bf16, and router logits recorded from Inductor's graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import attach
from expert_models import (
    EXPERTS,
    HOOKS_RECORD,
    KINDS,
    ROUTER,
    error_of,
    gradients_of,
    ids_of,
    of_experts,
    one_pass,
    true_gradients,
)
from torch import nn

from megatrain_accelerate.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not HOOKS_RECORD, reason="transformers records nothing by hooks"),
    # Of transformers' cached questions about torch's version, while it is traced.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def prepared(name: str, **settings: Any) -> tuple[nn.Module, Engine]:
    model = of_experts(name)
    return model, attach(model, device="cuda", **{"compile_layers": True, **settings})


@pytest.mark.parametrize("name", EXPERTS)
def test_compiled_experts_are_as_near_the_truth_as_the_layers_own_code(name: str) -> None:
    truth = true_gradients(name, "cuda")
    outputs, errors = [], []
    products: set[str] = set()

    def watched(graph: Any, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        products.update(str(node.target) for node in graph.graph.nodes if "grouped_mm" in str(node.target))
        compiler: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")
        return compiler(graph, inputs, **options)

    for compile_layers in (True, False):
        model, engine = prepared(name, compile_layers=compile_layers)
        engine.runtime.compiled.backend = watched
        outputs.append(one_pass(model, "cuda"))
        assert engine.runtime.compiled.compilations == (KINDS[name] if compile_layers else 0)
        gradients = gradients_of(model)
        errors.append([error_of(gradients, truth, part) for part in ("", ROUTER[name])])
        engine.close()
    assert products, "the products are grouped ones"
    assert not any("fallback" in product for product in products), "in one kernel"
    ours, theirs = outputs
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=2e-3)
    assert ours.aux_loss.item() == pytest.approx(theirs.aux_loss.item(), rel=2e-3)
    assert len(ours.router_logits) == len(theirs.router_logits) > 1
    for mine, other in zip(ours.router_logits, theirs.router_logits, strict=True):
        # bf16 rounds to 8 bits; a token that went to another expert comes to the next layers as another one.
        difference = (mine - other).detach().float()
        assert float(difference.square().mean().sqrt()) <= 0.1 * float(other.detach().float().std())
    for mine, other in zip(*errors, strict=True):
        # Now and then a token goes to another expert with one of the two, and both are wrong by as much.
        assert mine <= 2.0 * other


@pytest.mark.parametrize("name", EXPERTS)
def test_kept_layers_record_and_train_as_recomputed_ones(name: str) -> None:
    truth = true_gradients(name, "cuda")
    outputs, errors = [], []
    for kept in (0, 3):
        model, engine = prepared(name, kept_layers=kept)
        outputs.append(one_pass(model, "cuda"))
        gradients = gradients_of(model)
        errors.append([error_of(gradients, truth, part) for part in ("", ROUTER[name])])
        # The plan measures layers that are kept.
        assert KINDS[name] <= engine.runtime.compiled.compilations <= (1 if kept else 2) * KINDS[name]
        engine.close()
    recomputed, kept_output = outputs
    assert kept_output.loss.item() == pytest.approx(recomputed.loss.item(), rel=2e-3)
    assert len(kept_output.router_logits) == len(recomputed.router_logits) > 1
    for mine, other in zip(*errors, strict=True):
        assert 0.5 * other <= mine <= 2.0 * other


def test_the_plan_measures_the_graph_that_the_steps_run() -> None:
    model, engine = prepared("qwen3_moe", device_layers=None, offloaded_layers=None)
    count = []
    for _ in range(3):
        output = one_pass(model, "cuda")
        assert len(output.router_logits) == 2
        count.append(engine.runtime.compiled.compilations)
    assert count == [2, 2, 2]


def test_many_lengths_take_few_compilations() -> None:
    model, engine = prepared("mixtral", kept_layers=3)
    for batch, length in [(2, 32), (2, 64), (2, 40), (2, 33), (3, 57), (4, 48), (6, 16), (2, 32), (5, 24)]:
        ids = ids_of(batch, length).cuda()
        output = model(input_ids=ids, labels=ids)
        assert [logits.shape for logits in output.router_logits] == [(batch * length, 4)] * 3
        output.loss.backward()
    # One for the first shape, then any length, then any batch size; lengths that attention's kernels align may be apart.
    assert engine.runtime.compiled.compilations <= 5
