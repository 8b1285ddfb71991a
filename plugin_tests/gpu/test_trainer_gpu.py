"""The stock Trainer on a GPU, with and without the plugin: what the CPU can't run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_runs import Padding, close, ragged_examples, run_trainer, tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# They stream, though they would fit.
STREAMED: dict[str, Any] = {"device_layers": 0, "kept_layers": 0, "compile_layers": False}


def llama(**changes: Any) -> nn.Module:
    # Kernels of flex attention and Liger want heads of at least 16.
    return tiny_llama(hidden_size=128, intermediate_size=256, **changes)


def losses(tmp_path: Path, streamed: bool, make: Any, settings: dict[str, Any] | None = None, **arguments: Any) -> list[float]:
    run = run_trainer(
        make,
        tmp_path,
        streamed=streamed,
        dataset=ragged_examples(),
        use_cpu=False,
        settings=(STREAMED if settings is None else settings) if streamed else None,
        options=lambda model: {"data_collator": Padding("right")},
        **arguments,
    )
    return run.logged("loss")


@pytest.fixture
def default_precision() -> Iterator[None]:
    """Transformers leaves the process with what was asked for, in torch's newer switch where there is one."""
    owner, name = torch.backends.cuda.matmul, "allow_tf32"
    if hasattr(torch.backends, "fp32_precision"):
        owner, name = torch.backends, "fp32_precision"
    before = getattr(owner, name)
    yield
    setattr(owner, name, before)


@pytest.mark.usefixtures("default_precision")
def test_tf32_holds_for_layers_that_stream(tmp_path: Path) -> None:
    found = {
        (streamed, tf32): losses(tmp_path, streamed, llama, tf32=tf32) for tf32 in (False, True) for streamed in (False, True)
    }
    for tf32 in (False, True):
        # The same kernels in both; AdamW's roundings differ, and may move a weight to the next number of tf32 (10 bits).
        tolerance = 1e-4 if tf32 else 1e-5
        assert all(close(*pair, tolerance) for pair in zip(found[True, tf32], found[False, tf32], strict=True)), found
    assert found[True, True] != found[True, False]


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_trains_alike(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)

    def make() -> nn.Module:
        return llama(attn_implementation="flex_attention")

    theirs, ours = (losses(tmp_path, streamed, make) for streamed in (False, True))
    # Flex attention multiplies in tf32, and its block sizes may differ from call to call.
    assert all(close(*pair, 1e-3) for pair in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_flash_attention_trains_alike(tmp_path: Path) -> None:
    pytest.importorskip("flash_attn")
    torch.use_deterministic_algorithms(False)

    def make() -> nn.Module:
        return llama(attn_implementation="flash_attention_2", dtype="bfloat16")

    theirs, ours = (losses(tmp_path, streamed, make, bf16=True) for streamed in (False, True))
    # Stock keeps fp32 weights under autocast, we their roundings to bf16: 8 bits of a weight.
    assert all(close(*pair, 2e-2) for pair in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [STREAMED, {**STREAMED, "token_tile": 8}, {**STREAMED, "compile_layers": True}, {**STREAMED, "kept_layers": None}, {}],
    ids=["streamed", "tiles", "compiled", "kept", "planned"],
)
def test_liger_kernels_run_in_layers_wherever_they_live(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("liger_kernel")
    torch.use_deterministic_algorithms(False)
    plain = losses(tmp_path, False, llama)
    with caplog.at_level("INFO"):
        theirs, ours = (losses(tmp_path, streamed, llama, settings, use_liger_kernel=True) for streamed in (False, True))
    # Triton's sums are in another order than torch's.
    assert all(close(*pair, 1e-4) for pair in zip(ours, theirs, strict=True))
    assert theirs != plain
    assert "can't be predicted" not in caplog.text
