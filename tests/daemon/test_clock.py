"""The daemon's clock, by a clock that the test sets."""

from __future__ import annotations

import math

import pytest

from shmsched.daemon.clock import EXCUSED_S, LONGEST_TURN_S, SETTLING_S, Clock


class Hand:
    """A clock's hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at

    def moves(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def clock(hand: Hand) -> Clock:
    return Clock(hand)


def test_without_a_pause_it_is_the_systems(clock: Clock, hand: Hand) -> None:
    for _ in range(100):
        hand.moves(LONGEST_TURN_S)
        assert clock.now() == hand.at
        assert clock.of(hand.at + 5.0) == hand.at + 5.0


def test_a_wait_that_was_announced_is_none(clock: Clock, hand: Hand) -> None:
    for seconds in (0.2, 3600.0):
        clock.will_wait(seconds)
        hand.moves(seconds)
        assert clock.now() == hand.at
    # It was for once.
    hand.moves(1.0)
    assert clock.now() == pytest.approx(hand.at - 1.0)


def test_where_nothing_is_due_a_pause_is_known_by_the_signal_that_ends_it(clock: Clock, hand: Hand) -> None:
    deadline, before = hand.at + 1.0, clock.now()
    clock.will_wait(math.inf)
    hand.moves(3600.0)
    clock.continued()
    assert clock.now() == pytest.approx(before)
    assert clock.of(deadline) == pytest.approx(before + 1.0)
    # Such a signal in the middle of anything else says nothing.
    clock.will_wait(0.25)
    hand.moves(0.2)
    clock.continued()
    assert clock.now() == pytest.approx(before + 0.2)


def test_in_a_pause_it_stands_still(clock: Clock, hand: Hand) -> None:
    excused: list[float] = []
    clock.on_pause = excused.append
    before = clock.now()
    hand.moves(60.0)
    assert clock.now() == pytest.approx(before)
    clock.will_wait(0.25)
    hand.moves(60.25 + LONGEST_TURN_S)
    # The wait goes on as if there had been no pause in it.
    assert clock.now() == pytest.approx(before + 0.25)
    hand.moves(0.3)
    assert clock.now() == pytest.approx(before + 0.25)
    assert excused == pytest.approx([EXCUSED_S, EXCUSED_S, 0.3])


def test_it_never_goes_back(clock: Clock, hand: Hand) -> None:
    last = clock.now()
    for i in range(1000):
        clock.will_wait((i % 7) * 0.05)
        hand.moves((i * i % 11) * 0.07)
        now = clock.now()
        assert now >= last - 1e-9
        last = now


def test_a_deadline_named_before_or_in_a_pause_is_as_much_later_and_one_named_after_it_is_not(
    clock: Clock, hand: Hand
) -> None:
    deadline = hand.at + 1.0
    hand.moves(60.0)
    now = clock.now()
    # It is read only now.
    assert clock.of(deadline) == pytest.approx(now + 1.0)
    for _ in range(4):
        hand.moves(SETTLING_S / 3)
        clock.now()
    assert clock.of(hand.at + 1.0) == pytest.approx(clock.now() + 1.0)


def test_pauses_one_upon_the_other_count_for_what_came_before_the_first(clock: Clock, hand: Hand) -> None:
    deadline = hand.at + 1.0
    now = clock.now()
    for _ in range(3):
        hand.moves(10.0)
        assert clock.now() == pytest.approx(now)
    assert clock.of(deadline) == pytest.approx(now + 1.0)
