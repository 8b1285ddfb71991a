"""Small vision-language models, trained whole, with a frozen tower, and with a frozen language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from family_models import (
    IMAGE,
    TOWER,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCABULARY,
    Build,
    Inputs,
    build_of,
    frozen,
    words,
)
from family_registry import Family
from torch import nn

Batch = Callable[[int], Inputs]

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def qwen_text(**changes: Any) -> dict[str, Any]:
    """A text model with rotary positions in three dimensions."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    return {**TEXT, "rope_parameters": {**rope, **changes.pop("rope", {})}, **changes}


def one_picture_each(count: int, always: bool = False) -> Batch:
    """Two texts with a picture of 16 by 16 each, which stands for ``count`` tokens; unless ``always``, a third of the batches
    has none.
    """

    def batch(seed: int) -> Inputs:
        ids = words(seed, 2, 24)
        if seed % 3 == 2 and not always:
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        ids[:, 2 : 2 + count] = IMAGE
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        labels = ids.masked_fill(ids == IMAGE, -100)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pixels}

    return batch


def with_token_types(batch: Batch) -> Batch:
    """The same batches with what tells pictures from words, as Gemma's processor makes it."""

    def typed(seed: int) -> Inputs:
        inputs = batch(seed)
        return {**inputs, "token_type_ids": (inputs["input_ids"] == IMAGE).long()}

    return typed


def _texts_with(seed: int, *rows: Sequence[tuple[int, int, int]]) -> Inputs:
    """A text for each row; (column, token, count) says where ``count`` tokens stand for a picture or video, between marks."""
    ids = words(seed, len(rows), 20)
    for text, places in zip(ids, rows, strict=True):
        for column, token, count in places:
            text[column], text[column + 1 + count] = VISION_START, VISION_END
            text[column + 1 : column + 1 + count] = token
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids >= IMAGE, -100),
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
    }


def _patches(seed: int, count: int) -> torch.Tensor:
    """Patches of 4 by 4 of two frames each, in three colours; four of them become one token."""
    return torch.randn(count, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))


def pictures_and_videos(frames_apart: bool) -> Batch:
    """Even seeds: a text with a picture of 4 by 4 patches and one with 8 by 4; odd ones: videos of two steps of 4 by 4.

    Args:
        frames_apart: a video's steps have marks of their own (Qwen3-VL), instead of following each other (Qwen2.5-VL).
    """
    video = [(1, VIDEO, 4), (8, VIDEO, 4)] if frames_apart else [(1, VIDEO, 8)]

    def batch(seed: int) -> Inputs:
        if seed % 2:
            grid = torch.tensor([[2, 4, 4], [2, 4, 4]])
            return {**_texts_with(seed, video, video), "pixel_values_videos": _patches(seed, 64), "video_grid_thw": grid}
        grid = torch.tensor([[1, 4, 4], [1, 8, 4]])
        inputs = _texts_with(seed, [(1, IMAGE, 4)], [(3, IMAGE, 8)])
        return {**inputs, "pixel_values": _patches(seed, 48), "image_grid_thw": grid}

    return batch


def _llava() -> Any:
    vision, text = transformers.CLIPVisionConfig(**TOWER), transformers.LlamaConfig(**TEXT)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)


def _gemma3() -> Any:
    window = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    text = transformers.Gemma3TextConfig(**TEXT, **window, head_dim=8, query_pre_attn_scalar=8)
    vision = transformers.SiglipVisionConfig(**TOWER, vision_use_head=False)
    tokens = {"image_token_id": IMAGE, "boi_token_id": VISION_START, "eoi_token_id": VISION_END}
    return transformers.Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=4, **tokens)


def _qwen2_5() -> Any:
    vision = {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=qwen_text(), **QWEN_TOKENS)


def _qwen3() -> Any:
    vision = {**QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
    text = qwen_text(head_dim=8, rope={"mrope_interleaved": True}, tie_word_embeddings=True)
    return transformers.Qwen3VLConfig(vision_config=vision, text_config=text, tie_word_embeddings=True, **QWEN_TOKENS)


def _projection(model: Any) -> None:
    """Weights that a checkpoint brings along and that are zero in a new model."""
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)


def _trained_and_frozen(
    name: str,
    title: str,
    build: Build,
    batches: tuple[Batch, Batch],
    notes: str,
    tower: Sequence[str],
    language: Sequence[str],
) -> list[Family]:
    """Three rows of a family.

    Args:
        batches: for models whose language model is trained, and for those whose tower alone is: with pictures in each.
        tower, language: parts of the names of the parameters that are frozen.
    """
    rows = (
        ("", "", build, batches[0], notes),
        ("_tower_frozen", "tower frozen", frozen(build, *tower), batches[0], "the tower runs without a graph"),
        ("_language_frozen", "language model frozen", frozen(build, *language), batches[1], "gradients pass through it"),
    )
    return [
        Family(
            name=name + suffix,
            title=f"{title}, {what}" if what else title,
            build=made,
            batch=batch,
            kind="vision-language",
            notes=note,
        )
        for suffix, what, made, batch, note in rows
    ]


VISION_LANGUAGE = (
    *_trained_and_frozen(
        "llava",
        "LLaVA (CLIP, Llama)",
        build_of("LlavaForConditionalGeneration", _llava),
        (one_picture_each(16), one_picture_each(16, always=True)),
        "the tower's last layer runs without use; batches without pictures between others",
        ("vision_tower",),
        ("language_model", "lm_head"),
    ),
    *_trained_and_frozen(
        "gemma3_vision",
        "Gemma 3 with images (SigLIP)",
        build_of("Gemma3ForConditionalGeneration", _gemma3, _projection),
        (with_token_types(one_picture_each(4)), with_token_types(one_picture_each(4, always=True))),
        "attention both ways within a picture; batches without pictures between others",
        ("vision_tower",),
        ("language_model", "lm_head"),
    ),
    *_trained_and_frozen(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        build_of("Qwen2_5_VLForConditionalGeneration", _qwen2_5),
        (pictures_and_videos(frames_apart=False),) * 2,
        "pictures of several sizes, video, windows in the tower",
        ("visual.",),
        ("language_model", "lm_head"),
    ),
    *_trained_and_frozen(
        "qwen3_vl",
        "Qwen3-VL",
        build_of("Qwen3VLForConditionalGeneration", _qwen3),
        (pictures_and_videos(frames_apart=True),) * 2,
        "pictures of several sizes, video, features of inner tower layers in the first text layers, tied head",
        ("visual.",),
        ("language_model", "lm_head"),
    ),
)
