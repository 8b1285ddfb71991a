"""What the lists of families are made of: builders of small models, random inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from plain_torch import round_to_bf16
from torch import nn

VOCABULARY = 96
IMAGE, VIDEO, VISION_START, VISION_END = 90, 91, 92, 93
"""Token ids that stand for pictures; those of words are below 90."""

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
"""A vision transformer for pictures of 16 by 16: 16 patches."""

Inputs = dict[str, torch.Tensor]
Build = Callable[[], nn.Module]


def build_of(model: str, config: Callable[[], Any], change: Callable[[nn.Module], object] | None = None) -> Build:
    """Builds ``transformers.<model>`` in train mode, always with the same weights, and lets ``change`` alter it."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = getattr(transformers, model)(config()).train()
        if change is not None:
            change(made)
        return made

    return build


def config_of(name: str, **settings: Any) -> Callable[[], Any]:
    """Makes a ``transformers.<name>``."""
    return lambda: getattr(transformers, name)(**settings)


def frozen(build: Build, *parts: str) -> Build:
    """The same model with the parameters frozen whose names contain one of the parts.

    Frozen weights have no masters: rounded here, they are the same in bf16 whichever way ties are rounded.
    """

    def build_frozen() -> nn.Module:
        model = build()
        chosen = [parameter for name, parameter in model.named_parameters() if any(part in name for part in parts)]
        assert chosen
        for parameter in chosen:
            parameter.requires_grad_(False)
            parameter.data = round_to_bf16(parameter.data).float()
        return model

    return build_frozen


def words(seed: int, *shape: int) -> torch.Tensor:
    """Random token ids of words."""
    return torch.randint(3, IMAGE, shape, generator=torch.Generator().manual_seed(seed))


def classes(seed: int, rows: int = 2) -> torch.Tensor:
    """Random labels of three classes."""
    return torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(seed))
