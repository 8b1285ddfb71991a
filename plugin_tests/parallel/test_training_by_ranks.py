"""Several ranks that share one store train as one process does: bit for bit, over placements, schedules and moments."""

from __future__ import annotations

import sys
from typing import Any

import plain_torch
import pytest
import torch
from engine_runs import train_on_means, train_streamed
from plain_torch import PlainRun, tiny_model, token_batches, train_bf16_with_masters
from profile_cache import remembering
from rank_runs import join_ranks, runs_of

from megatrain_accelerate.plan import device_plan

SIZES = {"hidden_size": 32, "intermediate_size": 88}

SAME_BATCHES: dict[str, dict[str, Any]] = {
    "streamed": {},
    "in fp32": {"bf16": False},
    "serial, three slots": {"schedule": "serial", "slots": 3},
    "gathered": {"gathers": True},
    "gathered, in fp32, three slots": {"gathers": True, "bf16": False, "slots": 3},
    "two layers kept": {"kept_layers": 2},
    "two layers on the device": {"device_layers": 2},
    "all on the device": {"device_layers": 4, "kept_layers": 4},
    "states of three on the device": {"device_states": 3},
    "states on the device, in fp32": {"device_states": -1, "bf16": False},
    "states on the device, bf16 moments": {"device_states": -1, "moments_dtype": "bf16"},
    "states on the device, accumulation": {"device_states": -1, "accumulation": 3},
    "gathered, one layer and states of others on the device": {"gathers": True, "device_layers": 1, "device_states": 2},
    "bf16 moments": {"moments_dtype": "bf16"},
    "8-bit moments": {"moments_dtype": "int8"},
    "pieces of a batch": {"micro_batch_size": 1},
    "accumulation": {"accumulation": 3},
    "accumulation, two layers on the device": {"accumulation": 3, "device_layers": 2},
    "accumulation in bf16": {"accumulation": 3, "accumulation_dtype": "bf16"},
    "gathered, accumulation, two layers on the device": {"gathers": True, "accumulation": 3, "device_layers": 2},
    "a part frozen": {"frozen": "mlp"},
    "gathered, a part frozen": {"gathers": True, "frozen": "mlp"},
}
"""How the trainings differ in which all ranks get the same batches: the mean of two equal gradients is the gradient."""

OTHER_BATCHES: dict[str, dict[str, Any]] = {
    "streamed": {},
    "gathered": {"gathers": True},
    "two layers on the device": {"device_layers": 2},
    "all on the device": {"device_layers": 4, "kept_layers": 4},
    "states on the device": {"device_states": -1},
    "accumulation": {"accumulation": 2},
    "serial": {"schedule": "serial"},
    "8-bit moments": {"moments_dtype": "int8"},
}


def batches_of(how: dict[str, Any], ranks: int = 1) -> list[torch.Tensor]:
    """Of all ranks: four steps of one batch of each, or two of several."""
    return token_batches((6 if "accumulation" in how else 4) * ranks)


def train(batches: list[torch.Tensor], settings: dict[str, Any]) -> PlainRun:
    model, settings = tiny_model(**SIZES), dict(settings)
    frozen = settings.pop("frozen", None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    return train_streamed(model, batches, **{"max_norm": None, **settings})


pytestmark = pytest.mark.usefixtures("profiled_once")


def main() -> None:
    """What each rank does."""
    device_plan.profile_step = remembering(device_plan.profile_step, {})
    rank, ranks, folder = join_ranks(), int(sys.argv[2]), sys.argv[1]
    torch.Tensor.sqrt = plain_torch.ieee_sqrt
    runs = {f"other, {name}": train(batches_of(how, ranks)[rank::ranks], how) for name, how in OTHER_BATCHES.items()}
    own = batches_of({}, ranks)[rank::ranks]
    runs["clipped"] = train(own, {"max_norm": 0.5})
    runs["clipped, states on the device"] = train(own, {"max_norm": 0.5, "device_states": -1})
    runs["clipped, on the device"] = train(own, {"max_norm": 0.5, "device_layers": 4, "kept_layers": 4})
    if ranks == 2:
        runs |= {f"same, {name}": train(batches_of(how), how) for name, how in SAME_BATCHES.items()}
    torch.save(runs, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, PlainRun]]:
    return runs_of(__file__, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, PlainRun]]:
    return runs_of(__file__, 3, tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, PlainRun]]:
    return runs_of(__file__, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(params=["two", *(pytest.param(more, marks=pytest.mark.long) for more in ("three", "four"))])
def runs(request: pytest.FixtureRequest) -> list[dict[str, PlainRun]]:
    found: list[dict[str, PlainRun]] = request.getfixturevalue(request.param)
    return found


def assert_equal(ours: PlainRun, other: PlainRun, but_losses: bool = False) -> None:
    assert but_losses or ours.losses == other.losses
    for name, master in other.masters.items():
        assert torch.equal(ours.masters[name], master), f"{name}: masters differ"
        assert torch.equal(ours.weights[name], other.weights[name]), f"{name}: weights differ"


@pytest.mark.parametrize("how", SAME_BATCHES)
def test_ranks_with_equal_batches_train_as_one_process(two: list[dict[str, PlainRun]], how: str) -> None:
    alone = train(batches_of(SAME_BATCHES[how]), SAME_BATCHES[how])
    for run in two:
        assert_equal(run[f"same, {how}"], alone)


@pytest.mark.usefixtures("exact_torch_sqrt")
@pytest.mark.parametrize("how", OTHER_BATCHES)
def test_ranks_train_on_the_mean_of_their_gradients_bit_by_bit(runs: list[dict[str, PlainRun]], how: str) -> None:
    batches, accumulation = batches_of(OTHER_BATCHES[how], len(runs)), OTHER_BATCHES[how].get("accumulation", 1)
    if "moments_dtype" in OTHER_BATCHES[how]:
        plain = train_on_means(tiny_model(**SIZES), batches, len(runs), **OTHER_BATCHES[how])
    else:
        plain = train_bf16_with_masters(
            tiny_model(**SIZES), batches, max_norm=None, accumulation=accumulation, ranks=len(runs)
        )
    for run in runs:
        assert_equal(run[f"other, {how}"], plain, but_losses=True)


@pytest.mark.usefixtures("exact_torch_sqrt")
@pytest.mark.parametrize("how", ["clipped", "clipped, on the device", "clipped, states on the device"])
def test_ranks_clip_by_one_norm_on_all_of_them(runs: list[dict[str, PlainRun]], how: str) -> None:
    batches, norms = batches_of({}, len(runs)), runs[0][how].norms
    plain = train_bf16_with_masters(tiny_model(**SIZES), batches, max_norm=0.5, ranks=len(runs), clip_by=norms)
    assert norms == pytest.approx(plain.norms, rel=1e-5)  # fp32 sums of other parts
    assert min(norms) > 0.5
    for run in runs:
        assert run[how].norms == norms
        assert_equal(run[how], plain, but_losses=True)


if __name__ == "__main__":
    main()
