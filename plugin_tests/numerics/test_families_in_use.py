"""Families of text decoders in use: evaluation, generation with their own caches, batches in pieces, frozen parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from decoder_models import Decoder, whole_texts
from families import DECODERS
from family_parity import STREAMED, assert_parity, train_plainly, train_streamed
from torch import nn
from trainer_runs import plugin

from megatrain_accelerate.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("profiled_once")

BY_NAME = {family.name: family for family in DECODERS}
UNLIKE_LLAMA = ("gemma4", "granite_hybrid", "mamba", "qwen3_next")
"""What they hand on from token to token, or from layer to layer, isn't keys and values of each layer alone."""

each_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=() if family.name in UNLIKE_LLAMA else pytest.mark.long)
        for family in DECODERS
    ],
)


def logits_and_tokens(model: nn.Module, family: Decoder) -> list[torch.Tensor]:
    model.eval()
    inputs = family.batch(0)
    with torch.no_grad():
        found = [model(**inputs).logits]
    # transformers can't reckon an auxiliary loss for one token more than its mask was made for.
    model.config.output_router_logits = False  # type: ignore[union-attr]
    # Padded on the left, as prompts are.
    prompt, mask = inputs["input_ids"].flip(1)[:2], inputs["attention_mask"].flip(1)[:2]
    found.append(model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=5, do_sample=False))  # type: ignore[operator]
    return found


@each_family
@pytest.mark.filterwarnings("ignore")  # transformers' remarks on settings of generation
def test_evaluation_and_generation_are_those_of_the_plain_model(family: Decoder) -> None:
    expected = logits_and_tokens(family.build(), family)
    with plugin(**{**STREAMED, **family.settings}):
        model = Accelerator(cpu=True).prepare_model(family.build(), evaluation_mode=True)
        found = logits_and_tokens(model, family)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert found[1].shape[1] > family.batch(0)["input_ids"].shape[1]


def without_dropout(family: Decoder) -> Decoder:
    def build() -> nn.Module:
        model = family.build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
        return model

    return dataclasses.replace(family, build=build, batch=whole_texts)


WITHOUT_PIECES = {
    "mixtral": "its noise is drawn piece by piece",
    "gemma3n": "refused, see below",
}


@pytest.mark.long
@pytest.mark.parametrize("family", [f for f in DECODERS if f.name not in WITHOUT_PIECES], ids=lambda family: family.name)
def test_a_batch_in_pieces_has_the_losses_and_gradients_of_the_whole(family: Decoder) -> None:
    # Sums over samples are added in another order: the rounding of fp32, in five steps that follow from each other.
    family = without_dropout(family)
    whole = train_plainly(family, torch.float32)
    pieces = train_streamed(family, torch.float32, micro_batch_size=1)
    for name, gradient in whole.gradients.items():
        found = pieces.gradients[name]
        assert (found is None) == (gradient is None)
        if name.endswith(" 0") and found is not None and gradient is not None:
            torch.testing.assert_close(found, gradient, rtol=2e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    for name, loss in whole.losses.items():
        torch.testing.assert_close(pieces.losses[name], loss, rtol=2e-4, atol=0.0)


def test_a_batch_whose_samples_are_not_in_front_is_refused_in_pieces() -> None:
    # Gemma 3n's hidden states are (copies, B, T, D).
    with pytest.raises(UnsupportedError, match="dimension 0 isn't the batch"):
        train_streamed(BY_NAME["gemma3n"], torch.float32, micro_batch_size=1)


def halves(family: Decoder, freeze: Callable[[str], bool]) -> Decoder:
    def build() -> nn.Module:
        model = family.build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not freeze(name))
        return model

    return dataclasses.replace(family, build=build)


def _numbers(name: str) -> Iterator[int]:
    return (int(part) for part in name.split(".") if part.isdigit())


FREEZINGS: dict[str, Callable[[str], bool]] = {
    "lower_half": lambda name: "embed" in name or next(_numbers(name), 9) < 2,
    "upper_half": lambda name: next(_numbers(name), 0) >= 2,
    "attention_alone_is_trained": lambda name: "attn" not in name,
    "norms_are_frozen": lambda name: "norm" in name,
}


@pytest.mark.parametrize(
    "freeze",
    [pytest.param(freeze, id=key, marks=() if key == "lower_half" else pytest.mark.long) for key, freeze in FREEZINGS.items()],
)
@pytest.mark.parametrize("name", ["gemma4", pytest.param("mixtral", marks=pytest.mark.long)])
def test_frozen_parts_change_nothing_for_the_others(name: str, freeze: Callable[[str], bool]) -> None:
    family = halves(BY_NAME[name], freeze)
    assert_parity(train_streamed(family, torch.bfloat16), train_plainly(family, torch.bfloat16), 0.0)


def test_parameters_that_the_model_never_uses_keep_their_weights() -> None:
    def build() -> Any:
        model = BY_NAME["gemma3"].build()
        model.model.layers[1].spare = nn.Linear(8, 8)  # type: ignore[union-attr,index]
        model.model.unused = nn.Linear(8, 8)  # type: ignore[union-attr]
        return model

    family = dataclasses.replace(BY_NAME["gemma3"], build=build)
    plain = train_plainly(family, torch.bfloat16)
    ours = train_streamed(family, torch.bfloat16)
    assert_parity(ours, plain, 0.0)
    untouched = {name for name, weight in build().named_parameters() if torch.equal(weight, ours.masters[name])}
    assert untouched == {
        f"{place}.{kind}" for place in ("model.layers.1.spare", "model.unused") for kind in ("weight", "bias")
    }
