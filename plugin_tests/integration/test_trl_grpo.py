"""TRL's GRPOTrainer with the plugin: completions, rewards and weights are those that it has without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl_runs import TRL_WARNINGS, arguments, prompts, run_both, run_trl, tiny_model, tokenizer

from megatrain_accelerate.engine import engine_of

trl = pytest.importorskip("trl", exc_type=ImportError)

pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    *(pytest.mark.filterwarnings(warning) for warning in TRL_WARNINGS),
    # PEFT looks for the base model's config on the hub to see whether the vocabulary grew.
    pytest.mark.filterwarnings("ignore:Could not find a config file in"),
]

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


class Recorder:
    """A reward for different words; keeps what it was asked about."""

    __name__ = "different_words"

    def __init__(self) -> None:
        self.completions: list[str] = []

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.completions += completions
        return [float(len(set(completion.split()))) for completion in completions]


def grpo(
    recorder: Callable[[], Recorder] = Recorder,
    dtype: torch.dtype = torch.float32,
    options: dict[str, Any] | None = None,
    kind: str = "GRPO",
    **changes: Any,
) -> Callable[[Path], Any]:
    """Makes a GRPOTrainer, or an RLOOTrainer, for an output directory."""

    def make(folder: Path) -> Any:
        saved = folder.parent / "model"
        if not saved.exists():
            tiny_model(dtype).save_pretrained(saved)
        settings = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 3}
        return getattr(trl, f"{kind}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(saved, dtype=dtype),
            reward_funcs=recorder(),
            args=arguments(getattr(trl, f"{kind}Config"), folder, **{**settings, **changes}),
            train_dataset=prompts(),
            processing_class=tokenizer(),
            **(options or {}),
        )

    return make


CASES: dict[str, dict[str, Any]] = {
    "no reference": {},
    "a reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "disabled adapters": {"beta": 0.1, "options": {"peft_config": LORA}},
    "bf16, disabled adapters": {"beta": 0.1, "options": {"peft_config": LORA}, "dtype": torch.bfloat16, "bf16": True},
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "a reference": {"beta": 0.1},
    "several steps a generation": {"num_iterations": 2, "steps_per_generation": 2},
    "head in fp32": {"cast_lm_head_to_fp32": True},
    "accumulated": {"gradient_accumulation_steps": 2, "max_steps": 2},
    "rloo": {"kind": "RLOO", "beta": 0.1},
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_CASES)])
def test_grpo_is_that_of_trl_alone(tmp_path: Path, case: str) -> None:
    recorders: list[Recorder] = []

    def recorder() -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    stock, _ = run_both(grpo(recorder, **{**CASES, **MORE_CASES}[case]), tmp_path)
    theirs, ours = (made.completions for made in recorders)
    assert ours == theirs, "the streamed model generates what the plain one does"
    assert len(set(theirs)) > 4
    assert max(stock.logged("reward_std")) > 0, "an advantage that is zero trains nothing"
    assert len(stock.logged("loss")) == len(stock.logged("entropy")) >= 2
    assert stock.logged("completions/mean_length")
    if "beta" in case:
        assert max(stock.logged("kl")) > 0


def test_a_head_that_is_cast_to_fp32_stays_so_under_bf16(tmp_path: Path) -> None:
    trainer = run_trl(grpo(cast_lm_head_to_fp32=True, bf16=True, max_steps=1), tmp_path / "run", streamed=True).trainer
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_each_generated_token_fetches_every_layer_once_and_no_more(tmp_path: Path) -> None:
    fetches: list[int] = []

    def script(trainer: Any) -> None:
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
        engine = engine_of(trainer.model)
        assert engine is not None
        ids = torch.full((2, 5), 9)
        for tokens in (4, 8):
            before = engine.runtime.meter.counters.weight_fetches
            with torch.no_grad():
                trainer.model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            fetches.append(engine.runtime.meter.counters.weight_fetches - before)

    run_trl(grpo(), tmp_path / "run", streamed=True, script=script)
    # Four tokens more, three layers; what is fetched ahead at the end of one isn't at the beginning of the next.
    assert fetches[1] - fetches[0] == pytest.approx(4 * 3, abs=2)
