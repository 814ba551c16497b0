"""When the scheduler waits a moment, and that it never waits long. No clock: times are numbers here."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.daemon.linger import LEAST_S, PROMPTS_SHARE, Linger

SHARE = 0.05


def ended(linger: Linger, now: float, seconds: float, sessions: Iterable[int]) -> None:
    """A batch of the same size as all others."""
    linger.batch_ended(now, seconds, 8, sessions, False)


def warmed(turnaround: float = 0.001, step: float = 0.1, sessions: int = 2, rounds: int = 60) -> tuple[Linger, float]:
    """Sessions that come back after ``turnaround``, each time. Returns the time at which the next batch ends too."""
    linger, now = Linger(SHARE), 100.0
    for _ in range(rounds):
        now += step
        ended(linger, now, step, range(sessions))
        for session in range(sessions):
            linger.came_back([session], now + turnaround)
    return linger, now + step


def test_nobody_expected_no_wait() -> None:
    linger = Linger(SHARE)
    assert linger.expected == 0
    assert linger.deadline() <= 0.0
    ended(linger, 10.0, 0.1, [])
    assert linger.expected == 0
    assert linger.deadline() <= 0.0


def test_once_everyone_is_back_nothing_is_waited_for() -> None:
    linger, now = warmed()
    ended(linger, now, 0.1, [0, 1])
    linger.came_back([0], now + 0.0005)
    assert linger.expected == 1
    assert linger.deadline() > now + 0.0005
    linger.came_back([1], now + 0.0006)
    assert linger.expected == 0
    assert linger.deadline() <= now


@pytest.mark.parametrize("end", ["forget", "gave_up"])
def test_nobody_waits_for_who_is_gone_or_given_up(end: str) -> None:
    linger, now = warmed()
    ended(linger, now, 0.1, [0])
    if end == "forget":
        linger.forget(0)
    else:
        linger.gave_up()
    assert linger.expected == 0
    assert linger.deadline() <= now


def test_the_first_time_the_share_is_the_bound() -> None:
    linger = Linger(SHARE)
    ended(linger, 10.0, 0.2, [1])
    assert linger.deadline() == pytest.approx(10.0 + 0.2 * SHARE)


def test_the_deadline_follows_what_turnarounds_were_measured() -> None:
    linger, now = warmed(turnaround=0.001, step=0.1)
    ended(linger, now, 0.1, [0, 1])
    wait = linger.deadline() - now
    assert 0.001 <= wait <= 0.002, "a wait far beyond what sessions take is lost time"


def test_nothing_is_noted_of_who_comes_back_to_an_engine_too_quick_to_wait_for() -> None:
    linger = Linger(SHARE)
    ended(linger, 10.0, 0.9 * LEAST_S / SHARE, [1, 2])
    assert (linger.expected, linger.minds) == (0, False)
    assert linger.deadline() <= 10.0
    for i in range(20):
        ended(linger, 11.0 + i, 2 * LEAST_S / SHARE, [1, 2])
    assert (linger.expected, linger.minds) == (2, True)
    assert linger.deadline() > 30.0
    for i in range(20):
        ended(linger, 31.0 + i, 0.5 * LEAST_S / SHARE, [1, 2])
    assert (linger.expected, linger.minds) == (0, False)


def test_a_share_of_nothing_is_no_wait() -> None:
    linger = Linger(0.0)
    ended(linger, 10.0, 0.2, [1])
    assert linger.deadline() <= 10.0


@given(
    st.lists(
        st.tuples(
            st.floats(1e-5, 10.0),
            st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.floats(0.0, 100.0))), max_size=6),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_never_longer_than_the_share_of_the_mean_step(
    batches: list[tuple[float, list[tuple[int, float | None]]]],
) -> None:
    linger, now = Linger(SHARE), 1000.0
    steps: list[float] = []
    for seconds, sessions in batches:
        now += seconds
        steps.append(seconds)
        ended(linger, now, seconds, {session for session, _ in sessions})
        assert min(steps) <= linger.mean_step_s * (1 + 1e-9)
        assert linger.mean_step_s <= max(steps) * (1 + 1e-9)
        assert linger.deadline() <= now + SHARE * linger.mean_step_s * (1 + 1e-9)
        assert linger.expected <= len({session for session, _ in sessions})
        for session, turnaround in sessions:
            if turnaround is not None:
                linger.came_back([session], now + turnaround)
            assert linger.deadline() <= now + SHARE * linger.mean_step_s * (1 + 1e-9)
        linger.gave_up()
        now += max((t for _, t in sessions if t is not None), default=0.0)


def run(linger: Linger, now: float, turnarounds: dict[int, float], step: float = 0.1) -> tuple[bool, float]:
    """A batch of all these sessions; each comes back in its time. Whether session 9 was waited for, and the time after."""
    ended(linger, now, step, turnarounds)
    longest = linger.longest
    for session, seconds in turnarounds.items():
        if seconds <= longest:
            linger.came_back([session], now + seconds)
    waited = linger.expected > 0
    linger.gave_up()
    for session, seconds in turnarounds.items():
        if seconds > longest:
            linger.came_back([session], now + seconds)
    return waited, now + max(turnarounds.values()) + step


def test_a_slow_session_is_learned_and_not_waited_for_while_the_quick_ones_are() -> None:
    linger, now = Linger(SHARE), 100.0
    waited = []
    for _ in range(10):
        one, now = run(linger, now, {1: 0.001, 2: 0.001, 9: 5.0})
        waited.append(one)
    assert waited[-8:] == [False] * 8
    ended(linger, now, 0.1, [1, 2, 9])
    assert linger.expected == 2


def test_a_slow_session_does_not_spoil_the_turnaround_of_the_others() -> None:
    linger, now = Linger(SHARE), 100.0
    for _ in range(60):
        _, now = run(linger, now, {1: 0.001, 9: 5.0})
    ended(linger, now, 0.1, [1])
    assert linger.deadline() - now <= 0.003


@pytest.mark.parametrize("quick_before", [0, 20])
def test_one_pause_does_not_rule_a_session_out_for_long(quick_before: int) -> None:
    linger, now = Linger(SHARE), 100.0
    for _ in range(quick_before):
        _, now = run(linger, now, {9: 0.001})
    _, now = run(linger, now, {9: 60.0})
    for _ in range(10):
        _, now = run(linger, now, {9: 0.001})
    ended(linger, now, 0.1, [9])
    assert linger.expected == 1


def test_sessions_that_are_gone_leave_nothing() -> None:
    linger, now = Linger(SHARE), 100.0
    for session in range(1000):
        now += 0.1
        ended(linger, now, 0.1, [session])
        linger.came_back([session], now + 0.001)
        ended(linger, now, 0.1, [session])
        linger.forget(session)
    assert linger.expected == 0
    assert not linger._answered
    assert not linger._usual


def fitted(
    fixed: float, per_token: float, sizes: Iterable[int], prompts_wait: bool = False, share: float = SHARE
) -> Linger:
    linger, now = Linger(share), 100.0
    for tokens in sizes:
        seconds = fixed + per_token * tokens
        now += seconds
        linger.batch_ended(now, seconds, tokens, [1], prompts_wait)
    return linger


@given(st.floats(0.01, 1.0), st.floats(0.0, 0.1), st.lists(st.integers(1, 64), min_size=40, max_size=80))
def test_what_waiting_cannot_save_is_not_waited_for(fixed: float, per_token: float, sizes: list[int]) -> None:
    sizes += [4, 60]
    linger = fitted(fixed, per_token, sizes)
    assert linger.longest == pytest.approx(min(SHARE * fixed, SHARE * linger.mean_step_s), rel=1e-3)


@pytest.mark.parametrize("size", [1, 32])
def test_of_batches_that_are_all_alike_the_whole_step_may_be_saved(size: int) -> None:
    linger = fitted(0.05, 0.01, [size] * 20)
    assert linger.longest == pytest.approx(SHARE * (0.05 + 0.01 * size))


def test_where_prompts_wait_they_lose_little() -> None:
    linger = fitted(0.0, 0.01, [8, 16] * 20, prompts_wait=True, share=0.3)
    assert linger.longest == pytest.approx(PROMPTS_SHARE * linger.mean_step_s)
    assert fitted(0.0, 0.01, [8, 16] * 20, share=0.3).longest < 1e-6
