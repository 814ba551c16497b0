"""What was submitted behind a step that failed, before its client knew: it fails of the same, and not for its position."""

from __future__ import annotations

from typing import Any

from shmsched.errors import ErrorCode
from shmsched.memory.layouts import SAMPLING
from shmsched.wire import frames
from shmsched.wire.frames import StepDescriptor, StepFlags

from faults.generating import FAILED, Generations
from fuzz.world import World

PLAIN = (0, 0)


def failures(pair: Generations) -> list[tuple[tuple[int, ...], int, str]]:
    """What the client is told from now on of steps that failed: their numbers, a code and the words."""
    told: list[tuple[tuple[int, ...], int, str]] = []
    heard = pair.client.heard

    def hear(message: Any) -> None:
        if isinstance(message, frames.Failed):
            told.append((message.requests, message.code, message.message))
        heard(message)

    pair.client.heard = hear  # type: ignore[method-assign]
    return told


def submit(pair: Generations, position: int, n_tokens: int = 1) -> int:
    """One step of session 1. Returns its number."""
    client = pair.client
    client.request += 1
    client.tokens += n_tokens
    step = StepDescriptor(
        client.request, 1, n_tokens, position, 1, StepFlags.SAMPLED, SAMPLING.pack(0, 0.0, 1.0, 0), 0, 0, 0, 0.0
    )
    client.say(frames.Submit(client.tokens, *client.cursors[:2], 0, [step], ()))
    return client.request


def test_what_comes_behind_a_step_that_failed_fails_of_the_same(world: World) -> None:
    pair = Generations(world, further=PLAIN)
    told = failures(pair)
    pair.answer(1, (FAILED, 0), (FAILED, 0))
    (first, _) = (words for _, _, words in told)
    assert "no" in first
    late = submit(pair, 1), submit(pair, 2)
    world.turn()
    assert told[2:] == [((number,), ErrorCode.STEP_FAILED, first) for number in late]
    # Where the session stands, it goes on.
    submit(pair, 0)
    world.turn()
    assert pair.states["in flight"] == 1
    world.check()


def test_what_comes_behind_a_step_that_was_rejected_is_rejected_for_the_same(world: World) -> None:
    pair = Generations(world, further=PLAIN)
    told = failures(pair)
    # Longer than a chunk may be.
    submit(pair, 1, n_tokens=5)
    submit(pair, 6)
    world.turn()
    assert [code for _, code, _ in told] == [ErrorCode.INVALID_REQUEST] * 2
    assert told[0][2] == told[1][2]
    assert "5 tokens" in told[0][2]


def test_a_gap_behind_nothing_that_failed_is_named_as_one(world: World) -> None:
    pair = Generations(world, further=PLAIN)
    told = failures(pair)
    submit(pair, 7)
    world.turn()
    assert [code for _, code, _ in told] == [ErrorCode.INVALID_REQUEST]
    assert "position 7 leaves a gap" in told[0][2]
