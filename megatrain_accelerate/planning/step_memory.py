"""The device memory of a training step, found by running the step on tensors without data.

The user's own forward is run under ``FakeTensorMode`` (torch/_subclasses/fake_tensor.py) with the shapes of the real batch,
each streamed layer as one recomputed segment, then backward; a dispatch mode adds up what is alive. So logits, loss,
layer inputs and one layer's working set are counted by the code that will make them, and nothing is allocated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.checkpoint import checkpoint

from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.runtime import StreamingRuntime


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of storages that are made and die while it is active. Peak in :attr:`peak_bytes`.

    Args:
        present: tensors that are there already and don't count.
    """

    def __init__(self, present: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        # Their storages come back in views, and aren't new.
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in present)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                # A tensor that only stands for others (lazy logits) has a storage of no bytes, and mustn't be made to fill it.
                with torch._C.DisableTorchFunctionSubclass():
                    self._track(tensor.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        # The caching allocator hands out multiples of 512 bytes.
        size = -(-storage.nbytes() // 512) * 512
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live_bytes -= size


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextlib.contextmanager
def _fake_weights(model: nn.Module, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """The model's parameters and buffers are tensors without data while the body runs; yields the parameters."""
    fakes: dict[int, torch.Tensor] = {}
    saved: list[tuple[Any, str, Any]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            # A fresh tensor, since a conversion would carry over hooks and gradients.
            twin = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            fakes[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
        return fakes[id(tensor)]

    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        for module in model.modules():
            # Hooks belong to real calls: the user's may count them, or look at the data.
            module.__dict__.update({name: OrderedDict() for name in _HOOKS})
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        saved.append((store, name, tensor))
        for store, name, tensor in saved:
            store[name] = fake(tensor)
        yield list(fakes.values())
    finally:
        for store, name, tensor in saved:
            store[name] = tensor
        # What a forward keeps on a module (a lazily made table) has no data either.
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)


def _without_full_masks(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Models skip an attention mask of ones; without data they couldn't know, and would take another kernel."""
    mask = inputs.get("attention_mask")
    is_full = isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all())
    return {name: value for name, value in inputs.items() if not (is_full and name == "attention_mask")}


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def predict_step_bytes(
    model: nn.Module,
    runtime: StreamingRuntime,
    inputs: Mapping[str, Any],
    device: torch.device,
    kept_layers: Collection[int] = (),
) -> int:
    """Bytes of device memory that a training step on ``inputs`` takes besides what the engine holds in any case.

    Args:
        model: the prepared model; its ``forward`` is called once, without data.
        runtime: its engine at work.
        inputs: the keyword arguments of the real call; labels among them, or the loss is taken as a sum over the output.
        device: where the step will run.
        kept_layers: indices of the layers that aren't recomputed.

    Raises:
        Exception: whatever the model raises when it looks at data (``FakeTensorMode`` has none).
    """

    def segment(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layer.index in kept_layers:
            return layer.forward(*args, **kwargs)
        return checkpoint(layer.forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    in_layers = {id(state.parameter) for layer in runtime.layers for state in layer.unit.states}
    inputs = _without_full_masks(inputs)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        is_layer_weight = [id(p) in in_layers for p in model.parameters()]
        with _fake_weights(model, device) as weights, runtime.layers_run_by(segment), torch.enable_grad():
            for parameter, inside in zip(model.parameters(), is_layer_weight, strict=True):
                if inside and parameter.requires_grad:
                    # They leave for the host through a gradient slot; the slots are counted as static.
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
            fake_inputs = tree_map_only(torch.Tensor, mode.from_tensor, inputs)
            with LiveBytes(weights) as live:
                output = model.forward(**fake_inputs)
                loss = output["loss"] if isinstance(output, Mapping) and output.get("loss") is not None else None
                if loss is None:
                    tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
                    loss = sum((tensor.float().sum() for tensor in tensors), torch.zeros((), device=device))
                del output
                loss.backward()
    return live.peak_bytes
