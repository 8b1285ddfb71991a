"""The store's handle on a parameter knows whose its data and its gradient are, and whether somebody wrote to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatrain_accelerate.store.parameter import ParamHandle


@pytest.fixture
def handle() -> ParamHandle:
    """Of a parameter that shows the store's weight."""
    made = ParamHandle(nn.Parameter(torch.ones(4, dtype=torch.bfloat16)))
    assert made.is_written, "nothing is known of a parameter before the store shows its own"
    made.show(torch.ones(4, dtype=torch.bfloat16))
    return made


def write_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(2)


def replace_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize("write", [write_in_place, replace_data])
def test_what_somebody_writes_counts_until_the_store_shows_its_own_again(
    handle: ParamHandle, write: Callable[[nn.Parameter], None]
) -> None:
    assert not handle.is_written
    write(handle.parameter)
    assert handle.is_written
    handle.show(torch.zeros(4, dtype=torch.bfloat16))
    assert not handle.is_written
    assert handle.parameter.sum() == 0


def test_the_stores_own_writes_do_not_count_and_announced_ones_do(handle: ParamHandle) -> None:
    handle.fill(torch.full((4,), 3.0, dtype=torch.bfloat16))
    assert handle.parameter.sum() == 12
    assert not handle.is_written
    handle.mark_written()
    assert handle.is_written


def test_data_that_one_store_takes_over_count_as_written_for_another_that_holds_the_parameter(handle: ParamHandle) -> None:
    other = ParamHandle(handle.parameter)
    other.show(torch.ones(4, dtype=torch.bfloat16))
    assert not handle.is_written, "the other store's copy agrees with this one's master"
    replace_data(handle.parameter)
    other.show(torch.ones(4, dtype=torch.bfloat16))
    assert handle.is_written
    assert not other.is_written
    handle.show(torch.ones(4, dtype=torch.bfloat16))
    other.give_back(torch.zeros(4, dtype=torch.bfloat16))
    assert handle.parameter.sum() == 4, "given back by one store, it shows the other's copy"
    assert not handle.is_written


def test_after_a_step_on_masters_that_fails_the_parameter_is_as_before(handle: ParamHandle) -> None:
    parameter, gradient = handle.parameter, torch.ones(4, dtype=torch.bfloat16)
    handle.set_gradient(gradient)
    handle.note_fp32_sum()

    def step() -> None:
        with handle.replaced(torch.zeros(4), torch.full((4,), 5.0)):
            assert (parameter.dtype, parameter.grad.sum()) == (torch.float32, 20)
            write_in_place(parameter)
            parameter.grad.zero_()
            raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        step()
    assert torch.equal(parameter.detach(), torch.ones(4, dtype=torch.bfloat16))
    assert parameter.grad is gradient
    assert handle.has_fp32_sum
    assert not handle.is_written


def test_a_gradient_at_the_address_of_a_noted_sum_is_no_sum(handle: ParamHandle) -> None:
    gradient = torch.ones(4, dtype=torch.bfloat16)
    handle.set_gradient(gradient)
    assert not handle.has_fp32_sum
    handle.note_fp32_sum()
    assert handle.has_fp32_sum
    handle.parameter.grad = gradient.data
    assert handle.parameter.grad.data_ptr() == gradient.data_ptr()
    assert handle.parameter.grad._version == gradient._version
    assert not handle.has_fp32_sum


def test_a_sum_that_is_set_aside_is_one_again_and_one_that_is_set_anew_is_none(handle: ParamHandle) -> None:
    gradient = torch.ones(4, dtype=torch.bfloat16)
    handle.set_gradient(gradient)
    handle.note_fp32_sum()
    handle.set_gradient(None, keeps_sum=True)
    assert not handle.has_fp32_sum
    handle.set_gradient(gradient, keeps_sum=True)
    assert handle.has_fp32_sum
    handle.set_gradient(None)
    handle.set_gradient(gradient)
    assert not handle.has_fp32_sum
