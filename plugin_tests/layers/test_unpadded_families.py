"""Every family of decoders trains on padded batches as plain PyTorch does, whether its layers leave padding out or not."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from decoder_models import VOCABULARY, Decoder
from engine_runs import attach
from families import DECODERS
from torch import nn
from unpadded_calls import UnpaddedCalls

from megatrain_accelerate.layers.padding import real_tokens

LENGTHS = (24, 9, 3, 5, 11, 7, 2, 6)
WIDTH = 24
TOLERANCE = 1e-5
"""Relative to the largest of a tensor, in fp32: attention adds in another order where no mask is given."""

UNPADDED = {
    "qwen3": 3,
    "llama3": 0,  # draws random numbers
    "mistral": 0,
    "cohere2": 2,  # of 4: the others' windows are shorter than the batch
    "gemma2": 0,  # attention of its own
    "granite_hybrid": 2,  # of 4: the others are recurrent
    "mamba": 0,
    "deepseek_v3": 3,
    "qwen3_moe": 3,
}
"""How many layers leave padding out, of those that are tested always; and why not all."""


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Texts of several lengths, padded behind them."""
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), WIDTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.stack([(torch.arange(WIDTH) < length).long() for length in LENGTHS])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)  # of dropout
    random.seed(5)  # of layers that are left out
    loss = model(**batch(1)).loss
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | {"loss": loss.detach()}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=() if family.name in UNPADDED else pytest.mark.long)
        for family in DECODERS
        if family.refusal is None
    ],
)
def test_gradients_are_those_of_all_tokens(family: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    unpadded = UnpaddedCalls(monkeypatch)
    assert real_tokens(batch(1)) is not None
    # The loss of balanced experts looks at all tokens.
    balanced: dict[str, Any] = {"output_router_logits": False} if family.name == "qwen3_moe" else {}
    model = family.build(**balanced)
    expected = gradients(copy.deepcopy(model))
    engine = attach(model, bf16=False, kept_layers=0, **family.settings)
    ours = gradients(model)
    assert ours.keys() == expected.keys()
    for name, theirs in expected.items():
        assert float((ours[name] - theirs).abs().max()) <= TOLERANCE * max(1.0, float(theirs.abs().max())), name
    if family.name in UNPADDED:
        assert sum(unpadded.of(engine)) == UNPADDED[family.name]
    engine.close()
