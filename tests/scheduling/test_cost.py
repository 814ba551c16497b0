"""What a step costs does not grow with what is queued, and what leaves leaves nothing behind. Counted, never timed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shmsched.scheduling import QueuedStep, Scheduler, SchedulerParams, StepQueues
from shmsched.scheduling.rotation import Rotation
from shmsched.steps import Request

MANY = 100_000


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


def footprint(queues: StepQueues[QueuedStep]) -> int:
    """The entries in all containers of the queues."""
    rotation = queues._rotation
    containers = (queues._ready, queues._order, queues._late, queues._alone, queues._chunk_lanes, queues._decode_lanes)
    return sum(map(len, containers)) + len(rotation._at) + len(rotation._size)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("sessions", [10, 10_000])
def test_a_batch_looks_at_few_of_the_queued_steps(exclusive: bool, sessions: int) -> None:
    queues: StepQueues[CountedStep] = StepQueues(SchedulerParams(), exclusive)
    numbers = random.Random(5)
    for number in range(MANY):
        queues.push(CountedStep(number, number % sessions, 1 if numbers.random() < 0.5 else numbers.randint(2, 256)))
    for _ in range(50):
        CountedStep.looks = 0
        batch = queues.take()
        assert batch
        assert CountedStep.looks <= 25 * len(batch)


def test_a_batch_looks_at_few_of_the_sessions_whose_chunk_does_not_fit() -> None:
    queues: StepQueues[QueuedStep] = StepQueues(SchedulerParams(32, 256))
    for number in range(10_000):
        queues.push(QueuedStep(number, number, 256))
    queues.push(QueuedStep(-1, -1, 32))
    queues._rotation._size = CountedSizes(queues._rotation._size)
    CountedSizes.looks = 0
    assert [step.number for step in queues.take()] == [0, 1, -1]
    assert CountedSizes.looks < 500


def test_sessions_close_ranks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[int] = []
    lay_out = Rotation._lay_out

    def counted(rotation: Rotation[Any], members: list[Any], offers: list[int]) -> None:
        laid_out.append(len(members))
        lay_out(rotation, members, offers)

    monkeypatch.setattr(Rotation, "_lay_out", counted)
    queues: StepQueues[QueuedStep] = StepQueues(SchedulerParams(1, 4))
    sessions = 2**10 - 1
    for number in range(20 * sessions):
        queues.push(QueuedStep(number, number % sessions, 4))
    while queues:
        queues.take()
    assert sum(laid_out) <= 2 * 20 * sessions  # as many as moves, not as many for each


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("sessions", [1, MANY])
def test_cancelling_from_the_middle_leaves_nothing_that_grows(exclusive: bool, size: int, sessions: int) -> None:
    queues: StepQueues[QueuedStep] = StepQueues(SchedulerParams(32, 256), exclusive)
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
    assert footprint(queues) < 15_000
    assert queues.take() == ends
    assert queues.take() == []


@pytest.mark.parametrize("exclusive", [False, True])
def test_requeueing_over_and_over_leaves_nothing_that_grows(exclusive: bool) -> None:
    queues: StepQueues[QueuedStep] = StepQueues(SchedulerParams(1, 4), exclusive)
    for number in range(3):
        queues.push(QueuedStep(number, 1, 1))
    for _ in range(5000):
        (step,) = queues.take()
        queues.push_front(step)
    assert footprint(queues) < 300
    assert [step.number for _ in range(3) for step in queues.take()] == [0, 1, 2]


def test_removing_what_waits_behind_a_head_leaves_nothing_that_grows() -> None:
    queues: StepQueues[QueuedStep] = StepQueues(SchedulerParams(1, 4), exclusive_sessions=True)
    queues.push(QueuedStep(0, 1, 1))
    for number in range(1, 5000):
        step = QueuedStep(number, 1, 2)
        queues.push(step)
        assert queues.remove(step)
    assert footprint(queues) < 300


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
    assert footprint(scheduler._queues) < 200  # type: ignore[arg-type]
