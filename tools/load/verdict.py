"""What a run found, and what of it the faults explain that were injected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shmsched.tools.load.chaos import EXPLAINS, SHORTAGES, Fault
from shmsched.tools.load.fleet import Fleet, Member
from shmsched.tools.load.injector import Injected
from shmsched.tools.load.neighbour import BOUND_S
from shmsched.tools.load.options import MODEL, Options, Part
from shmsched.tools.load.tally import KEPT_EXAMPLES, Tally
from shmsched.tools.load.target import LEDGER, Status, balanced, engines_of
from shmsched.tools.load.trend import MEMORY, Series

FELT_S = 3.0
"""How long after a shortage an error may still blame it: the one who meets it tells later."""
SHOWN = 5


@dataclass(slots=True)
class Quiet:
    """How the quiet neighbour fared."""

    steps: int
    bound_s: float
    longest_wait_s: float
    late: int  # waits beyond the bound
    longest_wait_of_ours_s: float = 0.0  # of those, while nobody was paused and this machine let it run
    late_and_unexplained: int = 0


@dataclass(slots=True)
class Outcome:
    """What a run found."""

    options: Options
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    interrupted: bool = False
    ledger: dict[str, int] | None = None  # None if the daemon could not be asked any more
    batches: int = 0  # that the engines ran, and the steps and tokens in them
    batch_steps: int = 0
    batch_tokens: int = 0
    lost: int = 0
    written_off: int = 0  # outstanding in clients that were killed, as far as they had told
    all_told: bool = True
    leaked: list[str] = field(default_factory=list)  # one line for each piece
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be known
    injected: list[Injected] = field(default_factory=list)
    not_injected: dict[Fault, str] = field(default_factory=dict)
    disconnected: int = 0  # clients that were let go while they were stopped
    restarts: int = 0  # of engines, all in all
    apart: int = 0  # clients that had a PID namespace of their own
    explained: dict[Fault, Counter[str]] = field(default_factory=dict)  # steps, by kind of fault and of error
    pauses: dict[Fault, float] = field(
        default_factory=dict
    )  # the longest in which it found a client that it did not hit
    quiet: Quiet | None = None
    series: list[Series] = field(default_factory=list)  # what processes held over time

    def judges(self, series: Series) -> bool:
        """Whether it has to be flat: under chaos memory; else all that was watched."""
        return bool(series.values) and (series.quantity == MEMORY or not self.options.chaos)

    @property
    def is_flat(self) -> bool:
        """What was too short to tell counts as flat, and is told of."""
        return all(series.is_flat is not False for series in self.series if self.judges(series))

    @property
    def ledger_is_right(self) -> bool:
        ledger = self.ledger
        return ledger is not None and balanced(ledger) and ledger["queued"] == ledger["in_flight"] == 0

    @property
    def good(self) -> bool:
        faults = self.tally.wrong + self.tally.failed + self.lost + len(self.leaked) + len(self.problems)
        return faults == 0 and self.ledger_is_right and self.is_flat

    def pids(self, fault: Fault) -> set[int]:
        return {one.pid for one in self.injected if one.fault is fault}

    def hear(self, fleet: Fleet) -> None:
        """What all of them told, and what of it the faults explain."""
        for member in fleet.members:
            self.tally.merge(member.tally)
            self.seconds = max(self.seconds, member.told.seconds)
            if problem := member.problem:
                self.problems.append(problem)
            if not member.told.final:
                self.all_told = False
                # What it had outstanding when it last spoke; of a client that is gone nobody knows better.
                if member.killed:
                    self.written_off += member.told.outstanding
                else:
                    self.lost += member.told.outstanding
        self.lost += self.tally.lost
        self.explain()
        if neighbour := fleet.one(Part.QUIET):
            self.quiet, problems = judge(neighbour.tally, self.injected)
            self.problems += problems
        for fault in self.options.chaos.every_s:
            self.pauses[fault] = longest_pause(fleet.members, self.injected, fault)

    def read(self, before: Status, after: Status, *, is_ours: bool) -> None:
        """What the daemon counted meanwhile; of somebody else's, our share as our clients counted it."""
        for worker in after["workers"]:
            self.restarts += worker["restarts"]
            if worker["state"] == "given up":
                why = worker["reason"] or worker["last_exit"]
                self.problems.append(f"engine {worker['spec']} was given up: {why}")
        engines_before = {engine["engine"]: engine for engine in engines_of(before, MODEL)}
        for engine in engines_of(after, MODEL):
            was = engines_before.get(engine["engine"], {"batches": 0, "steps": 0, "tokens": 0})
            self.batches += engine["batches"] - was["batches"]
            self.batch_steps += engine["steps"] - was["steps"]
            self.batch_tokens += engine["tokens"] - was["tokens"]
        tally = self.tally
        if is_ours:
            self.ledger = after["ledger"]
            self._compare(after["ledger"])
            return
        if not balanced(after["ledger"]):
            self.problems.append(f"the daemon's ledger is not balanced: {after['ledger']}")
        failed, cancelled = tally.failed + tally.expired, tally.cancelled + tally.closed
        self.ledger = dict(zip(LEDGER, (tally.sent, 0, self.lost, tally.completed, failed, cancelled), strict=True))
        self.notes += [
            "the ledger is our share as our clients counted it: chunks of a cancelled submission that had run count as"
            " cancelled, a call that was refused as failed",
            "the batches hold others' steps too, and sessions in the engines may be others'",
        ]

    def _compare(self, ledger: dict[str, int]) -> None:
        """The daemon's ledger with what the clients counted."""
        tally = self.tally
        # A step that a failed session refused, that its call refused, or that came too late, never entered the ledger.
        least = tally.sent - tally.failed - tally.expired - tally.blamed.total()
        most = tally.sent + tally.unseen
        missing = max(least - ledger["submitted"], 0)
        # What a client that was killed had sent last, and what a hostile peer has, nobody knows.
        if self.all_told and not tally.attacks:
            missing = max(ledger["submitted"] - most, missing)
        unanswered = max(tally.completed - ledger["completed"], 0)
        if missing or unanswered:
            self.lost += missing + unanswered
            self.problems.append(
                f"the clients sent {least} to {most} steps and had {tally.completed} answers; the daemon counts"
                f" {ledger['submitted']} and {ledger['completed']}"
            )

    def explain(self) -> None:
        """Put what failed down to the faults that hit the processes it is blamed on; what is left has failed."""
        for said, steps in sorted(self.tally.blamed.items()):
            error, blamed = said.split()
            fault = explanation(error, blamed, self.injected)
            if fault is not None:
                self.explained.setdefault(fault, Counter())[error] += steps
                continue
            self.tally.failed += steps
            self.tally.errors[error] += steps
            if len(self.tally.examples) < 2 * KEPT_EXAMPLES:
                short_of, _, second = blamed.partition("@")
                why = (
                    f"a shortage is blamed ({short_of}), which nobody had injected by then"
                    if second
                    else f"process {blamed} is blamed, which no fault had hit"
                )
                self.tally.examples.append(f"failed: {steps} steps with {error}, for which {why}")


def explanation(error: str, blamed: str, injected: Sequence[Injected]) -> Fault | None:
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


def judge(tally: Tally, injected: Sequence[Injected]) -> tuple[Quiet, list[str]]:
    """Whether each of the quiet neighbour's answers came in time, or what else than us explains that it did not. And those that
    nothing else explains, in words."""
    quiet = Quiet(tally.completed, BOUND_S, round(tally.longest_wait, 3), tally.late)
    problems = []
    for wait in tally.late_waits:
        paused = sum(
            max(0.0, min(wait.at + wait.waited, one.until) - max(wait.at, one.at))
            for one in injected
            if one.fault is Fault.PAUSE
        )
        # Where it was paused with all the others it overslept as well: that is the same time, and counts once.
        ours = wait.waited - max(paused, wait.machine)
        quiet.longest_wait_of_ours_s = max(quiet.longest_wait_of_ours_s, round(ours, 3))
        if ours > BOUND_S:
            quiet.late_and_unexplained += 1
            problems.append(
                f"the quiet neighbour waited {wait.waited:.2f} s for a step; {BOUND_S:g} s are allowed, all were paused for"
                f" {paused:.2f} s of it, and a thread of its that only sleeps overslept {wait.machine:.2f} s"
            )
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f"and {len(problems) - SHOWN} more such waits of the quiet neighbour"]
    return quiet, problems


def longest_pause(members: Sequence[Member], injected: Sequence[Injected], fault: Fault) -> float:
    """In which a fault of the kind found a client that was not hit itself."""
    moments = [one.at for one in injected if one.fault is fault]
    longest = 0.0
    for member in members:
        own = [one.at for one in injected if one.pid == member.pid]
        for begin, end in member.pauses:
            if any(begin <= at <= end for at in moments) and not any(begin <= at <= end for at in own):
                longest = max(longest, end - begin)
    return longest
