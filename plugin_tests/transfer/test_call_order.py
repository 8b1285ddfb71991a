"""The prediction of which layers come next, from the passes before."""

from __future__ import annotations

import pytest

from megatrain_accelerate.transfer.call_order import CallOrder, Tape


def run(order: CallOrder, calls: list[int], count: int = 2, backward_follows: bool = True) -> tuple[Tape, list[list[int]]]:
    """Records a forward pass; returns its tape and what was expected after each call."""
    expected = []
    tape = Tape(order)
    for index in calls:
        tape, position = order.record(index)
        assert tape.calls[position] == index
        expected.append(list(order.after_forward(tape, position, count, backward_follows)))
    return tape, expected


def test_before_the_first_pass_layers_are_expected_in_index_order() -> None:
    _, expected = run(CallOrder(4), [0, 1, 2], count=2)
    assert expected == [[1, 2], [2, 3], [3, 2]]


def test_at_the_end_of_forward_backward_is_expected_from_the_last_layer_on() -> None:
    _, expected = run(CallOrder(3), [0, 1, 2], count=3)
    # Layer 2 itself runs first in backward: it is held already and costs nothing.
    assert expected[-1] == [2, 1, 0]


def test_at_the_end_of_an_evaluation_the_first_layers_are_expected() -> None:
    _, expected = run(CallOrder(4), [0, 1, 2, 3], count=2, backward_follows=False)
    assert expected[-1] == [0, 1]
    assert expected[-2] == [3, 0]


def test_backward_goes_down_and_ends_with_the_next_forward() -> None:
    order = CallOrder(4)
    tape, _ = run(order, [0, 1, 2, 3])
    assert list(order.after_backward(tape, 3, 2, forward_follows=True)) == [2, 1]
    assert list(order.after_backward(tape, 1, 2, forward_follows=True)) == [0, 0]
    assert list(order.after_backward(tape, 0, 2, forward_follows=True)) == [0, 1]
    # A step comes before the next forward: the layers' weights will be others.
    assert list(order.after_backward(tape, 0, 2, forward_follows=False)) == []


def test_another_order_is_learned_from_one_pass() -> None:
    order = CallOrder(4)
    calls = [2, 0, 3, 1]
    run(order, calls)
    order.end_pass()
    _, expected = run(order, calls, count=2)
    assert expected == [[0, 3], [3, 1], [1, 3], [1, 3]]


def test_a_layer_that_is_called_twice_is_expected_twice() -> None:
    order = CallOrder(3)
    calls = [0, 1, 1, 2, 1]
    run(order, calls, count=1)
    order.end_pass()
    tape, expected = run(order, calls, count=1)
    assert expected == [[1], [1], [2], [1], [1]]
    assert [list(order.after_backward(tape, position, 1, False)) for position in (4, 3, 2, 1, 0)] == [[2], [1], [1], [0], []]


def test_a_pass_that_begins_with_another_layer_is_a_new_pass_once_the_one_before_ended() -> None:
    order = CallOrder(4)
    first, _ = run(order, [0, 1, 2, 3])
    order.end_pass()
    second, position = order.record(2)
    assert second is not first
    assert position == 0
    assert first.calls == [0, 1, 2, 3], "the tape of a pass isn't written to by the next"


def test_the_first_layer_again_begins_a_new_pass() -> None:
    order = CallOrder(3)
    first, _ = run(order, [0, 1, 2])
    second, _ = run(order, [0, 1, 2])
    assert second is not first
    assert second.calls == [0, 1, 2]


def test_a_shortened_pass_and_a_longer_one_after_it_are_only_mispredicted() -> None:
    order = CallOrder(4)
    run(order, [0, 1])  # an exception, or early exit
    order.end_pass()
    _, expected = run(order, [0, 1, 2, 3], count=2)
    assert expected[0] == [1, 0]
    # What isn't known isn't guessed.
    assert expected[2] == []
    order.end_pass()
    _, expected = run(order, [0, 1, 2, 3], count=2)
    assert expected[2] == [3, 2]


def test_skipped_layers_are_found_again() -> None:
    order = CallOrder(5)
    _, expected = run(order, [0, 3, 4], count=1)
    assert expected[1] == [4]


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_never_more_are_expected_than_asked_for(count: int) -> None:
    order = CallOrder(3)
    for _ in range(2):
        tape, expected = run(order, [0, 1, 2], count=count)
        assert all(len(each) <= count for each in expected)
        assert all(len(order.after_backward(tape, p, count, True)) <= count for p in range(3))
        order.end_pass()


def test_a_pass_of_parts_is_one_of_their_layers_however_often_the_first_part_is_called() -> None:
    layers = CallOrder(2)
    parts = CallOrder(4, leader=layers)
    passes = []
    for _ in range(2):
        tapes = []
        for layer in range(2):
            layers.record(layer)
            tapes += [parts.record(part)[0] for part in (2 * layer, 2 * layer + 1) * 2]
        assert all(tape is tapes[0] for tape in tapes)
        passes.append(tapes[0])
    assert passes[0] is not passes[1]
    assert passes[1].calls == [0, 1, 0, 1, 2, 3, 2, 3]
    # The second pass was foreseen from the first.
    assert [list(parts.after_forward(passes[1], place, 2, False)) for place in (1, 3, 5)] == [[0, 1], [2, 3], [2, 3]]
