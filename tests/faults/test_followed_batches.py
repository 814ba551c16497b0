"""An engine is told what to go on with before its batch has ended: whatever becomes of that batch, every step is settled once, and
the engine and the scheduler agree on what was run. The engine's side is played by hand here; tests/engine has the host's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmsched.dataplane.batches import BATCH_SLOTS, BatchesInFlight
from shmsched.dataplane.layouts import BatchSlotLayout, ClientLayout
from shmsched.dataplane.session import SPEC, ClientPort, Generation, Session, StepSpec
from shmsched.dataplane.step import StepState
from shmsched.wire import frames

from support.generations import DEFERRED, DONE, FAILED, STOP, Generations
from support.world import World, of_settings


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Parametrized with settings of the daemon, and for how many tokens of generations there is room: no client reads here."""
    with of_settings(**getattr(request, "param", {})) as world:
        yield world


LINGERS = pytest.mark.parametrize("world", [{"linger_share": 0.5}], indirect=True, ids=["lingers"])
STEP_S = 1.0


def test_the_engine_has_the_next_batch_before_it_has_ended_one(world: World) -> None:
    pair = Generations(world)
    assert pair.engine.batches == [1, 2]
    (first, _, _), (second, _, _) = pair.given(1)
    assert pair.given(2) == [(first, 1, 0), (second, 1, 1)]
    # What follows is no step yet: nobody knows whether it will be one.
    assert pair.states == {"in flight": 2}
    pair.answer(1, (DONE, 5), (DONE, 6))
    assert pair.engine.batches == [2, 3]
    assert pair.given(3) == [(first, 2, 0), (second, 2, 1)]
    assert pair.states == {"completed": 2, "in flight": 2}


def test_of_a_generation_that_ended_nothing_comes_whatever_the_engine_makes_of_it(world: World) -> None:
    pair = Generations(world)
    pair.answer(1, (DONE, STOP), (DONE, 6))
    # In batch 3 is only the other one: the second of those in batch 2.
    assert [(position, place) for _, position, place in pair.given(3)] == [(2, 1)]
    assert pair.states == {"completed": 2, "in flight": 1}
    pair.answer(2, (FAILED, -1), (DONE, 5))
    assert pair.states == {"completed": 3, "queued": 1}
    pair.say(frames.Skipped(3))
    assert [(position, token) for _, position, token in pair.given(4)] == [(2, 5)]
    assert pair.open == {1, 2}


def test_after_a_step_that_was_not_done_the_engine_skips_what_follows_and_it_is_queued(world: World) -> None:
    pair = Generations(world)
    pair.answer(1, (FAILED, -1), (DONE, 6))
    assert pair.engine.batches == [2], "a batch was given to an engine that has not answered the one before"
    assert pair.states == {"failed": 1, "completed": 1, "queued": 1}
    pair.say(frames.Skipped(2))
    assert pair.engine.batches == [3, 4]
    assert [(position, token) for _, position, token in pair.given(3)] == [(1, 6)]
    assert pair.open == {1, 2}


def test_a_deferred_step_and_the_one_that_follows_another_go_together_once_the_engine_has_skipped(world: World) -> None:
    pair = Generations(world)
    pair.answer(1, (DEFERRED, -1), (DONE, 6))
    pair.say(frames.Skipped(2))
    assert [position for _, position, _ in pair.given(3)] == [0, 1]
    assert pair.open == {1, 2}


def test_an_engine_that_raises_takes_nothing_that_follows(world: World) -> None:
    pair = Generations(world)
    pair.say(frames.BatchFailed(1, "raised"))
    assert pair.engine.batches == [2]
    assert pair.states == {"failed": 2}
    pair.say(frames.Skipped(2))
    assert pair.open == set()
    assert pair.engine.batches == []


def test_an_engine_that_raises_loses_the_sessions_of_generations_that_ended_meanwhile_too(world: World) -> None:
    """It has taken a token of theirs, and nobody knows what it made of it."""
    pair = Generations(world)
    pair.answer(1, (DONE, STOP), (DONE, 6))
    pair.say(frames.BatchFailed(2, "raised"))
    assert pair.open == set()
    pair.say(frames.Skipped(3))
    assert pair.states == {"completed": 2, "failed": 1}


def test_an_engine_that_skips_what_it_should_have_run_is_given_it_again(world: World) -> None:
    pair = Generations(world)
    pair.answer(1, (DONE, 5), (DONE, 6))
    pair.say(frames.Skipped(2))
    assert pair.states == {"completed": 2, "queued": 2}
    pair.say(frames.Skipped(3))
    assert [(position, token) for _, position, token in pair.given(4)] == [(1, 5), (1, 6)]
    assert pair.states == {"completed": 2, "in flight": 2}


def test_results_that_do_not_fit_lose_the_batch_and_what_follows_it(world: World) -> None:
    pair = Generations(world)
    pair.answer(1, (DONE, 5), (DONE, 10_000))
    assert pair.states == {"failed": 2}
    assert pair.open == set()
    # A host that does not know of it has gone on.
    pair.answer(2, (DONE, 5), (DONE, 5))
    assert pair.states == {"failed": 2}
    assert pair.engine.batches == []


def test_a_session_that_is_cancelled_meanwhile_gets_nothing_more_and_can_go_on(world: World) -> None:
    pair = Generations(world)
    pair.client.say(frames.Cancel(1, 0, 0))
    world.turn()
    assert pair.states == {"cancelled": 1, "in flight": 1}
    pair.answer(1, (DONE, 5), (DONE, 6))
    pair.submit((1, 0, 0))
    pair.answer(2, (DONE, 5), (DONE, 6))
    pair.answer(3, (DONE, 5))
    assert [position for _, position, _ in pair.given(4)] == [0, 3]
    assert pair.open == {1, 2}


def test_a_client_that_leaves_takes_nothing_of_the_other_s_with_it(world: World) -> None:
    pair = Generations(world)
    world.leave(pair.client)
    world.turn()
    pair.answer(1, (DONE, 5), (DONE, 6))
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert pair.states == {"cancelled": 2, "ignored": 2}
    assert pair.engine.batches == []


@pytest.mark.parametrize("further", [(8, 0), (0, 8)])
def test_the_engine_is_not_sent_ahead_while_a_client_may_come_back_for_the_same_batch(
    world: World, further: tuple[int, int]
) -> None:
    pair = Generations(world, further)
    assert pair.engine.batches == [1]


@LINGERS
def test_the_engine_is_not_sent_ahead_while_a_session_is_expected_back(world: World) -> None:
    pair = Generations(world, step_s=STEP_S)
    pair.answer(1, (DONE, STOP), (DONE, 6))
    assert pair.engine.batches == [2]
    pair.submit((1, 1, 0))
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert [position for _, position, _ in pair.given(3)] == [1, 2], "the two are in one batch"


def test_the_engine_is_not_sent_ahead_of_steps_that_wait(world: World) -> None:
    pair = Generations(world)
    pair.client.say(frames.Cancel(1, 0, 0))
    pair.submit((1, 0, 8))
    pair.answer(1, (DONE, 5), (DONE, 6))
    assert pair.engine.batches == [2]
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert [position for _, position, _ in pair.given(3)] == [0, 2]
    assert pair.engine.batches == [3, 4]


@pytest.mark.parametrize("world", [{"streamed_tokens": 3}], indirect=True, ids=str)
def test_the_engine_is_not_sent_ahead_of_a_client_that_does_not_read(world: World) -> None:
    """What follows would wait until it has read: the engine would run it in vain, each time."""
    pair = Generations(world)
    given = 2
    for _ in range(20):
        if not pair.engine.batches:
            break
        batch = pair.engine.batches[0]
        pair.answer(batch, *[(DONE, 5)] * len(pair.given(batch)))
        given = max([given, *pair.engine.batches])
    counts = world.daemon.core.ledger.counts()
    # Three tokens fit the stream; one more of each generation waits in the daemon.
    assert (counts.queued, counts.in_flight) == (2, 0)
    assert given * 2 - counts.completed <= 2, "steps were run that nobody had room for"


@LINGERS
def test_a_client_that_is_gone_is_asked_for_nothing(world: World) -> None:
    """Its steps are still in the engine's batch; what it had is not there any more."""
    pair = Generations(world, step_s=STEP_S)
    pair.answer(1, (DONE, STOP), (DONE, 6))
    assert pair.engine.batches == [2]
    world.leave(pair.client)
    # Nothing follows batch 2, and the end of its sessions has the scheduler look again.
    world.turn()
    world.check()
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert pair.engine.batches == []


def test_the_engine_is_not_sent_ahead_with_more_decodes_than_it_takes(world: World) -> None:
    """Prompts may be more in a batch than decodes; what follows a prompt is a decode."""
    pair = Generations(world)
    (link,) = world.daemon.engines.links.values()
    link.batches.max_decodes = 1
    pair.answer(1, (DONE, 5), (DONE, 6))
    assert pair.engine.batches == [2]
    pair.answer(2, (DONE, 5), (DONE, STOP))
    # One is left, and one it takes.
    assert pair.engine.batches == [3, 4]


def test_the_room_of_a_client_is_counted_once_for_all_its_steps() -> None:
    """Also where those of two clients lie between one another's."""
    for room, expected in ((1, None), (2, 2)):
        batches = BatchesInFlight(memoryview(bytearray(BATCH_SLOTS * BatchSlotLayout(8).size)), 4, 8, 10)
        layout = ClientLayout(4, 4, 4, room)
        clients = [ClientPort(number, memoryview(bytearray(layout.size)), layout) for number in range(2)]
        steps = []
        for number in (0, 1, 0):
            session = Session(number, clients[number], 1, "m", b"")
            session.slot = len(steps)
            spec = StepSpec(SPEC.pack(1, 1, b"s" * 20, 7, 0), 1, True, generation=Generation(8, frozenset()))
            steps.append(session.add(len(steps), 1, 1, 1, bytes(4), 0, spec, 0.0))
            steps[-1].state = StepState.IN_FLIGHT
        batch = batches.give(0.0, steps)
        assert batch is not None
        assert batches.give_ahead(batch) == expected


def test_what_was_run_for_nobody_counts_for_what_a_batch_of_its_size_takes(world: World) -> None:
    pair = Generations(world)
    (link,) = world.daemon.engines.links.values()
    sizes: list[int] = []
    link.linger.batch_ended = lambda now, seconds, tokens, came, prompts: sizes.append(tokens)  # type: ignore[method-assign]
    pair.answer(1, (DONE, STOP), (DONE, STOP))
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert sizes == [2, 2]
    assert link.record.steps == 2
