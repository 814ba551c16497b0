"""A host that is told what to go on with before its batch has ended."""

from __future__ import annotations

import pytest
from engine.played import DEFER, DONE, FAIL, NOTHING, RAISE, WILD, Commanded, Start, last

from shmsched.errors import ProtocolError
from shmsched.wire import frames

from support.peers.scheduler import Step

pytestmark = pytest.mark.usefixtures("no_leftovers")


def test_a_batch_that_follows_another_takes_its_tokens_from_there(start: Start) -> None:
    scheduler = start(Commanded())
    for slot in range(3):
        scheduler.open(slot)
    _, sampled, _ = scheduler.run(Step(0, 0, [1, 2]), Step(1, 0, [3]), Step(2, 0, [4]))
    # One of the three is over, and the others come in another order.
    steps = Step(2, 1, [2]), Step(0, 2, [0])
    scheduler.follow(*steps)
    assert scheduler.hear_results(steps) == (
        [DONE] * 2,
        [last(4, sampled[2]), last(1, 2, sampled[0])],
        [],
    )


@pytest.mark.parametrize("token", [DEFER, FAIL, NOTHING, WILD])
def test_a_batch_that_follows_one_not_wholly_done_is_skipped(start: Start, token: int) -> None:
    scheduler = start(Commanded())
    for slot in range(2):
        scheduler.open(slot)
    scheduler.run(Step(0, 0, [1]), Step(1, 0, [token]))
    scheduler.follow(Step(0, 1, [0]))
    assert scheduler.hear(frames.Skipped) == frames.Skipped(2)
    assert scheduler.run(Step(0, 1, [5])) == ([DONE], [last(1, 5)], []), "the session stands where it stood"


@pytest.mark.prints("RuntimeError: out of luck")
def test_a_batch_that_follows_one_in_which_the_engine_raised_is_skipped(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    assert scheduler.run(Step(0, 0, [1]))[0] == [DONE]
    scheduler.write([Step(0, 1, [RAISE])])
    scheduler.say(frames.Work(scheduler.batch, scheduler.slot))
    assert scheduler.hear(frames.BatchFailed).batch == 2
    scheduler.follow(Step(0, 2, [0]))
    assert scheduler.hear(frames.Skipped) == frames.Skipped(3)


def test_a_batch_that_follows_one_that_was_skipped_is_skipped(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.run(Step(0, 0, [FAIL]))
    for batch in (2, 3):
        scheduler.follow(Step(0, 1, [0]))
        assert scheduler.hear(frames.Skipped) == frames.Skipped(batch)


def test_a_place_beyond_the_batch_before_is_a_broken_scheduler(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.run(Step(0, 0, [1]))
    scheduler.follow(Step(0, 1, [1]))
    scheduler.thread.join(10)
    assert isinstance(scheduler.error, ProtocolError)
    assert "follows one of 1 sampled tokens" in str(scheduler.error)
