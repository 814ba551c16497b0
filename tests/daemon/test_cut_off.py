"""What was submitted behind a step that failed, before its client knew: it fails of the same, and not for its position."""

from __future__ import annotations

from shmsched.errors import ErrorCode

from support.generations import DONE, FAILED, Generations
from support.world import World

PLAIN = (0, 0)


def failures(pair: Generations) -> list[tuple[tuple[int, ...], int, str]]:
    """What the client was told of steps that failed: their numbers, a code and the words."""
    return [(failed.requests, failed.code, failed.message) for failed in pair.client.failures]


def submit(pair: Generations, position: int, n_tokens: int = 1) -> int:
    """One step of session 1. Returns its number."""
    step = pair.client.step(position, n_tokens)
    pair.client.submit_unread(step)
    return step.request


def test_what_comes_behind_a_step_that_failed_fails_of_the_same(world: World) -> None:
    pair = Generations(world, further=PLAIN)
    pair.answer(1, (FAILED, 0), (FAILED, 0))
    (first, _) = (words for _, _, words in failures(pair))
    assert "no" in first
    late = submit(pair, 1), submit(pair, 2)
    world.turn()
    assert failures(pair)[2:] == [((number,), ErrorCode.STEP_FAILED, first) for number in late]
    # Where the session stands, it goes on.
    submit(pair, 0)
    world.turn()
    assert pair.states["in flight"] == 1
    world.check()


def test_a_chunk_that_was_done_behind_one_that_failed_in_the_same_batch_fails_with_it(world: World) -> None:
    pair = Generations(world, further=PLAIN)
    pair.answer(1, (DONE, 5), (DONE, 5))
    pair.submit_chunks(1, [(1, 4, 0, True), (5, 4, 0, True), (9, 4, 1, False)])
    pair.answer(2, (DONE, 0), (FAILED, 0), (DONE, 6))
    last = pair.client.request
    ((requests, code, words),) = failures(pair)
    assert (requests, code) == ((last - 1, last), ErrorCode.STEP_FAILED)
    assert "position 5" in words
    assert pair.states == {"completed": 3, "failed": 2, "ignored": 1}
    # It goes on where the failed chunk began.
    submit(pair, 5)
    world.turn()
    assert pair.states["in flight"] == 1
    world.check()


def test_what_comes_behind_a_step_that_was_rejected_is_rejected_for_the_same(world: World) -> None:
    pair = Generations(world, further=PLAIN)
    # Longer than a chunk may be.
    submit(pair, 1, n_tokens=5)
    submit(pair, 6)
    world.turn()
    assert [code for _, code, _ in failures(pair)] == [ErrorCode.INVALID_REQUEST] * 2
    assert failures(pair)[0][2] == failures(pair)[1][2]
    assert "5 tokens" in failures(pair)[0][2]


def test_a_gap_behind_nothing_that_failed_is_named_as_one(world: World) -> None:
    pair = Generations(world, further=PLAIN)
    submit(pair, 7)
    world.turn()
    assert [code for _, code, _ in failures(pair)] == [ErrorCode.INVALID_REQUEST]
    assert "position 7 leaves a gap" in failures(pair)[0][2]
