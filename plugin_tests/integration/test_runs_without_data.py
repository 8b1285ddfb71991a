"""The plan runs a model on tensors without data. What that leaves in the model's state and caches, a script would find."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, both, loss_of
from plain_torch import token_batches
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from trainer_runs import assert_same_run, plugin, run_trainer, tiny_llama
from transformers import BeitConfig, BeitForImageClassification, DINOv3ViTConfig, DINOv3ViTModel
from transformers.models.beit import modeling_beit
from transformers.models.dinov3_vit import modeling_dinov3_vit

from megatrain_accelerate.engine import engine_of

PLANNED = {"gpu_memory_gib": 1.0}


def empty_caches(*functions: Any) -> None:
    """So that no other test has filled them."""
    for function in functions:
        for cell in function.__closure__:
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


TOWER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "patch_size": 8}


def tiny_beit() -> nn.Module:
    torch.manual_seed(0)
    empty_caches(modeling_beit.BeitRelativePositionBias.generate_relative_position_index)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
    config = BeitConfig(**TOWER, **no_dropout, image_size=32, use_relative_position_bias=True, num_labels=4)
    return BeitForImageClassification(config)


class DinoClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        empty_caches(modeling_dinov3_vit.get_patches_center_coordinates)
        self.backbone = DINOv3ViTModel(DINOv3ViTConfig(**TOWER, image_size=32, num_register_tokens=2))
        self.head = nn.Linear(32, 4)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.backbone(pixel_values).pooler_output)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("make", [tiny_beit, DinoClassifier])
@pytest.mark.parametrize("settings", [{}, PLANNED], ids=str)
def test_models_with_tables_in_cached_functions_train_as_stock(
    tmp_path: Path, make: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    images = [{"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": at % 4} for at in range(12)]
    # SGD: the true gradients of attention's key biases are zero, see tiny_llama().
    arguments: dict[str, Any] = {"dataset": images, "optim": "sgd", "learning_rate": 0.01, "max_steps": 3}
    stock = run_trainer(make, tmp_path / "stock", streamed=False, **arguments)
    streamed = run_trainer(make, tmp_path / "streamed", streamed=True, settings=settings, **arguments)
    assert_same_run(streamed, stock)


class Keeping(nn.Module):
    """A tiny Llama that makes a table of positions once, and keeps it where ``place`` says."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.table: torch.Tensor | None = None
        self.tables: dict[int, torch.Tensor] = {}
        self.place = place
        self.helper = Helper()

    def positions(self, length: int) -> torch.Tensor:
        if self.place == "cached function":
            return cached_table(length)
        if self.place == "cached method":
            return self.cached_positions(length)
        if self.place == "attribute":
            self.table = table_of(length) if self.table is None else self.table
            return self.table
        tables = {"global": TABLES, "dict": self.tables, "helper": self.helper.tables}[self.place]
        if length not in tables:
            tables[length] = table_of(length)
        return tables[length]

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def cached_positions(length: int) -> torch.Tensor:
        return table_of(length)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embeddings = self.model.get_input_embeddings()(input_ids) + self.positions(input_ids.shape[1])
        return self.model(inputs_embeds=embeddings, labels=labels)


class Helper:
    """A plain object, which no list of modules names."""

    def __init__(self) -> None:
        self.tables: dict[int, torch.Tensor] = {}


TABLES: dict[int, torch.Tensor] = {}


def table_of(length: int) -> torch.Tensor:
    return torch.cos(torch.arange(length)[:, None] / 10)


@functools.lru_cache
def cached_table(length: int) -> torch.Tensor:
    return table_of(length)


@pytest.mark.parametrize("place", ["cached function", "cached method", "attribute", "global", "dict", "helper"])
def test_what_a_forward_keeps_for_later_ones_has_data(place: str) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        TABLES.clear()
        cached_table.cache_clear()
        Keeping.cached_positions.cache_clear()
        model = Keeping(place)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
        observed: Observed = []
        for ids in token_batches(3):
            loss = loss_of(model, ids)
            table = accelerator.unwrap_model(model).positions(ids.shape[1])
            assert not isinstance(table, FakeTensor), "the run without data made it"
            accelerator.backward(loss)
            observed.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return model, observed

    both(script, settings=PLANNED)


def test_a_cache_that_a_run_without_data_only_read_keeps_what_it_has() -> None:
    cached_table.cache_clear()
    table = cached_table(32)
    with plugin(**PLANNED):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(Keeping("cached function"))
        loss_of(model, token_batches(1)[0]).backward()
    assert cached_table(32) is table


class Watching(nn.Module):
    """Notes the mean of what it returns, as a script does that looks into its model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[torch.Tensor] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        self.seen.append(output[0].detach().mean())
        return output


@pytest.mark.parametrize("where", ["model", "layer"])
def test_a_list_that_a_forward_appends_to_has_an_entry_for_each_call(where: str) -> None:
    with plugin(**PLANNED):
        accelerator = Accelerator(cpu=True)
        model = tiny_llama()
        watching = Watching(model.lm_head if where == "model" else model.model.layers[1].mlp)
        if where == "model":
            model.lm_head = watching
        else:
            model.model.layers[1].mlp = watching
        model = accelerator.prepare(model)
        for ids in token_batches(3):
            loss_of(model, ids).backward()
    # Recompute in backward is a call as well.
    assert not any(isinstance(entry, FakeTensor) for entry in watching.seen)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_longer_rows_of_as_many_tokens_are_planned_for(attention: str) -> None:
    def predicted(*shapes: tuple[int, int]) -> int:
        with plugin(**PLANNED):
            accelerator = Accelerator(cpu=True)
            model = tiny_llama(max_position_embeddings=512, attn_implementation=attention)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            for rows, length in shapes:
                (ids,) = token_batches(1, batch=rows, length=length)
                mask = torch.ones_like(ids)
                mask[0, -1] = 0
                accelerator.backward(model(input_ids=ids, labels=ids, attention_mask=mask).loss)
                optimizer.step()
                optimizer.zero_grad()
            engine = engine_of(model)
            assert engine is not None
            return engine.device_plan.current.predicted_bytes

    assert predicted((64, 8), (1, 512)) >= predicted((1, 512))
