"""What a kept layer's graph holds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from engine_runs import attach, used_bytes
from plain_torch import tiny_model, token_batches
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.layers.saved_tensors import SavedTensors, SlotPlace
from megatrain_accelerate.transfer import activation_offload

pytestmark = pytest.mark.usefixtures("profiled_once")


def test_more_kept_layers_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has 4 layers"):
        attach(tiny_model(), kept_layers=5)


def test_a_kept_layer_holds_no_weights_and_lets_go_after_backward() -> None:
    model = tiny_model().train()
    engine = attach(model, kept_layers=4)
    ids = token_batches(1)[0]
    buffers = {slot.buffer.untyped_storage().data_ptr() for slot in engine.runtime.prefetcher.slots}
    saved: list[torch.Tensor] = []
    pack = SavedTensors.pack
    with pytest.MonkeyPatch.context() as patch:

        def spy(self: SavedTensors, tensor: torch.Tensor) -> object:
            packed = pack(self, tensor)
            if not isinstance(packed, SlotPlace):
                saved.append(packed[0] if type(packed) is tuple else packed)
            return packed

        patch.setattr(SavedTensors, "pack", spy)
        loss = model(input_ids=ids, labels=ids).loss
    assert len(saved) > 20
    assert not any(tensor.untyped_storage().data_ptr() in buffers for tensor in saved)
    loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    engine.close()


def test_a_second_backward_through_kept_layers_is_that_through_recomputed_ones() -> None:
    gradients = []
    for kept in (0, 4):
        model = tiny_model().train()
        engine = attach(model, kept_layers=kept)
        ids = token_batches(1)[0]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Made(TorchDispatchMode):
    """Notes the storages of what has a dimension of the given size, wherever an operation returns it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and self._size in leaf.shape]
        self.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        return made


@pytest.mark.parametrize(
    "settings",
    [
        {"kept_layers": 4},
        {"kept_layers": 4, "micro_batch_size": 1},
        {"kept_layers": 0, "kept_attention": 4},
        {"offloaded_layers": 4},
    ],
    ids=["kept", "pieces", "attention", "offloaded"],
)
def test_a_forward_without_a_backward_gives_all_of_it_back(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_OFFLOADED_BYTES", 1)
    # Attention and softmax save their own outputs: a graph that holds them as they come would hold itself.
    length = 23
    model = tiny_model().train()
    engine = attach(model, **{"kept_layers": 0, **settings})
    ids = token_batches(1, length=length)[0]
    model(input_ids=ids, labels=ids).loss.backward()  # is planned for
    with Made(length) as made:
        loss = model(input_ids=ids, labels=ids).loss
    alive = sum(not storage.expired() for storage in made.storages)
    assert alive > 4
    del loss
    # The last copies out may be under way until another forward begins.
    model(input_ids=ids, labels=ids).loss.backward()
    gc.collect()
    assert sum(not storage.expired() for storage in made.storages) == 0
    assert used_bytes(engine.runtime.activations.pool) == 0
    engine.close()


class Noted(torch.autograd.Function):
    """Saves a tensor that needs no gradient, with an attribute of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return grads[0] * scale.factor, None


def test_tensors_without_a_gradient_are_kept_as_they_are() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.full((1,), 2.0, dtype=x.dtype)
            scale.factor = 2.0  # type: ignore[attr-defined]
            return Noted.apply(x, scale)

    model = tiny_model().train()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, Scaled())
    engine = attach(model, kept_layers=4)
    ids = token_batches(1)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    engine.close()


@pytest.mark.parametrize("keep", [0, 4], ids=["recomputed", "kept"])
def test_what_a_layer_returned_is_given_up_before_its_own_backward(keep: int) -> None:
    model = tiny_model().train()
    engine = attach(model, kept_layers=keep)
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
