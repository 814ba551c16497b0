"""A stress run from beginning to end, each part of it bounded in time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from shmsched import ShmschedError
from shmsched.tools.load.chaos import Fault
from shmsched.tools.load.fleet import Fleet
from shmsched.tools.load.injector import Injector
from shmsched.tools.load.options import DRAIN_S, FINAL_S, QUIET_MODEL, Options, Part, Plan
from shmsched.tools.load.said import Ear
from shmsched.tools.load.tally import Tally
from shmsched.tools.load.target import Target, engines_of, pids
from shmsched.tools.load.trend import Watch
from shmsched.tools.load.verdict import Outcome

READY_S = 15.0
READY_EACH_S = 0.5
SETTLE_S = 4.0
CLOSE_S = 8.0
HEAR_OUT_S = 3.0
"""How long what was printed last may take to be read, once everybody has ended."""
SOAK_LIMIT_S = 7200.0
STALLED_S = 60.0
"""A soak in which nothing is completed for so long is ended."""


Show = Callable[[float, Tally], None]
"""Told how long a run goes on, and what was counted by now."""


def run(options: Options, show: Show) -> Outcome:
    """Raises ShmschedError if there is no daemon to stress, UnfitTarget if it cannot be checked."""
    ear, outcome = Ear(), Outcome(options)
    try:
        target = Target(options, ear)
        drive = Drive(outcome, target, ear, show)
        try:
            with _interruptible(drive.interrupted):
                drive.run()
                drive.look_back()
        finally:
            left, problems = target.close(time.monotonic() + CLOSE_S)
            drive.injector.close()
    finally:
        said = ear.close(HEAR_OUT_S)
    outcome.interrupted = drive.interrupted.is_set()
    outcome.leaked += left
    outcome.problems += problems + said.problems(drive.injector.counts)
    return outcome


@contextmanager
def _interruptible(asked: threading.Event) -> Iterator[None]:
    """Ctrl-C once ends the run early, but in order; twice at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Drive:
    """The clients at work, from the first to the last, and the faults that hit them."""

    def __init__(self, outcome: Outcome, target: Target, ear: Ear, show: Show) -> None:
        self._outcome = outcome
        self._options = options = outcome.options
        self._target = target
        self._show = show
        self._started = 0.0
        self._moved = (0, 0.0)
        self._seconds = options.seconds if options.soak is None else SOAK_LIMIT_S
        self._watch = Watch({})
        self._fleet = Fleet(ear, options.chaos.shares.get(Fault.PID_NAMESPACE, 0.0))
        self.injector = Injector(options.chaos, options.seed, target, self._fleet, self._replace)
        self.interrupted = threading.Event()

    def run(self) -> None:
        try:
            self._start_all()
            self._fleet.order("go")
            self._started = time.monotonic()
            self._moved = (0, self._started)
            self._watch = Watch(self._watched())
            self.injector.start()
            # A client that died or hung tells so at the end; the others go on.
            self._fleet.listen_until(self._enough, self._started + self._seconds, self._tick)
            self._outcome.seconds = time.monotonic() - self._started
            self.injector.finish()
            self._fleet.order("stop")
            end = time.monotonic() + DRAIN_S + FINAL_S
            self._fleet.listen_until(lambda: all(m.at_end for m in self._fleet.living), end, self._tick_at_end)
            self._conclude()
        finally:
            # Whatever happened, nobody is left behind.
            self.injector.finish()
            self._fleet.end()

    def _start_all(self) -> None:
        chaos = self._options.chaos
        parts = [Part.BUSY] * self._options.clients
        parts += [Part.QUIET] if chaos else []
        parts += [Part.INTERRUPTED] if Fault.INTERRUPT in chaos.every_s else []
        parts += [Part.HOSTILE] if Fault.GARBAGE in chaos.every_s else []
        for part in parts:
            self._start(part, self._seconds)
        deadline = time.monotonic() + READY_S + READY_EACH_S * len(parts)
        members = self._fleet.members
        self._fleet.listen_until(
            lambda: self.interrupted.is_set() or all(m.ready for m in members), deadline, lambda: None
        )

    def _start(self, part: Part, seconds: float) -> None:
        index, socket = len(self._fleet.members), self._target.socket
        self._fleet.start(
            Plan(index=index, part=part, socket=socket, options=self._options, give_up_s=seconds + FINAL_S)
        )

    def _replace(self) -> None:
        self._start(Part.BUSY, max(0.0, self._started + self._seconds - time.monotonic()))
        self._fleet.members[-1].order("go")

    def _watched(self) -> dict[str, int]:
        """Processes by name. Under chaos all others come and go."""
        target, options = self._target, self._options
        if not target.is_ours or not (options.chaos or options.soak):
            return {}
        watched = {"daemon": target.pid}
        if options.chaos:
            (quiet_engine,) = engines_of(target.before, QUIET_MODEL)
            watched["quiet engine"] = quiet_engine["pid"]
            if quiet_client := self._fleet.one(Part.QUIET):
                watched["quiet client"] = quiet_client.pid
        else:
            engines = sorted(engine["pid"] for engine in target.before["engines"])
            watched |= {f"engine {n}": pid for n, pid in enumerate(engines)}
        return watched

    # --- while it runs --------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.injector.tick()
        self._watch.tick(time.monotonic())
        self._tick_at_end()

    def _tick_at_end(self) -> None:
        self._target.watch_shm(pids(self._target.before) | self._fleet.pids)
        self._show(time.monotonic() - self._started, self._tally())

    def _tally(self) -> Tally:
        tally = Tally()
        for member in self._fleet.members:
            tally.merge(member.tally)
        return tally

    def _enough(self) -> bool:
        if self.interrupted.is_set() or not self._fleet.living:
            return True
        if self._options.soak is None:
            return False
        tally, now = self._tally(), time.monotonic()
        if tally.completed != self._moved[0]:
            self._moved = (tally.completed, now)
        return (self._has_soaked(tally) and self._watch.can_tell) or now - self._moved[1] > STALLED_S

    def _has_soaked(self, tally: Tally) -> bool:
        steps = self._options.soak or 0
        return tally.completed >= steps and min(tally.connects, tally.sessions_opened) >= steps // 100

    def _conclude(self) -> None:
        outcome, injector = self._outcome, self.injector
        outcome.series, outcome.apart = self._watch.series, self._fleet.apart
        outcome.injected, outcome.not_injected = injector.injected, injector.not_injected
        outcome.disconnected = len(injector.disconnected)
        outcome.hear(self._fleet)
        if self.interrupted.is_set():
            return
        if outcome.tally.completed == 0:
            outcome.problems.append("no step was completed")
        if not self._has_soaked(outcome.tally):
            outcome.problems.append(f"the soak ended after {outcome.seconds:.0f} s without having reached its goals")

    def look_back(self) -> None:
        """What the daemon says in the end, and what is left behind."""
        outcome, target, fleet = self._outcome, self._target, self._fleet
        everybody = pids(target.before) | fleet.pids
        try:
            after, outcome.leaked = target.settle(fleet.pids, time.monotonic() + SETTLE_S)
        except ShmschedError as e:
            outcome.problems.append(f"the daemon's last status is missing: {e}")
        else:
            everybody |= pids(after)
            outcome.read(target.before, after, is_ours=target.is_ours)
        for _ in range(2):
            target.watch_shm(everybody)
        outcome.leaked += [f"/dev/shm/{name}" for name in sorted(target.shm_stays)]
