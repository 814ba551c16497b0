"""Deadlines: what is not dispatched by then fails and takes the rest of its session with it; what is, completes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

import shmsched
from shmsched.dataplane.layouts import StepStatus
from shmsched.errors import ErrorCode

from faults.decoding import VOCAB
from processes import engines as moods
from processes.leftovers import wait_until
from support.peers.by_hand import DEADLINE, EngineByHand
from support.world import World, of_settings

MOODY = f"{moods.__file__}:Moody"
SOON = 0.05


@pytest.fixture
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(max_prefill_chunk_size=4) as cluster:
        yield cluster


def late(future: shmsched.StepFuture) -> str:
    with pytest.raises(shmsched.DeadlineExceeded) as e:
        future.result(DEADLINE)
    return str(e.value)


def test_a_step_not_dispatched_in_time_leaves_its_queue_with_what_follows_it_and_nobody_else(
    cluster: shmsched.Cluster,
) -> None:
    with EngineByHand(cluster.socket) as engine, cluster.client() as client:
        busy, session, other = (client.open_session() for _ in range(3))
        running = busy.submit([1])
        batch = engine.work()
        first = session.submit([1])
        doomed = session.submit([2], deadline=time.monotonic() + SOON)
        after = [session.submit([3]), session.submit([4], deadline=time.monotonic() + 3600)]
        bystander = other.submit([5])
        assert "the step at position 1 of session" in late(doomed)
        for future in after:
            late(future)
        assert session.position == 1
        assert not any(future.done() for future in (first, bystander, running))
        assert cluster.status()["engines"][0]["queued"] == 2
        engine.answer(batch, 7)
        assert running.result(DEADLINE).tokens.tolist() == [7]
        batch = engine.work()
        assert [(step.position, step.length) for step in engine.steps()] == [(0, 1), (0, 1)]
        engine.answer(batch, 8, 9)
        assert first.result(DEADLINE).tokens.tolist() == [8]
        assert bystander.result(DEADLINE).tokens.tolist() == [9]
        again = session.submit([2])
        batch = engine.work()
        assert [step.position for step in engine.steps()] == [1]
        engine.answer(batch, 3)
        assert again.result(DEADLINE).tokens.tolist() == [3]


@pytest.fixture
def world() -> Iterator[World]:
    with of_settings() as world:
        world.begin()
        yield world


def test_a_dispatched_step_completes_however_late(world: World) -> None:
    client, engine = world.clients[0], world.engines[0]
    client.submit(client.step(deadline=world.clock.now() + 1.0))
    world.turn()
    assert engine.batches == [1]
    world.pass_time(1.1)
    assert not client.failures
    engine.answer(1, [StepStatus.DONE], [7])
    world.turn()
    assert (client.cursors[0], client.failures) == (1, [])


def test_a_prompt_of_many_chunks_fails_as_one(cluster: shmsched.Cluster) -> None:
    """The chunks that were dispatched are in the engine, and the session goes on after them, or below."""
    with EngineByHand(cluster.socket) as engine, cluster.client() as client:
        session = client.open_session()
        future = session.submit(list(range(200)), deadline=time.monotonic() + 1.0)
        batch = engine.work()
        taken = sum(step.length for step in engine.steps())
        assert 0 < taken < 200
        late(future)
        engine.answer(batch)
        assert session.position == taken
        assert cluster.status()["engines"][0]["queued"] == 0
        again = session.submit([1])
        batch = engine.work()
        engine.answer(batch, 5)
        assert again.result(DEADLINE).tokens.tolist() == [5]


def test_a_deferred_step_still_has_its_deadline(cluster: shmsched.Cluster) -> None:
    with EngineByHand(cluster.socket) as engine, cluster.client() as client:
        session, other = client.open_session(), client.open_session()
        # Something runs beside it each time, or the youngest session would have to make room.
        beside = [other.submit([1]) for _ in range(200)]
        future = session.submit([1], deadline=time.monotonic() + 1.0)
        deferred, running = 0, -1
        for _ in beside:
            batch = engine.work()
            slots = [step.slot for step in engine.steps()]
            running = slots[0] if running < 0 else running
            deferred += len(slots) == 2
            engine.answer_by(batch, [StepStatus.DONE if slot == running else StepStatus.DEFERRED for slot in slots])
            wait([future], timeout=0.01)
            if future.done():
                break
        assert deferred > 1
        late(future)
        assert session.position == 0
        other.close()


def test_deadlines_hold_while_the_engine_hangs() -> None:
    with shmsched.launch(MOODY, step_timeout_s=3.0) as cluster, cluster.client() as client:
        hanging, waiting = client.open_session(), client.open_session()
        stuck = hanging.submit([moods.HANG])
        wait_until(lambda: cluster.status()["engines"][0]["in_flight"], "the engine to hang")
        late(waiting.submit([1], deadline=time.monotonic() + SOON))
        assert not stuck.done()
        with pytest.raises(shmsched.EngineTimeout):
            stuck.result(DEADLINE)


def test_each_further_decode_of_a_generation_has_the_deadline(world: World) -> None:
    client, engine = world.clients[0], world.engines[0]
    client.submit(client.step(further=10, deadline=world.clock.now() + 1.0))
    world.turn()
    for batch in (1, 2):
        engine.answer(batch, [StepStatus.DONE], [5])
        world.turn()
    world.pass_time(1.1)
    # The third was dispatched in time. The one after it was not, though the engine was given it ahead: its answer is nobody's.
    assert engine.batches == [1, 2, 3, 4]
    engine.answer(3, [StepStatus.DONE], [5])
    world.turn()
    assert client.cursors[2] == 3
    assert [failed.code for failed in client.failures] == [ErrorCode.DEADLINE_EXCEEDED]
    client.submit(client.step(3))
    engine.answer(4, [StepStatus.DONE], [6])
    world.turn()
    assert engine.batches[4:] == [5]
    assert [step.position for step in engine.slots.steps(5)] == [3]
    engine.answer(5, [StepStatus.DONE], [5])
    world.turn()
    assert (client.cursors[0], len(client.failures)) == (1, 1)
    world.check()


def test_cancelling_a_dispatched_step_drops_its_answer(cluster: shmsched.Cluster) -> None:
    with EngineByHand(cluster.socket) as engine, cluster.client() as client:
        session = client.open_session()
        future = session.submit([1])
        batch = engine.work()
        assert future.cancel()
        wait_until(lambda: cluster.status()["ledger"]["cancelled"] == 1, "the daemon to hear of it")
        engine.answer(batch, 7)
        wait_until(lambda: cluster.status()["ledger"]["ignored"] == 1, "the answer to be dropped")
        assert future.cancelled()
        assert session.position == 0
        again = session.submit([2])
        batch = engine.work()
        assert [step.position for step in engine.steps()] == [0]
        engine.answer(batch, 8)
        assert again.result(DEADLINE).tokens.tolist() == [8]


def test_two_thousand_far_deadlines_are_not_kept() -> None:
    with shmsched.launch(f"echo?vocab={VOCAB}") as cluster, cluster.client() as client:
        session = client.open_session()
        far = time.monotonic() + 1e6
        futures = [session.submit([1], deadline=far - i) for i in range(2000)]
        assert all(future.result(DEADLINE).tokens.size == 1 for future in futures)
