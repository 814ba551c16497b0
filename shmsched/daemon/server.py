"""The daemon: what it is made of, what happens at the end of each turn of its loop, and its own end."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys

from shmsched import failpoints
from shmsched.daemon.clock import Clock
from shmsched.daemon.config import DaemonConfig
from shmsched.daemon.connections import Connection, Handler
from shmsched.daemon.cpu_policy import CpuPolicy
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.handlers import ClientHandler, ControlHandler, EngineHandler
from shmsched.daemon.loop import contained
from shmsched.daemon.parts import Parts
from shmsched.daemon.signals import Signals, end_with
from shmsched.daemon.socket_keeper import SocketKeeper
from shmsched.daemon.supervisor import WorkerState
from shmsched.dataplane import BUILD
from shmsched.errors import ErrorCode, ProtocolError, SchedulerStopped, SystemLimit
from shmsched.saying import say
from shmsched.wire import frames

ENGINE_GRACE_S = 5.0
"""How long engines may take to end once their connections have."""
HURRIED_GRACE_S = 0.5
"""The same once somebody has asked a second time."""
LEAST_DESCRIPTORS = 64
"""Of its own the daemon has a dozen; a client or an engine takes three or four."""
MOST_ROUNDS = 100
"""At the end of one turn: each round may find that peers are gone, which gives others what those had."""
FLUSH_GRACE_S = 1.0
"""How long clients may take to read the last word."""


class Daemon(Parts):
    """One thread, one event loop, and everybody who is connected to it."""

    def __init__(self, config: DaemonConfig, clock: Clock | None = None) -> None:
        _allow_descriptors()
        super().__init__(config, clock)
        self.ending = False
        """Everything is settled; only the engines' ends are waited for."""
        self._cpu_policy = CpuPolicy()
        self._announced = False
        self._exit_status = 0
        self.connections.greet = self._greet
        self.loop.after_turn = self._end_of_turn
        self.loop.clock.on_pause = self._did_not_run

    def run(self) -> int:
        """Serve until told to stop. Returns the exit status."""
        Signals(self.loop, lambda: self.stop(self.config.drain_timeout_s), self.supervisor.reap)
        if self.config.launcher_pid:
            end_with(self.config.launcher_pid, self.loop, self.end)
        signal.signal(signal.SIGCONT, lambda *_: self.loop.clock.continued())
        self.supervisor.start()
        self._cpu_policy.begin()
        gc.collect()
        gc.freeze()
        self._end_of_turn()
        keeper = SocketKeeper(self.loop, self._listener, self.connections, self.log)
        try:
            self.loop.run()
        finally:
            keeper.close()
            self.close()
        return self._exit_status

    def close(self) -> None:
        """Give back what making it has taken."""
        self.connections.close()
        self._listener.close()
        self.loop.close()
        self.clients.close()
        self.supervisor.close()

    def _did_not_run(self, excused: float) -> None:
        """Nor may those have who owe us something."""
        for engine in self.engines.links.values():
            engine.watchdog.excuse(excused)
        self.connections.excuse(excused)

    def _greet(self, connection: Connection, hello: frames.Hello) -> Handler:
        """What a new connection is for."""
        if hello.role == frames.Role.CONTROL:
            return ControlHandler(self, connection, self.stop)
        if self.stopping:
            raise SchedulerStopped(f"the scheduler (pid {os.getpid()}) is stopping")
        if hello.role == frames.Role.ENGINE:
            return EngineHandler(self, connection)
        if hello.role == frames.Role.CLIENT:
            return ClientHandler(self, connection)
        raise ProtocolError(f"a hello of unknown role {hello.role}")

    # --- the end of each turn -------------------------------------------------------------------------------------------

    def _end_of_turn(self) -> None:
        """Do once what many frames of this turn may have asked for.

        Whatever goes wrong with one client, engine or part of it: all others have their turn.
        """
        engines, clients = self.core.touched_engines, self.core.touched_clients
        for _ in range(MOST_ROUNDS):
            if self.sessions.slots_changed:
                with contained():
                    self.sessions.serve_waiting()
            if self.overload.paused:
                with contained():
                    self.overload.relieve(len(self.clients.links))
            if engines:
                with contained():
                    self._give_batches()
                # The engines run while the clients are told.
                self.connections.flush()
            if clients:
                self.telling.tell_touched()
            self.connections.flush()
            # A flush may find that a peer is gone, and what it held is somebody else's now.
            if not (self.sessions.slots_changed or engines or clients):
                break
        else:
            # The peers are to be heard as well.
            self.loop.post(lambda: None)
        if not self._announced:
            self._announce()
        if self.stopping and not self.ending and not self.sessions.open:
            self.end()

    def _give_batches(self) -> None:
        engines, now = self.core.touched_engines, self.loop.clock.now()
        with contained():
            self.deadlines.expire(now)
        has_given_ahead = False
        while engines:
            engine = engines.pop()
            try:
                has_given_ahead |= self._dispatch(engine, now)
            except Exception as e:
                engine.blame(e)
        if has_given_ahead or self._cpu_policy.yields:
            self._cpu_policy.set(self._all_have_their_next())

    def _all_have_their_next(self) -> bool:
        running = [engine for engine in self.engines.links.values() if engine.batch is not None]
        return bool(running) and all(engine.has_its_next for engine in running)

    def _dispatch(self, engine: EngineLink, now: float) -> bool:
        """Whether the engine was given its next batch while it runs one."""
        if engine.may_go(now):
            engine.dispatch(now)
        elif (
            engine.batch is None
            and engine.queues.queued
            and engine.linger_timer is None
            and engine.state is not EngineState.DEAD
        ):
            engine.linger_timer = self.loop.call_at(engine.linger.deadline(), lambda: self._linger_over(engine))
        engine.watchdog.watch()
        return engine.run_ahead(now)

    def _linger_over(self, engine: EngineLink) -> None:
        engine.linger_timer = None
        self.core.touched_engines.add(engine)

    def _announce(self) -> None:
        """One line on standard output once every engine is up, or an error if none came up."""
        workers = self.supervisor.workers
        up = [w for w in workers if w.was_ready]
        given_up = [w for w in workers if w.state is WorkerState.GIVEN_UP]
        if len(up) + len(given_up) < len(workers):
            return
        self._announced = True
        if workers and not up:
            self._exit_status = 1
            if self.config.launcher_pid:
                reasons = dict.fromkeys(f"engine {w.spec} did not start: {w.reason or w.last_exit}" for w in workers)
                say("failed " + "; ".join(reasons).replace("\n", " "), sys.stdout)
            self.end()
        elif not self.ending:
            if not self.config.launcher_pid:
                self.log(f"{BUILD}, pid {os.getpid()}, on {self.config.socket}")
            say(f"ready {self.config.socket}", sys.stdout)

    # --- the end --------------------------------------------------------------------------------------------------------

    def stop(self, drain_s: float) -> None:
        """Take no new sessions, end when the open ones have closed or after ``drain_s``. A second time: end at once."""
        if self.stopping:
            self.end()
            self.supervisor.hurry(HURRIED_GRACE_S)
            return
        self.stopping = True
        if self.sessions.open and not self.config.launcher_pid:
            self.log(
                f"stopping; open sessions ({self.sessions.open}) may go on for {drain_s:g} s. A second signal ends at once"
            )
        self.sessions.take_no_more()
        for link in self.clients.links.values():
            link.tell(frames.Stopping(drain_s))
        self.loop.call_later(drain_s, self.end)
        failpoints.hit("daemon.stopping")

    def end(self) -> None:
        """Settle everything that is left, let the engines end, and leave."""
        if self.ending:
            return
        self.ending = self.stopping = self.engines.ending = True
        self.sessions.take_no_more()
        for link in list(self.clients.links.values()):
            with contained():
                self.sessions.close_all_of(link, ErrorCode.SCHEDULER_STOPPED, "the scheduler has stopped")
                link.tell(frames.Stopping(0.0))
        for engine in list(self.engines.links.values()):
            with contained():
                self.connections.drop(engine.connection, "the scheduler let the engine go")
        self.supervisor.end(ENGINE_GRACE_S, lambda: self._leave(self.loop.clock.now() + FLUSH_GRACE_S))

    def _leave(self, deadline: float) -> None:
        """Stop the loop once everybody has been told, or will not listen."""
        self.connections.flush()
        if self.connections.unsent and self.loop.clock.now() < deadline:
            self.loop.call_later(0.01, lambda: self._leave(deadline))
        else:
            self.loop.stop()


def _allow_descriptors() -> None:
    """As many as the system allows: a client takes a socket, a pidfd and, with Python's mmap, one for each mapping."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < LEAST_DESCRIPTORS:
        raise SystemLimit(
            f"at most {most} descriptors are allowed in this process; the daemon needs {LEAST_DESCRIPTORS}, and three or four"
            " more for each client. Raise the limit (`ulimit -n`)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
