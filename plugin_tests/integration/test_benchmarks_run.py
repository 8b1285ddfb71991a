"""The benchmarks' whole chain on the CPU: our Trainer job and the stock one, peers, generation, tables, plots, trace."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run_command

RECIPES = Path(__file__).parents[2] / "recipes"
RUN = RECIPES / "benchmarks" / "run.py"

SUITE = """
echo "$@" >> "$OUT/../calls.txt"
for bench in "$@"; do
  case $bench in
    warm) ;;
    broken) echo '{"tag": "broken", "ok": false, "error": "does not fit"}' >> "$OUT/peers.jsonl" ;;
    *) { printf '{"tag": "%s", "preset": "%s", "batch": %s, "seq": %s, ' "$bench" "$PRESET" "$BATCH" "$SEQ"
         printf '"steps": %s, "warmup": %s, "ok": true, "tokens_per_s": 2.0, "step_s": 8.0, ' "$STEPS" "$WARMUP"
         printf '"tflops_6nt": 0.5, "peak_gpu_gib": 1.5, "peak_host_used_gib": 3.5}\\n'; } >> "$OUT/peers.jsonl" ;;
  esac
done
"""


def bench(out: Path, *arguments: str | Path, check: bool = True) -> tuple[str, dict[str, Any]]:
    """(what was printed, the JSON file's content)."""
    command = (sys.executable, RUN, "--out", out, "--steps", "5", "--warmup", "2", *arguments)
    # Not from the checkout, whose package would be taken for that of --beside.
    printed = run_command(*command, check=check, cwd=out.parent)
    return printed, json.loads((out / "results.json").read_text())


def test_our_job_and_the_peers_end_in_one_table(tmp_path: Path) -> None:
    (tmp_path / "run_suite.sh").write_text(SUITE)
    peers = ("--peers", tmp_path, "--peer-benches", "ds3", "broken")
    cases = ("--cases", "tiny-2x32", "tiny-2x32-1gib", "--set", "placement.slots=3", "host_threads=1")
    printed, document = bench(tmp_path / "out", *cases, *peers, check=False)  # a peer that fails is reported as a failure
    rows = {(row["case"], row["system"]): row for row in document["rows"]}
    assert set(rows) == {
        ("tiny-2x32", "ds3"),
        ("tiny-2x32", "broken"),
        ("tiny-2x32", "megatrain"),
        ("tiny-2x32-1gib", "megatrain"),
    }
    # One shape: the suite runs once, with its set-up first.
    assert (tmp_path / "out" / "calls.txt").read_text() == "warm ds3 broken\n"
    peer = next(line for line in document["results"] if line["system"] == "ds3")
    assert (peer["preset"], peer["batch"], peer["seq"], peer["steps"], peer["warmup"]) == ("tiny", 2, 32, 3, 2)
    for case in ("tiny-2x32", "tiny-2x32-1gib"):
        ours = rows[case, "megatrain"]
        assert ours["tokens"] == 64
        # Seconds are rounded to four places, of steps of some tens of milliseconds.
        assert ours["tokens_per_second"] * ours["step_ms"] / 1e3 == pytest.approx(64.0, rel=0.02)
        assert ours["ratios"]["ds3"] * 2.0 == ours["tokens_per_second"]
        assert sum(ours["split_ms"].values()) == pytest.approx(ours["step_ms"], rel=0.05), "medians of shares add up nearly"
        assert ours["bound_by"] in printed
    commands = {line["case"]: line["command"] for line in document["results"] if line["system"] == "megatrain"}
    assert '{"placement.slots": 3, "host_threads": 1}' in commands["tiny-2x32"]
    assert '{"placement.slots": 3, "host_threads": 1, "gpu_memory_gib": 1.0}' in commands["tiny-2x32-1gib"]
    assert "failed: does not fit" in printed
    for name in ("torch", "transformers", "accelerate"):
        assert document["versions"][name][0].isdigit()
    assert document["cpus"] >= 1
    for name in ("tokens_per_second.png", "step_split.png", "memory.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_documents_train_alike_under_the_plugin_another_commit_and_the_stock_trainer(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    shutil.copytree(RECIPES.parent / "megatrain_accelerate", earlier / "megatrain_accelerate")
    with open(earlier / "megatrain_accelerate" / "engine.py", "a") as file:
        file.write(f"\nopen({str(earlier / 'used')!r}, 'w').close()\n")
    printed, document = bench(tmp_path, "--cases", "tiny-real-4x64", "--stock", "--beside", earlier)
    assert (earlier / "used").exists()
    rows = {row["system"]: row for row in document["rows"]}
    results = {line["system"]: line for line in document["results"]}
    stock, ours = results["stock"], results["megatrain"]
    assert "accelerate.commands.launch" not in stock["command"]
    assert not stock["log_medians"], "the plugin was at work in the stock Trainer's job"
    assert ours["losses"] == pytest.approx(stock["losses"], abs=2e-4), "the same weights on the same documents"
    assert ours["losses"] == results["earlier"]["losses"]
    assert set(rows["megatrain"]["ratios"]) == {"stock", "earlier"}
    assert (ours["data"], ours["weights"], ours["tokens"]) == ("real", "fp32", stock["tokens"])
    assert ours["plans"] >= 1
    assert ours["all_plans_seconds"] >= round(ours["plan_seconds"], 1)
    assert rows["megatrain"]["ratios"]["stock"] == ours["tokens_per_second"] / stock["tokens_per_second"]
    assert f"{ours['first_step_seconds'] / stock['first_step_seconds']:.2f}" in printed
    for result in results.values():
        assert 4 * 2 <= result["tokens"] < 4 * 64, "padding counted as tokens"
        # The four steps after the first, of which the last three count as warm ones.
        seconds = result["tokens"] / result["tokens_per_second"]
        assert result["mean_step_seconds"] == pytest.approx(seconds, rel=0.01, abs=1e-4)
        assert 4 * result["mean_step_seconds"] >= sum(result["step_seconds_all"]) - 0.01
        assert result["first_step_seconds"] < result["total_seconds"]


@pytest.mark.long
def test_generation_is_measured_beside_plain_transformers_and_gives_the_same_tokens(tmp_path: Path) -> None:
    result_file = tmp_path / "result.jsonl"
    shape = (
        "--preset",
        "tiny",
        "--layers",
        "2",
        "--prompts",
        "3",
        "--prompt-length",
        "5",
        "--new-tokens",
        "4",
        "--rounds",
        "1",
    )
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config", RECIPES / "megatrain_cpu.yaml")
    printed = run_command(*launch, RECIPES / "benchmarks" / "generation_run.py", *shape, "--json", result_file)
    assert "adopting 2 layers" in printed
    result = json.loads(result_file.read_text())
    assert (result["layers"], result["prompts"], result["new_tokens"]) == (2, 3, 4)
    for name in ("plain", "prepared"):
        # Seconds are rounded to four places, which may be more than 1% of so short a run.
        seconds = 3 * 4 / result[name]["tokens_per_second"]
        assert result[name]["seconds"] == pytest.approx(seconds, rel=0.01, abs=1e-4)
    assert result["ratio"] == pytest.approx(
        result["prepared"]["tokens_per_second"] / result["plain"]["tokens_per_second"], abs=1e-3
    )
    assert result["same_tokens"]


def test_peers_are_not_compared_on_documents_which_they_do_not_train_on(tmp_path: Path) -> None:
    (tmp_path / "run_suite.sh").write_text(SUITE)
    arguments = ("--cases", "tiny-2x32", "tiny-real-2x32", "--peers", tmp_path)
    printed = run_command(sys.executable, RUN, "--out", tmp_path, *arguments, check=False)
    assert "leave out the cases with -real" in printed


@pytest.mark.slow
@pytest.mark.long
def test_a_sweep_with_traces_and_a_setting_that_is_refused(tmp_path: Path) -> None:
    printed, document = bench(tmp_path / "sweep", "--cases", "tiny-1x16", "--sweep", "2", "--trace")
    assert [row["tokens"] for row in document["rows"]] == [16, 32]
    assert all("error" not in row for row in document["rows"])
    for case in ("tiny-1x16", "tiny-2x16"):
        assert (tmp_path / "sweep" / case / "trace.perfetto.json.gz").exists(), printed
    printed, document = bench(tmp_path / "refused", "--cases", "tiny-1x16", "--set", "placement.slotz=3", check=False)
    assert "exit status 2" in document["rows"][0]["error"]
    assert "did you mean 'slots'" in (tmp_path / "refused" / "tiny-1x16" / "log.txt").read_text()
    assert not (tmp_path / "refused" / "memory.png").exists(), "nothing was measured"


@pytest.mark.long
def test_host_time_is_told_of_streamed_and_held_weights_beside_plain_pytorch(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    script = RECIPES / "benchmarks" / "host_overhead.py"
    printed = run_command(sys.executable, script, "--steps", "1", "--rounds", "1", "--json", result_file)
    result = json.loads(result_file.read_text())
    assert result.keys() == {"training step", "forward without gradients"}
    for what, systems in {"training step": ["streamed"], "forward without gradients": ["streamed", "held"]}.items():
        for system in systems:
            ratio = result[what][system] / result[what]["plain"]
            assert result[what][f"{system}_ratio"] == pytest.approx(ratio)
            assert f"{system} {result[what][system]:.2f} ms, {ratio:.2f} times" in printed
