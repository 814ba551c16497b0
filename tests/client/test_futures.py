"""The future of a submission: settled once, whoever comes first; a cancelled one is seen to be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, as_completed, wait

import pytest

from shmsched.client.futures import StepFuture
from shmsched.dataplane.submission import PendingResult
from shmsched.errors import StepFailed, UsedAfterFork
from shmsched.steps import Response

ANSWER = Response(1, 2)


class Keeper:
    """A scheduler that cancels what it has."""

    def __init__(self, has_it: bool = True) -> None:
        self.has_it = has_it
        self.asked: list[PendingResult] = []

    def withdraw(self, reply: PendingResult, /) -> bool:
        self.asked.append(reply)
        return self.has_it

    def read_until(self, ready: Callable[[], bool], timeout: float | None, /) -> bool:
        """Another thread settles it."""
        return False

    def poke(self) -> None:
        """Nobody reads."""


def future(withdrawn: bool = True) -> StepFuture:
    return StepFuture(Keeper(withdrawn))


def test_cancelling_reaches_the_scheduler_once() -> None:
    keeper = Keeper()
    f = StepFuture(keeper)
    assert f.cancel()
    assert f.cancel()
    assert keeper.asked == [f]
    assert f.cancelled()
    assert f.done()


def test_waiting_returns_a_cancelled_future() -> None:
    cancelled, answered = future(), future()
    cancelled.cancel()
    answered.settle(ANSWER)
    done, not_done = wait([cancelled, answered], timeout=10)
    assert (done, not_done) == ({cancelled, answered}, set())
    assert set(as_completed([cancelled, answered], timeout=10)) == {cancelled, answered}
    with pytest.raises(CancelledError):
        cancelled.result(0)


def test_waiting_is_woken_by_a_cancel() -> None:
    f = future()
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(wait([f], timeout=10).done))
    thread.start()
    f.cancel()
    thread.join(10)
    assert results == [{f}]


def test_what_was_answered_cannot_be_cancelled() -> None:
    f = future()
    f.settle(ANSWER)
    assert not f.cancel()
    assert f.result(0) is ANSWER


def test_what_the_scheduler_no_longer_has_is_not_cancelled() -> None:
    f = future(withdrawn=False)
    assert not f.cancel()
    assert not f.done()
    f.settle(ANSWER)
    assert f.result(0) is ANSWER


def test_the_first_word_counts() -> None:
    """A late, repeated or contradicting answer is ignored (F7)."""
    answered, failed, cancelled = future(), future(), future()
    answered.settle(ANSWER)
    failed.settle_failed(StepFailed("first"))
    cancelled.settle_cancelled()
    for f in (answered, failed, cancelled):
        f.settle(Response(9, 9))
        f.settle_failed(StepFailed("later"))
        f.settle_cancelled()
    assert answered.result(0) is ANSWER
    with pytest.raises(StepFailed, match="first"):
        failed.result(0)
    assert cancelled.cancelled()


def test_callbacks_run_for_every_end() -> None:
    ends: list[bool] = []
    for settle in (
        lambda f: f.settle(ANSWER),
        lambda f: f.settle_failed(StepFailed("x")),
        lambda f: f.settle_cancelled(),
        lambda f: f.cancel(),
    ):
        f = future()
        f.add_done_callback(lambda f: ends.append(f.cancelled()))
        settle(f)
    assert ends == [False, False, True, True]


def test_a_forked_child_does_not_wait_for_a_lock_that_nobody_holds() -> None:
    f = future()
    held = threading.Thread(target=f._condition.acquire)
    held.start()
    held.join(10)
    child = threading.Thread(target=f.fail_in_forked_child, args=(UsedAfterFork("another process's"),), daemon=True)
    child.start()
    child.join(10)
    assert not child.is_alive()
    with pytest.raises(UsedAfterFork):
        f.result(0)
