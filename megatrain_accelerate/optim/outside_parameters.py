"""Parameters of an optimizer that aren't the streamed model's: a loss's own weights, a head, a temperature.

They live on the device as in plain PyTorch, and the optimizer's own ``step()`` steps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def move_to_device(parameter: torch.Tensor, device: torch.device) -> None:
    """Moves a parameter and its gradient from the host to ``device``; a parameter that isn't on the host stays where it is."""
    if parameter.device.type == "cpu" and device.type != "cpu":
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(device)
        parameter.grad = gradient if gradient is None else gradient.to(device)


def move_state_beside(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """Moves the optimizer's state of a parameter to its device. Step counts that torch keeps on the host stay there."""
    step_is_on_device = bool(group.get("capturable") or group.get("fused"))
    entry = optimizer.state.get(parameter) or {}
    for key, value in entry.items():
        if isinstance(value, torch.Tensor) and value.device != parameter.device and (key != "step" or step_is_on_device):
            entry[key] = value.to(parameter.device)


@contextlib.contextmanager
def narrowed_to(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Removes all other parameters from the optimizer's groups while the body runs."""
    ids = {id(parameter) for parameter in parameters}
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in ids]
        yield
    finally:
        for group, held in zip(optimizer.param_groups, before, strict=True):
            group["params"] = held
