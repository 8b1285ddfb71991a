"""The stock Trainer on encoders, encoder-decoders and vision-language models, with and without the plugin: the same runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families_other import OTHERS, translations
from families_vision import pictures_and_videos
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from trainer_runs import Record, run_both, run_trainer, short_run, snapshot
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    default_data_collator,
)

from megatrain_accelerate.engine import engine_of

# Keys' biases have no gradient but rounding errors, which Adam makes steps of: AdamW must round alike in both runs.
pytestmark = pytest.mark.usefixtures("exact_torch_sqrt", "profiled_once")
EXACT = {"optim": "adamw_torch"}
LONG = pytest.mark.long
FAMILIES = {family.name: family for family in OTHERS}


def rows_of(inputs: dict[str, torch.Tensor]) -> list[Record]:
    """A batch as the records of a data set."""
    return [{name: tensor[row] for name, tensor in inputs.items()} for row in range(len(inputs["input_ids"]))]


def records(name: str, batches: int) -> list[Record]:
    return [row for seed in range(batches) for row in rows_of(FAMILIES[name].batch(seed))]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


# ---------------------------------------------------------------------------------------- encoders


@pytest.mark.parametrize("name", ["bert_classifier", pytest.param("modernbert_classifier", marks=LONG)])
def test_classification_with_metrics_and_the_best_model_at_the_end(name: str, tmp_path: Path) -> None:
    def with_evaluation(model: nn.Module) -> Record:
        return {"eval_dataset": records(name, 5), "compute_metrics": accuracy}

    stock, _ = run_both(
        FAMILIES[name].build,
        tmp_path,
        dataset=records(name, 4),
        options=with_evaluation,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        **EXACT,
    )
    assert len(stock.logged("eval_accuracy")) == 3
    assert len(set(stock.logged("eval_loss"))) == 3


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w3 to w89, padding and a mask."""
    words = {f"w{i}": i for i in range(3, 90)} | {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]")


@pytest.mark.parametrize("name", [pytest.param("bert_mlm", marks=LONG), "modernbert_mlm"])
def test_masked_language_modelling_with_the_stock_collator(name: str, tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(4, 14, (12,), generator=generator).tolist()
    texts = [" ".join(f"w{i}" for i in torch.randint(3, 90, (n,), generator=generator).tolist()) for n in lengths]
    dataset = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]

    def with_collator(model: nn.Module) -> Record:
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=7)
        return {"data_collator": collator, "processing_class": tokenizer}

    stock, _ = run_both(FAMILIES[name].build, tmp_path, dataset=dataset, options=with_collator, **EXACT)
    assert len(set(stock.logged("loss"))) == 6


# ---------------------------------------------------------------------------------------- encoder-decoders


def generating_arguments(folder: Path) -> Seq2SeqTrainingArguments:
    generating = {"predict_with_generate": True, "generation_max_length": 8, "generation_num_beams": 2}
    return Seq2SeqTrainingArguments(**{**short_run(folder), "max_steps": 4, "learning_rate": 1e-2, **generating, **EXACT})


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_sequence_to_sequence_training_and_prediction_by_generation(name: str, tmp_path: Path) -> None:
    generated = []

    def script(trainer: Any) -> None:
        trainer.train()
        generated.append(trainer.predict(rows_of(translations(9))).predictions)

    def with_arguments(model: nn.Module) -> Record:
        return {"args": generating_arguments(tmp_path)}

    run_both(
        FAMILIES[name].build,
        tmp_path,
        dataset=records(name, 4),
        script=script,
        options=with_arguments,
        trainer_class=Seq2SeqTrainer,
    )
    theirs, ours = generated
    assert theirs.shape[0] == 2
    assert np.array_equal(ours, theirs)


def test_a_saved_encoder_decoder_loads_as_it_was(tmp_path: Path) -> None:
    # One tensor under three names: shared embedding, encoder, decoder and head.
    family = FAMILIES["t5"]

    def script(trainer: Any) -> None:
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))

    run = run_trainer(family.build, tmp_path, streamed=True, dataset=records("t5", 4), script=script, max_steps=2)
    loaded = type(run.trainer.model).from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight is loaded.encoder.embed_tokens.weight
    found = snapshot(loaded)
    assert found.keys() == run.weights.keys()
    for key, weight in run.weights.items():
        assert torch.equal(found[key], weight), key


# ---------------------------------------------------------------------------------------- vision-language


@pytest.mark.parametrize("name", [pytest.param("llava", marks=LONG), "gemma3_vision_tower_frozen"])
def test_pictures_in_a_stacked_batch(name: str, tmp_path: Path) -> None:
    dataset = [row for seed in (0, 1, 3, 4) for row in rows_of(FAMILIES[name].batch(seed))]

    def with_evaluation(model: nn.Module) -> Record:
        return {"eval_dataset": dataset[:4], "data_collator": default_data_collator}

    stock, _ = run_both(
        FAMILIES[name].build, tmp_path, dataset=dataset, options=with_evaluation, eval_strategy="steps", eval_steps=3, **EXACT
    )
    assert len(set(stock.logged("eval_loss"))) == 2


def conversations(count: int) -> list[Record]:
    """Texts with a picture each, of its own size."""
    batch = pictures_and_videos(frames_apart=True)
    found = []
    for seed in range(0, 2 * count, 2):
        inputs = batch(seed)
        counts = inputs["image_grid_thw"].prod(-1).tolist()
        patches = inputs.pop("pixel_values").split(counts)
        found += [{**row, "pixel_values": pixels} for row, pixels in zip(rows_of(inputs), patches, strict=True)]
    return found


def join_pictures(rows: Sequence[Record]) -> Record:
    """As a processor does it: the patches of all pictures in one row, sizes beside them."""
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "pixel_values"}
    return {**stacked, "pixel_values": torch.cat([row["pixel_values"] for row in rows])}


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=LONG), 2])
@pytest.mark.parametrize("name", [pytest.param("qwen2_5_vl", marks=LONG), "qwen3_vl"])
def test_pictures_of_several_sizes(name: str, accumulation: int, tmp_path: Path) -> None:
    def with_collator(model: nn.Module) -> Record:
        return {"data_collator": join_pictures, "eval_dataset": conversations(1)}

    _, streamed = run_both(
        FAMILIES[name].build,
        tmp_path,
        dataset=conversations(4),
        options=with_collator,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        settings={"join_micro_batches": True},
        **EXACT,
    )
    engine = engine_of(streamed.trainer.model)
    assert engine is not None
    # Pictures' patches are one row: they can't be cut again, and micro-batches aren't joined.
    assert engine.runtime.batch_cut.asked is None


@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2_5_vl", marks=LONG)])
def test_generation_about_a_picture(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    inputs = {key: value for key, value in family.batch(0).items() if key != "labels"}
    generated = []

    def script(trainer: Any) -> None:
        trainer.train()
        trainer.model.eval()
        with torch.no_grad():
            generated.append(trainer.model.generate(**inputs, max_new_tokens=5, do_sample=False))

    dataset = conversations(2) if name == "qwen2_5_vl" else [row for seed in (0, 1) for row in rows_of(family.batch(seed))]
    collator = {"data_collator": join_pictures if name == "qwen2_5_vl" else default_data_collator}
    run_both(family.build, tmp_path, dataset=dataset, script=script, options=lambda _: collator, max_steps=2, **EXACT)
    theirs, ours = generated
    assert theirs.shape[1] == inputs["input_ids"].shape[1] + 5
    assert torch.equal(ours, theirs)
