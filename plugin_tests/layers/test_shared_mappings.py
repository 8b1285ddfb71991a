"""Layers that hand tensors to each other through a mapping have their gradients; what can't be followed is refused."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from engine_runs import attach
from torch import nn

from megatrain_accelerate.errors import UnsupportedError

ROWS = 4


class Block(nn.Module):
    """The first two write an entry each, or overwrite one; the others read both."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        if self.number == 0:
            shared["pair"] = (2 * y, y.square())
        elif self.number == 1:
            shared[7] = y
            shared["pair"] = (shared["pair"][0] + y, shared["pair"][1])
        else:
            y = y + shared["pair"][0] * shared["pair"][1] + shared[7]
        return x + y


class Model(nn.Module):
    def __init__(self, make: Any = UserDict) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(number) for number in range(4))
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        shared = self.make()
        for block in self.blocks:
            x = block(x, shared=shared)
        return (x + shared[7]).square().mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def batch() -> torch.Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "settings",
    [{}, {"kept_layers": 3}, {"offloaded_layers": 2}, {"device_layers": -1}, {"compile_layers": True}],
    ids=lambda settings: next(iter(settings), "streamed"),
)
def test_gradients_pass_through_the_mapping(settings: dict[str, Any]) -> None:
    model = Model()
    plain = copy.deepcopy(model)
    loss = plain(batch())
    loss.backward()
    engine = attach(model, bf16=False, **settings)
    ours = model(batch())
    ours.backward()
    assert torch.equal(ours, loss)
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected.pop(name)), name
    assert not expected
    with torch.no_grad():
        assert torch.equal(model(batch()), loss)
    engine.close()


def test_the_step_is_profiled() -> None:
    model = Model()
    engine = attach(model, bf16=False)
    model.forward = lambda x, forward=model.forward: {"loss": forward(x)}  # type: ignore[method-assign,misc]
    model(x=batch())["loss"].backward()
    assert engine.device_plan.current.predicted_bytes > 0
    engine.close()


class Notes:
    """A holder of tensors that pytree doesn't know."""

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return self.entries[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value


@pytest.mark.parametrize(
    ("make", "kind"),
    [(dict, "list or dict"), (lambda: {"pair": 0, 7: 0}, "list or dict"), (Notes, "Notes")],
    ids=["added", "replaced", "in_an_object"],
)
def test_what_a_layer_writes_elsewhere_is_refused(make: Any, kind: str) -> None:
    model = Model(make)
    engine = attach(model, bf16=False)
    with pytest.raises(UnsupportedError, match=rf"layer blocks\.0 writes into an argument \({kind}\)"):
        model(batch())
    engine.close()


class Removes(Block):
    """The last one takes an entry away."""

    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        return super().forward(x, shared) if self.number < 3 else x + shared.pop("pair")[0]


@pytest.mark.parametrize("kept_layers", [0, 4])
def test_an_entry_that_a_layer_removes_is_gone_and_has_its_gradient(kept_layers: int) -> None:
    model = Model()
    for block in model.blocks:
        block.__class__ = Removes
    made: list[UserDict[Any, Any]] = []
    model.make = lambda: made.append(UserDict()) or made[-1]
    plain = copy.deepcopy(model)
    engine = attach(model, bf16=False, kept_layers=kept_layers)
    for each in (plain, model):
        each(batch()).backward()
    assert all(list(shared) == [7] for shared in made)
    assert gradients(model).keys() == gradients(plain).keys()
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(model)[name], gradient), name
    engine.close()


class Marking(Block):
    """The first one writes a mark, which the last one looks for."""

    found: bool | None = None

    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        if self.number == 0:
            shared["mark"] = None
        elif self.number == 3:
            self.found = "mark" in shared
        return super().forward(x, shared)


def test_an_entry_whose_value_is_none_is_passed_on() -> None:
    model = Model()
    model.blocks = nn.ModuleList(Marking(number) for number in range(4))
    engine = attach(model, bf16=False)
    model(batch()).backward()
    engine.close()
    assert model.blocks[3].found is True
