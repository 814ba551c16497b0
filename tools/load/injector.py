"""Injects faults while a run goes on, at random moments that depend on its seed."""

from __future__ import annotations

import heapq
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shmsched import ShmschedError
from shmsched.tools.load.chaos import Chaos, Fault
from shmsched.tools.load.fleet import ClientProcess, Fleet
from shmsched.tools.load.hostile import FAULT
from shmsched.tools.load.tally import KEPT_EXAMPLES
from shmsched.tools.load.target import STEP_TIMEOUT_S, Target

ENGINE_STOPPED_S = STEP_TIMEOUT_S + 2.0
CLIENT_STOPPED_S = (0.5, 4.0)
SPREAD = (0.5, 1.5)
"""Of an interval, around its mean."""
HOSTILE_END_S = 5.0
MOST_ATTACKS_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault. ``pid``: whom it hit; 0 where it was aimed at nobody in particular."""

    fault: Fault
    at: float
    pid: int


@dataclass(slots=True)
class Injector:
    """Called now and then, it injects what is due."""

    chaos: Chaos
    seed: int
    target: Target
    fleet: Fleet
    replace: Callable[[ClientProcess], None]
    """Has another client take the place of one that was killed."""
    injected: list[Injected] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)
    """What the daemon did about the hostile peer's attacks."""
    faults_found: list[str] = field(default_factory=list)
    """By the hostile peer, in words."""
    disconnected: set[int] = field(default_factory=set)
    """Clients that were let go while they were stopped."""
    _due: list[tuple[float, Fault]] = field(default_factory=list)
    _random: dict[Fault, random.Random] = field(default_factory=dict)
    _stopped: list[tuple[float, int]] = field(default_factory=list)
    """When whom to continue, by pidfd."""
    _hostile: subprocess.Popen[bytes] | None = None
    _said: bytes = b""
    _ahead: int = 0

    def start(self, now: float) -> None:
        for fault, every in self.chaos.every_s.items():
            self._random[fault] = random.Random(f"{self.seed} {fault}")
            heapq.heappush(self._due, (now + every * self._random[fault].uniform(*SPREAD), fault))
        if Fault.GARBAGE in self.chaos.every_s:
            self._hostile = subprocess.Popen(
                [sys.executable, "-P", "-m", "shmsched.tools.load.hostile", str(self.target.socket), str(self.seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )

    def tick(self) -> None:
        now = time.monotonic()
        self._continue(now)
        self._hear()
        self._replace_disconnected()
        while self._due and self._due[0][0] <= now:
            _, fault = heapq.heappop(self._due)
            # The next one is counted from now: what was late does not come all at once.
            heapq.heappush(self._due, (now + self.chaos.every_s[fault] * self._random[fault].uniform(*SPREAD), fault))
            self._inject(fault, now)

    def finish(self) -> None:
        """No more faults: whoever is stopped goes on."""
        self._due.clear()
        self._continue(float("inf"))
        if self._hostile is None:
            return
        try:
            # It ends with its input.
            said, _ = self._hostile.communicate(timeout=HOSTILE_END_S)
            self._take(said)
        except subprocess.TimeoutExpired:
            self.faults_found.append("the hostile peer hung in an attack; it was killed")
            self._hostile.kill()
            self._hostile.communicate()

    def end(self) -> None:
        """After a run that was broken off: leave nobody behind."""
        if self._hostile is not None and self._hostile.poll() is None:
            self._hostile.kill()
            self._hostile.communicate()

    def count(self, fault: Fault) -> int:
        return sum(injected.fault is fault for injected in self.injected)

    def pids(self, fault: Fault) -> set[int]:
        return {injected.pid for injected in self.injected if injected.fault is fault}

    # --- each kind ------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, now: float) -> None:
        match fault:
            case Fault.KILL_ENGINE | Fault.STOP_ENGINE:
                self._hit_engine(fault, now)
            case Fault.KILL_CLIENT | Fault.STOP_CLIENT:
                self._hit_client(fault, now)
            case Fault.GARBAGE:
                self._attack(now)

    def _hit_engine(self, fault: Fault, now: float) -> None:
        """Only one that is ready and has run something: to kill it as it starts, again and again, is no accident."""
        try:
            engines = self.target.status().document["engines"]
        except ShmschedError:
            # The daemon is gone or hangs, which the run's verdict says.
            return
        ready = [e["pid"] for e in engines if e["state"] == "ready" and e["batches"]]
        if not ready:
            return
        pid = self._random[fault].choice(ready)
        number = signal.SIGKILL if fault is Fault.KILL_ENGINE else signal.SIGSTOP
        # Counted before it can be felt.
        self.injected.append(Injected(fault, now, pid))
        self._signal(pid, number, now + ENGINE_STOPPED_S)

    def _hit_client(self, fault: Fault, now: float) -> None:
        able = [c for c in self.fleet.living if c.ready and c.tally.completed]
        if not able:
            return
        client = self._random[fault].choice(able)
        self.injected.append(Injected(fault, now, client.process.pid))
        if fault is Fault.KILL_CLIENT:
            client.killed = True
            client.process.kill()
            self.replace(client)
        else:
            self._signal(client.process.pid, signal.SIGSTOP, now + self._random[fault].uniform(*CLIENT_STOPPED_S))

    def _attack(self, now: float) -> None:
        assert self._hostile is not None
        assert self._hostile.stdin is not None
        if self._ahead >= MOST_ATTACKS_AHEAD:
            return
        self.injected.append(Injected(Fault.GARBAGE, now, 0))
        try:
            os.write(self._hostile.stdin.fileno(), b"\n")
            self._ahead += 1
        except BrokenPipeError:
            self.faults_found.append("the hostile peer has ended, which it must not")
            self._ahead = MOST_ATTACKS_AHEAD

    # --- what follows from it -------------------------------------------------------------------------------------------

    def _signal(self, pid: int, number: int, until: float) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # It has ended by itself in this moment.
            return
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            number = signal.SIGKILL
        if number == signal.SIGSTOP:
            heapq.heappush(self._stopped, (until, pidfd))
        else:
            os.close(pidfd)

    def _continue(self, now: float) -> None:
        while self._stopped and self._stopped[0][0] <= now:
            _, pidfd = heapq.heappop(self._stopped)
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            except ProcessLookupError:
                # It was killed while it was stopped.
                pass
            os.close(pidfd)

    def _hear(self) -> None:
        hostile = self._hostile
        if hostile is None or hostile.stdout is None:
            return
        while select.select([hostile.stdout], [], [], 0)[0]:
            data = os.read(hostile.stdout.fileno(), 1 << 16)
            if not data:
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            name, _, outcome = line.decode(errors="replace").partition("\t")
            self._ahead -= 1
            if outcome.startswith(FAULT):
                self.attacks["was answered with a fault"] += 1
                if len(self.faults_found) < KEPT_EXAMPLES:
                    self.faults_found.append(f"after an attack with {name}: {outcome.removeprefix(FAULT + ': ')}")
            else:
                self.attacks[outcome] += 1

    def _replace_disconnected(self) -> None:
        """A client that the daemon let go while it was stopped has told its last; another one takes its place."""
        stopped = self.pids(Fault.STOP_CLIENT)
        for client in self.fleet.clients:
            pid = client.process.pid
            if client.final and pid in stopped - self.disconnected and client.tally.blamed[f"SchedulerDied {pid}"]:
                self.disconnected.add(pid)
                self.replace(client)
