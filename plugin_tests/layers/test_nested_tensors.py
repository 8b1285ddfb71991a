"""Tensors within arguments and results."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import CausalLMOutput

from megatrain_accelerate.layers.nested_tensors import tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


ONE, TWO, THREE = (torch.full((1,), float(number)) for number in range(3))


@pytest.mark.parametrize(
    "tree",
    [
        ONE,
        None,
        torch.nn.Parameter(TWO),
        ((ONE, [TWO, None, 3.0, "text"]), {"key": THREE, "other": {"inner": (ONE,)}}),
        Pair(ONE, [TWO]),
        collections.OrderedDict(b=ONE, a=TWO),
        collections.deque([ONE, TWO]),
        CausalLMOutput(loss=ONE, logits=TWO, hidden_states=(THREE, ONE)),
        torch.Size([2, 3]),
        {ONE: 1},
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_the_tensors_of_a_tree_are_those_among_torchs_leaves(tree: Any) -> None:
    expected = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert list(map(id, tensors_in(tree))) == list(map(id, expected))
