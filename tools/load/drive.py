"""A run's middle: the clients at work, the faults that hit them, and what they told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shmsched.tools.load.chaos import EXPLAINS, SHORTAGES, Fault
from shmsched.tools.load.fleet import ClientProcess, Fleet, Part
from shmsched.tools.load.garbage import Garbage
from shmsched.tools.load.injector import Injected, Injector
from shmsched.tools.load.options import ClientPlan, Options
from shmsched.tools.load.quiet import Quiet, judge
from shmsched.tools.load.tally import KEPT_EXAMPLES, Tally
from shmsched.tools.load.target import Status, Target
from shmsched.tools.load.trend import Held, Watch

READY_S = 15.0
READY_EACH_S = 0.5
DRAIN_S = 8.0
FINAL_S = 3.0
SOAK_LIMIT_S = 7200.0
FELT_S = 3.0
"""How long after a shortage an error may still blame it: the one who meets it tells later."""
STALLED_S = 60.0
"""A soak in which nothing is completed for so long is ended."""


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    elapsed: float
    completed: int
    wrong: int
    failed: int
    connects: int
    session_opens: int


@dataclass(slots=True)
class Found:
    """What the clients told, and what became of those that did not."""

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    lost: int = 0
    written_off: int = 0
    """Outstanding in clients that were killed, as far as they had told."""
    explained: dict[Fault, dict[str, int]] = field(default_factory=dict)
    """Steps that failed because of a fault that was injected, by kind of fault and of error."""
    pauses: dict[Fault, float] = field(default_factory=dict)
    """The longest pause, in seconds, in which a fault found a client that it did not hit."""
    interrupts: int = 0
    interrupted: dict[str, int] = field(default_factory=dict)
    """In which calls they came."""
    quiet: Quiet | None = None
    """None if there was no quiet neighbour."""
    problems: list[str] = field(default_factory=list)
    all_told: bool = True


@dataclass(slots=True)
class Drive:
    """Client processes and their work, from the first to the last."""

    options: Options
    target: Target
    before: Status
    show: Callable[[Progress], None]
    interrupted: Callable[[], bool]
    fleet: Fleet
    injector: Injector | None = None
    watch: Watch = field(default_factory=lambda: Watch([]))
    started: float = 0.0
    _moved: tuple[int, float] = (0, 0.0)

    def run(self) -> Found:
        options, fleet = self.options, self.fleet
        for index in range(options.clients):
            fleet.start(self._plan(index, self._time_left()))
        if options.chaos is not None:
            fleet.start(self._plan(options.clients, self._time_left()), Part.QUIET)
            if Fault.INTERRUPT in options.chaos.every_s:
                fleet.start(self._plan(options.clients + 1, self._time_left()), Part.INTERRUPTED)
        clients = fleet.clients
        fleet.listen_until(
            lambda: self.interrupted() or all(c.ready or c.at_end for c in clients),
            time.monotonic() + READY_S + READY_EACH_S * options.clients,
            lambda: None,
        )
        fleet.order("go")
        self.started = time.monotonic()
        self._begin()
        # A client that died or hung tells so at the end; the others go on.
        fleet.listen_until(self._enough, self.started + self._time_left(), self._tick)
        ran = time.monotonic() - self.started
        if self.injector is not None:
            self.injector.finish()
        fleet.order("stop")
        fleet.listen_until(
            lambda: all(c.at_end for c in fleet.living), time.monotonic() + DRAIN_S + FINAL_S, self._tick_at_end
        )
        found = collect(fleet, self.injector, ran)
        if found.tally.completed == 0 and not self.interrupted():
            found.problems.append("no step was completed")
        if options.soak is not None and not self._has_soaked() and not self.interrupted():
            found.problems.append(f"the soak ended after {ran:.0f} s without having reached its goals")
        return found

    def end(self) -> None:
        """Leave no process behind."""
        self.fleet.end()
        if self.injector is not None:
            self.injector.end()

    def _begin(self) -> None:
        options, fleet = self.options, self.fleet
        if options.chaos is not None:
            garbage = Garbage(self.target.socket, options.seed, fleet.ear)
            not_injected = dict(self.target.not_injected)
            self.injector = Injector(
                options.chaos, options.seed, self.target, fleet, self._replace, garbage, not_injected=not_injected
            )
            self.injector.start(self.started)
        if self.target.cluster is not None and (options.chaos is not None or options.soak is not None):
            processes = [Held("daemon", self.target.cluster.pid)]
            if options.chaos is None:
                processes += [
                    Held(f"engine {n}", pid) for n, pid in enumerate(sorted(self.before.pids - {processes[0].pid}))
                ]
            else:
                # All others come and go.
                processes += [Held("quiet engine", pid) for pid in self.before.quiet_engines]
                processes += [Held("quiet client", c.process.pid) for c in fleet.clients if c.part is Part.QUIET]
            self.watch = Watch(processes)

    def _plan(self, index: int, seconds: float) -> ClientPlan:
        options, chaos = self.options, self.options.chaos
        soak = options.soak
        return ClientPlan(
            index=index,
            socket=str(self.target.socket),
            sessions=options.sessions,
            mode=options.mode.value,
            seed=options.seed,
            give_up_s=seconds + FINAL_S,
            drain_s=DRAIN_S,
            cancel=None if chaos is None else chaos.shares.get(Fault.CANCEL),
            interrupt_every_s=0.0 if chaos is None else chaos.every_s.get(Fault.INTERRUPT, 0.0),
            peers_fall=chaos is not None and chaos.hits_processes,
            # What is under way when a life is over adds about as much again.
            life_steps=0 if soak is None else max(1, soak.steps // soak.connects // 2),
        )

    def _replace(self, _: ClientProcess) -> None:
        seconds = max(0.0, self.started + self._time_left() - time.monotonic())
        self.fleet.start(self._plan(len(self.fleet.clients), seconds)).order("go")

    def _time_left(self) -> float:
        return self.options.seconds if self.options.soak is None else SOAK_LIMIT_S

    # --- while it runs --------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.injector is not None:
            self.injector.tick()
        self.watch.tick(time.monotonic())
        self._tick_at_end()

    def _tick_at_end(self) -> None:
        self.target.watch_shm(self.before.pids | self.fleet.pids)
        self.show(self._progress())

    def _progress(self) -> Progress:
        tallies = [c.tally for c in self.fleet.clients]
        return Progress(
            time.monotonic() - self.started,
            sum(t.completed for t in tallies),
            sum(t.wrong for t in tallies),
            sum(t.failed for t in tallies),
            sum(t.connects for t in tallies),
            sum(t.sessions_opened for t in tallies),
        )

    def _enough(self) -> bool:
        if self.interrupted() or not self.fleet.living:
            return True
        if self.options.soak is None:
            return False
        progress, now = self._progress(), time.monotonic()
        if progress.completed != self._moved[0] or not self._moved[1]:
            self._moved = (progress.completed, now)
        return (self._has_soaked() and self.watch.can_tell) or now - self._moved[1] > STALLED_S

    def _has_soaked(self) -> bool:
        soak, progress = self.options.soak, self._progress()
        return soak is not None and (
            progress.completed >= soak.steps
            and progress.connects >= soak.connects
            and progress.session_opens >= soak.session_opens
        )


def collect(fleet: Fleet, injector: Injector | None, ran: float) -> Found:
    """What all of them told, and what of it the faults explain."""
    found = Found(problems=fleet.problems(time.monotonic()), seconds=ran)
    for client in fleet.clients:
        found.tally.merge(client.tally)
        found.seconds = max(found.seconds, client.seconds)
        found.interrupts += sum(client.interrupts.values())
        found.interrupted |= client.interrupts
        if not client.final:
            found.all_told = False
            # What it had outstanding when it last spoke; of a client that is gone nobody knows better.
            if client.killed:
                found.written_off += client.outstanding
            else:
                found.lost += client.outstanding
    found.lost += found.tally.lost
    explain(found, injector)
    found.quiet = judge(fleet, injector.injected if injector else ())
    if found.quiet is not None:
        found.problems += found.quiet.problems
    if injector is not None:
        found.problems += injector.garbage.faults_found
        found.pauses = {fault: _longest_pause(fleet, injector, fault) for fault in injector.chaos.every_s}
    return found


def explain(found: Found, injector: Injector | None) -> None:
    """Put what failed down to the faults that hit the processes it is blamed on; what is left has failed."""
    for said, steps in sorted(found.tally.blamed.items()):
        error, blamed = said.split()
        fault = _explanation(error, blamed, injector.injected if injector else [])
        if fault is None:
            found.tally.failed += steps
            found.tally.errors[error] += steps
            if len(found.tally.examples) < 2 * KEPT_EXAMPLES:
                found.tally.examples.append(f"failed: {steps} steps with {error}, for which {_in_words(blamed)}")
        else:
            counts = found.explained.setdefault(fault, {})
            counts[error] = counts.get(error, 0) + steps


def _explanation(error: str, blamed: str, injected: list[Injected]) -> Fault | None:
    """The fault that hit the process that is blamed, or the shortage that there was at the time."""
    short_of, _, second = blamed.partition("@")
    for one in injected:
        if error not in EXPLAINS.get(one.fault, ()):
            continue
        if second:
            if one.fault == short_of and one.at - 1 <= int(second) <= one.until + FELT_S:
                return one.fault
        elif one.pid == int(blamed) and one.fault not in SHORTAGES:
            return one.fault
    return None


def _in_words(blamed: str) -> str:
    short_of, _, second = blamed.partition("@")
    if second:
        return f"a shortage is blamed ({short_of}), which nobody had injected by then"
    return f"process {blamed} is blamed, which no fault had hit"


def _longest_pause(fleet: Fleet, injector: Injector, fault: Fault) -> float:
    """In which a fault of the kind found a client that was not stopped itself."""
    moments = [injected.at for injected in injector.injected if injected.fault is fault]
    longest = 0.0
    for client in fleet.clients:
        own = [injected.at for injected in injector.injected if injected.pid == client.process.pid]
        for begin, end in client.pauses:
            if any(begin <= moment <= end for moment in moments) and not any(begin <= at <= end for at in own):
                longest = max(longest, end - begin)
    return longest
