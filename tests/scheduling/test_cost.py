"""What a step costs does not grow with what is queued, and what leaves leaves nothing behind. Counted, never timed."""

from __future__ import annotations

import gc
import random

import pytest

from shmsched import dataplane
from shmsched.dataplane.queues import StepQueues
from shmsched.dataplane.step import QueuedStep
from shmsched.scheduling import Scheduler
from shmsched.steps import Request

MANY = 100_000

looks_can_be_counted = pytest.mark.skipif(
    dataplane.BUILD == "compiled",
    reason="compiled code reads memory, where nobody can count; SHMSCHED_INTERPRETED=1 does it",
)


def queues_with(d: int = 32, c: int = 256, exclusive: bool = False) -> StepQueues:
    return StepQueues(d, 2 * c + d, exclusive)


class CountedStep(QueuedStep):
    """Counts how often the size of any step is looked at: nothing is done with a step without that."""

    __slots__ = ("_size",)
    looks = 0

    @property
    def n_tokens(self) -> int:
        CountedStep.looks += 1
        return self._size

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        self._size = n


class CountedSizes(list[int]):
    """Counts how often the rotation looks at the size of an offer."""

    looks = 0

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        CountedSizes.looks += 1
        return super().__getitem__(i)


def footprint(queues: StepQueues) -> int:
    """How many references there are in all that the queues lead to."""
    seen: dict[int, object] = {id(queues): queues}
    new: list[object] = [queues]
    n = 0
    while new:
        referents = [o for o in gc.get_referents(new.pop()) if not isinstance(o, type | Scheduler)]
        n += len(referents)
        for o in referents:
            if id(o) not in seen:
                seen[id(o)] = o
                new.append(o)
    return n


@looks_can_be_counted
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("sessions", [10, 10_000])
def test_a_batch_looks_at_few_of_the_queued_steps(exclusive: bool, sessions: int) -> None:
    queues = queues_with(exclusive=exclusive)
    numbers = random.Random(5)
    for number in range(MANY):
        queues.push(CountedStep(number, number % sessions, 1 if numbers.random() < 0.5 else numbers.randint(2, 256)))
    for _ in range(50):
        CountedStep.looks = 0
        batch = queues.take()
        assert batch
        assert CountedStep.looks <= 25 * len(batch)


@looks_can_be_counted
def test_a_batch_looks_at_few_of_the_sessions_whose_chunk_does_not_fit() -> None:
    queues = queues_with(32, 256)
    for number in range(10_000):
        queues.push(QueuedStep(number, number, 256))
    queues.push(QueuedStep(-1, -1, 32))
    queues.rotation.sizes = CountedSizes(queues.rotation.sizes)
    CountedSizes.looks = 0
    assert [step.number for step in queues.take()] == [0, 1, -1]
    assert CountedSizes.looks < 500


def test_sessions_close_ranks_seldom() -> None:
    queues = queues_with(1, 4)
    sessions = 2**10 - 1
    for number in range(20 * sessions):
        queues.push(QueuedStep(number, number % sessions, 4))
    laid_out = 0
    place = queues.rotation.next
    while queues:
        queues.take()
        if queues.rotation.next < place:  # places only grow, unless they are given out anew
            laid_out += sessions
        place = queues.rotation.next
    assert 0 < laid_out <= 2 * 20 * sessions  # as many as moves, not as many for each


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("sessions", [1, MANY])
def test_cancelling_from_the_middle_leaves_nothing_that_grows(exclusive: bool, size: int, sessions: int) -> None:
    queues = queues_with(32, 256, exclusive)
    ends = [QueuedStep(number, number, size) for number in (-1, -2)]
    queues.push(ends[0])
    for start in range(0, MANY, 1000):
        steps = [QueuedStep(number, number % sessions, size) for number in range(start, start + 1000)]
        for step in steps:
            queues.push(step)
        for step in reversed(steps):
            assert queues.remove(step)
            assert not queues.remove(step)
    queues.push(ends[1])
    assert len(queues) == 2
    assert footprint(queues) < 60_000
    assert queues.take() == ends
    assert queues.take() == []


@pytest.mark.parametrize("exclusive", [False, True])
def test_requeueing_over_and_over_leaves_nothing_that_grows(exclusive: bool) -> None:
    queues = queues_with(1, 4, exclusive)
    for number in range(3):
        queues.push(QueuedStep(number, 1, 1))
    for _ in range(5000):
        (step,) = queues.take()
        queues.push_front(step)
    assert footprint(queues) < 300
    assert [step.number for _ in range(3) for step in queues.take()] == [0, 1, 2]


def test_removing_what_waits_behind_a_head_leaves_nothing_that_grows() -> None:
    queues = queues_with(1, 4, exclusive=True)
    queues.push(QueuedStep(0, 1, 1))
    for size in (1, 2):
        for number in range(1, 5000):
            step = QueuedStep(number, 1, size)
            queues.push(step)
            assert queues.remove(step)
    assert footprint(queues) < 300


def test_decodes_that_wait_for_others_of_their_session_leave_nothing_that_grows() -> None:
    queues = queues_with(1, 4, exclusive=True)
    for number in range(3):
        queues.push(QueuedStep(number, number, 1))
    for _ in range(5000):
        late = [QueuedStep(number, 3, 1) for number in (3, 4)]
        queues.extend(late)
        queues.push(QueuedStep(5, 5, 1))
        assert queues.remove(late[0])  # so the other may go, behind some and ahead of others
        assert queues.remove(late[1])
        queues.drop_session(5)
    assert footprint(queues) < 300
    assert [step.number for _ in range(3) for step in queues.take()] == [0, 1, 2]


@pytest.mark.parametrize("exclusive", [False, True])
def test_sessions_that_come_and_go_leave_nothing(exclusive: bool) -> None:
    scheduler = Scheduler(exclusive_sessions=exclusive)
    for i in range(5_000):
        scheduler.submit_many([Request(2 * i, i, [1, 2]), Request(2 * i + 1, i, [1])])
        for _ in range(1 + i % 2):
            scheduler.get_work()
        scheduler.complete(2 * i, [1])
        assert scheduler.fail(2 * i + 1, "why")
        scheduler.submit(Request(2 * i, i, [1, 2]))
        assert scheduler.get_work()
        scheduler.complete(2 * i, [1])
    assert not scheduler._open
    assert footprint(scheduler._queues) < 200
