"""Kinds of models and uses of layers as cases, each run in plain PyTorch and on the engine, and compared bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from engine_runs import attach
from plain_torch import tiny_model, token_batches
from torch import nn

from megatrain_accelerate.engine import Engine
from megatrain_accelerate.plan.layer_discovery import discover_layers
from megatrain_accelerate.transfer.prefetch import Prefetcher
from megatrain_accelerate.transfer.streams import WeightSlot

Step = Callable[[Any], list[torch.Tensor]]
Failure = type[BaseException]

PLACEMENTS: dict[str, tuple[float, dict[str, int]]] = {
    "kept": (1.0, {"slots": 2}),
    "recomputed": (0.0, {"slots": 2}),
    "mixed": (0.5, {"slots": 2}),
    "recomputed_with_3_slots": (0.0, {"slots": 3}),
    "fitting": (1.0, {"device_layers": -1}),
}
"""The share of the layers whose activations are kept, counted from the model's end, and settings."""

RECOMPUTED = ("recomputed", "mixed", "recomputed_with_3_slots")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model and what a script does with it."""

    build: Callable[[], nn.Module]
    """The model in fp32, in train mode; the seed is set before."""

    step: Step
    """Forwards and backwards on the model; returns what is compared besides the gradients. The seed is set before."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the engine."""

    plain_build: Callable[[], nn.Module] | None = None
    """The model of the plain run, if it is another one."""

    placements: Iterable[str] = tuple(PLACEMENTS)
    """Those under which the outcome is to be that of the plain run."""

    collected: bool = False
    """Whether gradients are looked at as clipping and a step do: a backward that goes through no output of a layer tells of
    none before."""


def each_placement(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    """Parametrises a test by ``case`` and ``placement``."""
    return pytest.mark.parametrize(
        ("case", "placement"),
        [
            pytest.param(case, placement, id=f"{name}-{placement}")
            for name, case in cases.items()
            for placement in case.placements
        ],
    )


@dataclasses.dataclass
class Outcome:
    """What a case left: its observations, and each parameter's gradient by name."""

    observed: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]


def _take(case: Case, model: nn.Module, collect: Callable[[], None] = lambda: None) -> Outcome:
    torch.manual_seed(1)
    observed = [seen.detach().clone() for seen in case.step(model)]
    if case.collected:
        collect()
    # Where the next dropout would begin.
    observed.append(torch.rand(2))
    gradients = {name: p.grad if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    return Outcome(observed, gradients)


@functools.cache
def run_plainly(case: Case) -> Outcome:
    """The case in plain PyTorch."""
    torch.manual_seed(0)
    return _take(case, (case.plain_build or case.build)())


def spoil_released_slots(prefetcher: Prefetcher) -> None:
    """A slot that no layer uses holds NaN, until it is filled again: whoever reads it too late gets NaN."""
    release = prefetcher.release

    def release_and_spoil(slot: WeightSlot) -> None:
        release(slot)
        if not slot.user_count and slot in prefetcher.slots:  # others are the home of what they hold
            slot.buffer.fill_(0xFF)
            slot.contents = None

    prefetcher.release = release_and_spoil  # type: ignore[method-assign]


def leases_ended(device: str) -> list[int]:
    """The layers, of four, in the order in which backward gave their slots back. The third layer is frozen."""
    model = tiny_model(num_hidden_layers=4).train()
    model.model.layers[2].requires_grad_(False)
    engine = attach(model, device=device, slots=5)
    prefetcher, ended = engine.runtime.prefetcher, list[int]()
    end_lease = prefetcher.end_lease

    def noting(index: int, prefetches: bool = True) -> None:
        ended.extend({index} & prefetcher.leases.keys())
        end_lease(index, prefetches)

    prefetcher.end_lease = noting  # type: ignore[method-assign]
    (ids,) = token_batches(1)
    model(input_ids=ids.to(device), labels=ids.to(device)).loss.backward()
    engine.close()
    return ended


@contextlib.contextmanager
def placed(model: nn.Module, placement: str, **settings: Any) -> Iterator[Engine]:
    """``model`` streams and computes in fp32, under one of :data:`PLACEMENTS`. Slots that nobody uses are spoilt."""
    share, of_placement = PLACEMENTS[placement]
    layers = len(discover_layers(model, settings.get("layer_classes", ())).layers)
    engine = attach(model, bf16=False, kept_layers=int(share * layers), **{**of_placement, **settings})
    spoil_released_slots(engine.runtime.prefetcher)
    try:
        yield engine
    finally:
        engine.close()


def run_on_engine(case: Case, placement: str) -> Outcome:
    """The case on a model whose layers stream."""
    torch.manual_seed(0)
    model = case.build()
    with placed(model, placement, **case.settings) as engine:
        return _take(case, model, engine.runtime.collect_gradients)


def assert_same_outcome(ours: Outcome, plain: Outcome) -> None:
    """Observations and gradients are equal element by element, and the same parameters have none."""
    assert any(gradient is not None for gradient in plain.gradients.values())
    assert ours.gradients.keys() == plain.gradients.keys()
    observed = ((f"observation {place}", seen) for place, seen in enumerate(plain.observed))
    pairs = zip([*ours.observed, *ours.gradients.values()], [*observed, *plain.gradients.items()], strict=True)
    differing = {}
    for found, (name, expected) in pairs:
        if found is None or expected is None:
            if found is not expected:
                differing[name] = "only one run has it"
        elif not torch.equal(found, expected):
            differing[name] = f"by {float((found - expected).abs().max() / expected.abs().max()):.1e} of the largest element"
    assert not differing, f"{len(differing)} values differ: {differing}"


def check(case: Case, placement: str) -> None:
    """The test of a case."""
    assert_same_outcome(run_on_engine(case, placement), run_plainly(case))


def backward_of(loss: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Runs backward; the loss is what is observed."""
    loss.backward(**options)
    return [loss.detach()]


ROWS, WIDTH = 3, 8
"""Of the inputs of a :class:`Net`."""


class Layer(nn.Module):
    """A residual MLP with dropout and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation, self.dropout = nn.Tanh(), nn.Dropout(0.2)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(self.activation(self.up(hidden * self.scale))))

    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden + self.mlp(hidden)


class LeavesHiddenStatesBehind(Layer):
    """Leaves a loss of its own on itself."""

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden = super().forward(hidden)
        self.left = hidden.pow(2).mean()
        return hidden


Run = Callable[[Any, torch.Tensor], torch.Tensor]


def one_after_another(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The layers in a row."""
    for layer in layers:
        hidden = layer(hidden)
    return hidden


class Net(nn.Module):
    """Four layers behind a projection, and how their parent runs them."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, run: Run = one_after_another) -> None:
        super().__init__()
        self.projection, self.run = nn.Linear(WIDTH, WIDTH), run
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.run(self.layers, self.projection(inputs))


def random_rows(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    """Inputs of a :class:`Net`, (rows, WIDTH)."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    """A forward's loss."""
    return model(random_rows(seed, rows)).pow(2).sum()


def one_step(model: nn.Module) -> list[torch.Tensor]:
    """A forward and a backward."""
    return backward_of(loss_of(model))


def net(layer: Callable[[], nn.Module] = Layer, run: Run = one_after_another, step: Step = one_step, **more: Any) -> Case:
    """The case of a :class:`Net`."""
    return Case(build=functools.partial(Net, layer, run), step=step, **more)
