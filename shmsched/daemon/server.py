"""The daemon: one thread, one event loop, and everything that sessions, clients and engines do to one another."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.config import DaemonConfig
from shmsched.daemon.connections import Connection, Connections, Handler
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.handlers import ClientHandler, ControlHandler, EngineHandler
from shmsched.daemon.loop import READ, EventLoop
from shmsched.daemon.memory_budget import MemoryBudget
from shmsched.daemon.models import tell_models
from shmsched.daemon.placement import NoPlace, Placement
from shmsched.daemon.settling import Settling
from shmsched.daemon.state import Session, SessionState, Step
from shmsched.daemon.supervisor import Supervisor, Worker, WorkerState
from shmsched.errors import ErrorCode, ProtocolError, SchedulerStopped, SharedMemoryError
from shmsched.memory.layouts import ClientLayout
from shmsched.memory.segment import Segment, sweep
from shmsched.wire import frames
from shmsched.wire.listener import Listener

ENGINE_GRACE_S = 5.0
"""How long engines may take to end once their connections have."""
FLUSH_GRACE_S = 1.0
"""How long clients may take to read the last word."""


class Daemon:
    """Owns sessions and the order of events. Each method is one thing that can happen."""

    def __init__(self, config: DaemonConfig) -> None:
        self.config = config
        self.started = time.monotonic()
        self.loop = EventLoop()
        self.listener = Listener(config.socket)
        sweep()
        self.connections = Connections(self.loop, self.listener, config.max_clients, self._greet)
        self.settling = Settling()
        self.supervisor = Supervisor(config, self.loop, self._worker_died, self.log)
        self.placement = Placement(lambda: self.engines.values(), lambda: self.supervisor.coming)
        self.budget = MemoryBudget(config.max_shared_memory)
        self.clients: dict[int, ClientLink] = {}
        self.engines: dict[int, EngineLink] = {}
        self.open_sessions = 0
        self.touched_engines: set[EngineLink] = set()
        self.touched_clients: set[ClientLink] = set()
        self.slots_changed = False
        self.stopping = False
        self.exit_status = 0
        self._ending = False
        self._announced = False
        self._numbers = itertools.count(1)
        self._to_allocate: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._allocate_all, name="shmsched-allocate", daemon=True).start()
        self.loop.after_turn = self._end_of_turn

    def run(self) -> int:
        """Serve until told to stop. Returns the exit status."""
        self._watch_signals()
        if self.config.launcher_pid:
            self._end_with(self.config.launcher_pid)
        self.supervisor.start()
        gc.collect()
        gc.freeze()
        self.loop.after_turn()
        try:
            self.loop.run()
        finally:
            self.connections.close()
            self.listener.close()
            self.loop.close()
        return self.exit_status

    def log(self, message: str) -> None:
        print(f"shmsched: {message}", file=sys.stderr, flush=True)

    def next_number(self) -> int:
        """A number that was never used before in this daemon, for a step, a session, a client or an engine."""
        return next(self._numbers)

    # --- connections ----------------------------------------------------------------------------------------------------

    def _greet(self, connection: Connection, hello: frames.Hello) -> Handler:
        if hello.role == frames.Role.CONTROL:
            return ControlHandler(self, connection)
        if self.stopping:
            raise SchedulerStopped(f"the scheduler (pid {os.getpid()}) is stopping")
        if hello.role == frames.Role.ENGINE:
            return EngineHandler(self, connection)
        if hello.role == frames.Role.CLIENT:
            return self._welcome(connection)
        raise ProtocolError(f"a hello of unknown role {hello.role}")

    def _welcome(self, connection: Connection) -> Handler:
        limits = self.config.client
        layout = ClientLayout(limits.ring_tokens, limits.outstanding_steps, limits.outstanding_results)
        what = f"client pid {connection.peer.pid}"
        try:
            pidfd = os.pidfd_open(connection.peer.pid)
        except OSError as e:
            raise ProtocolError(f"cannot watch the client's process {connection.peer.pid}: {e.strerror}") from e
        try:
            self.budget.reserve(layout.size, what)
            try:
                segment = Segment.create(layout.size, what)
            except SharedMemoryError:
                self.budget.release(layout.size)
                raise
        except SharedMemoryError:
            os.close(pidfd)
            raise
        link = ClientLink(self.next_number(), connection.peer, segment, layout, limits, self.touched_clients.add)
        handler = ClientHandler(self, connection, link, pidfd)
        self.clients[link.number] = link
        tell_models(self.engines.values(), [link])
        arena = min(limits.arena_bytes, self.config.max_shared_memory)
        welcome = frames.Welcome(link.number, os.getpid(), layout.ring_tokens, layout.records, layout.results, arena)
        link.tell(welcome, segment.fd)
        segment.close_descriptor()
        return handler

    def client_gone(self, link: ClientLink) -> None:
        """Its queued steps leave their queues, its sessions close, its memory goes once no engine writes into it."""
        link.closed = True
        for session in list(link.sessions.values()):
            self._end_session(session, ErrorCode.SESSION_CLOSED, "its client is gone")
        del self.clients[link.number]
        for engine in self.engines.values():
            engine.forget_client(link)
        self.budget.release(link.segment_size)
        if link.arena is not None:
            self.budget.release(link.arena.size)
            link.arena.close_descriptor()

    def open_arena(self, link: ClientLink, size: int) -> None:
        """Make the client's arena, off the loop: reserving a gigabyte takes a third of a second."""
        what = f"the logits arena of client pid {link.peer.pid}"
        if link.arena_requested or not 0 < size <= link.limits.arena_bytes:
            raise ProtocolError(f"an arena of {size} bytes; one of at most {link.limits.arena_bytes} is allowed")
        link.arena_requested = True
        try:
            self.budget.reserve(size, what)
        except SharedMemoryError as e:
            link.arena_requested = False
            link.tell(frames.ArenaRefused(ErrorCode.SHARED_MEMORY, str(e)))
            return

        def allocate() -> None:
            try:
                arena = Segment.create(size, what)
            except SharedMemoryError as e:
                message = str(e)
                self.loop.post(lambda: self._arena_refused(link, size, message))
            else:
                self.loop.post(lambda: self._arena_made(link, arena))

        self._to_allocate.put(allocate)

    def _allocate_all(self) -> None:
        while True:
            self._to_allocate.get()()

    def _arena_made(self, link: ClientLink, arena: Segment) -> None:
        if link.closed:
            self.budget.release(arena.size)
            arena.close_descriptor()
            return
        link.arena = arena
        link.tell(frames.Arena(arena.size), arena.fd)

    def _arena_refused(self, link: ClientLink, size: int, message: str) -> None:
        self.budget.release(size)
        link.arena_requested = False
        link.tell(frames.ArenaRefused(ErrorCode.SHARED_MEMORY, message))

    # --- sessions -------------------------------------------------------------------------------------------------------

    def open_session(self, link: ClientLink, message: frames.OpenSession) -> None:
        if message.session in link.sessions:
            raise ProtocolError(f"session {message.session} is open already")
        if len(message.options) > frames.MAX_OPTIONS:
            raise ProtocolError(f"options of {len(message.options)} bytes; at most {frames.MAX_OPTIONS} are allowed")
        session = Session(self.next_number(), link, message.session, message.model, message.options)
        link.sessions[message.session] = session
        self.open_sessions += 1
        if self.stopping:
            self._end_session(
                session, ErrorCode.SCHEDULER_STOPPED, "the scheduler is stopping; it takes no new sessions"
            )
            return
        if len(link.sessions) > link.limits.sessions:
            self._end_session(session, ErrorCode.FULL, f"a client has at most {link.limits.sessions} sessions")
            return
        try:
            self.placement.place(session, bool(message.block))
        except NoPlace as e:
            self._end_session(session, e.code, e.message)

    def close_session(self, link: ClientLink, client_id: int) -> None:
        session = link.sessions.get(client_id)
        if session is not None:
            self._end_session(session, ErrorCode.SESSION_CLOSED, "the session was closed", tell=False)

    def lose_session(self, session: Session, code: ErrorCode, message: str) -> None:
        """The session's state in its engine is gone, or has to go."""
        self._end_session(session, code, message)

    def _end_session(self, session: Session, code: ErrorCode, message: str, *, tell: bool = True) -> None:
        if session.state is SessionState.ENDED:
            return
        self.settling.fail_session(session, code, message)
        if tell:
            session.client.end_session(session, code, message)
        else:
            session.client.sessions.pop(session.client_id, None)
        if session.engine is not None:
            session.engine.close(session)
            self.touched_engines.add(session.engine)
        else:
            self.placement.forget(session)
        session.state = SessionState.ENDED
        self.open_sessions -= 1
        self.slots_changed = True

    def slot_opened(self, engine: EngineLink, slot: int, number: int) -> None:
        session = engine.opening_answered(slot, number)
        self.slots_changed = True
        if session is not None:
            session.state = SessionState.OPEN
            session.client.tell(frames.SessionOpened(session.client_id, engine.number, engine.offer.model))

    def slot_refused(self, engine: EngineLink, message: frames.SlotRefused) -> None:
        session = engine.opening_answered(message.slot, message.session)
        self.slots_changed = True
        if session is not None:
            engine.close(session, refused=True)
            code = ErrorCode.UNSUPPORTED if message.code == ErrorCode.UNSUPPORTED else ErrorCode.ENGINE_ERROR
            self._end_session(session, code, f"engine {engine.offer.spec} did not open the session: {message.message}")

    def enqueue(self, step: Step) -> None:
        """The step counts as submitted from here on."""
        session = step.session
        engine = session.engine
        assert engine is not None
        session.outstanding[step.number] = step
        self.settling.ledger.enter(step)
        engine.queues.push(step)
        engine.linger.came_back(session.number, time.monotonic())
        self.touched_engines.add(engine)

    # --- engines --------------------------------------------------------------------------------------------------------

    def engine_offered(self, connection: Connection, offer: frames.Offer) -> EngineLink:
        """An engine has connected and said what it serves. Raises ProtocolError if it does not fit its model's others."""
        for other in self.engines.values():
            if other.offer.model == offer.model and other.offer.vocab_size != offer.vocab_size:
                raise ProtocolError(
                    f"engine {offer.spec} serves model {offer.model!r} with a vocabulary of {offer.vocab_size}; engine"
                    f" {other.offer.spec} serves it with {other.offer.vocab_size}. Give one of them another model name"
                )
        limits = self.config.params.within(
            offer.max_batch_size or None, offer.max_decode_sequences or None, offer.max_prefill_chunk_size or None
        )
        link = EngineLink(self.next_number(), connection.peer, offer, limits, self.config.linger_share)
        link.hang_up = lambda: self.connections.drop(connection, "the scheduler let the engine go")
        link.read = lambda: self.connections.read_all(connection)
        link.read_and_hang_up = lambda why: self.connections.read_and_drop(connection, why)
        self.engines[link.number] = link
        worker = self.supervisor.worker_of(connection.peer.pid)
        if worker is not None:
            self.supervisor.attached(worker, link)
        attached = frames.Attached(link.number, limits.max_decode_sequences, limits.max_prefill_chunk_size, 1)
        connection.peer.send(attached, link.segment.fd)
        link.segment.close_descriptor()
        return link

    def engine_ready(self, link: EngineLink) -> None:
        link.state = EngineState.READY
        worker = self.supervisor.worker_of(link.peer.pid)
        if worker is not None:
            self.supervisor.is_ready(worker)
        self.slots_changed = True
        tell_models(self.engines.values(), self.clients.values())

    def engine_hangs(self, link: EngineLink) -> None:
        """Its batch has run for the whole step time-out. Its steps fail now; its rows return once it is dead."""
        link.read()
        batch = link.batch
        if (
            batch is None
            or link.state is EngineState.DEAD
            or time.monotonic() < batch.started + self.config.step_timeout_s
        ):
            return
        message = (
            f"engine {link.offer.spec} (pid {link.peer.pid}) has not finished batch {batch.number} of {len(batch.steps)} steps"
            f" within {self.config.step_timeout_s:g} s; it is killed"
        )
        self.log(message)
        self._abandon(link, ErrorCode.ENGINE_TIMEOUT, message)
        # The end of its connection, which comes with its death, does the rest.
        try:
            os.kill(link.peer.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def engine_lost(self, link: EngineLink, why: str) -> None:
        """Its connection is gone: whatever its process still does, it gets no more work and its answers count no more."""
        if link.state is not EngineState.DEAD:
            holding = f" while it ran batch {link.batch.number}" if link.batch is not None else ""
            message = f"engine {link.offer.spec} (pid {link.peer.pid}) ended{holding}: {why}"
            if not self._ending:
                self.log(message)
            self._abandon(link, ErrorCode.SCHEDULER_STOPPED if self._ending else ErrorCode.ENGINE_DIED, message)
        del self.engines[link.number]
        worker = self.supervisor.worker_of(link.peer.pid)
        if worker is not None and worker.link is link:
            if not self._ending:
                self.supervisor.kill(worker)
        else:
            # Not our child. Its host closes the connection only when no forward pass runs any more, and the kernel only
            # when no thread of it is left.
            link.buried()

    def _abandon(self, link: EngineLink, code: ErrorCode, message: str) -> None:
        link.abandon(code, message, self)
        self.slots_changed = True
        tell_models(self.engines.values(), self.clients.values())

    def _worker_died(self, worker: Worker) -> None:
        """The process is reaped: nothing of it writes anywhere any more."""
        link = worker.link
        if link is not None:
            link.read_and_hang_up(worker.last_exit)
            link.buried()
        self.slots_changed = True

    # --- the end of each turn -------------------------------------------------------------------------------------------

    def _end_of_turn(self) -> None:
        if self.slots_changed:
            self.slots_changed = False
            for session, no_place in self.placement.serve_waiting():
                self._end_session(session, no_place.code, no_place.message)
        if self.touched_engines:
            now = time.monotonic()
            while self.touched_engines:
                self._dispatch(self.touched_engines.pop(), now)
        while self.touched_clients:
            self.touched_clients.pop().tell_completions()
        self.connections.flush()
        if not self._announced:
            self._announce()
        if self.stopping and not self._ending and not self.open_sessions:
            self.end()

    def _dispatch(self, engine: EngineLink, now: float) -> None:
        if engine.may_go(now):
            engine.dispatch(self, now)
        elif engine.batch is None and len(engine.queues) and engine.linger_timer is None:
            engine.linger_timer = self.loop.call_at(engine.linger.deadline(), lambda: self._linger_over(engine))

    def _linger_over(self, engine: EngineLink) -> None:
        engine.linger_timer = None
        self.touched_engines.add(engine)

    def _announce(self) -> None:
        """One line on standard output once every engine is up, or an error if none came up."""
        workers = self.supervisor.workers
        up = [w for w in workers if w.was_ready]
        given_up = [w for w in workers if w.state is WorkerState.GIVEN_UP]
        if len(up) + len(given_up) < len(workers):
            return
        self._announced = True
        if workers and not up:
            self.log("no engine came up; see its message above")
            self.exit_status = 1
            self.end()
        else:
            print(f"ready {self.config.socket}", flush=True)

    # --- the end --------------------------------------------------------------------------------------------------------

    def stop(self, drain_s: float) -> None:
        """Take no new sessions, end when the open ones have closed or after ``drain_s``. A second time: end at once."""
        if self.stopping:
            self.end()
            return
        self.stopping = True
        if self.open_sessions and not self.config.launcher_pid:
            self.log(f"stopping; {self.open_sessions} open sessions may take up to {drain_s:g} s")
        for session in self.placement.take_waiting():
            self._end_session(
                session, ErrorCode.SCHEDULER_STOPPED, "the scheduler is stopping; it takes no new sessions"
            )
        for link in self.clients.values():
            link.tell(frames.Stopping(drain_s))
        self.loop.call_at(time.monotonic() + drain_s, self.end)

    def end(self) -> None:
        """Settle everything that is left, let the engines end, and leave."""
        if self._ending:
            return
        self._ending = self.stopping = True
        for link in list(self.clients.values()):
            for session in list(link.sessions.values()):
                self._end_session(session, ErrorCode.SCHEDULER_STOPPED, "the scheduler has stopped")
            link.tell(frames.Stopping(0.0))
        for engine in list(self.engines.values()):
            engine.hang_up()
        self.supervisor.end(ENGINE_GRACE_S, self._engines_ended)

    def _engines_ended(self) -> None:
        self._flush_deadline = time.monotonic() + FLUSH_GRACE_S
        self._leave_when_flushed()

    def _leave_when_flushed(self) -> None:
        self.connections.flush()
        if self.connections.unsent and time.monotonic() < self._flush_deadline:
            self.loop.call_at(time.monotonic() + 0.01, self._leave_when_flushed)
        else:
            self.loop.stop()

    def _watch_signals(self) -> None:
        # The interpreter's C handler writes to this descriptor, so a signal wakes the loop however it comes to lie.
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        self._signal_sockets = wake, woken
        signal.set_wakeup_fd(wake.fileno())
        self.loop.watch(woken.fileno(), READ, lambda _: self._drain_signals(woken))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.stop(self.config.drain_timeout_s))

    def _drain_signals(self, woken: socket.socket) -> None:
        woken.recv(4096)

    def _end_with(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.end()
            return

        def launcher_ended(_: int) -> None:
            self.loop.unwatch(pidfd)
            self.end()

        self.loop.watch(pidfd, READ, launcher_ended)
