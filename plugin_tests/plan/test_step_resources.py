"""The resources of a simulated step: copies are slower while the host's optimizer is at work, and only then."""

from __future__ import annotations

import pytest

from megatrain_accelerate.plan.step_simulation import Link, Resource, Slots, end_beside


def stepping(*spans: tuple[float, float]) -> Resource:
    """At work in these spans."""
    optimizer = Resource()
    for begin, end in spans:
        optimizer.work(end - begin, begin)
    return optimizer


def test_a_resource_does_one_thing_after_another() -> None:
    resource = Resource()
    assert resource.work(2.0) == 2.0
    assert resource.work(1.0, not_before=5.0) == 6.0
    assert resource.work(1.0, not_before=3.0) == 7.0
    assert resource.busy == 4.0


@pytest.mark.parametrize(
    ("start", "seconds", "end"),
    [
        (0.0, 10.0, 10.0),  # over when the first span begins
        (0.0, 12.0, 14.0),  # 10 before it, and 2 at half the speed
        (10.0, 5.0, 20.0),  # all of it within
        (12.0, 4.0, 20.0),
        (15.0, 4.0, 21.5),  # 2.5 of it within, the rest behind
        (20.0, 10.0, 30.0),  # between
        (5.0, 30.0, 45.0),  # across both
        (60.0, 3.0, 63.0),
    ],
)
def test_a_copy_gets_slower_for_as_long_as_the_optimizer_works_beside_it(start: float, seconds: float, end: float) -> None:
    optimizer = stepping((10.0, 20.0), (30.0, 40.0))
    assert end_beside(optimizer.spans, start, seconds, 0.5) == pytest.approx(end)
    link = Link(100.0, 0.5, optimizer)
    assert link.copy(int(100 * seconds), start) == pytest.approx(end)
    assert link.busy == pytest.approx(end - start)
    assert Link(100.0, 1.0, optimizer).copy(int(100 * seconds), start) == pytest.approx(start + seconds)


def test_work_that_follows_at_once_is_one_span() -> None:
    optimizer = stepping((0.0, 1.0), (1.0, 2.0), (1.5, 4.0), (10.0, 12.0))
    assert optimizer.free_at == 12.0
    assert end_beside(optimizer.spans, 0.0, 3.0, 0.5) == pytest.approx(5.25)  # at work from 0 to 4.5
    assert end_beside(optimizer.spans, 10.0, 1.0, 0.5) == 12.0
    assert end_beside(optimizer.spans, 11.0, 0.0, 0.0) == 12.0, "what stands still meanwhile ends behind it, whatever is left"


def test_what_is_queued_waits_for_a_moment_which_is_no_work() -> None:
    resource = Resource()
    assert (resource.wait_until(2.0), resource.wait_until(1.0)) == (2.0, 2.0)
    assert (resource.work(1.0), resource.busy, resource.spans) == (3.0, 1.0, [(2.0, 3.0)])


def test_copies_of_steps_follow_each_other_and_what_waits_for_them_takes_the_gaps() -> None:
    link = Link(100.0, 0.5, Resource())
    assert link.copy_of_step(100, 1.0) == 3.0  # both ways at once, at half the speed
    assert link.copy_of_step(50, 2.0) == 4.0
    assert link.copy_of_step(50, 6.0) == 7.0
    assert link.copy(300, 0.5) == 3.5, "one that is urgent waits for none"
    assert link.copy(100, 3.5, steps_first=True) == 5.0
    assert link.copy(150, steps_first=True) == 7.5, "one second before the last, half of one behind it"
    assert link.busy == pytest.approx(2.0 + 1.0 + 1.0 + 3.0 + 1.0 + 1.5)


def test_slots_take_turns_and_hold_what_used_them_last() -> None:
    link = Link(10.0, 1.0, Resource())
    slots = Slots(2, link)
    assert slots.filled_at("a", 10, not_before=1.0) == 2.0
    slots.use("a", until=7.0)
    assert slots.filled_at("b", 10, not_before=0.0) == 3.0  # a free slot; the link is free at 2
    slots.use("b", until=9.0)
    assert slots.filled_at("a", 10, not_before=0.0) == 0.0
    assert slots.filled_at("c", 10, not_before=0.0) == 8.0  # when `a` has computed
    slots.use("c", until=12.0)
    assert slots.filled_at("a", 10, not_before=0.0) == 10.0  # its slot is another's, and `b` computes until 9
    slots = Slots(2, link)  # as a step leaves them
    assert slots.filled_at("c", 10, not_before=0.0) == 11.0
