"""TRL with vLLM in its process, by a stand-in: it reads weights by name, sleeps, and generates from what it read.

vLLM itself is not run. The stand-in has what TRL calls of it, computes with transformers, and has no memory on a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trl_grpo import LORA, Recorder, grpo
from transformers import AutoModelForCausalLM
from trl_runs import TRL_WARNINGS, run_both, run_trl

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import UnsupportedError

vllm_generation = pytest.importorskip("trl.generation.vllm_generation", exc_type=ImportError)

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in TRL_WARNINGS),
    pytest.mark.filterwarnings("ignore:Could not find a config file in"),
]


class StandIn:
    """What TRL calls of vLLM's ``LLM``."""

    def __init__(self, *, model: str, gpu_memory_utilization: float, enable_sleep_mode: bool, **_: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.share, self.can_sleep = gpu_memory_utilization, enable_sleep_mode
        self.syncs: list[dict[str, torch.Tensor]] = [{}]
        self.awake = {"weights", "kv_cache"}
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def sleep(self, level: int) -> None:
        assert self.can_sleep
        assert level == 2
        self.awake.clear()
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)  # it discards them

    def wake_up(self, tags: list[str]) -> None:
        self.awake.update(tags)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        assert "weights" in self.awake
        for name, tensor in weights:
            self.syncs[-1][name] = tensor.clone()
            self.model.get_parameter(name).data.copy_(tensor)

    def reset_prefix_cache(self) -> None:
        self.syncs.append({})

    @torch.no_grad()
    def generate(self, prompts: list[dict[str, list[int]]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}
        random = torch.Generator().manual_seed(len(self.syncs))
        return [self._completed(prompt["prompt_token_ids"], sampling_params.max_tokens, random) for prompt in prompts]

    def _completed(self, prompt: list[int], count: int, random: torch.Generator) -> Any:
        tokens, logprobs = [], []
        for _ in range(count):
            found = self.model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float().log_softmax(-1)
            tokens.append(int(torch.multinomial(found.exp(), 1, generator=random)))
            logprobs.append({tokens[-1]: SimpleNamespace(rank=1, logprob=float(found[tokens[-1]]))})
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])


LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""TRL sets them for vLLM, and the next Accelerator of this process would take them for a launcher's."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL finds the stand-in, and what it sets in the environment is taken back."""
    for name in LAUNCHERS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", StandIn, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleeping"])
@pytest.mark.parametrize("changes", [{}, {"options": {"peft_config": LORA}}, {"kind": "RLOO"}], ids=["full", "lora", "rloo"])
def test_vllm_beside_the_streamed_model_reads_the_weights_of_each_step(
    tmp_path: Path, sleeps: bool, changes: dict[str, Any]
) -> None:
    recorders: list[Recorder] = []

    def recorder() -> Recorder:
        for name in LAUNCHERS:
            os.environ.pop(name, None)
        recorders.append(Recorder())
        return recorders[-1]

    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sleeps, "vllm_gpu_memory_utilization": 0.4}
    both = run_both(grpo(recorder, **options, beta=0.1, learning_rate=1e-2, **changes), tmp_path)
    theirs, ours = (made.completions for made in recorders)
    assert ours == theirs
    assert len(set(theirs)) > 4
    stock, streamed = (run.trainer.vllm_generation.llm for run in both)
    assert len(streamed.syncs) == len(stock.syncs) > 3
    for read, expected in zip(streamed.syncs, stock.syncs, strict=True):
        assert read.keys() == expected.keys()
        assert all(torch.allclose(read[name], expected[name], rtol=0, atol=1e-5) for name in read)
    changed = [name for name, tensor in streamed.syncs[1].items() if not torch.equal(tensor, streamed.syncs[0][name])]
    assert any("layers.0" in name for name in changed), "a step is applied before the weights are read"
    engine = engine_of(both[1].trainer.model)
    assert engine is not None
    assert engine.device_plan.budget.reserved_share == (streamed.share if sleeps else 0)


def test_a_vllm_server_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"vllm_mode='server'.*vllm_mode='colocate'"):
        run_trl(grpo(use_vllm=True, vllm_mode="server"), tmp_path / "run", streamed=True)
