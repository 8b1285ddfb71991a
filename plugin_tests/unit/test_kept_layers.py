"""What a kept layer's graph holds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches

from megatrain_accelerate.errors import ConfigError


def test_more_kept_layers_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has 4 layers"):
        attach(tiny_model(), keep_layers=5)


def test_a_kept_layer_holds_no_weights_and_lets_go_after_backward() -> None:
    model = tiny_model().train()
    engine = attach(model, keep_layers=4)
    ids = token_batches(1)[0]
    buffers = {slot.buffer.untyped_storage().data_ptr() for slot in engine.runtime.prefetcher.slots}
    saved: list[torch.Tensor] = []
    from megatrain_accelerate.streaming import kept_graph

    pack = kept_graph._SavedTensors.pack
    with pytest.MonkeyPatch.context() as patch:

        def spy(self: kept_graph._SavedTensors, tensor: torch.Tensor) -> object:
            packed = pack(self, tensor)
            if isinstance(packed, torch.Tensor):
                saved.append(packed)
            return packed

        patch.setattr(kept_graph._SavedTensors, "pack", spy)
        loss = model(input_ids=ids, labels=ids).loss
    assert len(saved) > 20
    assert not any(tensor.untyped_storage().data_ptr() in buffers for tensor in saved)
    loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    engine.close()


def test_a_second_backward_through_a_kept_layer_recomputes() -> None:
    gradients = []
    for kept in (0, 4):
        model = tiny_model().train()
        engine = attach(model, keep_layers=kept)
        ids = token_batches(1)[0]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_kept_forward_without_a_backward_gives_its_activations_back() -> None:
    model = tiny_model().train()
    engine = attach(model, keep_layers=4)
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    hook = lambda module, args, output: alive.append(weakref.ref(output.untyped_storage()))  # noqa: E731
    model.model.layers[1].mlp.act_fn.register_forward_hook(hook)
    ids = token_batches(1)[0]
    loss = model(input_ids=ids, labels=ids).loss
    assert alive[0]() is not None
    del loss
    gc.collect()
    assert alive[0]() is None
    engine.close()


@pytest.mark.parametrize("keep", [0, 4], ids=["recomputed", "kept"])
def test_what_a_layer_returned_is_given_up_before_its_own_backward(keep: int) -> None:
    model = tiny_model().train()
    engine = attach(model, keep_layers=keep)
    returned: dict[int, weakref.ref[torch.UntypedStorage]] = {}
    is_gone: dict[int, bool] = {}

    def note(index: int, output: Any) -> None:
        returned[index] = weakref.ref(output.untyped_storage())

    def look(index: int) -> None:
        is_gone[index] = returned[index]() is None

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, args, output, index=index: note(index, output))
        layer.mlp.register_full_backward_pre_hook(lambda module, gradients, index=index: look(index))
    ids = token_batches(1)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    # The final norm's node holds the last layer's until its own backward, which is over then.
    assert is_gone == dict.fromkeys(range(4), True)
    engine.close()
