"""Vision-language models, encoder-decoders and encoders on a GPU: near plain PyTorch there, planned for, compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from families_other import OTHERS
from family_parity import batch_of, differences, optimizer_for, train_plainly, train_streamed
from family_registry import Family
from trainer_runs import plugin

from megatrain_accelerate.engine import engine_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Some kernels have no deterministic form, and say so.
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]
TRAINED = [family for family in OTHERS if family.refusal is None]
WHOLE = [family for family in TRAINED if not family.name.endswith("_frozen")]
BY_NAME = {family.name: family for family in OTHERS}

TOLERANCE = {"losses": 0.02, "gradients": 0.02, "masters": 0.011}
"""Atomics add in another order each time: some ulps of bf16, 2**-8. Where they change the sign of a tiny gradient, five steps
of AdamW at 1e-3 differ by twice the rate each."""


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    """In the place of the folder's fixture, which makes an error of kernels without a deterministic form."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_near_plain(family: Family, **settings: object) -> None:
    plain = train_plainly(family, torch.bfloat16, device="cuda")
    ours = train_streamed(family, torch.bfloat16, device="cuda", **settings)
    far = [
        (kind, name, difference)
        for kind, name, difference in differences(ours, plain)
        # Later gradients are of weights that differ already.
        if difference > TOLERANCE[kind] and (kind != "gradients" or name.endswith(" 0"))
    ]
    assert not far, far[:8]


@pytest.mark.parametrize("family", TRAINED, ids=lambda family: family.name)
def test_five_steps_are_near_those_of_plain_pytorch(family: Family) -> None:
    assert_near_plain(family)


@pytest.mark.parametrize("name", ["t5_gated", "qwen2_5_vl"])
def test_compiled_stacks_are_near_plain_pytorch(name: str) -> None:
    # Position biases handed from layer to layer; a tower that splits its tokens by sizes of pictures.
    assert_near_plain(BY_NAME[name], compile_layers=True)


@pytest.mark.parametrize("family", WHOLE, ids=lambda family: family.name)
def test_a_step_is_measured_and_planned_for(family: Family) -> None:
    # Sizes of pictures, places of tokens, ends of sentences: what the forward decides by is known to the plan.
    with plugin():
        accelerator = Accelerator(mixed_precision="bf16")
        model = family.build()
        model, optimizer = accelerator.prepare(model, optimizer_for(list(model.parameters())))
        engine = engine_of(model)
        assert engine is not None
        losses = []
        for step in range(3):
            loss = model(**batch_of(family, step, "cuda")).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert engine.predicted_step_seconds is not None
        assert engine.predicted_device_bytes > 0
        # A model as small as these fits whole.
        assert engine.device_plan.placement.kept or engine.device_plan.placement.on_device
        assert all(loss == loss for loss in losses)
        engine.close()
