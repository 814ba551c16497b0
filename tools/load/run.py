"""A stress run from beginning to end, each part of it bounded in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from shmsched import ShmschedError
from shmsched.tools.load.fleet import Fleet
from shmsched.tools.load.options import ClientPlan, Options
from shmsched.tools.load.tally import Tally
from shmsched.tools.load.target import Ledger, Status, Target

READY_S = 15.0
READY_EACH_S = 0.5
DRAIN_S = 8.0
FINAL_S = 3.0
SETTLE_S = 4.0
CLOSE_S = 8.0


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

    @property
    def ledger_is_right(self) -> bool:
        ledger = self.ledger
        return ledger is not None and ledger.balanced and ledger.queued == 0 and ledger.in_flight == 0

    @property
    def good(self) -> bool:
        faults = self.tally.wrong + self.tally.failed + self.lost + len(self.leaked) + len(self.problems)
        return faults == 0 and self.ledger_is_right


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    elapsed: float
    completed: int
    wrong: int
    failed: int


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


@dataclass(slots=True)
class _Found:
    """What the clients told, and what became of those that did not."""

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    lost: int = 0
    problems: list[str] = field(default_factory=list)
    all_told: bool = True


def run(options: Options, show: Callable[[Progress], None]) -> Outcome:
    """Raises ShmschedError if there is no daemon to stress, UnfitTarget if it cannot be checked."""
    target = Target.open(options)
    try:
        interrupt = _Interrupt()
        with interrupt.caught():
            outcome = _run_on(target, options, show, interrupt)
    finally:
        left, problems = target.close(time.monotonic() + CLOSE_S)
    outcome.leaked += left
    outcome.problems += problems
    return outcome


def _run_on(target: Target, options: Options, show: Callable[[Progress], None], interrupt: _Interrupt) -> Outcome:
    before = target.baseline()
    fleet = Fleet()
    try:
        found = _drive(fleet, target, before, options, show, interrupt)
    finally:
        fleet.end()
    leaked: list[str] = []
    after: Status | None = None
    try:
        after, leaked = target.settle(fleet.pids, before, time.monotonic() + SETTLE_S)
    except ShmschedError as e:
        found.problems.append(f"the daemon's last status is missing: {e}")
    for _ in range(2):
        target.watch_shm(before.pids | fleet.pids | (after.pids if after else set()))
    leaked += [f"/dev/shm/{name}" for name in sorted(target.shm_seen)]
    ledger, notes = _ledger(target, found, after) if after else (None, [])
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
    )


def _drive(
    fleet: Fleet,
    target: Target,
    before: Status,
    options: Options,
    show: Callable[[Progress], None],
    interrupt: _Interrupt,
) -> _Found:
    for index in range(options.clients):
        fleet.start(
            ClientPlan(
                index=index,
                socket=str(target.socket),
                sessions=options.sessions,
                mode=options.mode.value,
                seed=options.seed,
                give_up_s=options.seconds + FINAL_S,
                drain_s=DRAIN_S,
            )
        )
    clients = fleet.clients
    fleet.listen_until(
        lambda: interrupt.asked or all(c.ready or c.at_end for c in clients),
        time.monotonic() + READY_S + READY_EACH_S * options.clients,
        lambda: None,
    )
    fleet.order("go")
    started = time.monotonic()

    def tick() -> None:
        target.watch_shm(before.pids | fleet.pids)
        show(
            Progress(
                time.monotonic() - started,
                sum(c.completed for c in clients),
                sum(c.wrong for c in clients),
                sum(c.failed for c in clients),
            )
        )

    # A client that died or hung tells so at the end; the others go on.
    fleet.listen_until(lambda: interrupt.asked or all(c.at_end for c in clients), started + options.seconds, tick)
    ran = time.monotonic() - started
    fleet.order("stop")
    fleet.listen_until(lambda: all(c.at_end for c in clients), time.monotonic() + DRAIN_S + FINAL_S, tick)
    found = _collect(fleet, ran)
    if found.tally.completed == 0 and not interrupt.asked:
        found.problems.append("no step was completed")
    return found


def _collect(fleet: Fleet, ran: float) -> _Found:
    found = _Found(problems=fleet.problems(time.monotonic()), seconds=ran)
    for client in fleet.clients:
        if client.tally is None:
            found.all_told = False
            # What it had outstanding when it last spoke; of a client that is gone nobody knows better.
            found.lost += client.outstanding
            found.tally.sent += client.sent
            found.tally.completed += client.completed
            continue
        found.tally.merge(client.tally)
        found.seconds = max(found.seconds, client.seconds)
    found.lost += found.tally.lost
    return found


def _ledger(target: Target, found: _Found, after: Status) -> tuple[Ledger, list[str]]:
    """The daemon's ledger, checked against what the clients counted; of a shared daemon, our share of it."""
    tally = found.tally
    if target.cluster is None:
        if not after.ledger.balanced:
            found.problems.append(f"the daemon's ledger is not balanced: {after.ledger}")
        ours = Ledger(
            submitted=tally.sent,
            in_flight=found.lost,
            completed=tally.completed,
            failed=tally.failed,
            cancelled=tally.cancelled + tally.closed,
        )
        return ours, [
            "the ledger is our share as our clients counted it: chunks of a cancelled submission that had run count as"
            " cancelled, a call that was refused as failed",
            "the batches hold others' steps too, and sessions in the engines may be others'",
        ]
    ledger = after.ledger
    if found.all_told:
        # A step that a failed session refused, or that its call refused, never entered the ledger.
        missing = max(tally.sent - tally.failed - ledger.submitted, ledger.submitted - tally.sent, 0)
        unanswered = max(tally.completed - ledger.completed, 0)
        if missing or unanswered:
            found.lost += missing + unanswered
            found.problems.append(
                f"the clients sent {tally.sent} steps and had {tally.completed} answers; the daemon counts"
                f" {ledger.submitted} and {ledger.completed}"
            )
    return ledger, []


def _difference(after: tuple[int, int, int], before: tuple[int, int, int]) -> tuple[int, int, int]:
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]
