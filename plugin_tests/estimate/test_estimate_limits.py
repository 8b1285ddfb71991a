"""The largest batch and the longest context of an estimate: what bounds them, and where the search ends."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    PretrainedConfig,
)

from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.estimate import command, findings, report
from megatrain_accelerate.estimate.findings import MOST_BATCH, MOST_TOKENS, Estimate, Limits, find_limits, longest_context
from megatrain_accelerate.estimate.forecast import Forecaster
from megatrain_accelerate.estimate.meta_engine import PositionTable, model_on_meta, position_table
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.units import GIB

MACHINE = Machine(h2d_bytes=5e10, d2h_bytes=5e10, host_step_parameters=6e9, device_bytes=4e12, device_flops=7e14)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 1024,
    "attn_pdrop": 0.0,
}
ENCODER = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 98,
}


def estimated(folder: Path, shape: dict[str, object], *arguments: str) -> Estimate:
    (folder / "config.json").write_text(json.dumps(shape))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    machine = ["--gpu", "H200", "--gpu-memory", "1GiB", "--host-memory", "4GiB", "--cores", "16"]
    return Estimate(parser.parse_args([str(folder), *machine, *arguments]))


# ---------------------------------------------------------------- tables of positions


def table_of(config: PretrainedConfig, kind: type) -> PositionTable | None:
    with torch.device("meta"):
        model = kind.from_config(config)  # type: ignore[attr-defined]
    return position_table(model, config.get_text_config().max_position_embeddings)


@pytest.mark.parametrize(
    ("model_type", "shape", "kind", "name", "positions"),
    [
        ("gpt2", {**GPT2, "n_positions": 96}, AutoModelForCausalLM, "transformer.wpe", 96),
        # Two rows more than positions.
        (
            "opt",
            {**ENCODER, "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 96},
            AutoModelForCausalLM,
            "model.decoder.embed_positions",
            96,
        ),
        ("bert", ENCODER, AutoModelForMaskedLM, "bert.embeddings.position_embeddings", 98),
        (
            "gptj",
            {"n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16, "n_positions": 96, "vocab_size": 512},
            AutoModelForCausalLM,
            "transformer.h.0.attn.embed_positions",
            96,
        ),
        # The first position has the number after the padding's, which is 1.
        ("roberta", ENCODER, AutoModelForMaskedLM, "roberta.embeddings.position_embeddings", 96),
    ],
)
def test_a_table_of_positions_is_found_with_its_length(
    model_type: str, shape: dict[str, object], kind: type, name: str, positions: int
) -> None:
    shape = {key: value for key, value in shape.items() if key != "model_type"}
    assert table_of(AutoConfig.for_model(model_type, **shape), kind) == PositionTable(name, positions)


def test_rotary_positions_and_those_of_a_tower_for_images_bound_no_text() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    vision = {**ENCODER, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 16}
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=1)
    with torch.device("meta"):
        tower = AutoModelForImageTextToText.from_config(config)
    assert any(name.endswith("position_embedding") for name, _ in tower.named_modules())
    assert table_of(config, AutoModelForImageTextToText) is None


def test_sequences_are_no_longer_than_the_models_table_of_positions(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--length 2048 is more than the model's 1,024 positions .*transformer\.wpe.*lower it"
    ):
        estimated(tmp_path, GPT2, "--length", "2048", "--batch", "1")
    found = estimated(tmp_path, GPT2, "--batch", "1", "--no-limits")
    assert found.length == 1024
    found.limits = Limits(4, 1024, None)
    assert any(
        "1,024 tokens, one sequence; the model has 1,024 positions (transformer.wpe)" in line for line in report.table(found)
    )
    assert report.as_json(found)["table_positions"] == 1024


# ---------------------------------------------------------------- the search


@pytest.mark.parametrize(
    ("budget", "most", "found"),
    [
        (512, 10**6, 512),
        (100, 10**6, 64),
        (63, 10**6, 63),
        (10**9, 512, 512),
        (10**9, 1500, 1500),
        (5000, 10**6, 4096),
        (0, 9, 0),
    ],
)
def test_a_short_context_is_found_in_finer_steps(budget: int, most: int, found: int) -> None:
    asked: list[int] = []

    def needs(tokens: int) -> int:
        asked.append(tokens)
        return tokens

    assert longest_context(needs, budget, most) == found
    assert max(asked) <= most


class Linear:
    """In the place of a forecaster: a token takes a byte, and the model's code takes no more than so many."""

    host_store_bytes = host_bytes = 1

    def __init__(self, most_tokens: int = 10**9) -> None:
        self.most_tokens = most_tokens

    def least_gpu_bytes(self, batch: int, length: int) -> int:
        if length > self.most_tokens:
            raise ConfigError("no such position")
        return batch * length

    def forecast(self, batch: int, length: int) -> tuple[int, int]:
        return batch, length


def limits_of(forecaster: Linear, gpu_bytes: int, length: int = 16, table: PositionTable | None = None) -> Limits:
    return find_limits(forecaster, gpu_bytes, length, table)  # type: ignore[arg-type]


@pytest.mark.parametrize("most_tokens", [512, 70, 16])
def test_a_length_that_the_models_code_fails_at_is_one_that_does_not_fit(most_tokens: int) -> None:
    found = limits_of(Linear(most_tokens), 10**6)
    assert found.context == (most_tokens // 64 * 64 or 16) < MOST_TOKENS
    with pytest.raises(ConfigError, match="no such position"):
        limits_of(Linear(15), 10**6)


def test_the_message_names_the_length_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "position_table", lambda *_: None)
    shape = {**ENCODER, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    found = estimated(tmp_path, shape, "--length", "130", "--batch", "1", "--no-limits")
    with pytest.raises(ConfigError, match="can't be run without data on token ids of 130 tokens"):
        next(found.rows())


def test_the_end_of_the_search_is_not_a_limit() -> None:
    bound = limits_of(Linear(), 10_000)
    assert bound.batch == 625 < MOST_BATCH
    assert bound.context < MOST_TOKENS
    assert limits_of(Linear(), 10**9, table=PositionTable("wpe", 1000)).context == 1000 < MOST_TOKENS
    ended = limits_of(Linear(), 10**9)
    assert (ended.batch, ended.context) == (MOST_BATCH, MOST_TOKENS)


def test_the_end_of_the_search_is_said_to_be_one(tmp_path: Path) -> None:
    found = estimated(tmp_path, LLAMA, "--length", "16", "--batch", "1", "--no-limits")
    for start, batch, context in (("at least ", MOST_BATCH, MOST_TOKENS), ("", 4, 192)):
        found.limits = Limits(batch, context, None)
        facts = [line.split("  ")[-1] for line in report.table(found) if line.startswith(("largest", "longest"))]
        assert [fact.strip() for fact in facts] == [
            f"{start}{batch:,} sequences of 16 tokens",
            f"{start}{context:,} tokens, one sequence; the configuration names 512",
        ]
        as_json = report.as_json(found)["limits"]
        assert as_json["largest_batch_is_least"] is as_json["longest_context_is_least"] is bool(start)


def test_the_first_row_is_shown_before_the_limits_are_known(tmp_path: Path) -> None:
    found = estimated(tmp_path, LLAMA, "--length", "16")
    assert any(line.split()[:2] == ["1", "16"] for line in report.table(found))
    assert "limits" not in vars(found)


# ---------------------------------------------------------------- what doesn't fit


def verdict(found: Estimate) -> str:
    assert not found.fits
    return list(report.table(found))[-1]


def test_a_model_whose_single_token_does_not_fit_is_not_told_to_shorten_it(tmp_path: Path) -> None:
    arguments = ["--length", "64", "--batch", "1", "--no-limits", "--set"]
    none = estimated(tmp_path, LLAMA, *arguments, "gpu_memory_gib=0.01")
    none.limits = find_limits(none.forecaster, none.machine.gpu_bytes, none.length, None)
    assert "one sequence of 64 tokens takes 0.1 GiB more than the 0.0 GiB" in verdict(none)
    assert "take a GPU with more: a single token doesn't fit either" in verdict(none)
    assert "shorten" not in verdict(none)
    fits = estimated(tmp_path, LLAMA, *arguments, "gpu_memory_gib=0.4")
    assert fits.fits
    fits.least_gpu_bytes = 2 * GIB
    long = verdict(fits)
    assert "one sequence of 64 tokens takes 1.6 GiB more than the 0.4 GiB" in long
    assert long.endswith("shorten it, or take a GPU with more")


PASSING, BF16, INT8 = {"host_gradients": "passing"}, {"moments_dtype": "bf16"}, {"moments_dtype": "int8"}


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, [PASSING, BF16, PASSING | BF16, INT8, PASSING | INT8]),
        (BF16 | {"step_schedule": "deferred"}, [INT8]),
        (PASSING | INT8, []),
        (PASSING | {"placement.device_layers": 1}, [BF16]),
        ({"accumulation": 2}, [BF16, INT8]),
    ],
)
def test_where_host_memory_is_missing_the_settings_that_fit_are_named(
    tmp_path: Path, settings: dict[str, Any], changes: list[dict[str, str]]
) -> None:
    accumulation = settings.pop("accumulation", 1)
    given = [f"{name}={value}" for name, value in settings.items()]
    arguments = ["--length", "16", "--batch", "1", "--no-limits", "--accumulation", str(accumulation)]
    deep = {**LLAMA, "num_hidden_layers": 8}  # gradients that pass have buffers of two layers
    found = estimated(tmp_path, deep, *arguments, *(["--set", *given] if given else []))
    forecaster = found.forecaster
    for change in changes:
        expected = Forecaster(
            model_on_meta(forecaster.model.config, False),
            dataclasses.replace(forecaster.config, **change),
            dataclasses.replace(found.machine, host_bytes=None),
            micro_batches=accumulation,
        )
        forecaster.host_bytes = expected.host_store_bytes
        said = verdict(found)
        assert f"{found.missing_host_bytes / GIB:,.1f} GiB of host memory are missing. It fits with --set " in said
        named = said.partition("--set ")[2].partition(" (")[0].split()
        assert named == [f"{name}={value}" for name, value in change.items()]
        assert ("max_grad_norm must be 0" in said) is ("host_gradients" in change)
    forecaster.host_bytes = (forecaster.host_bytes if changes else forecaster.host_store_bytes) - 1
    assert "no settings take so little" in verdict(found)


@pytest.mark.parametrize("joins", [True, False])
def test_rows_whose_micro_batches_run_as_one_batch_say_so(joins: bool, tmp_path: Path) -> None:
    joining = ("--accumulation", "3", "--set", f"join_micro_batches={str(joins).lower()}")
    found = estimated(tmp_path, LLAMA, "--length", "16", "--batch", "2", "--no-limits", *joining)
    text = "\n".join(report.table(found))
    assert ("2 x 3 as one" in text) is joins
    assert ("as one: " in text) is joins
    assert "2 x 3" in text
    assert [row["joined"] for row in report.as_json(found)["rows"]] == [joins]
