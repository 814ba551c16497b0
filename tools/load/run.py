"""A stress run from beginning to end, each part of it bounded in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from shmsched import ShmschedError
from shmsched.tools.load.chaos import Fault
from shmsched.tools.load.drive import Drive, Found, Progress
from shmsched.tools.load.ear import Ear
from shmsched.tools.load.fleet import Fleet
from shmsched.tools.load.injector import Injector
from shmsched.tools.load.options import Options
from shmsched.tools.load.tally import Tally
from shmsched.tools.load.target import Ledger, Status, Target
from shmsched.tools.load.trend import MEMORY, Series, Watch

SETTLE_S = 4.0
CLOSE_S = 8.0
HEAR_OUT_S = 3.0
"""How long what was printed last may take to be read, once everybody has ended."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run found."""

    options: Options
    seconds: float
    tally: Tally
    ledger: Ledger | None
    """None if the daemon could not be asked any more."""
    batches: int
    """That the engines ran, and the steps and tokens in them."""
    batch_steps: int
    batch_tokens: int
    lost: int
    leaked: list[str]
    """What was left behind, one line for each piece."""
    problems: list[str]
    """What else was not as it must be."""
    notes: list[str]
    """What could not be known."""
    interrupted: bool
    found: Found
    injector: Injector | None
    """None if no faults were asked for."""
    watch: Watch
    """What daemon and engines held over time; of no process, unless it was a run with faults or a soak."""
    restarts: int
    """Of engines, all in all."""
    clients_apart: int
    """Clients that had a PID namespace of their own."""

    @property
    def judged(self) -> list[tuple[str, str, Series]]:
        """What has to be flat: process, quantity, and its course. Under chaos the daemon's memory; else all that it watched."""
        only_memory = self.options.chaos is not None
        return [
            (held.name, quantity, series)
            for held in self.watch.processes
            for quantity, series in held.series.items()
            if quantity == MEMORY or not only_memory
        ]

    @property
    def is_flat(self) -> bool:
        """What was too short to tell counts as flat, and is told of."""
        return all(series.is_flat is not False for _, _, series in self.judged)

    @property
    def ledger_is_right(self) -> bool:
        ledger = self.ledger
        return ledger is not None and ledger.balanced and ledger.queued == 0 and ledger.in_flight == 0

    @property
    def good(self) -> bool:
        faults = self.tally.wrong + self.tally.failed + self.lost + len(self.leaked) + len(self.problems)
        return faults == 0 and self.ledger_is_right and self.is_flat


@dataclass(slots=True)
class _Interrupt:
    """Ctrl-C once ends the run early, but in order; twice at once."""

    asked: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def caught(self) -> Iterator[None]:
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(options: Options, show: Callable[[Progress], None]) -> Outcome:
    """Raises ShmschedError if there is no daemon to stress, UnfitTarget if it cannot be checked."""
    ear = Ear()
    try:
        target = Target.open(options, ear)
        try:
            interrupt = _Interrupt()
            with interrupt.caught():
                outcome = _run_on(target, options, show, interrupt, Fleet(ear, _share_apart(options)))
        finally:
            left, problems = target.close(time.monotonic() + CLOSE_S)
    finally:
        said = ear.close(HEAR_OUT_S)
    injector = outcome.injector
    if injector is not None:
        injector.close()
    outcome.leaked += left
    outcome.problems += problems + said.problems(injector.counts if injector else {})
    return outcome


def _share_apart(options: Options) -> float:
    return 0.0 if options.chaos is None else options.chaos.shares.get(Fault.PID_NAMESPACE, 0.0)


def _run_on(
    target: Target, options: Options, show: Callable[[Progress], None], interrupt: _Interrupt, fleet: Fleet
) -> Outcome:
    before = target.baseline()
    drive = Drive(options, target, before, show, lambda: interrupt.asked, fleet)
    try:
        found = drive.run()
    finally:
        drive.end()
    leaked: list[str] = []
    after: Status | None = None
    try:
        after, leaked = target.settle(fleet.pids, before, time.monotonic() + SETTLE_S)
        found.problems += after.given_up
    except ShmschedError as e:
        found.problems.append(f"the daemon's last status is missing: {e}")
    for _ in range(2):
        target.watch_shm(before.pids | fleet.pids | (after.pids if after else set()))
    leaked += [f"/dev/shm/{name}" for name in sorted(target.shm_seen)]
    ledger, notes = _ledger(target, found, after, drive.injector) if after else (None, [])
    engines = after.engines if after else {}
    runs = [_difference(engine, before.engines.get(n, (0, 0, 0))) for n, engine in engines.items()]
    return Outcome(
        options=options,
        seconds=found.seconds,
        tally=found.tally,
        ledger=ledger,
        batches=sum(r[0] for r in runs),
        batch_steps=sum(r[1] for r in runs),
        batch_tokens=sum(r[2] for r in runs),
        lost=found.lost,
        leaked=leaked,
        problems=found.problems,
        notes=notes,
        interrupted=interrupt.asked,
        found=found,
        injector=drive.injector,
        watch=drive.watch,
        restarts=after.restarts if after else 0,
        clients_apart=fleet.apart,
    )


def _ledger(target: Target, found: Found, after: Status, injector: Injector | None) -> tuple[Ledger, list[str]]:
    """The daemon's ledger, checked against what the clients counted; of a shared daemon, our share of it."""
    tally = found.tally
    if target.cluster is None:
        if not after.ledger.balanced:
            found.problems.append(f"the daemon's ledger is not balanced: {after.ledger}")
        ours = Ledger(
            submitted=tally.sent,
            in_flight=found.lost,
            completed=tally.completed,
            failed=tally.failed + tally.expired,
            cancelled=tally.cancelled + tally.closed,
        )
        return ours, [
            "the ledger is our share as our clients counted it: chunks of a cancelled submission that had run count as"
            " cancelled, a call that was refused as failed",
            "the batches hold others' steps too, and sessions in the engines may be others'",
        ]
    ledger = after.ledger
    # A step that a failed session refused, that its call refused, or that came too late, never entered the ledger.
    least = tally.sent - tally.failed - tally.expired - sum(tally.blamed.values())
    most = tally.sent + tally.unseen
    missing = max(least - ledger.submitted, 0)
    # What a client that was killed had sent last, and what a hostile peer has, nobody knows.
    if found.all_told and (injector is None or not injector.count(Fault.GARBAGE)):
        missing = max(ledger.submitted - most, missing)
    unanswered = max(tally.completed - ledger.completed, 0)
    if missing or unanswered:
        found.lost += missing + unanswered
        found.problems.append(
            f"the clients sent {least} to {most} steps and had {tally.completed} answers; the daemon counts"
            f" {ledger.submitted} and {ledger.completed}"
        )
    return ledger, []


def _difference(after: tuple[int, int, int], before: tuple[int, int, int]) -> tuple[int, int, int]:
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]
