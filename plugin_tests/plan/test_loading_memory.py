"""Loading a checkpoint and adopting it: what both hold at their peak, whatever the files' shards and dtypes are."""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import attach, masters_of
from forked_process import run_forked
from plain_torch import tiny_model
from process_memory import PeakMemory, anonymous_bytes, file_bytes
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from versions import older

from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.plan import adoption
from megatrain_accelerate.store import host_limits
from megatrain_accelerate.store.file_mappings import FileMappings, page_out, read_ahead
from megatrain_accelerate.units import GIB, MIB

CONSTANT_BYTES = 24 * MIB
"""Python's objects, thread stacks, lazily imported modules of the loader, and what malloc holds back before it is trimmed."""

LAYERS = 6
LARGE = {"vocab_size": 2048, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}


def save(kind: str, folder: Path) -> None:
    """A checkpoint of about 80 million parameters in several shards."""
    if kind == "moe":
        torch.manual_seed(0)
        moe = MixtralConfig(**{**LARGE, "intermediate_size": 512}, num_hidden_layers=LAYERS, num_local_experts=8)
        model: Any = MixtralForCausalLM(moe)
    elif kind == "small tensors":
        model = tiny_model(**{**LARGE, "hidden_size": 256, "intermediate_size": 1024}, num_hidden_layers=60)
    else:
        model = tiny_model(**LARGE, num_hidden_layers=LAYERS)
    model.to(torch.float32 if kind == "fp32" else torch.bfloat16).save_pretrained(folder, max_shard_size="40MB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def load(folder: Path, dtype: torch.dtype) -> Any:
    name = "torch_dtype" if older("transformers", "4.56") else "dtype"
    return AutoModelForCausalLM.from_pretrained(folder, **{name: dtype})


def measure(folder: Path, dtype: str) -> dict[str, int]:
    """Bytes, anonymous, above those before loading."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).zero_grad()  # its lazy imports aren't the adoption's
    attach(tiny_model(), training=False).close()
    before = anonymous_bytes()
    with PeakMemory() as peak:
        model = load(folder, getattr(torch, dtype))
        loaded = anonymous_bytes() - before
        engine = attach(model, training=False)
    held = engine.host_bytes_by_kind()
    return {
        "model": sum(parameter.nbytes for parameter in model.parameters()),
        "loaded": loaded,
        "peak": peak.growth,
        "store": sum(held.values()),
        "residuals": held["residuals"],
        "adopted": anonymous_bytes() - before,
        "layer": engine.runtime.layers[0].unit.layout.weight_bytes,
        "device": sum(engine.device_plan.budget.held_bytes_by_kind().values()),
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("small tensors", "float32"),
        pytest.param("bf16", "bfloat16", marks=pytest.mark.long),
        pytest.param("bf16", "float32", marks=pytest.mark.long),
        pytest.param("fp32", "bfloat16", marks=pytest.mark.long),
        pytest.param("moe", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_loading_and_adopting_never_holds_a_second_copy(kind: str, dtype: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    found = json.loads(run_forked(__file__, tmp_path, dtype).strip().splitlines()[-1])
    print(found)
    assert found["model"] > 80 * MIB
    # fp32 weights have masters (2 and 2 bytes); those that were loaded in bf16 have none in an evaluation.
    assert found["store"] >= found["model"] or dtype == "bfloat16"
    assert (found["residuals"] > 0) is (dtype == "float32")
    one_layer = 2 * found["layer"]
    whole = max(found["loaded"], found["store"])
    # Memory of small tensors goes back when some of it has come together.
    assert found["peak"] < whole + found["device"] + one_layer + CONSTANT_BYTES
    assert found["adopted"] < found["store"] + found["device"] + CONSTANT_BYTES


def test_values_that_were_written_to_a_mapped_model_survive_the_return_of_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(hidden_size=256, intermediate_size=704).save_pretrained(tmp_path)
    model = load(tmp_path, torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.25)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    aliases = {name: parameter.detach() for name, parameter in model.named_parameters()}
    monkeypatch.setattr(adoption, "unused_host_bytes", lambda: 0)
    returned: list[int] = []

    def noting(ranges: list[tuple[int, int]]) -> None:
        returned.append(sum(end - start for start, end in ranges))
        page_out(ranges)

    monkeypatch.setattr(adoption, "page_out", noting)
    engine = attach(model)
    masters = masters_of(engine, model)
    for name, value in expected.items():
        assert torch.equal(masters[name], value), name
        assert torch.equal(aliases[name], value), name
    if FileMappings().holds(aliases["model.layers.0.mlp.up_proj.weight"]):
        assert sum(returned) >= sum(value.nbytes for value in expected.values())
    engine.close()


def test_cache_is_kept_where_the_store_fits_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = load(tmp_path, torch.float32)
    monkeypatch.setattr(adoption, "unused_host_bytes", lambda: GIB)
    monkeypatch.setattr(adoption, "page_out", lambda ranges: pytest.fail("cache was given back"))
    attach(model).close()


def map_file(path: Path, size: int) -> torch.Tensor:
    path.write_bytes(bytes(range(256)) * (size // 256))
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def test_pages_of_a_mapped_file_are_found_and_given_back(tmp_path: Path) -> None:
    size = 32 * MIB
    tensor = map_file(tmp_path / "weights", size)
    other = torch.zeros(size, dtype=torch.uint8)
    files = FileMappings()
    assert files.holds(tensor)
    assert files.holds(tensor[size // 2 :])
    assert not files.holds(other)
    parts = [tensor[: size // 2], other, tensor[size // 2 :]]
    assert files.pages(parts) == [(tensor.data_ptr(), tensor.data_ptr() + size)]
    assert files.pages([tensor[5000:5001]]) == [(tensor.data_ptr() + mmap.PAGESIZE, tensor.data_ptr() + 2 * mmap.PAGESIZE)]
    read_ahead(files.pages(parts))
    assert int(tensor.sum(dtype=torch.int64)) == size // 256 * sum(range(256))
    before = file_bytes()
    page_out(files.pages(parts))
    assert file_bytes() < before - size // 2
    assert int(tensor.sum(dtype=torch.int64)) == size // 256 * sum(range(256))


def test_mapped_pages_do_not_count_against_the_users_figure(tmp_path: Path) -> None:
    size = 64 * MIB
    tensor = map_file(tmp_path / "weights", size)
    before = host_limits.available_host_bytes(1000.0)
    tensor.sum(dtype=torch.int64)
    assert host_limits.available_host_bytes(1000.0) > before - size // 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("elements", [0, 1, 4095, 9 * MIB + 3])
def test_copying_on_several_threads_copies_every_byte_and_none_beside(dtype: torch.dtype, elements: int) -> None:
    kernels = HostKernels(threads=3)
    source = torch.randint(0, 200, (elements,), dtype=torch.uint8).to(dtype)
    target = torch.full((elements + 2,), 7, dtype=dtype)
    kernels.copy(target[1 : elements + 1], source)
    assert torch.equal(target[1 : elements + 1], source)
    assert target[0] == target[-1] == 7
    kernels.close()


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])))
