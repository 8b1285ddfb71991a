"""In a run without data, masks of known values fix the shapes of what they select, and lists of tensors are numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from megatrain_accelerate.plan.fake_runs import KnownValues, NumbersOfTensors

IDS_BT = torch.tensor([[5, 9, 9, 2], [9, 3, 2, 2]])
HIDDEN_BTD = torch.ones(2, 4, 8)


def select(ids_BT: torch.Tensor, hidden_BTD: torch.Tensor) -> torch.Tensor:
    return hidden_BTD[ids_BT == 9]


def select_rows(ids_BT: torch.Tensor, hidden_BTD: torch.Tensor) -> torch.Tensor:
    return hidden_BTD[:, (ids_BT[0] == 9)]


@pytest.mark.parametrize("selection", [select, select_rows], ids=["tokens", "columns"])
def test_a_selection_has_the_shape_that_it_has_with_data(selection: Callable[..., torch.Tensor]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, KnownValues() as values:
        ids, hidden = mode.from_tensor(IDS_BT), mode.from_tensor(HIDDEN_BTD).requires_grad_()
        values.learn(ids, IDS_BT)
        found = selection(ids, hidden)
        found.sum().backward()
    assert found.shape == selection(IDS_BT, HIDDEN_BTD).shape
    assert hidden.grad is not None
    assert hidden.grad.shape == HIDDEN_BTD.shape


def test_a_mask_of_unknown_values_selects_nothing_that_is_known() -> None:
    with FakeTensorMode() as mode, KnownValues():
        hidden = mode.from_tensor(HIDDEN_BTD)
        with pytest.raises(DynamicOutputShapeException):
            hidden[hidden > 0]


def test_a_list_of_tensors_becomes_a_tensor_of_their_numbers() -> None:
    # torch.tensor reads the elements' memory: without it Qwen-VL's positions can't be made.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, KnownValues() as values, NumbersOfTensors():
        ids = mode.from_tensor(IDS_BT)
        values.learn(ids, IDS_BT)
        offsets = torch.tensor([row.max() - 2 for row in ids]).unsqueeze(1)
        assert offsets.tolist() == [[7], [7]]
        assert torch.tensor([1, 2]).shape == (2,)
