"""What layers take, return, change and leave behind, and what their parents do with it: gradients are those of plain PyTorch,
element by element, whatever becomes of the layers' activations.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from layer_uses import (
    RECOMPUTED,
    ROWS,
    WIDTH,
    Case,
    Layer,
    LeavesHiddenStatesBehind,
    Net,
    check,
    each_placement,
    loss_of,
    net,
    one_after_another,
    one_step,
    placed,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("profiled_once")

# ------------------------------------------------------------------------------ parents that change what layers return


def changed_in_place(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        hidden = layer(hidden)
        hidden += 1
        hidden.mul_(0.5)
    return hidden


class ReturnsView(Layer):
    """Returns a view of its result, and nothing besides it."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden).view(ROWS, 2, WIDTH // 2), None


def view_changed_in_place(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        view, _ = layer(hidden)
        view[:, 0] *= 2
        hidden = view.reshape(ROWS, WIDTH)
    return hidden


class ReturnsItsInput(Layer):
    """Passes its input on if it is told to."""

    def forward(self, hidden: torch.Tensor, passes: bool = False) -> Any:
        return hidden if passes else super().forward(hidden)


def passed_on_and_changed_in_place(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    for place, layer in enumerate(layers):
        passes = place % 2 == 1
        hidden = layer(hidden, passes=passes)
        if passes:
            hidden = hidden.add_(1)
    return hidden


class WritesToItsInput(Layer):
    """Adds its result to its input in place."""

    def forward(self, hidden: torch.Tensor) -> Any:
        result = self.mlp(hidden * 1)
        hidden += result
        return hidden


def written_to(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 1
    for layer in layers:
        layer(hidden)
    return hidden


IN_PLACE = {
    "output": net(run=changed_in_place),
    "view_of_an_output": net(ReturnsView, view_changed_in_place),
    "input_passed_on": net(ReturnsItsInput, passed_on_and_changed_in_place),
    "input_within_a_kept_layer": net(WritesToItsInput, written_to, placements=["kept"]),
}


@each_placement(IN_PLACE)
def test_changes_in_place_of_what_layers_take_and_return_are_differentiated(case: Case, placement: str) -> None:
    check(case, placement)


@pytest.mark.parametrize("placement", RECOMPUTED)
def test_a_layer_that_writes_to_its_input_and_is_to_run_again_is_an_error(placement: str) -> None:
    model = Net(WritesToItsInput, written_to)
    with placed(model, placement), pytest.raises(RuntimeError, match=r"in ?place"):
        one_step(model)


class UsesItsInputTwice(Layer):
    """Multiplies its result by its input, which autograd saves for this."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.mlp(hidden) * hidden


def inputs_changed_after_the_call(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        output = layer(hidden)
        hidden.add_(1)
        hidden = hidden + output
    return hidden


@pytest.mark.parametrize("offloaded_inputs", [False, True])
@pytest.mark.parametrize("placement", ["kept", *RECOMPUTED])
def test_an_input_that_is_changed_in_place_after_the_call_is_an_error(placement: str, offloaded_inputs: bool) -> None:
    model = Net(UsesItsInputTwice, inputs_changed_after_the_call)
    with placed(model, placement, offloaded_inputs=offloaded_inputs):
        loss = loss_of(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ------------------------------------------------------------------------------ what layers take and return


@dataclasses.dataclass
class State:
    """What layers hand to each other."""

    hidden: torch.Tensor
    nothing: object = None
    more: tuple[Any, ...] = ()


class TakesState(Layer):
    """Takes and returns containers of several kinds."""

    def forward(self, state: State, *, weights: dict[str, torch.Tensor] | None = None) -> Any:
        assert weights is not None
        hidden = super().forward(state.hidden)
        return State(hidden, None, (weights["mean"] * hidden.mean(), [hidden.sum(), None], "text"))


def through_containers(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    state, mean, total = State(hidden), hidden.mean(), torch.zeros(())
    for layer in layers:
        state = layer(state, weights={"mean": mean})
        total = total + state.more[0] + state.more[1][0]
    return state.hidden * total


class HandsOutItsWeights(Layer):
    """Returns a parameter, and a view of another."""

    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden), self.scale, self.up.weight[:2]


def weights_used_outside(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        hidden, scale, weight = layer(hidden)
        hidden = hidden * scale + weight.sum(0)
    return hidden


def weights_used_at_the_end(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    scales = []
    for layer in layers:
        hidden, scale, _ = layer(hidden)
        scales.append(scale)
    return hidden + torch.stack(scales).sum(0)


def evaluated_and_trained(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        evaluated = loss_of(model)
    return [evaluated, *one_step(model)]


def branches(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    left = right = hidden
    for place in (0, 2):
        left, right = layers[place](left), layers[place + 1](right)
        left, right = left + right.mean(), right * left.std()
    return left + right


class LeavesWeightsBehind(Layer):
    """Leaves something on itself that depends on its weights alone."""

    def forward(self, hidden: torch.Tensor) -> Any:
        self.left = self.scale + 0
        return super().forward(hidden)


def what_is_left_alone(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    one_after_another(layers, hidden.detach())
    return torch.stack([layer.left.sum() for layer in layers])


def what_is_left_too(layers: Any, hidden: torch.Tensor) -> torch.Tensor:
    hidden = one_after_another(layers, hidden)
    return hidden + torch.stack([layer.left.sum() for layer in layers]).sum()


class RunsInAnotherThread(nn.Linear):
    """Its node was made in a thread that had made many before, and autograd orders nodes by the numbers of their threads."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        def work() -> None:
            for _ in range(3000):
                _ = self.weight * 1
            made.append(nn.functional.linear(hidden, self.weight, self.bias))

        made: list[torch.Tensor] = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return made[0]


class BeginsWithItsWeights(Layer):
    """A node that depends on weights alone is made after the layer's input, and isn't above it in the graph."""

    def forward(self, hidden: torch.Tensor) -> Any:
        doubled = self.scale * 2
        hidden = hidden * doubled
        return hidden + self.down(self.activation(self.up(hidden)))


def fed_by_another_thread() -> nn.Module:
    model = Net(BeginsWithItsWeights)
    model.projection = RunsInAnotherThread(WIDTH, WIDTH)
    return model


def watched_by_backward_hooks(model: Any) -> list[torch.Tensor]:
    """Hooks of modules see the gradients of each layer's output and input."""

    def note(layer: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
        seen.extend([of_inputs[0].clone(), of_outputs[0].clone()])

    seen: list[torch.Tensor] = []
    handles = [layer.register_full_backward_hook(note) for layer in model.layers]
    loss = one_step(model)
    for handle in handles:
        handle.remove()
    assert len(seen) == 2 * len(model.layers)
    return [*loss, *seen]


INTERFACES = {
    "containers": net(TakesState, through_containers),
    "weights_handed_out": net(HandsOutItsWeights, weights_used_outside),
    "weights_handed_out_without_gradients": net(HandsOutItsWeights, weights_used_at_the_end, evaluated_and_trained),
    # Sums of what two layers make of one tensor have another order.
    "branches": net(run=branches),
    # Gradients of weights that don't come by the layer's output are lost.
    "weights_left_behind_alone": net(LeavesWeightsBehind, what_is_left_alone, collected=True),
    "weights_left_behind": net(LeavesWeightsBehind, what_is_left_too),
    "weights_left_behind_without_use": net(LeavesWeightsBehind),
    "loss_left_behind": net(LeavesHiddenStatesBehind, what_is_left_too),
    "inputs_from_another_thread": Case(build=fed_by_another_thread, step=one_step),
    "backward_hooks_of_modules": net(step=watched_by_backward_hooks),
}


@each_placement(INTERFACES)
def test_gradients_pass_whatever_way_tensors_take_between_layers(case: Case, placement: str) -> None:
    check(case, placement)
