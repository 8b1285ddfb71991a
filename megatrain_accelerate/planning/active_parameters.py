"""How many of a model's parameters a token meets: what its FLOPs are counted by."""

from __future__ import annotations

from typing import Any

from torch import nn

_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
_PRESENT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configurations of transformers call the experts that a token is sent to, and those of a layer."""


def _count(config: Any, names: tuple[str, ...]) -> int | None:
    return next((count for name in names if isinstance(count := getattr(config, name, None), int) and count), None)


def _of_text(config: Any) -> Any:
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):  # not of transformers, or with several texts, none of which speaks for the model
        return config


def active_parameters(model: nn.Module, config: Any) -> int:
    """Parameters that a token meets, frozen ones too: all, but for the experts that it isn't sent to.

    Adapters on experts count as the experts do. Shared experts, which every token is sent to, count whole.

    Args:
        model: its experts are the parameters with ``.experts.`` in their names, as transformers has them.
        config: of the model, or None; names the experts of a layer and those that a token is sent to, where there are any.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    text = _of_text(config)
    chosen, present = _count(text, _CHOSEN), _count(text, _PRESENT)
    if chosen is None or present is None:
        return total
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    return total - experts + experts * chosen // present
