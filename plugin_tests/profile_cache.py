"""Profiles of steps that many tests of a file take alike: each is run once.

A run without data takes most of the time of a training of a few steps on a tiny model. What is a test's own (optimizers,
schedules, arguments of the Trainer, faults) doesn't reach it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.loss import tiled_cross_entropy
from megatrain_accelerate.plan.step_profile import StepProfile
from megatrain_accelerate.transfer import activation_offload

Profiles = dict[Hashable, StepProfile]


def _tensor_key(tensor: torch.Tensor) -> Hashable:
    """All of it."""
    values = hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return tuple(tensor.shape), tensor.dtype, str(tensor.device), values


def _input_key(model: nn.Module, name: str, value: Any) -> Hashable:
    """All of an input: runs without data look at the values of integers. Models of text alone don't at those of tokens, and
    of labels only at which of them count."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    config = getattr(model, "config", None)
    if name in ("input_ids", "labels") and hasattr(config, "get_text_config") and config.get_text_config() is config:
        value = value < 0
    return _tensor_key(value)


def _module_key(module: nn.Module) -> Hashable:
    """Its class, what it was set up with, and its own parameters and buffers without their values."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    tensors = [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in own]
    attributes = [(name, _value_key(value)) for name, value in sorted(vars(module).items())]
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    return type(module), tuple(attributes), tuple(tensors), hooks


def _value_key(value: Any) -> str:
    """A simple value itself, the name of a function, and the class of anything else."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _step_key(model: nn.Module, runtime: StreamingRuntime, inputs: Mapping[str, Any], device: torch.device) -> Hashable:
    """Equal for steps of equal step profiles."""
    config, real = getattr(model, "config", None), runtime.calls.real_tokens
    return (
        tuple((name, _module_key(module)) for name, module in model.named_modules()),
        config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else repr(config),
        getattr(model.forward, "__qualname__", ""),
        tuple((key, _input_key(model, key, at)) for key, at in sorted(inputs.items())),
        tuple(
            (at.unit.layout.key, tuple(len(experts.parts) for experts in at.experts), at.has_trainable)
            for at in runtime.layers
        ),
        (runtime.token_tile, runtime.batch_cut.asked, runtime.batch_cut.chosen),
        None if real is None else (real.lengths, real.counts, real.width),
        (activation_offload.MIN_OFFLOADED_BYTES, tiled_cross_entropy.TILE_BYTES),
        (str(device), torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)),
    )


def remembering(profile_step: Callable[..., StepProfile], made: Profiles) -> Callable[..., StepProfile]:
    """``profile_step`` that takes step profiles of equal steps from those ``made`` before."""

    def step_profile(
        model: nn.Module, runtime: StreamingRuntime, inputs: Mapping[str, Any], device: torch.device
    ) -> StepProfile:
        key = _step_key(model, runtime, inputs, device)
        if key not in made:
            made[key] = profile_step(model, runtime, inputs, device)
        return made[key]

    return step_profile
