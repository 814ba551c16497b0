"""Injects faults while a run goes on, at random moments that depend on its seed."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from shmsched import ShmschedError
from shmsched.tools.load.chaos import SHORTAGES, Chaos, Fault
from shmsched.tools.load.fleet import Fleet, Member
from shmsched.tools.load.options import MODEL, Part
from shmsched.tools.load.shortages import (
    NotInjected,
    PidsCgroup,
    all_stopped,
    descendants,
    filled_shm,
    little_address_space,
    no_descriptors,
    stopped,
)
from shmsched.tools.load.target import STEP_TIMEOUT_S, Target, kill

LASTS_S = {
    Fault.STOP_ENGINE: (STEP_TIMEOUT_S + 2.0, STEP_TIMEOUT_S + 2.0),
    Fault.STOP_CLIENT: (0.5, 4.0),
    Fault.PAUSE: (0.5, 4.0),
    **dict.fromkeys(SHORTAGES, (1.0, 2.0)),
}
WHOM = {
    Fault.KILL_ENGINE: ("engine",),
    Fault.STOP_ENGINE: ("engine",),
    Fault.KILL_CLIENT: ("client",),
    Fault.STOP_CLIENT: ("client",),
    Fault.SHORT_DESCRIPTORS: ("client", "daemon", "engine"),
    Fault.SHORT_MEMORY: ("client", "daemon", "engine"),
}


@dataclass(slots=True)
class Injected:
    """One fault. ``pid``: whom it hit; 0 where it was aimed at nobody in particular. ``until``: when it was over; 0 for what takes
    no time, infinity while it lasts."""

    fault: Fault
    at: float
    pid: int = 0
    until: float = 0.0
    whom: str = ""


class Injector:
    """Called now and then, it injects what is due."""

    def __init__(self, chaos: Chaos, seed: int, target: Target, fleet: Fleet, replace: Callable[[], None]) -> None:
        """``replace`` has another client take the place of one that is gone."""
        self.injected: list[Injected] = []
        self.not_injected = dict(target.not_injected)
        """What this machine did not let us inject, and why."""
        self.disconnected: set[int] = set()
        """Clients that were let go while they were stopped."""
        self._chaos = chaos
        self._target = target
        self._fleet = fleet
        self._replace = replace
        self._random = {fault: random.Random(f"{seed} {fault}") for fault in chaos.every_s}
        self._due: dict[Fault, float] = {}
        self._lasting: list[tuple[float, ExitStack]] = []
        self._cgroup: PidsCgroup | None = None
        if Fault.SHORT_PIDS in chaos.every_s:
            try:
                self._cgroup = PidsCgroup({target.pid, *descendants(target.pid)})
            except NotInjected as e:
                self.not_injected[Fault.SHORT_PIDS] = str(e)

    def start(self) -> None:
        # Interrupts and garbage come of processes of their own.
        for fault in self._chaos.every_s.keys() - self.not_injected.keys() - {Fault.INTERRUPT, Fault.GARBAGE}:
            self._schedule(fault)

    def _schedule(self, fault: Fault) -> None:
        """Counted from now: what was late does not come all at once."""
        self._due[fault] = time.monotonic() + self._chaos.every_s[fault] * self._random[fault].uniform(0.5, 1.5)

    def tick(self) -> None:
        now = time.monotonic()
        self._end_what_is_over(now)
        self._replace_disconnected()
        for fault in [fault for fault, at in self._due.items() if at <= now]:
            self._schedule(fault)
            # One shortage of a kind at a time: the end of one must not be that of another.
            if not self._lasts_already(fault) or fault in (Fault.STOP_ENGINE, Fault.STOP_CLIENT):
                self._inject(Injected(fault, now))

    def finish(self) -> None:
        """No more faults: whoever is stopped goes on."""
        self._due.clear()
        self._end_what_is_over(math.inf)

    def close(self) -> None:
        """Once the daemon has ended."""
        if self._cgroup is not None:
            self._cgroup.close()

    @property
    def counts(self) -> Counter[Fault]:
        return Counter(injected.fault for injected in self.injected)

    # --- each kind ------------------------------------------------------------------------------------------------------

    def _inject(self, one: Injected) -> None:
        choose = self._random[one.fault].choice
        if one.fault in WHOM:
            one.whom = choose(WHOM[one.fault])
            pids = self._pids(one.whom)
            if not pids:
                return
            one.pid = choose(pids)
        match one.fault:
            case Fault.KILL_ENGINE | Fault.KILL_CLIENT:
                # Counted before it can be felt.
                self.injected.append(one)
                for client in self._clients():
                    client.killed |= client.pid == one.pid
                kill(one.pid)
                if one.whom == "client":
                    self._replace()
            case Fault.STOP_ENGINE | Fault.STOP_CLIENT:
                self._lasts(one, stopped(one.pid))
            case Fault.PAUSE:
                everybody = self._target.pid, *descendants(self._target.pid), *(m.pid for m in self._fleet.living)
                self._lasts(one, all_stopped(self._random[one.fault].sample(everybody, len(everybody))))
            case Fault.FULL_SHM:
                self._lasts(one, filled_shm())
            case Fault.SHORT_PIDS if self._cgroup is not None:
                self._lasts(one, self._cgroup.exhausted())
            case Fault.SHORT_DESCRIPTORS | Fault.SHORT_MEMORY:
                short = no_descriptors if one.fault is Fault.SHORT_DESCRIPTORS else little_address_space
                try:
                    self._lasts(one, short(one.pid))
                except (FileNotFoundError, ProcessLookupError):
                    # It has ended by itself in this moment.
                    pass

    def _lasts(self, one: Injected, fault: AbstractContextManager[None]) -> None:
        one.until = math.inf
        self.injected.append(one)
        stack = ExitStack()
        try:
            stack.enter_context(fault)
        except BaseException:
            self.injected.remove(one)
            raise
        stack.callback(lambda: setattr(one, "until", time.monotonic()))
        self._lasting.append((one.at + self._random[one.fault].uniform(*LASTS_S[one.fault]), stack))

    def _lasts_already(self, fault: Fault) -> bool:
        return any(one.fault is fault and one.until == math.inf for one in self.injected)

    def _end_what_is_over(self, now: float) -> None:
        over = [lasting for lasting in self._lasting if lasting[0] <= now]
        for lasting in over:
            self._lasting.remove(lasting)
            lasting[1].close()

    # --- whom -----------------------------------------------------------------------------------------------------------

    def _pids(self, whom: str) -> list[int]:
        match whom:
            case "daemon":
                return [self._target.pid]
            case "client":
                return [client.pid for client in self._clients()]
            case _:
                return self._engines()

    def _engines(self) -> list[int]:
        """Those that are ready and have run something: to kill one as it starts, again and again, is no accident."""
        if self._lasts_already(Fault.PAUSE):
            return []
        try:
            engines = self._target.status()["engines"]
        except ShmschedError:
            # The daemon is gone or hangs, which the run's verdict says.
            return []
        return [e["pid"] for e in engines if e["state"] == "ready" and e["batches"] and e["model"] == MODEL]

    def _clients(self) -> list[Member]:
        return [m for m in self._fleet.living if m.plan.part is Part.BUSY and m.tally.completed]

    def _replace_disconnected(self) -> None:
        """A client that the daemon let go while it was stopped has told its last; another one takes its place."""
        stopped_ones = {one.pid for one in self.injected if one.fault is Fault.STOP_CLIENT}
        for member in self._fleet.members:
            lost = member.told.final and member.tally.blamed[f"SchedulerDied {member.pid}"]
            if lost and member.pid in stopped_ones - self.disconnected:
                self.disconnected.add(member.pid)
                self._replace()
