"""The attached engines: from offer to death."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from functools import partial

from shmsched import failpoints
from shmsched.daemon.clients import Clients
from shmsched.daemon.config import DaemonConfig
from shmsched.daemon.connections import Connection, Connections
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.loop import READ, EventLoop
from shmsched.daemon.models import tell_models
from shmsched.daemon.outcomes import Outcomes
from shmsched.daemon.pidfds import pidfd_of
from shmsched.daemon.sessions import Sessions
from shmsched.daemon.supervisor import Supervisor, Worker
from shmsched.dataplane.batches import BATCH_SLOTS
from shmsched.dataplane.core import Core
from shmsched.engine.contract import EngineInfo
from shmsched.errors import ErrorCode, ProtocolError, SharedMemoryError, ShmschedError, SystemLimit
from shmsched.saying import counted
from shmsched.wire import frames

LAST_WORD_S = 1.0
"""How long the process of an engine whose connection is gone may take to end, before its clients are told without the reason."""
MOST_NAMED = 8
"""Sessions that a line of the log names."""


class Engines:
    """All engines by number: one incarnation each."""

    def __init__(
        self, config: DaemonConfig, core: Core, loop: EventLoop, outcomes: Outcomes, sessions: Sessions, connections: Connections,
        supervisor: Supervisor, clients: Clients, log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.links: dict[int, EngineLink] = {}
        self.ending = False
        """They end because the daemon does."""
        self._config = config
        self._core = core
        self._loop = loop
        self._outcomes = outcomes
        self._sessions = sessions
        self._connections = connections
        self._supervisor = supervisor
        self._clients = clients
        self._log = log

    def offered(self, connection: Connection, offer: frames.Offer) -> EngineLink:
        """An engine has connected and said what it serves.

        Raises ProtocolError if it does not fit its model's others, SharedMemoryError with the sizes if there is no room for it.
        """
        try:
            return self._attach(connection, offer)
        except ShmschedError as e:
            worker = self._supervisor.worker_of(connection.peer.pid)
            if worker is not None:
                worker.reason = str(e)
            raise

    def _attach(self, connection: Connection, offer: frames.Offer) -> EngineLink:
        for other in self.links.values():
            if other.offer.model == offer.model:
                _check_interchangeable(offer, other.offer)
        _check(offer)
        config = self._config
        limits = config.params.within(
            offer.max_batch_size or None, offer.max_decode_sequences or None, offer.max_prefill_chunk_size or None
        )
        worker = self._supervisor.worker_of(connection.peer.pid)
        # First of all: if the process is gone already, nothing has been made yet that would have to go.
        pidfd = pidfd_of(connection.peer.pid, "engine's") if worker is None else -1
        link: EngineLink | None = None
        try:
            link = EngineLink(connection, offer, limits, config, self._core, self._loop)
            failpoints.hit("daemon.offer.taken")
            decodes, chunk = limits.max_decode_sequences, limits.max_prefill_chunk_size
            connection.peer.send(frames.Attached(link.number, decodes, chunk, BATCH_SLOTS), link.segment.fd)
        except (SharedMemoryError, SystemLimit):
            if link is not None:
                link.buried()
            if pidfd >= 0:
                os.close(pidfd)
            raise
        link.segment.close_descriptor()
        link.blame = partial(self._connections.blame, connection)
        link.watchdog.warn = lambda since: self._is_silent(link, since)
        link.watchdog.bark = lambda: self._hangs(link)
        if worker is not None:
            self._supervisor.attached(worker, link)
        elif pidfd >= 0:
            # See the end of an engine that is not our child, also where a child of its own holds its socket open.
            link.pidfd = pidfd
            self._loop.watch(pidfd, READ, lambda _: self._process_ended(link))
        self.links[link.number] = link
        return link

    def ready(self, link: EngineLink) -> None:
        """The engine has started. Raises ProtocolError if it says so again: every client is told, each time."""
        if link.state is EngineState.DEAD:
            # Given up before its process has ended: nothing that it says counts any more.
            return
        if link.state is EngineState.READY:
            raise ProtocolError(f"engine {link.offer.spec} was ready already")
        link.state = EngineState.READY
        worker = self._supervisor.worker_of(link.peer.pid)
        if worker is not None:
            self._supervisor.is_ready(worker)
        else:
            self._log(f"engine {link.offer.spec} ({link.peer.name}) is attached, for model {link.offer.model!r}")
        self._changed()

    def failed_to_start(self, pid: int, reason: str) -> None:
        """An engine says why it will not be ready; the end of its process follows."""
        worker = self._supervisor.worker_of(pid)
        if worker is not None:
            worker.reason = reason
        else:
            self._log(f"the engine with pid {pid} did not start: {reason}")

    def faulty(self, link: EngineLink, reason: str) -> None:
        """It has written where it must not. Nothing of it counts, and it is not started again: it would do the same."""
        message = f"engine {link.offer.spec} ({link.peer.name}) is marked down: {reason}"
        self._abandon(link, ErrorCode.ENGINE_ERROR, message)
        worker = self._supervisor.worker_of(link.peer.pid)
        if worker is not None:
            self._supervisor.give_up(worker, message)
        else:
            _end_process(link)

    def _is_silent(self, link: EngineLink, since: float) -> None:
        """It has owed an answer for a good part of the step time-out: whoever waits may read in the log for whom."""
        self._connections.read_all(link.connection)
        if link.silent_since == since:
            self._log(
                f"engine {link.offer.spec} ({link.peer.name}) has been silent for {self._loop.clock.now() - since:.3g} s;"
                f" it has not {_owed(link)}; {_waiting(link)}. After {self._config.step_timeout_s:g} s it is killed"
            )

    def _hangs(self, link: EngineLink) -> None:
        """It has owed an answer for the whole step time-out. Its steps fail now; its rows return once it is dead."""
        self._connections.read_all(link.connection)
        limit = self._config.step_timeout_s
        if not link.watchdog.is_over:
            link.watchdog.watch()
            return
        message = f"engine {link.offer.spec} ({link.peer.name}) has not {_owed(link)} within {limit:g} s; it is killed"
        self._abandon(link, ErrorCode.ENGINE_TIMEOUT, message, f"; {_waiting(link)}")
        # The end of its process does the rest.
        worker = self._supervisor.worker_of(link.peer.pid)
        if worker is not None:
            self._supervisor.kill(worker)
        else:
            _end_process(link)

    def lost(self, link: EngineLink, why: str) -> None:
        """Its connection is gone: whatever its process still does, it gets no more work and its answers count no more."""
        del self.links[link.number]
        worker = self._supervisor.worker_of(link.peer.pid)
        if worker is not None and worker.link is link:
            self._child_lost(link, worker, why)
        else:
            self._settle(link, f"{why}{self._what_of_its_process(link)}")
            # Not our child. Its host closes the connection only when no forward pass runs any more, and the kernel only
            # when no thread of it is left.
            link.buried()
        self._unwatch_process(link)
        self._changed()

    def _child_lost(self, link: EngineLink, worker: Worker, why: str) -> None:
        """How its process ended is known in a moment, and more than that its connection did: what it held is settled then."""
        if self.ending:
            self._settle(link, why)
            return
        if link.state is EngineState.DEAD or worker.pidfd < 0:
            self._supervisor.let_go(worker)
            self._settle(link, why)
            return
        was, link.state = link.state, EngineState.DEAD
        timer = self._loop.call_later(LAST_WORD_S, lambda: lingers())

        def lingers() -> None:
            self._supervisor.let_go(worker)
            link.ended(f"{why}, and its process did not end within {LAST_WORD_S:g} s")

        def settle(why: str) -> None:
            link.ended = lambda why: None
            timer.cancel()
            link.state = was
            self._settle(link, why)

        link.ended = settle

    def _settle(self, link: EngineLink, why: str) -> None:
        """What the engine held fails now, if it has not before."""
        if link.state is EngineState.DEAD:
            return
        ending = self.ending
        holding = f" while it ran batch {link.batch.number}" if link.batch is not None else ""
        message = f"engine {link.offer.spec} ({link.peer.name}) ended{holding}: {why}"
        if not ending and not self._said_why(link):
            self._log(message)
        self._outcomes.abandon(link, ErrorCode.SCHEDULER_STOPPED if ending else ErrorCode.ENGINE_DIED, message)
        self._changed()

    @staticmethod
    def _what_of_its_process(link: EngineLink) -> str:
        """Of one that is not our child, whose status only its parent is told."""
        if link.pidfd < 0:
            return ""
        poll = select.poll()
        poll.register(link.pidfd, select.POLLIN)
        if poll.poll(0):
            return "; its process has ended, and how, only whoever started it can tell"
        return "; its process still runs, or is about to end"

    def _said_why(self, link: EngineLink) -> bool:
        """It did not start, and has told us the reason."""
        return link.state is EngineState.STARTING and any(w.link is link and w.reason for w in self._supervisor.workers)

    def worker_died(self, worker: Worker) -> None:
        """The process is reaped: nothing of it writes anywhere any more."""
        if worker.link is not None:
            self._connections.read_and_drop(worker.link.connection, worker.last_exit)
            worker.link.ended(worker.last_exit)
            worker.link.buried()
        self._sessions.slots_changed = True

    def _process_ended(self, link: EngineLink) -> None:
        self._unwatch_process(link)
        self._connections.read_all(link.connection)
        if link.number in self.links and link.state is not EngineState.DEAD:
            # Whoever still holds its socket may hold its memory too: rows in flight return with the end of the connection.
            message = f"engine {link.offer.spec} ({link.peer.name}) ended; a child of its keeps its connection open"
            self._abandon(link, ErrorCode.ENGINE_DIED, message)

    def _abandon(self, link: EngineLink, code: ErrorCode, message: str, more: str = "") -> None:
        """All that it held fails. ``more``: that the log says."""
        self._log(f"{message}{more}")
        self._outcomes.abandon(link, code, message)
        self._changed()

    def _unwatch_process(self, link: EngineLink) -> None:
        if link.pidfd >= 0:
            self._loop.unwatch(link.pidfd)
            os.close(link.pidfd)
            link.pidfd = -1

    def _changed(self) -> None:
        self._sessions.slots_changed = True
        tell_models(self.links.values(), self._clients.links.values())


def _end_process(link: EngineLink) -> None:
    """End an engine that is not our child."""
    if link.pidfd >= 0:
        signal.pidfd_send_signal(link.pidfd, signal.SIGKILL)
    else:
        # Of another PID namespace. It ends as it reads the end of the stream, should it ever read again; until then it may write
        # into its rows, which return with the end of its side of the connection.
        link.peer.end_sending()


def _owed(link: EngineLink) -> str:
    """What the engine should have done by now."""
    if link.batch is None:
        return "opened a session"
    return f"finished batch {link.batch.number} of {counted(len(link.batch.steps), 'step')}"


def _waiting(link: EngineLink) -> str:
    """The sessions that an engine keeps waiting, by their clients' numbers, as in ``status``; a few of many."""
    sessions = link.opening if link.batch is None else [step.session for step in link.batch.steps]
    named = [
        f"session {s.client_id} of client {s.client.number} ({s.client.peer.name})" for s in dict.fromkeys(sessions)
    ]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"waiting: {', '.join(named[:MOST_NAMED]) or 'nobody any more'}{more}"


def _check_interchangeable(offer: frames.Offer, other: frames.Offer) -> None:
    """Clients are told one vocabulary, one tokenizer and one set of stop tokens of a model. Raises ProtocolError."""
    for what, mine, theirs in (
        ("a vocabulary of", offer.vocab_size, other.vocab_size),
        ("the tokenizer", offer.tokenizer or "none", other.tokenizer or "none"),
        ("the stop tokens", sorted(offer.stop_tokens), sorted(other.stop_tokens)),
    ):
        if mine != theirs:
            raise ProtocolError(
                f"engine {offer.spec} serves model {offer.model!r} with {what} {mine}; engine {other.spec} serves it with"
                f" {theirs}. Give one of them another model name"
            )


def _check(offer: frames.Offer) -> None:
    """Clients are told what it says: what they could not take must not reach them. Raises InvalidRequest or ProtocolError."""
    frames.Rewinds.of(offer.rewinds)
    EngineInfo(
        model=offer.model,
        vocab_size=offer.vocab_size,
        max_sessions=offer.max_sessions,
        max_session_tokens=offer.max_session_tokens,
        max_batch_size=offer.max_batch_size or None,
        max_decode_sequences=offer.max_decode_sequences or None,
        max_prefill_chunk_size=offer.max_prefill_chunk_size or None,
        stop_tokens=offer.stop_tokens,
    )
