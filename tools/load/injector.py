"""Injects faults while a run goes on, at random moments that depend on its seed."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from shmsched import ShmschedError
from shmsched.tools.load.chaos import SHORTAGES, Chaos, Fault
from shmsched.tools.load.fleet import ClientProcess, Fleet
from shmsched.tools.load.garbage import Garbage
from shmsched.tools.load.options import MODEL
from shmsched.tools.load.shortages import NotInjected, PidsCgroup, filled_shm, little_address_space, no_descriptors
from shmsched.tools.load.stopping import all_stopped, descendants, stopped
from shmsched.tools.load.target import STEP_TIMEOUT_S, Target

ENGINE_STOPPED_S = STEP_TIMEOUT_S + 2.0
CLIENT_STOPPED_S = (0.5, 4.0)
PAUSED_S = (0.5, 4.0)
SHORT_S = (1.0, 2.0)
SPREAD = (0.5, 1.5)
"""Of an interval, around its mean."""


@dataclass(slots=True)
class Injected:
    """One fault. ``pid``: whom it hit; 0 where it was aimed at nobody in particular."""

    fault: Fault
    at: float
    pid: int
    until: float = 0.0
    """When it was over; 0 for what takes no time, infinity while it lasts."""
    whom: str = ""


@dataclass(slots=True)
class Injector:
    """Called now and then, it injects what is due."""

    chaos: Chaos
    seed: int
    target: Target
    fleet: Fleet
    replace: Callable[[ClientProcess], None]
    """Has another client take the place of one that was killed."""
    garbage: Garbage
    injected: list[Injected] = field(default_factory=list)
    not_injected: dict[Fault, str] = field(default_factory=dict)
    """What this machine did not let us inject, and why."""
    disconnected: set[int] = field(default_factory=set)
    """Clients that were let go while they were stopped."""
    _due: list[tuple[float, Fault]] = field(default_factory=list)
    _random: dict[Fault, random.Random] = field(default_factory=dict)
    _lasting: list[tuple[float, int, ExitStack]] = field(default_factory=list)
    """What is to end, and when."""
    _order: Any = field(default_factory=itertools.count)
    _cgroup: PidsCgroup | None = None

    def start(self, now: float) -> None:
        for fault, every in self.chaos.every_s.items():
            self._random[fault] = random.Random(f"{self.seed} {fault}")
            if fault not in self.not_injected and fault is not Fault.INTERRUPT:
                heapq.heappush(self._due, (now + every * self._random[fault].uniform(*SPREAD), fault))
        if Fault.SHORT_PIDS in self.chaos.every_s:
            try:
                assert self.target.cluster is not None
                daemon = self.target.cluster.pid
                self._cgroup = PidsCgroup({daemon, *descendants(daemon)})
            except NotInjected as e:
                self.not_injected[Fault.SHORT_PIDS] = str(e)

    def tick(self) -> None:
        now = time.monotonic()
        self._end_what_is_over(now)
        self.garbage.hear()
        self._replace_disconnected()
        while self._due and self._due[0][0] <= now:
            _, fault = heapq.heappop(self._due)
            # The next one is counted from now: what was late does not come all at once.
            heapq.heappush(self._due, (now + self.chaos.every_s[fault] * self._random[fault].uniform(*SPREAD), fault))
            if fault not in self.not_injected:
                self._inject(fault, now)

    def finish(self) -> None:
        """No more faults: whoever is stopped goes on."""
        self._due.clear()
        self._end_what_is_over(float("inf"))
        self.garbage.finish()

    def end(self) -> None:
        """Once daemon and clients have ended, or after a run that was broken off: leave nothing behind."""
        self._end_what_is_over(float("inf"))
        self.garbage.end()

    def close(self) -> None:
        """Once the daemon has ended."""
        if self._cgroup is not None:
            self._cgroup.close()

    @property
    def counts(self) -> Counter[Fault]:
        return Counter(injected.fault for injected in self.injected)

    def count(self, fault: Fault) -> int:
        return self.counts[fault]

    def pids(self, fault: Fault) -> set[int]:
        return {injected.pid for injected in self.injected if injected.fault is fault}

    # --- each kind ------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, now: float) -> None:
        match fault:
            case Fault.KILL_ENGINE:
                for pid in self._one_of(fault, self._engines()):
                    # Counted before it can be felt.
                    self.injected.append(Injected(fault, now, pid))
                    _kill(pid)
            case Fault.STOP_ENGINE:
                for pid in self._one_of(fault, self._engines()):
                    self._lasts(Injected(fault, now, pid), now + ENGINE_STOPPED_S, stopped(pid))
            case Fault.KILL_CLIENT:
                for client in self._one_of(fault, self._clients()):
                    self.injected.append(Injected(fault, now, client.process.pid))
                    client.killed = True
                    client.process.kill()
                    self.replace(client)
            case Fault.STOP_CLIENT:
                for client in self._one_of(fault, self._clients()):
                    pid = client.process.pid
                    self._lasts(Injected(fault, now, pid), now + self._uniform(fault, CLIENT_STOPPED_S), stopped(pid))
            case Fault.GARBAGE:
                if self.garbage.attack():
                    self.injected.append(Injected(fault, now, 0))
            case Fault.PAUSE:
                pids = self._everybody()
                self._random[fault].shuffle(pids)
                until = now + self._uniform(fault, PAUSED_S)
                self._lasts(Injected(fault, now, 0), until, all_stopped(pids))
            case _ if fault in SHORTAGES:
                self._run_short(fault, now)

    def _run_short(self, fault: Fault, now: float) -> None:
        """One shortage of a kind at a time: the end of one must not be that of another."""
        if any(injected.fault is fault and injected.until == float("inf") for injected in self.injected):
            return
        until = now + self._uniform(fault, SHORT_S)
        if fault is Fault.FULL_SHM:
            self._lasts(Injected(fault, now, 0), until, filled_shm())
        elif fault is Fault.SHORT_PIDS:
            assert self._cgroup is not None
            self._lasts(Injected(fault, now, 0), until, self._cgroup.exhausted())
        else:
            assert self.target.cluster is not None
            kinds = {
                "daemon": [self.target.cluster.pid],
                "engine": self._engines(),
                "client": [client.process.pid for client in self._clients()],
            }
            whom = self._random[fault].choice(sorted(kinds))
            short = no_descriptors if fault is Fault.SHORT_DESCRIPTORS else little_address_space
            for pid in self._one_of(fault, kinds[whom]):
                try:
                    self._lasts(Injected(fault, now, pid, whom=whom), until, short(pid))
                except (FileNotFoundError, ProcessLookupError):
                    # It has ended by itself in this moment.
                    continue

    def _lasts(self, injected: Injected, until: float, fault: AbstractContextManager[None]) -> None:
        injected.until = float("inf")
        self.injected.append(injected)
        stack = ExitStack()
        try:
            stack.enter_context(fault)
        except BaseException:
            self.injected.remove(injected)
            raise
        stack.callback(lambda: setattr(injected, "until", time.monotonic()))
        heapq.heappush(self._lasting, (until, next(self._order), stack))

    def _end_what_is_over(self, now: float) -> None:
        while self._lasting and self._lasting[0][0] <= now:
            heapq.heappop(self._lasting)[2].close()

    # --- whom -----------------------------------------------------------------------------------------------------------

    def _engines(self) -> list[int]:
        """Those that are ready and have run something: to kill one as it starts, again and again, is no accident."""
        if self._is_paused:
            return []
        try:
            engines = self.target.status().document["engines"]
        except ShmschedError:
            # The daemon is gone or hangs, which the run's verdict says.
            return []
        return [e["pid"] for e in engines if e["state"] == "ready" and e["batches"] and e["model"] == MODEL]

    def _clients(self) -> list[ClientProcess]:
        return [c for c in self.fleet.living if c.ready and c.tally.completed and c.may_be_hit]

    def _everybody(self) -> list[int]:
        if self._is_paused or self.target.cluster is None:
            return []
        daemon = self.target.cluster.pid
        return [daemon, *descendants(daemon), *(client.process.pid for client in self.fleet.living)]

    @property
    def _is_paused(self) -> bool:
        return any(i.fault is Fault.PAUSE and i.until == float("inf") for i in self.injected)

    def _one_of(self, fault: Fault, all_: list[Any]) -> list[Any]:
        return [self._random[fault].choice(all_)] if all_ else []

    def _uniform(self, fault: Fault, seconds: tuple[float, float]) -> float:
        return self._random[fault].uniform(*seconds)

    def _replace_disconnected(self) -> None:
        """A client that the daemon let go while it was stopped has told its last; another one takes its place."""
        stopped_ones = self.pids(Fault.STOP_CLIENT)
        for client in self.fleet.clients:
            pid = client.process.pid
            if client.final and pid in stopped_ones - self.disconnected and client.tally.blamed[f"SchedulerDied {pid}"]:
                self.disconnected.add(pid)
                self.replace(client)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        # It has ended by itself in this moment.
        pass
