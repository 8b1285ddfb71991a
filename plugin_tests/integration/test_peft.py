"""PEFT with the plugin: the numbers, the files and the merges of the stock Trainer, and 2 bytes for each frozen parameter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from loop_runs import loss_of, prepared, slow
from peft import LoraConfig, PeftModel, get_peft_model
from plain_torch import token_batches
from safetensors.torch import load_file
from torch import nn
from trainer_runs import TrainerRun, assert_same_run, examples, plugin, run_trainer, snapshot, tiny_llama
from trainer_runs import run_both as run_both_trainers

import megatrain_accelerate
from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import StateError, UnsupportedError
from megatrain_accelerate.store.layout import ALIGNMENT_ELEMENTS
from megatrain_accelerate.units import round_up

pytestmark = [
    pytest.mark.usefixtures("profiled_once"),
    # PEFT guesses that weights are tied or that a name may clash; neither is so here.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Adapter name .* should not be contained in the prefix"),
    # It says so of every layer norm that it is asked to train.
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),
    pytest.mark.filterwarnings("ignore:Adapter cannot be set when the model is merged"),
    # PEFT looks for the base model's config on the hub to see whether the vocabulary grew.
    pytest.mark.filterwarnings("ignore:Could not find a config file in"),
]

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}


def adapted(config: peft.PeftConfig, dtype: torch.dtype = torch.float32) -> PeftModel:
    """A tiny Llama with adapters; its base is frozen."""
    torch.manual_seed(2)
    return get_peft_model(tiny_llama().to(dtype), config)


def lora(dtype: torch.dtype = torch.float32, **changes: Any) -> PeftModel:
    return adapted(LoraConfig(**{**LORA, **changes}), dtype)


def assert_same_files(ours: Path, stock: Path) -> None:
    """Two checkpoints: the same files, the same adapter to the bit, the same adapter config."""
    assert {path.name for path in ours.iterdir()} == {path.name for path in stock.iterdir()}
    weights, expected = load_file(ours / "adapter_model.safetensors"), load_file(stock / "adapter_model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor), name
    config, wanted = (json.loads((path / "adapter_config.json").read_text()) for path in (ours, stock))
    assert config == wanted


# ---------------------------------------------------------------- numbers and files

PRECISIONS = {
    "fp32": (torch.float32, False),
    "bf16 base, bf16 autocast": (torch.bfloat16, True),
    "bf16 base, no autocast": (torch.bfloat16, False),
}


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "fp32"),
        ({}, "bf16 base, bf16 autocast"),
        ({"use_dora": True}, "bf16 base, bf16 autocast"),
        *(
            pytest.param(changes, precision, marks=pytest.mark.long)
            for changes, precision in (
                ({}, "bf16 base, no autocast"),
                ({"use_dora": True}, "fp32"),
                ({"use_dora": True}, "bf16 base, no autocast"),
            )
        ),
    ],
)
def test_adapters_and_their_checkpoints_are_those_of_the_stock_trainer(
    tmp_path: Path, changes: dict[str, Any], precision: str
) -> None:
    dtype, bf16 = PRECISIONS[precision]
    stock, streamed = run_both_trainers(
        lambda: lora(dtype, **changes), tmp_path, bf16=bf16, save_strategy="steps", save_steps=3, save_total_limit=2
    )
    # Adapters are fp32 in all three, and autocast rounds them in both: to the bit.
    for name, weight in stock.weights.items():
        assert streamed.weights[name].dtype == weight.dtype
        assert torch.equal(streamed.weights[name], weight), name
    for step in (3, 6):
        folder = f"checkpoint-{step}"
        assert_same_files(tmp_path / "streamed" / folder, tmp_path / "stock" / folder)
    loaded = PeftModel.from_pretrained(tiny_llama().to(dtype), tmp_path / "streamed" / "checkpoint-6")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, stock.weights[name]), name


def test_modules_to_save_are_trained_and_saved_as_by_the_stock_trainer(tmp_path: Path) -> None:
    stock, _ = run_both_trainers(
        lambda: lora(modules_to_save=["lm_head"]), tmp_path, save_strategy="steps", save_steps=6, weight_decay=0.1
    )
    assert any("modules_to_save" in name for name in stock.moved)
    assert_same_files(tmp_path / "streamed" / "checkpoint-6", tmp_path / "stock" / "checkpoint-6")


def test_adapters_on_a_base_in_fp32_stay_fp32_under_autocast(tmp_path: Path) -> None:
    stock, streamed = (
        run_trainer(lora, tmp_path / str(on), streamed=on, bf16=True, save_strategy="steps", save_steps=6)
        for on in (False, True)
    )
    ours, theirs = (load_file(tmp_path / str(on) / "checkpoint-6/adapter_model.safetensors") for on in (True, False))
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype == torch.float32
        # Frozen weights are rounded to bf16 once instead of at each use, norms too, which flips signs of tiny gradients:
        # Adam's first steps have the size of the learning rate, 1e-3 and falling, whatever the gradient's.
        assert float((ours[name] - tensor).abs().max()) < 4e-3
    for one, other in zip(streamed.logged("loss"), stock.logged("loss"), strict=True):
        assert one == pytest.approx(other, abs=2e-3)  # bf16 has 8 bits: 0.4% of what the norms scale


def test_an_fp32_head_of_a_bf16_model_stays_fp32(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = lora(torch.bfloat16)
        model.get_base_model().lm_head.float()
        return model

    stock, streamed = run_both_trainers(make, tmp_path, bf16=True)
    assert streamed.trainer.model.get_base_model().lm_head.weight.dtype == torch.float32
    assert all(torch.equal(streamed.weights[name], weight) for name, weight in stock.weights.items())


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.long), True], ids=["fp32", "bf16"])
def test_gradient_accumulation_with_adapters(tmp_path: Path, bf16: bool) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    run_both_trainers(lambda: lora(dtype), tmp_path, bf16=bf16, gradient_accumulation_steps=2, max_steps=3)


def test_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    stock, _ = run_both_trainers(
        lora,
        tmp_path,
        options=lambda model: {"eval_dataset": examples(4, seed=8)},
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that it isn't the last
    )
    assert stock.trainer.state.best_global_step == 2


# ---------------------------------------------------------------- memory and traffic


@pytest.mark.parametrize("changes", [{}, {"layers_to_transform": [2]}], ids=["all_layers", "last_layer"])
def test_frozen_weights_take_two_bytes_and_send_nothing_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    steps = 4
    run = run_trainer(lambda: lora(torch.bfloat16, **changes), tmp_path, streamed=True, bf16=True, max_steps=steps)
    engine = engine_of(run.trainer.model)
    assert engine is not None
    parameters = list(run.trainer.model.parameters())
    frozen, trained = (
        sum(round_up(p.numel(), ALIGNMENT_ELEMENTS) for p in parameters if p.requires_grad is flag) for flag in (False, True)
    )
    held = engine.host_bytes_by_kind()
    # Adapters compute in fp32, so they are their own masters: 4 + 4 + 8.
    assert held == {"weights": 2 * frozen + 4 * trained, "gradients": 4 * trained, "residuals": 0, "moments": 8 * trained}
    assert engine.runtime.meter.counters.d2h_bytes == steps * 4 * trained
    assert all(parameter.grad is None for parameter in parameters if not parameter.requires_grad)


# ---------------------------------------------------------------- resume


def resumed(folder: Path, checkpoint: Path, streamed: bool) -> TrainerRun:
    script = lambda trainer: trainer.train(resume_from_checkpoint=str(checkpoint))  # noqa: E731
    return run_trainer(
        lambda: lora(torch.bfloat16, lora_dropout=0.1), folder, streamed=streamed, script=script, bf16=True, max_steps=6
    )


def test_adapters_resume_from_ours_and_from_stock_checkpoints_in_both(tmp_path: Path) -> None:
    def make() -> PeftModel:
        return lora(torch.bfloat16, lora_dropout=0.1)

    whole, ours = run_both_trainers(make, tmp_path, bf16=True, save_strategy="steps", save_steps=3)
    for origin in ("stock", "streamed"):
        for streamed in (False, True):
            checkpoint = tmp_path / origin / "checkpoint-3"
            run = resumed(tmp_path / f"{origin}-{streamed}", checkpoint, streamed)
            for name, weight in whole.weights.items():
                assert torch.equal(run.weights[name], weight), f"{origin} checkpoint, streamed: {streamed}, {name}"
    assert ours.moved == whole.moved


@pytest.mark.long
def test_training_twice_in_one_process_with_a_resume_between(tmp_path: Path) -> None:
    def twice(trainer: Any) -> None:
        trainer.args.max_steps = 3
        trainer.train()
        trainer.args.max_steps = 6
        trainer.train(resume_from_checkpoint=True)

    run_both_trainers(lambda: lora(torch.bfloat16), tmp_path, bf16=True, script=twice, save_strategy="steps", save_steps=3)


# ---------------------------------------------------------------- merging


def trained_in_a_loop(streamed: bool, use: Callable[[PeftModel], list[torch.Tensor]], **changes: Any) -> list[torch.Tensor]:
    """What ``use`` returns for a model whose last step may still be in flight."""
    with plugin(streamed):
        torch.manual_seed(1)
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator, lambda: lora(init_lora_weights=False, **changes))
        for ids in token_batches(3):
            accelerator.backward(loss_of(model, ids))
            slow(model)
            optimizer.step()
            optimizer.zero_grad()
        assert (engine_of(model) is not None) is streamed
        return use(model)


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=token_batches(1)[0]).logits.clone()


def assert_close(ours: list[torch.Tensor], stock: list[torch.Tensor]) -> None:
    # Three steps of AdamW in fp32, rounded in another order, and a product of two such matrices.
    for place, (one, other) in enumerate(zip(ours, stock, strict=True)):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=f"tensor {place} differs")


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("safe_merge", [False, True])
def test_merge_and_unload_gives_the_plain_merged_model(tmp_path: Path, changes: dict[str, Any], safe_merge: bool) -> None:
    def use(model: PeftModel) -> list[torch.Tensor]:
        merged = model.merge_and_unload(safe_merge=safe_merge)
        assert engine_of(model) is None
        merged.save_pretrained(tmp_path)
        reloaded = type(merged).from_pretrained(tmp_path)
        assert torch.equal(logits_of(reloaded), logits_of(merged))
        return [logits_of(merged), *snapshot(merged).values()]

    assert_close(*(trained_in_a_loop(streamed, use, **changes) for streamed in (True, False)))


def test_unload_gives_the_base_model_back() -> None:
    def use(model: PeftModel) -> list[torch.Tensor]:
        return [logits_of(model.unload())]

    ours, stock = (trained_in_a_loop(streamed, use) for streamed in (True, False))
    assert torch.equal(ours[0], stock[0])
    assert torch.equal(ours[0], logits_of(tiny_llama()))


def test_merged_weights_are_streamed_until_they_are_unmerged() -> None:
    def use(model: PeftModel) -> list[torch.Tensor]:
        before = logits_of(model)
        slow(model)
        model.merge_adapter()
        merged = logits_of(model)
        model.unmerge_adapter()
        after = logits_of(model)
        base = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
        loss_of(model.train(), token_batches(1)[0]).backward()
        return [before, merged, after, base.detach().clone()]

    ours, stock = (trained_in_a_loop(streamed, use) for streamed in (True, False))
    assert not torch.equal(ours[0], ours[1]), "another order of sums"
    assert_close(ours, stock)


@pytest.mark.parametrize("leave", ["disable", "switch"])
def test_merged_weights_are_unmerged_when_their_adapter_is_left(leave: str) -> None:
    def use(model: PeftModel) -> list[torch.Tensor]:
        model.add_adapter("other", LoraConfig(**LORA))
        before = logits_of(model)
        model.merge_adapter()
        if leave == "disable":
            with model.disable_adapter():
                base = logits_of(model)
        else:
            model.set_adapter("other")
            base = logits_of(model)
            model.set_adapter("default")
        return [before, base, logits_of(model)]

    ours, stock = (trained_in_a_loop(streamed, use) for streamed in (True, False))
    assert float((ours[0] - ours[1]).abs().max()) > 1e-3, "adapters do something"
    assert_close([ours[0]], [ours[2]])
    assert_close(ours, stock)


def test_a_model_that_streams_on_after_disable_is_merged_and_unmerged_all_the_same() -> None:
    def use(model: PeftModel) -> list[torch.Tensor]:
        megatrain_accelerate.disable()
        seen = [logits_of(model), logits_of(model)]  # its layers are held from here on
        model.merge_adapter()
        seen.append(logits_of(model))
        model.unmerge_adapter()
        seen.append(logits_of(model))
        merged = model.merge_and_unload()
        assert engine_of(model) is None
        return [*seen, logits_of(merged)]

    assert_close(*(trained_in_a_loop(streamed, use) for streamed in (True, False)))


def test_an_adapter_is_swapped_for_a_saved_one_under_layers_that_are_held(tmp_path: Path) -> None:
    hotswap = pytest.importorskip("peft.utils.hotswap", reason="this peft swaps no adapters")
    other = lora(init_lora_weights=False)
    for parameter in other.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    other.save_pretrained(tmp_path)

    def use(model: PeftModel) -> list[torch.Tensor]:
        seen = [logits_of(model), logits_of(model)]
        hotswap.hotswap_adapter(model, str(tmp_path), adapter_name="default")
        seen.append(logits_of(model))
        loss_of(model.train(), token_batches(1)[0]).backward()
        return [*seen, model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight").grad]

    ours, stock = (trained_in_a_loop(streamed, use) for streamed in (True, False))
    assert float((ours[1] - ours[2]).abs().max()) > 1e-2, "another adapter"
    assert_close(ours, stock)


# ---------------------------------------------------------------- several adapters


def two_adapters(active: list[str]) -> PeftModel:
    torch.manual_seed(2)
    model = get_peft_model(tiny_llama(), LoraConfig(**LORA), adapter_name="one")
    model.add_adapter("two", LoraConfig(**{**LORA, "target_modules": ["q_proj", "v_proj"]}))
    model.base_model.set_adapter(active)
    return model


@pytest.mark.parametrize("active", [pytest.param(["one"], marks=pytest.mark.long), ["two"], ["one", "two"]], ids="+".join)
def test_of_several_adapters_the_active_ones_are_trained(tmp_path: Path, active: list[str]) -> None:
    stock, _ = run_both_trainers(lambda: two_adapters(active), tmp_path)
    assert {name for name in ("one", "two") if any(f".{name}." in moved for moved in stock.moved)} == set(active)


def test_another_adapter_may_be_read_between_steps_and_trained_after_them() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepared(accelerator, lambda: two_adapters(["one"]))
        ids = token_batches(1)[0]
        accelerator.backward(loss_of(model, ids))
        optimizer.step()
        optimizer.zero_grad()
        model.set_adapter("two")
        logits_of(model)
        with torch.no_grad():
            loss_of(model.train(), ids)
        model.set_adapter("one")
        accelerator.backward(loss_of(model, ids))
        assert model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.one.weight").grad is not None
        model.set_adapter("two")
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})
        accelerator.backward(loss_of(model, ids))
        assert model.get_parameter("base_model.model.model.layers.0.self_attn.v_proj.lora_B.two.weight").grad is not None


def test_an_adapter_that_is_added_after_prepare_is_refused_when_it_is_to_be_trained() -> None:
    with plugin():
        ids = token_batches(1)[0]
        accelerator = Accelerator(cpu=True)
        model, _ = prepared(accelerator, lora)
        loss = loss_of(model, ids)
        model.add_adapter("late", LoraConfig(**{**LORA, "target_modules": ["v_proj"]}))
        assert torch.equal(loss_of(model, ids), loss), "it isn't active"
        model.set_adapter("late")
        with pytest.raises(StateError, match=r"lora_A.late.weight was added or replaced after the model was prepared"):
            loss_of(model, ids)
        model = accelerator.prepare(accelerator.unwrap_model(model))
        accelerator.backward(loss_of(model, ids))
        assert model.get_parameter("base_model.model.model.layers.0.self_attn.v_proj.lora_B.late.weight").grad is not None


# ---------------------------------------------------------------- other methods

CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
METHODS: dict[str, Callable[[], peft.PeftConfig]] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, **CAUSAL),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    "trainable tokens": lambda: LoraConfig(**{**LORA, "trainable_token_indices": [1, 2]}),
    "target parameters": lambda: LoraConfig(target_parameters=["up_proj.weight", "gate_proj.weight"], **CAUSAL),
    "embeddings and head": lambda: LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
}
MORE_METHODS: dict[str, Callable[[], peft.PeftConfig]] = {
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, **CAUSAL),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4, **CAUSAL),
    "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"], r=4, **CAUSAL),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, **CAUSAL),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "biases": lambda: LoraConfig(**{**LORA, "bias": "all"}),
    "rank-stabilised": lambda: LoraConfig(**{**LORA, "use_rslora": True}),
}


@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_METHODS)])
def test_other_methods_train_as_without_the_plugin(tmp_path: Path, method: str) -> None:
    config = {**METHODS, **MORE_METHODS}[method]
    runs = [run_trainer(lambda: adapted(config()), tmp_path / str(on), streamed=on, max_steps=4) for on in (True, False)]
    # Embeddings' adapters have gradients of about AdamW's epsilon, 1e-8, where rounding is seen.
    assert_same_run(*runs, 1e-4 if method == "embeddings and head" else 1e-6)


def test_prefix_tuning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="prefix tuning can't be trained"):
        run_trainer(lambda: adapted(peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL)), tmp_path, streamed=True)


def test_layers_that_share_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="share the parameter"):
        run_trainer(lambda: lora(layer_replication=[[0, 2], [1, 3]]), tmp_path, streamed=True)
