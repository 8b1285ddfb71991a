"""Optimizers that don't fit a prepared model, and changes of the model that come too late, are one clear error."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from plain_torch import tiny_model, token_batches
from refusals import prepare
from torch import nn

import megatrain_accelerate
from megatrain_accelerate.engine import all_engines, engine_of
from megatrain_accelerate.errors import StateError, UnsupportedError

pytestmark = pytest.mark.usefixtures("active", "profiled_once")


@pytest.mark.parametrize("order", ["model_first", "optimizer_first"])
def test_an_optimizer_over_another_streamed_models_parameters_is_refused_and_a_right_one_works(order: str) -> None:
    model, accelerator = tiny_model(), Accelerator(cpu=True)
    other = accelerator.prepare(tiny_model(seed=1))
    stranger = next(other.parameters())
    wrong = torch.optim.AdamW([*model.parameters(), stranger], lr=1e-3)
    with pytest.raises(UnsupportedError, match=r"trained parameters of another streamed model"):
        accelerator.prepare(*((model, wrong) if order == "model_first" else (wrong, model)))
    assert type(wrong) is torch.optim.AdamW
    model, right = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for ids in token_batches(1) * 3:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        right.step()
        right.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("where", ["outside the layers", "in a layer"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_where_they_would_be_trained(kind: type[nn.Module], where: str) -> None:
    model, accelerator = tiny_model(), Accelerator(cpu=True)
    owner = model.model if where == "outside the layers" else model.model.layers[1]
    owner.table = kind(5, 4, sparse=True)
    accelerator.prepare_model(model, evaluation_mode=True)
    with pytest.raises(UnsupportedError, match=r"table has sparse=True.*create it with sparse=False"):
        accelerator.prepare(model)
    owner.table.requires_grad_(False)
    accelerator.prepare(model)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_optimizer_whose_step_was_replaced_before_it_is_adopted_is_refused(is_prepared: bool) -> None:
    model, accelerator = tiny_model(), Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if is_prepared:
        accelerator.prepare(model, optimizer)
        model.lm_head.requires_grad_(False)
    own_step = optimizer.step
    optimizer.step = lambda *arguments: own_step(*arguments)
    with pytest.raises(UnsupportedError, match=r"was replaced on the object itself.*register_step_pre_hook\(\)"):
        accelerator.prepare(model, optimizer)


def test_an_optimizer_of_other_parameters_alone_stays_a_stock_one() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(tiny_model())
    loose = nn.Parameter(torch.ones(3))
    optimizer = accelerator.prepare(torch.optim.AdamW([loose], lr=0.1, weight_decay=0))
    loose.sum().backward()
    optimizer.step()
    torch.testing.assert_close(loose.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize("training", [True, False])
def test_embeddings_that_are_resized_after_prepare_are_refused_at_the_next_forward(training: bool) -> None:
    model, _ = prepare(tiny_model())
    ids = token_batches(1)[0]
    model(input_ids=ids, labels=ids)
    model.resize_token_embeddings(160)
    with (
        torch.set_grad_enabled(training),
        pytest.raises(StateError, match=r"after the model was prepared; change the model \(.*tokens\) before"),
    ):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.norm", "lm_head"])
def test_a_weight_that_is_replaced_after_prepare_is_refused_at_the_next_forward(name: str, training: bool) -> None:
    model, _ = prepare(tiny_model())
    module = model.get_submodule(name)
    kept = module.weight
    module.weight = nn.Parameter(kept.detach().clone())
    ids = token_batches(1)[0]
    with torch.set_grad_enabled(training), pytest.raises(StateError, match=r"replaced .*after the model was prepared"):
        model(input_ids=ids, labels=ids)
    module.weight = kept
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("name", ["lm_head", "model.layers.2"])
def test_a_module_that_is_replaced_after_prepare_is_refused_at_the_next_forward(name: str) -> None:
    model, _ = prepare(tiny_model())
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, copy.deepcopy(model.get_submodule(name)))
    ids = token_batches(1)[0]
    with pytest.raises(StateError, match=rf"{name}.* was replaced or removed after the model was prepared"):
        model(input_ids=ids, labels=ids)


def test_layers_that_are_removed_after_prepare_are_refused_at_the_next_forward() -> None:
    model, _ = prepare(tiny_model())
    model.model.layers = model.model.layers[:2]
    with pytest.raises(StateError, match=r"layer model\.layers\.2 was replaced or removed"):
        model(input_ids=token_batches(1)[0])


def test_weights_that_were_written_before_a_model_is_prepared_anew_are_kept() -> None:
    model, _ = prepare(tiny_model())
    weights = tiny_model(5).state_dict()
    model.load_state_dict(weights)
    model.model.layers[0].requires_grad_(False)
    model, _ = Accelerator(cpu=True).prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_a_model_that_was_resized_can_be_prepared_anew(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = prepare(tiny_model())
    model.resize_token_embeddings(160)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert "preparing it again" in caplog.text
    ids = token_batches(1, vocabulary=160)[0]
    before = model.lm_head.weight.detach().clone()
    assert before.shape[0] == 160
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    megatrain_accelerate.drain(model)
    assert not torch.equal(model.lm_head.weight, before)
    assert sum(engine is engine_of(model) for engine in all_engines()) == 1
