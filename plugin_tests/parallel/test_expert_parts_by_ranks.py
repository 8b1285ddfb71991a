"""Several ranks train experts that stream in parts: bit for bit as one process does on the means of their gradients. A rank's
share of the experts cuts parts where it likes, and a part may be one rank's altogether."""

from __future__ import annotations

import sys
from typing import Any

import plain_torch
import pytest
import torch
from engine_runs import attach, train_on_means, train_streamed
from part_models import EXPERTS, tiny_experts
from plain_torch import PlainRun, token_batches
from profile_cache import remembering
from rank_runs import join_ranks, runs_of

from megatrain_accelerate.gradients import exchange
from megatrain_accelerate.plan import device_plan

FEW_TOKENS = {"batch": 1, "length": 2}
"""They meet 4 of 6 experts at most."""

SAME_BATCHES: dict[str, dict[str, Any]] = {
    "two parts": {"expert_parts": 2},
    "in fp32": {"expert_parts": 4, "bf16": False},
    "serial": {"expert_parts": 4, "schedule": "serial"},
    "gathered, three slots": {"expert_parts": 4, "gathers": True, "slots": 3},
    "accumulation": {"expert_parts": 4, "accumulation": 2},
    "accumulation in bf16": {"expert_parts": 4, "accumulation": 2, "accumulation_dtype": "bf16"},
    "bf16 moments": {"expert_parts": 2, "moments_dtype": "bf16"},
    "8-bit moments": {"expert_parts": 2, "moments_dtype": "int8"},
    "a matrix frozen": {"expert_parts": 3, "frozen": "down_proj"},
    "states of the layers on the device": {"expert_parts": 3, "device_states": -1},
    "parts without tokens": {"expert_parts": EXPERTS, "tokens": FEW_TOKENS},
    "parts without tokens, accumulation": {"expert_parts": EXPERTS, "tokens": FEW_TOKENS, "accumulation": 2},
}
"""How the trainings differ in which all ranks get the same batches: the mean of two equal gradients is the gradient."""
OTHER_BATCHES: dict[str, dict[str, Any]] = {
    "one part": {"expert_parts": 1},
    "two parts": {"expert_parts": 2},
    "four parts": {"expert_parts": 4},
    "parts without tokens": {"expert_parts": EXPERTS, "tokens": FEW_TOKENS},
    "one part, in pieces": {"expert_parts": 1},
    "two parts, in pieces": {"expert_parts": 2},
    "parts without tokens, accumulation": {"expert_parts": EXPERTS, "tokens": FEW_TOKENS, "accumulation": 2},
}
ACCUMULATED = [name for name in OTHER_BATCHES if "accumulation" in OTHER_BATCHES[name]]

pytestmark = pytest.mark.usefixtures("profiled_once")


def model_of(frozen: str | None = None) -> torch.nn.Module:
    model = tiny_experts()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    return model


def batches_of(how: dict[str, Any], ranks: int) -> list[torch.Tensor]:
    """Of all ranks: three steps of one batch of each, or two of two."""
    return token_batches((4 if "accumulation" in how else 3) * ranks, **how.get("tokens", {}))


def train(rank: int, ranks: int, how: dict[str, Any]) -> PlainRun:
    """On every ``ranks``-th batch, from that of this rank on."""
    settings = {"max_norm": None, **how}
    batches = batches_of(how, ranks)[rank::ranks]
    settings.pop("tokens", None)
    return train_streamed(model_of(settings.pop("frozen", None)), batches, **settings)


def parts_chosen(rank: int) -> int:
    """Into how many parts experts are cut where the second rank has less memory than the first."""
    with torch.device("meta"):
        model = tiny_experts(num_hidden_layers=1, num_experts=64, hidden_size=512, moe_intermediate_size=1024)
    engine = attach(model, training=False, expert_parts="auto", gpu_memory_gib=4.0 if rank == 0 else 1.2)
    found = sum(len(experts.parts) for experts in engine.runtime.experts)
    engine.close()
    return found


def main() -> None:
    """What each rank does."""
    device_plan.profile_step = remembering(device_plan.profile_step, {})
    rank, ranks, folder = join_ranks(), int(sys.argv[2]), sys.argv[1]
    torch.Tensor.sqrt = plain_torch.ieee_sqrt
    runs = {}
    for name, how in OTHER_BATCHES.items():
        with pytest.MonkeyPatch.context() as patch:
            if name.endswith("in pieces"):
                patch.setattr(exchange, "_BUCKET_BYTES", 4096)  # less than a layer's share
            runs[f"other, {name}"] = train(rank, ranks, how)
    few = {"expert_parts": 2, "tokens": FEW_TOKENS, "accumulation": 2}
    runs["two parts, accumulation"] = train(rank, ranks, few)
    runs["clipped"] = train(rank, ranks, {"expert_parts": 4, "max_norm": 0.5})
    runs["clipped, one part"] = train(rank, ranks, {"expert_parts": 1, "max_norm": 0.5})
    runs["parts"] = parts_chosen(rank)
    if ranks == 2:
        runs |= {f"same, {name}": train(0, 1, how) for name, how in SAME_BATCHES.items()}
    torch.save(runs, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, PlainRun]]:
    return runs_of(__file__, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, PlainRun]]:
    return runs_of(__file__, 3, tmp_path_factory.mktemp("three"))


@pytest.fixture(params=["two", pytest.param("three", marks=pytest.mark.long)])
def runs(request: pytest.FixtureRequest) -> list[dict[str, PlainRun]]:
    found: list[dict[str, PlainRun]] = request.getfixturevalue(request.param)
    return found


def assert_equal(ours: PlainRun, other: PlainRun) -> None:
    for name, master in other.masters.items():
        assert torch.equal(ours.masters[name], master), f"{name}: masters differ"
        assert torch.equal(ours.weights[name], other.weights[name]), f"{name}: weights differ"


@pytest.mark.parametrize("how", SAME_BATCHES)
def test_ranks_with_equal_batches_train_as_one_process(two: list[dict[str, PlainRun]], how: str) -> None:
    alone = train(0, 1, SAME_BATCHES[how])
    for run in two:
        assert run[f"same, {how}"].losses == alone.losses
        assert_equal(run[f"same, {how}"], alone)


@pytest.mark.usefixtures("exact_torch_sqrt")
@pytest.mark.parametrize("how", [name for name in OTHER_BATCHES if name not in ACCUMULATED])
def test_ranks_train_on_the_mean_of_their_gradients_bit_by_bit(runs: list[dict[str, PlainRun]], how: str) -> None:
    settings = dict(OTHER_BATCHES[how])
    batches = batches_of(settings, len(runs))
    settings.pop("tokens", None)
    plain = train_on_means(model_of(), batches, len(runs), **settings)
    for run in runs:
        assert_equal(run[f"other, {how}"], plain)


@pytest.mark.parametrize("how", ACCUMULATED)
def test_parts_without_tokens_add_up_as_others_do(runs: list[dict[str, PlainRun]], how: str) -> None:
    for run in runs:
        assert run[f"other, {how}"].losses == run["two parts, accumulation"].losses
        assert_equal(run[f"other, {how}"], runs[0]["two parts, accumulation"])


def test_ranks_clip_by_one_norm_on_all_of_them(runs: list[dict[str, PlainRun]]) -> None:
    first = runs[0]["clipped"]
    # fp32 sums of other parts. A factor that differs in its last bit flips bf16 weights here and there, so only the first
    # step's norms are those of the same weights; experts have a tenth of them.
    assert first.norms[0] == pytest.approx(runs[0]["clipped, one part"].norms[0], rel=1e-6)
    assert first.norms == pytest.approx(runs[0]["clipped, one part"].norms, rel=2e-3)
    assert min(first.norms) > 0.5
    for run in runs:
        assert run["clipped"].norms == first.norms
        assert_equal(run["clipped"], first)


def test_ranks_cut_experts_alike_for_the_one_with_the_least_memory(runs: list[dict[str, Any]]) -> None:
    (found,) = {run["parts"] for run in runs}
    assert found > 1


if __name__ == "__main__":
    main()
