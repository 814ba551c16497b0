"""The engine processes that the daemon spawns: started, watched, reaped, started again."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from shmsched import failpoints
from shmsched.daemon.config import DaemonConfig
from shmsched.daemon.endings import how_it_ended
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.loop import READ, EventLoop, Timer
from shmsched.daemon.strays import Mark
from shmsched.engine.leash import PID, STOP
from shmsched.limits import is_shortage, lacking, no_thread

MOST_FAILURES = 5
"""Deaths in a row, with no batch completed in between, after which an engine is not started again."""
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 30.0
LONGEST_SHORTAGE_BACKOFF_S = 2.0
FIRST_PATIENCE_S = 10.0
"""For how long the first start of an engine is tried where the system has no room for a process: then whoever waits is told."""
LAST_WORD_S = 0.05
"""How long the last word of an engine that ended before it attached may take to be read."""


class WorkerState(Enum):
    STARTING = "starting"
    ATTACHED = "attached"
    WAITING = "waiting to be restarted"
    GIVEN_UP = "given up"
    """It never came up, or died again and again: starting it once more would end the same way."""
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Worker:
    """One engine process to keep running, over all its incarnations."""

    spec: str
    python: str
    env: Mapping[str, str]
    state: WorkerState = WorkerState.STARTING
    process: subprocess.Popen[bytes] | None = None
    """The keeper of the engine's process: over once that one is, and all that it had started."""
    leash: socket.socket | None = None
    """The keeper ends the engine once this end is closed, whoever closes it: the daemon, or the kernel after it."""
    mark: Mark = field(default_factory=Mark)
    killed: bool = False
    """By the daemon, for a reason of its own."""
    pidfd: int = -1
    link: EngineLink | None = None
    ready: bool = False
    """This incarnation's engine has started."""
    was_ready: bool = False
    """An engine of it has started at least once."""
    failures: int = 0
    """Deaths since a batch last completed."""
    restarts: int = 0
    model: str = ""
    """What its engine serves, once one has said so."""
    reason: str = ""
    """Why its engine did not start, in the engine's own words."""
    last_exit: str = ""
    shortages: int = 0
    """How often in a row it could not be started because the system lacked something, which tells nothing of the engine."""
    short_since: float = 0.0
    started: float = 0.0
    start_timer: Timer | None = None
    """Until this incarnation's engine has started, or has ended: kept any longer, it would keep the process's object as well."""
    _pid: int = 0

    @property
    def pid(self) -> int:
        """Of the engine's process; 0 where there is none, or it has not said so yet."""
        if not self._pid and self.leash is not None:
            try:
                said = self.leash.recv(PID.size)
            except OSError:
                return 0
            if len(said) == PID.size:
                (self._pid,) = PID.unpack(said)
        return self._pid

    def ask_to_stop(self) -> None:
        """Have the engine's process sent SIGTERM."""
        if self.leash is not None:
            try:
                self.leash.send(STOP)
            except OSError:
                # Its keeper has ended.
                pass

    def let_go(self) -> None:
        """Have the engine's process killed."""
        if self.leash is not None:
            # Its number is still wanted, for what it has said and nobody has read.
            _ = self.pid
            self.leash.close()
            self.leash = None

    @property
    def is_dying(self) -> bool:
        """Its engine is lost, and its process not reaped yet."""
        return self.state is WorkerState.ATTACHED and self.link is not None and self.link.state is EngineState.DEAD


class Supervisor:
    """Keeps the workers running. ``died(worker)`` is called once for each process, after it was reaped."""

    def __init__(
        self, config: DaemonConfig, loop: EventLoop, died: Callable[[Worker], None], log: Callable[[str], None]
    ) -> None:
        self._config = config
        self._loop = loop
        self._died = died
        self._log = log
        self._ending = False
        self._to_come = 0
        """Processes that are being spawned, and whose numbers are not known."""
        self.workers = [
            Worker(engine.spec, engine.python or sys.executable, engine.env_of(copy))
            for engine in config.engines
            for copy in range(engine.copies)
        ]
        # One thread for the daemon's whole life: a child's parent-death signal is tied to the thread that made it.
        self._to_spawn: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._spawn_all, name="shmsched-spawn", daemon=True).start()
        except RuntimeError as e:
            raise no_thread("starting engines", e) from e

    def start(self) -> None:
        for worker in self.workers:
            self._ask_for(worker)

    def _ask_for(self, worker: Worker) -> None:
        self._to_come += 1
        self._to_spawn.put(worker)

    def reap(self) -> None:
        """Wait for children that nobody here has made: as PID 1 of a container this process is given the orphans of others."""
        if self._to_come:
            return
        known = {worker.process.pid for worker in self.workers if worker.process is not None}
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in known:
                    # Looked at again once that one is buried.
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    @property
    def coming(self) -> list[str]:
        """The models of workers whose engine is not attached but may be soon; empty where it was never known."""
        return [w.model for w in self.workers if w.state in (WorkerState.STARTING, WorkerState.WAITING) or w.is_dying]

    @property
    def down(self) -> list[tuple[str, str]]:
        """Of workers that are not started again: the model, empty where it was never known, and what became of the engine."""
        return [
            (w.model, f"engine {w.spec} is down: {w.reason or w.last_exit}")
            for w in self.workers
            if w.state is WorkerState.GIVEN_UP
        ]

    def worker_of(self, pid: int) -> Worker | None:
        return next((w for w in self.workers if w.process is not None and pid and w.pid == pid), None)

    def attached(self, worker: Worker, link: EngineLink) -> None:
        worker.link = link
        worker.model = link.offer.model
        worker.state = WorkerState.ATTACHED

    def is_ready(self, worker: Worker) -> None:
        worker.ready = worker.was_ready = True
        worker.shortages = 0
        self._expect_no_more(worker)

    def kill(self, worker: Worker) -> None:
        """End the worker's process at once, for a reason that the daemon has; ``died`` follows."""
        worker.killed = True
        self.let_go(worker)

    def let_go(self, worker: Worker) -> None:
        """The worker's engine is over; see to it that its process is, if it is not already. ``died`` follows."""
        worker.let_go()
        if worker.pidfd >= 0:
            # Whoever has stopped the keeper must not keep the engine alive.
            signal.pidfd_send_signal(worker.pidfd, signal.SIGCONT)
        elif worker.process is not None:
            worker.process.send_signal(signal.SIGCONT)

    def give_up(self, worker: Worker, reason: str) -> None:
        """End the worker's process at once, and start no other one."""
        worker.reason = reason
        worker.state = WorkerState.GIVEN_UP
        self.kill(worker)

    def end(self, grace_s: float, ended: Callable[[], None]) -> None:
        """No more restarts. Engines end by the end of their connections; what still runs after ``grace_s`` is killed."""
        self._ending = True
        self._ended = ended
        for worker in self.workers:
            if worker.process is None:
                worker.state = WorkerState.ENDED
            elif not worker.ready:
                # What loads for minutes does not hear the end of its connection; it does hear this.
                worker.ask_to_stop()
        self.hurry(grace_s)
        self._check_ended()

    def hurry(self, grace_s: float) -> None:
        """Kill what still runs after ``grace_s``."""
        self._loop.call_later(grace_s, self._kill_all)

    def _kill_all(self) -> None:
        for worker in self.workers:
            self.kill(worker)

    def _check_ended(self) -> None:
        if self._ending and all(w.process is None for w in self.workers):
            self._ended()

    def _spawn_all(self) -> None:
        for worker in iter(self._to_spawn.get, None):
            try:
                process, leash = self._spawn(worker)
            except Exception as e:
                short = is_shortage(e)
                message = f"cannot run {worker.python}: {lacking(e) if short else e}"
                self._loop.post(lambda w=worker, m=message, s=short: self._not_spawned(w, m, s))  # type: ignore[misc]
                continue
            self._loop.post(lambda w=worker, p=process, s=leash: self._spawned(w, p, s))  # type: ignore[misc]

    def close(self) -> None:
        self._to_spawn.put(None)

    def _spawn(self, worker: Worker) -> tuple[subprocess.Popen[bytes], socket.socket]:
        # -P: a file in the working directory must not stand in for a library.
        leash, theirs = socket.socketpair()
        leash.setblocking(False)
        command = [worker.python, "-P", "-m", "shmsched.engine.keeper", str(theirs.fileno()), worker.spec]
        try:
            # Standard output is the daemon's own, for its ready line; a session of its own keeps a terminal's Ctrl-C away.
            process = subprocess.Popen(
                [*command, "--socket", str(self._config.socket)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, **worker.env, **worker.mark.environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            leash.close()
            raise
        finally:
            theirs.close()
        failpoints.hit("daemon.engine.spawned")
        return process, leash

    def _not_spawned(self, worker: Worker, message: str, short: bool) -> None:
        self._to_come -= 1
        worker.last_exit = message
        if short and not self._ending and self._try_again(worker, message):
            return
        worker.state = WorkerState.ENDED if self._ending else WorkerState.GIVEN_UP
        self._log(f"engine {worker.spec} did not start: {message}")
        self._died(worker)
        self._check_ended()

    def _try_again(self, worker: Worker, why: str) -> bool:
        """The system lacks something that it may have in a moment. False where whoever waits for the first start is to be told."""
        now = self._loop.clock.now()
        if not worker.shortages:
            worker.short_since = now
        if not worker.was_ready and now >= worker.short_since + FIRST_PATIENCE_S:
            return False
        delay = min(LONGEST_SHORTAGE_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(worker.shortages, 8))
        worker.shortages += 1
        worker.state = WorkerState.WAITING
        self._log(f"engine {worker.spec} cannot be started for now, and is tried again in {delay:g} s: {why}")
        self._loop.call_later(delay, lambda: self._restart(worker))
        return True

    def _spawned(self, worker: Worker, process: subprocess.Popen[bytes], leash: socket.socket) -> None:
        self._to_come -= 1
        worker.reason, worker.ready, worker.killed = "", False, False
        worker.process, worker.leash, worker._pid = process, leash, 0
        worker.started = self._loop.clock.now()
        limit = self._config.start_timeout_s
        worker.start_timer = self._loop.call_later(limit, lambda: self._expect_ready(worker, process, limit))
        self._watch_process(worker, process)
        if self._ending:
            self.kill(worker)
        self.reap()

    def _watch_process(self, worker: Worker, process: subprocess.Popen[bytes]) -> None:
        try:
            worker.pidfd = os.pidfd_open(process.pid)
        except OSError:
            # No descriptor for now. It is our child: whether it has ended can be asked.
            if process.poll() is None:
                self._loop.call_later(FIRST_BACKOFF_S, lambda: self._watch_process(worker, process))
            else:
                self._exited(worker)
            return
        self._loop.watch(worker.pidfd, READ, lambda _: self._exited(worker))

    def _expect_ready(self, worker: Worker, process: subprocess.Popen[bytes], limit: float) -> None:
        if worker.process is process and not worker.ready:
            self._log(f"engine {worker.spec} (pid {worker.pid}) did not start within {limit:g} s; it is killed")
            self.kill(worker)

    def _expect_no_more(self, worker: Worker) -> None:
        if worker.start_timer is not None:
            worker.start_timer.cancel()
            worker.start_timer = None

    def _exited(self, worker: Worker) -> None:
        assert worker.process is not None
        self._expect_no_more(worker)
        if worker.pidfd >= 0:
            self._loop.unwatch(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        if worker.link is None and not worker.reason:
            # It may have said why, on a connection that is not accepted yet.
            self._loop.call_later(LAST_WORD_S, lambda: self._bury(worker))
        else:
            self._bury(worker)

    def _bury(self, worker: Worker) -> None:
        assert worker.process is not None
        status = worker.process.wait()
        worker.last_exit = how_it_ended(status, by_us=worker.killed)
        worker.process = None
        worker.let_go()
        if status == -signal.SIGKILL:
            # It may have been the keeper itself that somebody killed.
            self._kill_strays(worker.mark)
            worker.mark = Mark()
        self.reap()
        if worker.was_ready and not worker.ready and not self._ending and self._was_short(worker, status):
            worker.restarts += 1
            self._try_again(worker, worker.reason or worker.last_exit)
            self._died(worker)
            worker.link = None
            return
        completed = worker.link is not None and worker.link.record.steps > 0
        worker.failures = 1 if completed else worker.failures + 1
        if self._ending:
            worker.state = WorkerState.ENDED
        elif worker.state is WorkerState.GIVEN_UP:
            pass
        elif not worker.was_ready:
            worker.state = WorkerState.GIVEN_UP
            self._log(f"engine {worker.spec} did not start: {worker.reason or worker.last_exit}")
        elif worker.failures >= MOST_FAILURES:
            worker.state = WorkerState.GIVEN_UP
            worker.reason = f"it died {worker.failures} times without completing a batch ({worker.last_exit}); it is not started again"
            self._log(f"engine {worker.spec}: {worker.reason}")
        else:
            worker.state = WorkerState.WAITING
            worker.restarts += 1
            delay = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (worker.failures - 1))
            self._loop.call_later(delay, lambda: self._restart(worker))
        self._died(worker)
        worker.link = None
        self._check_ended()

    def _kill_strays(self, mark: Mark) -> None:
        try:
            mark.kill_all()
        except OSError:
            # To look for them takes a descriptor.
            self._loop.call_later(FIRST_BACKOFF_S, lambda: self._kill_strays(mark))

    def _was_short(self, worker: Worker, status: int) -> bool:
        """Whether what ended an engine before it was ready was none of its own: it has said so, or did not get as far as saying
        anything, where it once did."""
        if worker.state is WorkerState.GIVEN_UP:
            return False
        return status == os.EX_TEMPFAIL or (status > 0 and worker.link is None and not worker.reason)

    def _restart(self, worker: Worker) -> None:
        if not self._ending:
            worker.state = WorkerState.STARTING
            self._ask_for(worker)
