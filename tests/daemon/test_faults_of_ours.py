"""What a fault in the scheduler itself may cost: the one client or engine in whose affairs it is found, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shmsched.daemon import lookout
from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.engine_link import EngineLink
from shmsched.daemon.outcomes import Outcomes
from shmsched.dataplane.layouts import StepStatus
from shmsched.wire import frames

from support.peers.client import ClientPeer
from support.peers.engine import EnginePeer
from support.world import World

STREAM, NO_STREAM = 3, 0


class Fault(Exception):
    """Stands for any error in our own code."""


class Pair:
    """Two clients with a session each of two engines: the first of each is the unlucky one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clients: list[ClientPeer] = []
        self.engines: list[EnginePeer] = []
        for model in ("m", "n"):
            client, engine = world.add_client(), world.add_engine(model)
            world.open_session(client, engine, 1, model)
            self.clients.append(client)
            self.engines.append(engine)

    @property
    def links(self) -> tuple[ClientLink, EngineLink]:
        """The daemon's side of the unlucky ones."""
        daemon = self.world.daemon
        return next(iter(daemon.clients.links.values())), next(iter(daemon.engines.links.values()))

    def submit(self, which: int, position: int, further: int = NO_STREAM) -> None:
        client = self.clients[which]
        client.submit(client.step(position, further=further))

    def answer(self, which: int) -> None:
        engine = self.engines[which]
        engine.give(engine.batches.pop(0), StepStatus.DONE)

    def faults(self) -> list[BaseException]:
        """Those that the daemon has said, which are expected here."""
        found, self.world._faults = self.world._faults, []
        return found


@pytest.fixture
def pair(world: World) -> Pair:
    return Pair(world)


def fail(owner: Any, *names: str, monkeypatch: pytest.MonkeyPatch, of: Any = None) -> None:
    """Each method of ``owner`` named raises, for the object ``of`` alone."""
    for name in names:
        real: Callable[..., Any] = getattr(owner, name)

        def method(self: Any, *args: Any, real: Callable[..., Any] = real) -> Any:
            if self is of:
                raise Fault
            return real(self, *args)

        monkeypatch.setattr(owner, name, method)


CLIENTS = ["can_hear_later", "tell_completions", "answered", "streamed", "tell_failed"]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_fault_in_what_a_client_is_told_costs_its_connection_and_no_other_answer(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, further = pair.world, STREAM if name == "streamed" else NO_STREAM
    for which in (0, 1):
        pair.submit(which, 0, further)
    world.turn()
    fail(ClientLink, name, monkeypatch=monkeypatch, of=pair.links[0])
    if name == "tell_failed":
        pair.clients[0].say(frames.Cancel(1, 1, 0))
        pair.answer(1)
    else:
        # Both in one turn: whoever comes first must not end it.
        pair.answer(0)
        pair.answer(1)
    world.turn()
    assert [type(fault) for fault in pair.faults()] == [Fault]
    assert pair.clients[0].gone
    assert not pair.clients[1].gone
    records, _, streamed = pair.clients[1].cursors
    assert records + streamed == 1, "the other client was not told of its answer"
    assert [engine.gone for engine in pair.engines] == [False, False]
    monkeypatch.undo()
    world.check()


@pytest.mark.parametrize("name", ["may_go", "dispatch", "run_ahead"])
def test_a_fault_in_giving_an_engine_its_batch_costs_that_engine_and_loses_no_step(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, link = pair.world, pair.links[1]
    fail(EngineLink, name, monkeypatch=monkeypatch, of=link)
    pair.submit(0, 0)
    pair.submit(1, 0)
    world.turn()
    assert {type(fault) for fault in pair.faults()} == {Fault}
    assert [engine.gone for engine in pair.engines] == [True, False]
    assert [client.gone for client in pair.clients] == [False, False]
    assert pair.clients[0].positions == {}, "the session of the engine that is gone was not ended"
    pair.answer(1)
    world.turn()
    assert pair.clients[1].cursors[0] == 1
    counts = world.daemon.core.ledger.counts()
    assert (counts.completed, counts.failed, counts.queued, counts.in_flight) == (1, 1, 0, 0)
    world.check()


def test_a_fault_in_settling_a_batch_settles_its_steps_with_the_end_of_the_engine(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = pair.world
    for which in (0, 1):
        pair.submit(which, 0)
    world.turn()
    unlucky, settle = pair.links[1], Outcomes._settle

    def settle_or_fail(self: Outcomes, link: EngineLink, *args: Any) -> None:
        if link is unlucky:
            raise Fault
        settle(self, link, *args)

    monkeypatch.setattr(Outcomes, "_settle", settle_or_fail)
    pair.answer(0)
    pair.answer(1)
    world.turn()
    assert Fault in {type(fault) for fault in pair.faults()}
    assert [engine.gone for engine in pair.engines] == [True, False]
    counts = world.daemon.core.ledger.counts()
    assert (counts.completed, counts.failed, counts.in_flight) == (1, 1, 0)
    assert pair.clients[1].cursors[0] == 1
    monkeypatch.undo()
    world.check()


def test_a_fault_in_any_part_of_the_end_of_a_turn_leaves_the_other_parts_their_turn(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of these belongs to one client or engine."""
    world, daemon = pair.world, pair.world.daemon
    fail(type(daemon.sessions), "serve_waiting", monkeypatch=monkeypatch, of=daemon.sessions)
    fail(type(daemon.deadlines), "expire", monkeypatch=monkeypatch, of=daemon.deadlines)
    daemon.sessions.slots_changed = True
    pair.submit(0, 0)
    world.turn()
    assert pair.engines[0].batches
    pair.answer(0)
    world.turn()
    assert pair.clients[0].cursors[0] == 1
    assert {type(fault) for fault in pair.faults()} == {Fault}
    assert not any(peer.gone for peer in world.peers)


def test_a_fault_in_the_end_of_a_connection_leaves_the_loop_and_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = pair.world
    pair.submit(0, 0)
    world.turn()
    fail(ClientLink, "settled_without_answer", monkeypatch=monkeypatch, of=pair.links[0])
    pair.submit(1, 0)
    world.leave(pair.clients[0])
    world.turn()
    pair.answer(1)
    world.turn()
    assert pair.clients[1].cursors[0] == 1
    assert [type(fault) for fault in pair.faults()] == [Fault]
    world.check()


def test_an_answer_that_was_written_and_not_announced_is_noticed_and_announced(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    world, daemon = pair.world, pair.world.daemon
    pair.submit(0, 0)
    world.turn()
    forgotten = pair.links[0]
    # As if a turn had been cut short.
    monkeypatch.setattr(daemon.telling, "tell_touched", daemon.core.touched_clients.clear)
    pair.answer(0)
    world.turn()
    assert pair.clients[0].cursors[0] == 0
    assert forgotten.has_unannounced
    monkeypatch.undo()

    for _ in range(lookout.FORGOTTEN):
        assert pair.clients[0].cursors[0] == 0
        world.pass_time(lookout.LOOK_S)
    assert pair.clients[0].cursors[0] == 1, "the lookout did not have the client told"
    assert capfd.readouterr().err.count("answers to client") == 1


def test_an_engine_that_was_not_given_its_steps_is_noticed_and_given_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    world, daemon = pair.world, pair.world.daemon
    monkeypatch.setattr(daemon, "_give_batches", daemon.core.touched_engines.clear)
    pair.submit(0, 0)
    world.turn()
    assert not pair.engines[0].batches
    monkeypatch.undo()

    for _ in range(lookout.FORGOTTEN):
        assert not pair.engines[0].batches
        world.pass_time(lookout.LOOK_S)
    assert pair.engines[0].batches, "the lookout did not have the engine given its batch"
    assert capfd.readouterr().err.count("1 step queued") == 1


@pytest.mark.parametrize("engine_first", [True, False])
def test_a_client_that_ends_in_the_turn_of_its_answer_costs_the_others_nothing(pair: Pair, engine_first: bool) -> None:
    world = pair.world
    for which in (0, 1):
        pair.submit(which, 0, STREAM)
    world.turn()
    if engine_first:
        pair.answer(0)
    world.leave(pair.clients[0])
    if not engine_first:
        pair.answer(0)
    pair.answer(1)
    world.turn()
    assert pair.clients[1].cursors[2] == 1
    assert pair.faults() == []
    world.check()
