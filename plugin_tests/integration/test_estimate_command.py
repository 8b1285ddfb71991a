"""``megatrain estimate`` as a user calls it, on configurations in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fresh_process import run_python
from transformers import LlamaForCausalLM

from megatrain_accelerate.cli import main

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MACHINE = ["--gpu", "H200", "--gpu-memory", "900MiB", "--host-memory", "4GiB", "--cores", "16"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_plot_names_the_model_and_no_folder_of_this_machine(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = folder / "speed.svg"
    quick = ["--length", "64", "--batch", "1", "2", "--no-limits"]
    assert main(["estimate", str(folder / name), *MACHINE, *quick, "--plot", str(plot)]) == 0
    drawn = plot.read_text()
    assert f"{folder.name} on H200" in drawn
    assert str(folder) not in drawn


@pytest.mark.slow
def test_without_a_model_a_table_and_a_picture_say_what_the_machine_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "models.svg"
    machine = ["--gpu", "rtx4090", "--host-memory", "10GiB"]
    assert main(["estimate", *machine, "--length", "64", "--batch", "1", "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    models = [line.split() for line in shown.splitlines() if " G  " in line]
    assert [float(words[1]) for words in models] == [0.49, 1.54, 3.09, 8.03, 14.77, 30.53, 32.76, 70.55, 116.83]
    fits, *others = models
    stock = "7.4"
    assert fits[:5] == ["Qwen2.5-0.5B", "0.49", "G", "8.4", stock]
    assert "doesn't" not in fits
    assert all("of host memory are missing" in " ".join(words) for words in others)
    assert "23.0, doesn't fit" in " ".join(others[0])
    speed = fits[5]
    assert f"{speed} tokens/s" in plot.read_text()


@pytest.mark.long
def test_the_table_says_what_fits_and_how_fast_and_a_plot_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = folder / "speed.png"
    assert main(["estimate", str(folder), *MACHINE, "--length", "64", "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    for text in ("LlamaForCausalLM", "largest batch", "longest context", "names 512", "tokens/s", "host step", "of 4"):
        assert text in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_holds_the_numbers_of_a_config_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches = ["--batch", "1", "2", "--accumulation", "2"]
    assert main(["estimate", str(folder / "config.json"), *MACHINE, "--length", "64", "--json", *batches, "--no-limits"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 2 * 4096 * 128 + 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 512 + 2 * 128)
    assert found["fits"]
    assert found["host_memory_gib"] == 4.0
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert row["micro_batches"] == 2
        assert row["tokens_per_second"] == pytest.approx(2 * 64 * row["batch"] / row["step_seconds"])
        assert row["gpu_gib"] <= found["gpu_planned_gib"]
    assert found["limits"] is None


@pytest.mark.long
def test_limits_are_the_last_that_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = [*MACHINE, "--length", "64", "--json"]
    assert main(["estimate", str(folder), *machine, "--batch", "1"]) == 0
    limits = json.loads(capsys.readouterr().out)["limits"]
    assert limits["longest"]["fits"]
    assert limits["longest"]["length"] == limits["longest_context"]
    for batch, fits in ((limits["largest_batch"], True), (int(1.1 * limits["largest_batch"]), False)):
        main(["estimate", str(folder), *machine, "--batch", str(batch), "--no-limits"])
        assert json.loads(capsys.readouterr().out)["rows"][0]["fits"] is fits


def test_a_sequence_that_fits_since_inputs_leave_is_said_to_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 24, "vocab_size": 512}))
    arguments = ["estimate", str(folder), *MACHINE, "--length", "24576", "--batch", "1", "--no-limits", "--json"]
    for offloaded_inputs in ("null", "false"):
        fits = offloaded_inputs == "null"
        assert main([*arguments, "--set", f"placement.offloaded_inputs={offloaded_inputs}"]) == (0 if fits else 1)
        found = json.loads(capsys.readouterr().out)
        assert found["fits"] is found["rows"][0]["fits"] is fits
        assert (found["rows"][0]["offloaded_gib"] > 0) is fits


def test_what_does_not_fit_is_said_with_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ["--gpu", "H200", "--host-memory", "2GiB"]
    assert main(["estimate", str(folder), *gpu, "--length", "64", "--batch", "1"]) == 1
    shown = capsys.readouterr().out
    assert "GiB of host memory are missing" in shown
    assert "(doesn't fit)" in shown


def test_settings_of_the_plugin_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for settings in ([], ["--set", *(f"placement.{kind}_layers=0" for kind in ("kept", "device", "offloaded"))]):
        assert (
            main(["estimate", str(folder), *MACHINE, "--length", "64", "--batch", "2", "--no-limits", "--json", *settings])
            == 0
        )
        rows.append(json.loads(capsys.readouterr().out)["rows"][0])
    assert (rows[0]["layers_on_gpu"], rows[0]["layers_kept"]) == (4, 4)
    assert (rows[1]["layers_on_gpu"], rows[1]["layers_kept"], rows[1]["layers_offloaded"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H300"], "isn't known"),
        (["--gpu", "H200", "--no-limits"], "needs --batch"),
        (["--gpu", "H200", "--set", "keep_layer=0"], "did you mean 'placement.kept_layers'"),
        (["--gpu", "H200", "--set", "placement.kept_layers=5"], "kept_layers is 5, but the model has 4 layers"),
        (["--gpu", "H200", "--set", "host_gradients=passing", "--accumulation", "2"], "gradient_accumulation_steps is 2"),
        pytest.param([], "no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    ],
)
def test_a_wrong_argument_is_said_with_the_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["estimate", str(folder), *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        pytest.param(
            {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "head_dim": 32,
                "output_router_logits": True,
            },
            8 * 4 * 3 * 128 * 64,
            2 * 4 * 3 * 128 * 64,
            id="experts",
        ),
        pytest.param(
            {
                "model_type": "t5",
                "architectures": ["T5ForConditionalGeneration"],
                "d_model": 64,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 2,
                "decoder_start_token_id": 0,
                "pad_token_id": 0,
            },
            0,
            0,
            marks=pytest.mark.long,
            id="encoder_decoder",
        ),
    ],
)
def test_other_sorts_of_models_are_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: dict[str, object], total: int, active: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **shape}))
    arguments = [*MACHINE, "--length", "64", "--batch", "2", "--no-limits", "--json"]
    assert main(["estimate", str(tmp_path), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] - found["active_parameters"] == total - active
    assert found["rows"][0]["fits"]


def test_a_model_that_cannot_be_made_is_said_with_the_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("rope_type")

    monkeypatch.setattr(LlamaForCausalLM, "__init__", fails)
    assert main(["estimate", str(folder), *MACHINE]) == 1
    assert "(KeyError: 'rope_type'); mend the configuration" in capsys.readouterr().err


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(tmp_path), *MACHINE]) == 1
    assert "configuration" in capsys.readouterr().err


def test_a_model_that_takes_no_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "intermediate_size": 64, "num_attention_heads": 2}))
    assert main(["estimate", str(tmp_path), *MACHINE, "--length", "32"]) == 1
    assert "name a language model" in capsys.readouterr().err


@pytest.mark.long
def test_a_model_of_70_billion_parameters_takes_no_memory(tmp_path: Path) -> None:
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **shape, **heads}))
    script = f"""
        import resource
        from megatrain_accelerate.cli import main
        arguments = ["--gpu", "H200", "--host-memory", "1.5TiB", "--batch", "1", "--length", "2048"]
        assert main(["estimate", {str(tmp_path)!r}, *arguments]) == 0
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20, "KiB"
    """
    run_python(script)


@pytest.mark.parametrize("text", ["[1, 2]", json.dumps({**SHAPE, "hidden_size": "64"}), "no JSON"])
def test_a_configuration_that_is_none_is_said_in_a_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["estimate", str(tmp_path), *MACHINE]) == 1
    assert "can't be read" in capsys.readouterr().err


def test_a_plot_that_cannot_be_drawn_leaves_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--length", "64", "--batch", "1", "--no-limits"]
    assert main(["estimate", str(folder), *MACHINE, *quick, "--plot", str(folder / "speed.foo")]) == 1
    shown = capsys.readouterr()
    assert "tokens/s" in shown.out
    assert "speed.foo" in shown.err


def test_gradients_that_pass_take_no_memory_of_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = {}
    for gradients in ("kept", "passing"):
        quick = ["--length", "64", "--batch", "1", "--no-limits", "--json", "--set", f"host_gradients={gradients}"]
        main(["estimate", str(folder), *MACHINE, *quick])
        needed[gradients] = json.loads(capsys.readouterr().out)["host_needed_gib"] * 2**30
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 512 + 2 * 128
    # Gradients of 4 layers, for which there are three buffers.
    assert needed["kept"] - needed["passing"] == pytest.approx((4 - 3) * 2 * layer, rel=0.01)
