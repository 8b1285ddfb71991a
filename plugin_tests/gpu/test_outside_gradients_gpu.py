"""Weights that get gradients from outside their layer, on a GPU: autograd's threads and the copies run beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from penalised_runs import Penalised, PenalisedBefore, adalora
from trainer_runs import close, run_trainer, tiny_llama
from transformers import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STREAMED: dict[str, Any] = {"device_layers": 0, "kept_layers": 0, "compile_layers": False}


LARGER: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
"""Copies that take a while, and several layers of them."""


@pytest.mark.parametrize("settings", [{}, {"kept_layers": 6}, {"device_layers": 3}, {"kept_layers": 6, "device_layers": -1}])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    ("make", "trainer_class"), [(tiny_llama, Penalised), (tiny_llama, PenalisedBefore), (adalora, Trainer)]
)
def test_gradients_from_outside_count_whatever_arrives_first(
    tmp_path: Path, make: Any, trainer_class: type[Trainer], max_grad_norm: float, settings: dict[str, Any]
) -> None:
    runs = [
        run_trainer(
            lambda: make(**LARGER),
            tmp_path / str(streamed),
            streamed=streamed,
            settings={**STREAMED, **settings} if streamed else None,
            trainer_class=trainer_class,
            max_grad_norm=max_grad_norm,
            use_cpu=False,
        )
        for streamed in (False, True)
    ]
    for key in ("loss", "grad_norm"):
        stock, ours = (run.logged(key) for run in runs)
        assert len(stock) > 2
        # Sums over weights are taken in another order on the host: fp32 has 24 bits, and 20 M numbers are added.
        assert all(close(*pair, 1e-4) for pair in zip(ours, stock, strict=True)), (key, ours, stock)
