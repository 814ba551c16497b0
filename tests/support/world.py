"""A daemon in the test's own process, a turn of its loop at a time, and peers that may say anything.

The peers connect to its real socket. After each turn ``check`` holds the daemon to what must always be true, and
``everybody_leaves`` to what must be left in the end: nothing.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shmsched.daemon import connections, handlers, loop
from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.config import ClientLimits, DaemonConfig
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.server import Daemon
from shmsched.dataplane.session import Session, Step
from shmsched.dataplane.step import StepState
from shmsched.saying import say_trace
from shmsched.scheduling import SchedulerParams
from shmsched.wire import frames

from support.clock import StandingClock
from support.peers.client import ClientPeer
from support.peers.connection import ControlPeer, Stranger
from support.peers.engine import HONEST_OFFER, EnginePeer

LIMITS = ClientLimits(
    ring_tokens=64,
    outstanding_steps=8,
    outstanding_results=12,
    streamed_tokens=3,
    arena_bytes=1 << 14,
    sessions=6,
    option_bytes=100_000,
)
"""Small, so that each is reached."""
MOST_QUEUED = 10
MOST_CLIENTS = 7
ARENA_S = 5.0


class World:
    """One daemon for many runs: what one run leaves behind, the next one's end would find."""

    def __init__(
        self,
        limits: ClientLimits = LIMITS,
        client_type: type[ClientPeer] = ClientPeer,
        engine_type: type[EnginePeer] = EnginePeer,
        **settings: Any,
    ) -> None:
        """``client_type``, ``engine_type``: who is connected to begin with. ``settings``: the daemon's own."""
        self._client_type, self._engine_type = client_type, engine_type
        self._directory = tempfile.TemporaryDirectory(prefix="shmsched-fuzz-")
        config = DaemonConfig(
            socket=Path(self._directory.name) / "s",
            params=SchedulerParams(max_decode_sequences=4, max_prefill_chunk_size=4),
            client=limits,
            max_queued_steps=settings.pop("max_queued_steps", MOST_QUEUED),
            max_clients=MOST_CLIENTS,
            max_shared_memory=1 << 15,
            **settings,
        )
        self.clock = StandingClock()
        self.daemon = Daemon(config, self.clock)
        # What it logs is of no interest here, and there is much of it.
        self.daemon.log = lambda message: None  # type: ignore[method-assign]
        self.clients: list[ClientPeer] = []
        self.engines: list[EnginePeer] = []
        self.others: list[ControlPeer | Stranger] = []
        self._faults: list[BaseException] = []
        for module in (loop, connections, handlers):
            module.say_trace = self._note
        self.turn()
        self._callbacks = len(self.daemon.loop._callbacks)
        self._descriptors = _open_descriptors()

    def close(self) -> None:
        for module in (loop, connections, handlers):
            module.say_trace = say_trace
        self.daemon.close()
        self._directory.cleanup()

    def _note(self, fault: BaseException | None = None) -> None:
        fault = fault or sys.exception()
        assert fault is not None
        self._faults.append(fault)

    @property
    def socket(self) -> str:
        return str(self.daemon.config.socket)

    @property
    def timers(self) -> int:
        """How many calls the daemon's loop has to make later."""
        return sum(timer.pending for _, _, timer in self.daemon.loop._timers)

    @property
    def peers(self) -> list[Any]:
        return [*self.clients, *self.engines, *self.others]

    def turn(self) -> None:
        """Let the daemon handle what its peers have said."""
        for _ in range(3):
            self.daemon.loop.post(lambda: None)
            self.daemon.loop.turn()
        # Arenas are made in another thread, and a client may be gone before its is.
        deadline = time.monotonic() + ARENA_S
        while self.daemon.clients.budget.used != self._handed_out():
            assert time.monotonic() < deadline, (
                f"waited {ARENA_S:g} s in vain for the memory handed out to be accounted for"
            )
            self.daemon.loop.post(lambda: None)
            self.daemon.loop.turn()
        for peer in self.peers:
            if peer.reads:
                peer.read()
            if peer.gone:
                self.leave(peer)

    def _handed_out(self) -> int:
        links = self.daemon.clients.links.values()
        return sum(link.segment_size + (link.arena.size if link.arena is not None else 0) for link in links)

    def begin(self) -> None:
        """With a session that is open: most of what can go wrong needs one."""
        client, engine = self.add_client(), self.add_engine()
        self.open_session(client, engine, 1)

    def add_client(self) -> ClientPeer:
        client = self._client_type(self.socket, self.clock.now)
        self.clients.append(client)
        self.turn()
        return client

    def add_engine(self, model: str = "m") -> EnginePeer:
        engine = self._engine_type(self.socket)
        self.engines.append(engine)
        engine.say(HONEST_OFFER._replace(model=model))
        engine.say(frames.Ready(0.0))
        self.turn()
        return engine

    def open_session(self, client: ClientPeer, engine: EnginePeer, session: int, model: str = "m") -> None:
        client.say(frames.OpenSession(session, 0, model, b""))
        self.turn()
        engine.open_next()
        self.turn()
        assert client.positions[session] == 0

    def pass_time(self, seconds: float) -> None:
        """By the daemon's clock, and then a turn."""
        self.clock.advance(seconds)
        self.turn()

    def leave(self, peer: Any) -> None:
        peer.close()
        for peers in (self.clients, self.engines, self.others):
            if peer in peers:
                peers.remove(peer)  # type: ignore[arg-type]

    # --- what must be true ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._faults:
            raise self._faults[0]
        daemon = self.daemon
        counts = daemon.core.ledger.counts()
        assert counts.balanced, counts
        links = list(daemon.clients.links.values())
        for link in links:
            self._check_client(link)
        sessions = [session for link in links for session in link.sessions.values()]
        outstanding = [step for session in sessions for step in session.outstanding.values()]
        assert daemon.sessions.open == len(sessions)
        in_flight = [step for step in outstanding if step.state is StepState.IN_FLIGHT]
        assert (counts.queued, counts.in_flight) == (len(outstanding) - len(in_flight), len(in_flight))
        waiting = [step for link in links for step in link.unstreamed]
        assert all(step.state is StepState.QUEUED for step in waiting), "a settled step waits for room in a stream"
        engines = list(daemon.engines.links.values())
        assert counts.queued == sum(len(e.queues) for e in engines) + len(waiting)
        assert daemon.placement.waiting == sum(session.engine is None for session in sessions)
        assert all(daemon.placement._waiting.values()), "a line in which nobody waits is kept"
        for engine in engines:
            self._check_engine(engine, sessions)
        assert all(connection.open for connection in daemon.overload.paused), "a paused client is gone, and kept"
        assert len(daemon.connections) <= MOST_CLIENTS + connections.RESERVED
        assert not daemon.core.touched_clients
        assert not daemon.core.touched_engines

    def _check_client(self, link: ClientLink) -> None:
        steps = [step for session in link.sessions.values() for step in session.outstanding.values()]
        assert link.outstanding == len(steps)
        assert link.outstanding_results == sum(step.n_results for step in steps)
        assert link.option_bytes == sum(len(session.options) for session in link.sessions.values())
        assert link.option_bytes <= LIMITS.option_bytes
        for session in link.sessions.values():
            assert session.client is link
            ends = [step.position + step.n_tokens for step in session.outstanding.values()]
            ends.append(session.next_position)
            starts = [step.position for step in session.outstanding.values()]
            assert all(start <= end for start, end in zip(starts[1:], ends, strict=False)), "a gap between its steps"
            generating = [step for step in session.outstanding.values() if step.generation is not None]
            assert generating in ([], [session.generating])

    def _check_engine(self, engine: EngineLink, sessions: list[Session]) -> None:
        mine = {session.slot: session for session in sessions if session.engine is engine}
        assert engine.sessions == mine
        if engine.state is EngineState.DEAD:
            return
        taken = engine._slots
        slots = [*mine, *taken._freed, *taken._closed_early]
        assert sorted(slots) == list(range(taken._next)), "a slot is lost, or has two sessions"
        assert taken._next <= engine.offer.max_sessions
        assert engine.linger._expected | set(engine.linger._usual) <= {session.number for session in mine.values()}

    def everybody_leaves(self) -> None:
        """After which all numbers are back where they were."""
        for peer in self.peers:
            self.leave(peer)
        self.turn()
        self.check()
        daemon = self.daemon
        counts = daemon.core.ledger.counts()
        assert (counts.queued, counts.in_flight, daemon.sessions.open, daemon.placement.waiting) == (0, 0, 0, 0)
        assert (len(daemon.connections), len(daemon.clients.links), len(daemon.engines.links)) == (0, 0, 0)
        assert (daemon.clients.budget.used, len(daemon.overload), len(daemon.connections._silent)) == (0, 0, 0)
        assert len(daemon.loop._callbacks) == self._callbacks
        deadline = time.monotonic() + ARENA_S
        while left := _open_descriptors() - self._descriptors:
            # The thread that makes arenas may not have let go of the last one yet.
            assert time.monotonic() < deadline, f"descriptors are left: {sorted(left)}"

    def nothing_is_kept(self) -> None:
        """No object of anybody who has left lives on."""
        daemon = self.daemon
        daemon.deadlines._compact()
        assert len(daemon.deadlines) == 0
        gc.collect()
        kept = [o for o in gc.get_objects() if isinstance(o, ClientLink | EngineLink | Session | Step)]
        assert kept == []


@contextmanager
def of_settings(streamed_tokens: int = 64, **settings: Any) -> Iterator[World]:
    """One that lingers for nobody and gives what comes after a batch at once, unless ``settings`` say otherwise."""
    limits = replace(LIMITS, streamed_tokens=streamed_tokens)
    world = World(limits, **{"linger_share": 0.0, "ahead_share": 0.0, **settings})
    yield world
    world.everybody_leaves()
    world.close()


def _open_descriptors() -> set[tuple[str, str]]:
    """What each open descriptor of this process refers to."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:
            continue
    return found
