"""Host memory: what adopting a model takes at its peak, what the store holds, and which limits are seen."""

from __future__ import annotations

import json
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_runs import Training, attach
from flat_settings import nested
from forked_process import run_forked
from plain_torch import tiny_model, token_batches
from process_memory import PeakMemory, anonymous_bytes, file_bytes
from torch import nn
from transformers import AutoModelForCausalLM

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.store import host_limits
from megatrain_accelerate.store.host_limits import (
    CONSTANT_OVERHEAD_BYTES,
    available_host_bytes,
    cgroup_available_bytes,
    require_host_bytes,
    settings_that_take_less,
    unused_host_bytes,
)
from megatrain_accelerate.store.layout import ALIGNMENT_ELEMENTS
from megatrain_accelerate.units import GIB, MIB

CONSTANT_BYTES = 16 * MIB
"""Python's objects, thread stacks, and one sample's worth of a tensor on its way."""

LARGE = {"vocab_size": 2048, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS = 6


def measure(checkpoint: Path, precision: str, source: str) -> dict[str, int]:
    """Loads a model as a script would and adopts it; peaks and sizes in bytes."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).zero_grad()  # its lazy imports aren't the adoption's
    before_load = anonymous_bytes()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if source == "memory":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    own = host_limits.anonymous_bytes(model.parameters())
    loaded = anonymous_bytes()
    with PeakMemory() as adopting:
        engine = attach(model, bf16=precision == "bf16", training=False)
    adopted = anonymous_bytes()
    with PeakMemory() as whole:
        engine.enable_training()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        adopt_optimizer(optimizer, engine.runtime, "deferred")
        for unit in engine.runtime.units:  # as the first step does
            unit.allocate("gradients")
            unit.allocate("moments")
    return {
        "loaded": loaded - before_load,
        "model": sum(4 * parameter.numel() for parameter in model.parameters()),
        "own": own,
        "adopting_peak": loaded - before_load + adopting.growth,
        "adopted": adopted - before_load,
        "training_peak": adopted - before_load + whole.growth,
        "store": sum(engine.host_bytes_by_kind().values()),
        "device": sum(engine.device_plan.budget.held_bytes_by_kind().values()),
        "layer": engine.runtime.layers[0].unit.layout.weight_bytes,
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(num_hidden_layers=LAYERS, **LARGE).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("precision", "source"),
    [
        ("bf16", "file"),
        ("fp32", "memory"),
        pytest.param("bf16", "memory", marks=pytest.mark.long),
        pytest.param("fp32", "file", marks=pytest.mark.long),
    ],
)
def test_adopting_holds_the_store_one_layer_and_a_constant_at_its_peak(checkpoint: Path, precision: str, source: str) -> None:
    measured = json.loads(run_forked(__file__, checkpoint, precision, source).strip().splitlines()[-1])
    print(measured)
    assert measured["model"] > 150 * MIB
    # transformers 5 maps the file; then nothing of the model's own is given back.
    if source == "memory":
        assert measured["own"] == measured["model"]
        assert measured["loaded"] > 0.98 * measured["model"]
    elif measured["loaded"] < 0.1 * measured["model"]:
        assert measured["own"] == 0
    # On the CPU the "device" is host memory too: slots and the residents' copies.
    one_layer = 4 * measured["layer"] // (2 if precision == "bf16" else 4)
    # While adopting, a layer's 4 bytes a parameter (fp32, or bf16 and residual) take the place of the loaded model's 4.
    assert measured["adopting_peak"] < measured["model"] + measured["device"] + one_layer + CONSTANT_BYTES
    assert measured["adopted"] < measured["model"] + measured["device"] + CONSTANT_BYTES
    assert measured["training_peak"] < measured["store"] + measured["device"] + CONSTANT_BYTES
    # And it is all there: the store was touched.
    assert measured["training_peak"] > 0.98 * measured["store"]


def padding_elements(model: nn.Module) -> int:
    return ALIGNMENT_ELEMENTS * sum(1 for _ in model.parameters())


@pytest.mark.parametrize(("bf16", "bytes_each"), [(True, 14), (False, 16)])
def test_a_trained_parameter_takes_14_bytes_in_bf16_and_16_in_fp32(bf16: bool, bytes_each: int) -> None:
    model = tiny_model(hidden_size=128, intermediate_size=352)
    count = sum(parameter.numel() for parameter in model.parameters())
    engine = attach(model, bf16=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred"))
    before = engine.host_bytes_by_kind()
    assert before["gradients"] == before["moments"] == 0, "they are made when they are needed"
    run.step(token_batches(1)[0])
    held = engine.host_bytes_by_kind()
    size = 2 if bf16 else 4
    each = {"weights": size, "gradients": size, "residuals": 2 if bf16 else 0, "moments": 8}
    assert sum(each.values()) == bytes_each
    for kind, expected in each.items():
        assert expected * count <= held[kind] <= expected * (count + padding_elements(model)), kind
    engine.close()


@pytest.mark.parametrize(("bf16", "bytes_each"), [(True, 2), (False, 4)])
def test_a_frozen_parameter_takes_its_weight_only(bf16: bool, bytes_each: int) -> None:
    model = tiny_model(hidden_size=128, intermediate_size=352).requires_grad_(False)
    model.model.norm.requires_grad_(True)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    engine = attach(model, bf16=bf16)
    optimizer = torch.optim.AdamW(model.model.norm.parameters(), lr=1e-3)
    Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred")).step(token_batches(1)[0])
    norm = ALIGNMENT_ELEMENTS
    held = engine.host_bytes_by_kind()
    assert bytes_each * frozen <= held["weights"] <= bytes_each * (frozen + padding_elements(model))
    assert held["moments"] == 8 * norm
    assert held["gradients"] == bytes_each * norm
    assert held["residuals"] == (2 * norm if bf16 else 0)
    engine.close()


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_store_takes_what_was_planned(bf16: bool, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[dict[str, int]] = []
    monkeypatch.setattr("megatrain_accelerate.engine.require_host_bytes", lambda parts, *_, **__: planned.append(parts))
    model = tiny_model()
    model.model.layers[1].requires_grad_(False)
    engine = attach(model, bf16=bf16, training=training)
    if training:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        Training(model, engine, optimizer, adopt_optimizer(optimizer, engine.runtime, "deferred")).step(token_batches(1)[0])
    assert planned[0] == engine.host_bytes_by_kind()
    engine.close()


# ---------------------------------------------------------------------------------------- limits


def write_cgroup(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def membership(folder: Path, text: str) -> Path:
    path = folder / "cgroup"
    path.write_text(text)
    return path


def test_the_tightest_version_2_cgroup_above_the_process_counts(tmp_path: Path) -> None:
    root = write_cgroup(tmp_path / "fs")
    write_cgroup(root / "job", memory__max=10 * GIB, memory__current=4 * GIB)
    write_cgroup(root / "job" / "task", memory__max="max", memory__current=3 * GIB)
    assert cgroup_available_bytes(root, membership(tmp_path, "0::/job/task\n")) == 6 * GIB
    write_cgroup(root / "job" / "task", memory__max=5 * GIB)
    assert cgroup_available_bytes(root, membership(tmp_path, "0::/job/task\n")) == 2 * GIB
    # Another job's limits are not ours.
    write_cgroup(root / "other", memory__max=1, memory__current=1)
    assert cgroup_available_bytes(root, membership(tmp_path, "0::/job/task\n")) == 2 * GIB


def test_page_cache_in_a_cgroup_counts_as_free(tmp_path: Path) -> None:
    stat = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\nslab 5"
    root = write_cgroup(tmp_path / "fs", memory__max=8 * GIB, memory__current=7 * GIB, memory__stat=stat)
    assert cgroup_available_bytes(root, membership(tmp_path, "0::/\n")) == 4 * GIB


def test_a_version_1_cgroup_counts(tmp_path: Path) -> None:
    root = write_cgroup(tmp_path / "fs")
    write_cgroup(root / "memory" / "job", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB)
    lines = "4:cpu,cpuacct:/job\n7:memory:/job\n1:name=systemd:/job\n"
    assert cgroup_available_bytes(root, membership(tmp_path, lines)) == 2 * GIB


def test_a_path_of_the_host_that_a_container_does_not_see_falls_back_to_its_root(tmp_path: Path) -> None:
    root = write_cgroup(tmp_path / "fs", memory__max=4 * GIB, memory__current=GIB)
    assert cgroup_available_bytes(root, membership(tmp_path, "0::/kubepods/pod1/abc\n")) == 3 * GIB


@pytest.mark.parametrize("limit", ["max", 1 << 62])
def test_no_limit_is_no_limit(tmp_path: Path, limit: object) -> None:
    root = write_cgroup(tmp_path / "fs", memory__max=limit, memory__current=GIB)
    assert cgroup_available_bytes(root, membership(tmp_path, "0::/\n")) is None
    assert cgroup_available_bytes(root, tmp_path / "missing") is None


def test_a_cgroup_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    root = write_cgroup(tmp_path / "fs", memory__max=GIB, memory__current=2 * GIB)
    assert cgroup_available_bytes(root, membership(tmp_path, "0::/\n")) == 0


@pytest.fixture
def nothing_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that other tests left don't count."""
    nobody: weakref.WeakSet[Any] = weakref.WeakSet()
    for module in ("store.host_limits", "engine"):
        monkeypatch.setattr(f"megatrain_accelerate.{module}.promising", nobody)


@pytest.mark.usefixtures("nothing_promised")
def test_the_cgroup_bounds_what_the_machine_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = psutil.virtual_memory().available
    monkeypatch.setattr(host_limits, "cgroup_available_bytes", lambda: 123 * MIB)
    assert available_host_bytes() == 123 * MIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert available_host_bytes() == 41 * MIB
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(host_limits, "cgroup_available_bytes", lambda: None)
    # Other processes come and go.
    assert available_host_bytes() == pytest.approx(machine, rel=0.2)


@pytest.mark.usefixtures("nothing_promised")
def test_the_users_figure_overrides_what_the_machine_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "cgroup_available_bytes", lambda: 0)
    held = psutil.Process().memory_info().rss - file_bytes()  # without pages of files, which are cache
    assert available_host_bytes(1000.0) == pytest.approx(1000 * GIB - held, abs=8 * MIB)
    assert available_host_bytes(0.001) == 0


@pytest.mark.usefixtures("nothing_promised")
@pytest.mark.parametrize("settings", [{}, {"moments_dtype": "int8"}, {"host_gradients": "passing"}], ids=str)
def test_what_a_model_will_take_is_available_to_nobody_else(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "cgroup_available_bytes", lambda **_: None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000 * GIB, free=1000 * GIB))
    model = tiny_model()
    engine = attach(model, training=False, **settings)

    def promised() -> int:
        assert unused_host_bytes() == available_host_bytes(), "of this machine all memory that isn't used is free"
        return 1000 * GIB - available_host_bytes()

    assert promised() == 0
    engine.enable_training()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients = promised()
    assert gradients
    passes = "host_gradients" in settings
    driver = adopt_optimizer(optimizer, engine.runtime, "backward" if passes else "deferred")
    moments = promised() - gradients
    with torch.no_grad():
        model(input_ids=token_batches(1)[0])
    assert promised() == gradients + moments
    model.train()(input_ids=token_batches(1)[0])
    assert promised() == moments
    Training(model, engine, optimizer, driver).step(token_batches(1)[0])
    engine.runtime.drain()  # the steps make the pages of moments
    assert promised() == 0
    held = engine.host_bytes_by_kind()
    assert gradients == pytest.approx(held["gradients"], abs=3 * 4096)  # whole pages
    assert moments == held["moments"]
    engine.runtime.place((0,), groups_on_device=False)
    assert promised() == 0
    engine.runtime.place((), groups_on_device=False)
    layer = engine.runtime.layers[0].unit
    assert promised() == (0 if passes else layer.layout.gradient_bytes)
    engine.close()
    assert promised() == 0


def test_a_run_that_just_fits_is_accepted_and_one_byte_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda figure: 10 * GIB)
    required = 12 * GIB - CONSTANT_OVERHEAD_BYTES
    require_host_bytes({"weights": required}, None, freed=2 * GIB)
    with pytest.raises(HostMemoryError) as raised:
        require_host_bytes({"weights": 4 * GIB, "gradients": 0, "moments": 6 * GIB + 1}, None, freed=2 * GIB)
    require_host_bytes({"weights": 3 * required}, None, freed=2 * GIB, ranks=3)
    for part in ("take 10.00 GiB", "weights 4.00 GiB, moments 6.00 GiB", "leaves 12.00 GiB", "2.00 GiB are the loaded"):
        assert part in str(raised.value)
    assert "the machine or its cgroup leaves" in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "accumulates", "named"),
    [
        ({}, False, ["host_gradients: passing", "moments_dtype: bf16", "moments_dtype: int8"]),
        ({}, True, ["moments_dtype: bf16", "moments_dtype: int8"]),
        ({"moments_dtype": "bf16"}, False, ["host_gradients: passing", "moments_dtype: int8"]),
        ({"device_layers": 2}, True, ["moments_dtype: bf16"]),
        ({"moments_dtype": "int8"}, True, []),
        ({"moments_dtype": "int8", "host_gradients": "passing"}, False, []),
    ],
)
def test_a_refusal_names_the_settings_that_would_take_less(
    settings: dict[str, object], accumulates: bool, named: list[str]
) -> None:
    said = settings_that_take_less(MegatrainConfig.from_mapping(nested(settings)), keeps_gradients=accumulates)
    texts = ("host_gradients: passing", "moments_dtype: bf16", "moments_dtype: int8")
    assert [text for text in texts if text in said] == named
    assert bool(said) == bool(named)


@pytest.mark.parametrize("training", [True, False])
def test_a_refusal_comes_before_any_allocation(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(vocab_size=8192, hidden_size=256, intermediate_size=704)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda figure: 0)
    with PeakMemory() as memory, pytest.raises(HostMemoryError):
        attach(model, training=training)
    assert memory.growth < 2 * MIB
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
