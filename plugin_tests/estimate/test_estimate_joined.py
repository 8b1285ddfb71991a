"""An estimate joins the micro-batches of a step where the stock Trainer's training would."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from flat_settings import nested
from machine_options import machine_with
from meta_models import meta_experts, meta_model
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.estimate.forecast import Forecast, Forecaster
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.micro_batches import BatchCut, BatchSplit
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.units import GIB

# A link so slow that a second fetch of the layers costs more than what they compute.
MACHINE = Machine(h2d_bytes=1e8, d2h_bytes=1e8, host_step_parameters=6e9, device_bytes=4e12, device_flops=7e14)
STREAMED = {"kept_layers": 0, "offloaded_layers": 0, "device_layers": 0}
MICRO_BATCHES, SAMPLES, LENGTH = 4, 2, 64


def forecaster(
    model: nn.Module | None = None,
    *,
    machine: Machine = MACHINE,
    micro_batches: int = MICRO_BATCHES,
    gpu_bytes: int = GIB,
    **settings: object,
) -> Forecaster:
    config = MegatrainConfig.from_mapping(nested({**STREAMED, **settings}))
    model = model or meta_model()
    return Forecaster(model, config, machine_with(machine, gpu_bytes), micro_batches)


def forecast(**options: object) -> Forecast:
    return forecaster(**options).forecast(SAMPLES, LENGTH)  # type: ignore[arg-type]


@functools.cache
def known(**options: object) -> Forecast:
    """A forecast that several tests compare with."""
    return forecast(**options)


def test_joined_micro_batches_are_a_batch_in_pieces_with_one_backward() -> None:
    joined = known()
    whole = forecaster(micro_batches=1, micro_batch_size=SAMPLES).forecast(MICRO_BATCHES * SAMPLES, LENGTH)
    assert joined.joined
    assert not whole.joined
    assert (joined.seconds, joined.gpu_bytes) == (whole.seconds, whole.gpu_bytes)
    assert joined.tokens == whole.tokens
    assert joined.micro_batches == MICRO_BATCHES
    # Host memory that accumulation needs is held in any case.
    assert joined.host_bytes > whole.host_bytes


def test_a_setting_of_smaller_pieces_holds_for_joined_micro_batches_too() -> None:
    joined = forecast(micro_batch_size=1)
    whole = forecaster(micro_batches=1, micro_batch_size=1).forecast(MICRO_BATCHES * SAMPLES, LENGTH)
    assert joined.joined
    assert joined.seconds == whole.seconds


def test_micro_batches_are_joined_where_that_pays() -> None:
    apart, joined = known(join_micro_batches=False), known()
    assert not apart.joined
    assert joined.joined
    # Of what a step takes on this link nearly all is fetching layers and sending gradients, once instead of four times.
    assert joined.seconds < 0.5 * apart.seconds


def test_micro_batches_stay_apart_where_all_at_once_do_not_fit() -> None:
    whole = {"token_tile": 0, "tiled_loss": False}
    apart = forecaster(join_micro_batches=False, **whole)
    needs_one, needs_all = (apart.least_gpu_bytes(count * SAMPLES, 512) for count in (1, MICRO_BATCHES))
    between = (needs_one + needs_all) // 2
    found, forced = (
        forecaster(gpu_bytes=between, join_micro_batches=joins, **whole).forecast(SAMPLES, 512) for joins in ("auto", True)
    )
    assert found.fits
    assert not found.joined
    assert forced.joined
    assert not forced.fits


def test_micro_batches_stay_apart_where_all_of_them_would_be_recomputed() -> None:
    # Whose computing is so slow that the link doesn't matter; and room for the activations of one micro-batch.
    slow = dataclasses.replace(MACHINE, h2d_bytes=1e12, d2h_bytes=1e12, device_flops=1e10)
    free = {"kept_layers": None, "machine": slow}
    kept = forecast(join_micro_batches=False, **free)
    assert len(kept.candidate.placement.kept) == len(kept.forecaster.engine.runtime.layers)
    found = forecast(gpu_bytes=kept.gpu_bytes, **free)
    assert not found.joined
    assert found.seconds == kept.seconds


class _WithoutKwargs(nn.Module):
    """A model that doesn't take ``num_items_in_batch``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self._no_split_modules = model._no_split_modules

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> object:
        return self.model(input_ids=input_ids, labels=labels)


def _with_batch_norm(model: nn.Module) -> nn.Module:
    model.add_module("statistics", nn.BatchNorm1d(4, device="meta"))
    return model


def _that_says_no(model: nn.Module) -> nn.Module:
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    return model


def _that_averages() -> nn.Module:
    """Takes ``num_items_in_batch`` among its keywords and leaves it alone."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 512}
    with torch.device("meta"):
        return BertForMaskedLM(BertConfig(**shape)).to(torch.bfloat16).train()


@pytest.mark.parametrize(
    ("model", "joined", "joins"),
    [
        # Whatever the setting says: what would change the loss is never joined.
        pytest.param(lambda: meta_experts(records_routing=False), True, "auto", id="experts"),
        pytest.param(lambda: meta_experts(records_routing=True), False, "auto", id="balanced experts"),
        pytest.param(lambda: meta_experts(records_routing=True), False, True, id="balanced experts that are to be joined"),
        pytest.param(lambda: _WithoutKwargs(meta_model()), False, True, id="no loss arguments"),
        pytest.param(lambda: _that_says_no(meta_model()), False, True, id="says that it takes none"),
        pytest.param(lambda: _with_batch_norm(meta_model()), False, True, id="batch normalisation"),
        pytest.param(lambda: _that_averages(), False, True, id="averages all the same"),
    ],
)
def test_micro_batches_are_joined_only_where_the_loss_stays_the_same(model: object, joined: bool, joins: object) -> None:
    assert forecast(model=model(), join_micro_batches=joins).joined is joined  # type: ignore[operator]


def test_experts_in_parts_are_fetched_for_each_piece_all_the_same() -> None:
    assert not forecast(model=meta_experts(records_routing=False), expert_parts=2).joined


def test_one_micro_batch_is_nothing_to_join() -> None:
    assert not forecast(micro_batches=1).joined


def test_a_batch_that_cannot_be_cut_stays_in_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(layer: StreamedLayer, args: object, kwargs: object, cut: BatchCut) -> object:
        if cut.size is not None:
            raise UnsupportedError("it can't be cut")
        return of_call(layer, args, kwargs, cut)

    of_call = BatchSplit.of_call
    apart = forecast(join_micro_batches=False)
    monkeypatch.setattr(BatchSplit, "of_call", refuses)
    found = forecast()
    assert not found.joined
    assert found.seconds == apart.seconds


def test_what_was_found_for_pieces_is_not_taken_for_whole_batches() -> None:
    used = forecaster()
    # Of so few sequences layers are traced as they are; more are extrapolated.
    assert used.forecast(1, LENGTH).joined
    assert used.engine.runtime.batch_cut.asked is None
    assert used.plan.micro_batches == MICRO_BATCHES
    fresh = forecaster(join_micro_batches=False)
    for ours, theirs in zip(
        used.fastest(MICRO_BATCHES, LENGTH)[0].profiles.values(),
        fresh.fastest(MICRO_BATCHES, LENGTH)[0].profiles.values(),
        strict=True,
    ):
        assert ours == theirs
        assert ours.pieces == 1


@functools.cache
def least_gpu_bytes(joins: bool | str) -> int:
    return forecaster(join_micro_batches=joins).least_gpu_bytes(1, LENGTH)


def test_the_least_memory_is_that_of_the_way_that_takes_less() -> None:
    # Gradients of micro-batches wait to be added up, in memory of their own; those of a joined batch leave at once.
    apart, joined, free = map(least_gpu_bytes, (False, True, "auto"))
    assert apart != joined
    assert free == min(apart, joined)


def test_a_row_that_fits_is_of_a_model_that_fits() -> None:
    least = least_gpu_bytes("auto")
    found = forecaster(gpu_bytes=least).forecast(1, LENGTH)
    assert found.fits
    assert not forecaster(gpu_bytes=least - 1).forecast(1, LENGTH).fits


def test_joining_must_pay_clearly() -> None:
    apart, joined = known(join_micro_batches=False).candidate, known().candidate
    assert joined.is_worth_it(apart)
    assert joined.is_worth_it(None)
    assert not apart.is_worth_it(apart)
    little_less = dataclasses.replace(apart.time, seconds=0.998 * apart.time.seconds)
    assert not dataclasses.replace(apart, time=little_less).is_worth_it(apart)
