"""What hostile peers could do to the daemon once, each as the shortest sequence of frames that did it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmsched.dataplane.layouts import StepStatus
from shmsched.dataplane.session import Step
from shmsched.dataplane.step import StepState
from shmsched.wire import frames

from fuzz.actions import act_on, lying_world
from fuzz.streams import read_stream
from support.peers.connection import Stranger
from support.peers.engine import HONEST_OFFER, EnginePeer
from support.world import LIMITS, MOST_CLIENTS, World

pytestmark = pytest.mark.usefixtures("no_leftovers")
CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Parametrized with settings of the daemon."""
    world = lying_world(**getattr(request, "param", {}))
    yield world
    world.everybody_leaves()
    world.close()


def test_a_closed_daemon_has_no_thread_left() -> None:
    before = set(threading.enumerate())
    world = World()
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"shmsched-allocate", "shmsched-spawn"}
    world.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


class Pair:
    """A client with session 1, and the engine that has it."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.begin()
        self.client, self.engine = world.clients[0], world.engines[0]

    def submit(
        self, *, further: int = 0, deadline: float = 0.0, position: int = 0, session: int = 1, n: int = 1
    ) -> None:
        steps = [self.client.step(position + i, session=session, further=further, deadline=deadline) for i in range(n)]
        self.client.submit_unread(*steps)
        self.world.turn()

    def answer(self, status: StepStatus = StepStatus.DONE) -> None:
        self.engine.give(self.engine.batches.pop(0), status)
        self.world.turn()

    def cancel(self) -> None:
        self.client.say(frames.Cancel(1, 0, 0))
        self.world.turn()


def test_a_client_that_never_reads_its_stream_and_cancels_piles_nothing_up(world: World) -> None:
    pair = Pair(world)
    for _ in range(LIMITS.streamed_tokens + 30):
        pair.submit(further=1)
        pair.answer()
        pair.cancel()
        while pair.engine.batches:
            pair.answer()
        world.check()
    (link,) = world.daemon.clients.links.values()
    assert not link.unstreamed


def test_a_generation_whose_client_does_not_read_waits_and_goes_on_when_it_has(world: World) -> None:
    pair = Pair(world)
    pair.submit(further=10)
    while pair.engine.batches:
        pair.answer()
    counts = world.daemon.core.ledger.counts()
    # That many are in the stream, one more waits in the daemon, and with it the step that comes after it.
    assert (counts.completed, counts.queued) == (LIMITS.streamed_tokens + 1, 1)
    world.check()
    pair.client.say(frames.Consumed(*pair.client.cursors))
    world.turn()
    assert pair.engine.batches
    while pair.engine.batches:
        pair.answer()
        pair.client.say(frames.Consumed(*pair.client.cursors))
        world.turn()
    assert world.daemon.core.ledger.counts().completed == 11


def test_models_that_nobody_serves_leave_no_line_of_waiting_sessions(world: World) -> None:
    pair = Pair(world)
    for i in range(20):
        pair.client.say(frames.OpenSession(2 + i, 1, f"model {i}", b""))
        world.turn()
    assert len(world.daemon.placement._waiting) == 0


def segments_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/shmsched-")


def test_a_dead_engine_is_not_kept_by_the_timer_that_watched_it_nor_by_a_far_deadline(world: World) -> None:
    gc.collect()  # what earlier tests left
    before = segments_mapped()
    pair = Pair(world)
    pair.submit(deadline=world.clock.now() + 3600)
    world.leave(pair.engine)
    del pair.engine
    world.turn()
    mapped = segments_mapped() - before
    assert mapped == 2, "the client's segment, by the daemon and by the client, and not the engine's"


def test_an_engine_that_says_ready_again_is_let_go(world: World) -> None:
    pair = Pair(world)
    pair.engine.say(frames.Ready(0.0))
    world.turn()
    assert not world.daemon.engines.links


def test_an_engine_that_was_given_up_does_not_come_back_by_saying_ready(world: World) -> None:
    pair = Pair(world)
    (link,) = world.daemon.engines.links.values()
    # As after its process has ended, while a child of its holds the connection.
    world.daemon.engines._process_ended(link)
    pair.engine.say(frames.Ready(0.0))
    world.turn()
    assert not link.has_slot
    pair.client.say(frames.OpenSession(2, 1, "m", b""))
    world.turn()
    assert not pair.engine.openings


def test_answers_that_nobody_waits_for_do_not_pass_for_work(world: World) -> None:
    pair = Pair(world)
    pair.submit()
    (link,) = world.daemon.engines.links.values()
    since = link.silent_since
    pair.client.say(frames.OpenSession(2, 1, "m", b""))
    world.turn()
    for message in (frames.Done(99, ()), frames.SlotOpened(0, 0), frames.SlotOpened(1, 12345)):
        pair.engine.say(message)
        world.turn()
    assert link.silent_since == since
    world.clock.advance(0.01)
    pair.engine.open_next()
    world.turn()
    assert link.silent_since is not None
    assert link.silent_since > (since or 0.0)


def test_an_engine_whose_process_is_gone_before_its_offer_is_read_leaves_no_descriptor(world: World) -> None:
    pid = os.fork()
    if pid == 0:
        engine = EnginePeer(world.socket)
        engine.say(HONEST_OFFER)
        os._exit(0)
    os.waitpid(pid, 0)
    world.turn()
    assert not world.daemon.engines.links


def test_a_paused_client_that_leaves_is_forgotten(world: World) -> None:
    pair = Pair(world)
    for _ in range(2):
        world.add_client()
    pair.submit(n=8)
    busy = pair.client
    for client in world.clients[1:]:
        client.say(frames.OpenSession(1, 0, "m", b""))
        world.turn()
        pair.engine.open_next()
        world.turn()
        pair.client = client
        pair.submit(n=4)
    assert len(world.daemon.overload) > 0
    for client in reversed(list(world.clients)):
        world.leave(client)
        world.turn()
        world.check()
    assert busy not in world.clients
    assert len(world.daemon.overload) == 0


@pytest.mark.parametrize("world", [{"max_queued_steps": 6}], indirect=True, ids=str)
def test_who_does_not_flood_is_not_paused_for_those_who_do(world: World) -> None:
    pair = Pair(world)
    pair.submit(n=8)
    assert len(world.daemon.overload) == 1
    modest = world.add_client()
    modest.say(frames.OpenSession(1, 0, "m", b""))
    world.turn()
    pair.engine.open_next()
    world.turn()
    pair.client = modest
    pair.submit()
    assert len(world.daemon.overload) == 1


@pytest.mark.parametrize("world", [{"max_queued_steps": 1}], indirect=True, ids=str)
def test_steps_that_wait_for_their_client_to_read_do_not_shut_it_out(world: World) -> None:
    """They are queued, by the ledger; and only the client, by saying that it has read, can make them go."""
    pair = Pair(world)
    pair.submit(further=8)
    while pair.engine.batches:
        pair.answer()
    assert world.daemon.core.ledger.queued == 1
    pair.client.submit_unread()
    world.turn()
    pair.client.say(frames.Consumed(*pair.client.cursors))
    world.turn()
    assert pair.engine.batches


def test_a_step_that_is_deferred_for_ever_is_watched_once(world: World) -> None:
    pair = Pair(world)
    pair.submit(deadline=world.clock.now() + 3600)
    (link,) = world.daemon.clients.links.values()
    step: Step = next(iter(link.sessions[1].outstanding.values()))
    deadlines = world.daemon.deadlines
    for _ in range(5000):
        deadlines.add(step)
    step.state = StepState.QUEUED
    deadlines._compact()
    assert len(deadlines) == 1
    step.state = StepState.IN_FLIGHT


def test_options_of_sessions_that_wait_are_bounded(world: World) -> None:
    pair = Pair(world)
    for session in range(2, 6):
        pair.client.say(frames.OpenSession(session, 1, "m", b"o" * 60_000))
        world.turn()
        world.check()
    assert len(pair.engine.openings) == 1
    pair.engine.open_next()
    world.turn()
    pair.client.say(frames.OpenSession(6, 1, "m", b"o" * 60_000))
    world.turn()
    assert len(pair.engine.openings) == 1


def test_connections_that_say_nothing_give_way(world: World) -> None:
    for _ in range(MOST_CLIENTS + 3):
        world.others.append(Stranger(world.socket))
        world.turn()
    Pair(world)
    assert len(world.daemon.clients.links) == len(world.daemon.engines.links) == 1
    for _ in range(MOST_CLIENTS):
        world.others.append(Stranger(world.socket))
        world.turn()
    assert len(world.daemon.clients.links) == len(world.daemon.engines.links) == 1


@pytest.mark.parametrize("path", sorted(CORPUS.glob("daemon/*")), ids=lambda path: path.name)
def test_the_daemon_takes_what_a_fuzzer_found(world: World, path: Path) -> None:
    act_on(world, path.read_bytes())


@pytest.mark.parametrize("path", sorted(CORPUS.glob("frames/*")), ids=lambda path: path.name)
def test_the_parser_takes_what_a_fuzzer_found(path: Path) -> None:
    read_stream(path.read_bytes())


def test_a_fault_inside_the_daemon_is_seen(world: World) -> None:
    """The daemon goes on after one; here it must be found."""
    world.daemon.loop.post(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.turn()
        world.check()
    world._faults.clear()
