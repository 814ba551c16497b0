"""Deadlines against a plain list, and what far ones may keep."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.daemon.deadlines import Deadlines
from shmsched.daemon.loop import EventLoop
from shmsched.dataplane.session import Session, Step, StepSpec
from shmsched.dataplane.step import StepState

FAR = 3600.0


def step(number: int, deadline: float) -> Step:
    session = Session(number, None, number, "", b"")
    return session.add(number, number, 1, 1, b"", 0, StepSpec(b"", 1, True, deadline=deadline), 0.0)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def turn(loop: EventLoop) -> None:
    loop.post(lambda: None)
    loop.turn()


OFFSETS = st.sampled_from((-1e308, -1.0, -0.001, 0.0, FAR, FAR + 1, 2 * FAR, 1e308))
ACTIONS = st.lists(
    st.one_of(OFFSETS, st.tuples(st.sampled_from(("dispatch", "settle", "requeue")), st.integers(0, 30)))
)


@given(ACTIONS)
def test_each_queued_step_is_told_of_once_its_deadline_has_passed_and_no_other(actions: list[object]) -> None:
    loop = EventLoop()
    passed: list[Step] = []
    steps: list[Step] = []
    due: list[Step] = []

    def told(late: Step) -> None:
        assert late.state is StepState.QUEUED
        late.state = StepState.FAILED
        passed.append(late)

    deadlines = Deadlines(loop, told)
    try:
        for action in actions:
            if isinstance(action, float):
                steps.append(step(len(steps), time.monotonic() + action))
                deadlines.add(steps[-1])
            elif isinstance(action, tuple) and steps:
                what, at = action
                chosen = steps[at % len(steps)]
                if what == "dispatch" and chosen.state is StepState.QUEUED:
                    chosen.state = StepState.IN_FLIGHT
                elif what == "settle" and chosen.state is StepState.IN_FLIGHT:
                    chosen.state = StepState.COMPLETED
                elif what == "requeue" and chosen.state is StepState.IN_FLIGHT:
                    chosen.state = StepState.QUEUED
                    deadlines.add(chosen)
            due += [s for s in steps if s.state is StepState.QUEUED and s.deadline <= time.monotonic()]
            turn(loop)
            assert {s.number for s in due} == {s.number for s in passed}
        assert len(passed) == len({s.number for s in passed})
    finally:
        loop.close()


def test_a_late_step_is_told_of_before_a_batch_is_formed_even_if_its_timer_had_no_turn_yet(loop: EventLoop) -> None:
    passed: list[Step] = []
    deadlines = Deadlines(loop, passed.append)
    late, early = step(1, time.monotonic() - 0.001), step(2, time.monotonic() + FAR)
    deadlines.add(late)
    deadlines.add(early)
    deadlines.expire(time.monotonic())
    assert passed == [late]
    assert len(deadlines) == 1


def test_far_deadlines_of_steps_that_have_gone_are_forgotten(loop: EventLoop) -> None:
    deadlines = Deadlines(loop, lambda late: None)
    for number in range(20_000):
        gone = step(number, time.monotonic() + FAR)
        deadlines.add(gone)
        gone.state = StepState.COMPLETED
    assert len(deadlines) <= 1025


def test_a_step_that_is_added_again_and_again_is_kept_once(loop: EventLoop) -> None:
    deadlines = Deadlines(loop, lambda late: None)
    deferred = step(1, time.monotonic() + FAR)
    for _ in range(20_000):
        deadlines.add(deferred)
    assert len(deadlines) <= 1025


def test_deadlines_each_earlier_than_the_last_leave_no_timers(loop: EventLoop) -> None:
    deadlines = Deadlines(loop, lambda late: None)
    for number in range(20_000):
        gone = step(number, time.monotonic() + FAR - number / 100)
        deadlines.add(gone)
        gone.state = StepState.COMPLETED
    assert len(loop._timers) <= 1025
