"""Families of text decoders on a GPU: near plain PyTorch there, and the plan is made for what is special about them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decoder_models import Decoder
from families import DECODERS
from family_gpu import assert_near_plain, planned_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Some kernels of experts and scans have no deterministic form, and say so.
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    """In the place of the folder's fixture, which makes an error of kernels without a deterministic form."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_five_steps_are_near_those_of_plain_pytorch(family: Decoder) -> None:
    assert_near_plain(family)


PLANNED = ["mixtral", "qwen3_moe", "gpt_oss", "phi4", "opt", "gemma4", "qwen3_next", "deepseek_v3"]


@pytest.mark.parametrize("family", [family for family in DECODERS if family.name in PLANNED], ids=lambda family: family.name)
def test_a_step_is_measured_and_planned_for(family: Decoder) -> None:
    # Auxiliary losses, decisions by the batch's positions, layers left out, keys and values shared by layers.
    with planned_training(family):
        pass
