"""A submission on its way, and what the closed loops of one client share."""

from __future__ import annotations

import queue
import re
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmsched import (
    Client,
    EngineDied,
    EngineTimeout,
    Response,
    SchedulerDied,
    Session,
    SessionLost,
    SharedMemoryError,
    StepFuture,
    SystemLimit,
)
from shmsched.tools.load.answers import I64
from shmsched.tools.load.chaos import Fault
from shmsched.tools.load.rows import HeldLeases, RowCheck
from shmsched.tools.load.tally import Tally
from shmsched.tools.load.turns import Part

PAUSE_S = 0.1
"""What counts as a pause."""

if TYPE_CHECKING:
    from shmsched.tools.load.loop import ClosedLoop


@dataclass(slots=True, eq=False)
class Flight:
    """A submission on its way, or answered and not yet looked at."""

    loop: ClosedLoop
    session: Session
    part: Part
    start: int
    steps: int
    expected: I64
    request_id: int | None
    landings: queue.SimpleQueue[Flight | None]
    submitted_ns: int
    answered_ns: int = 0
    may_cancel: bool = False
    """It was cancelled, or follows one that was."""
    may_close: bool = False
    """Its session was closed while it was outstanding."""
    future: StepFuture | None = None

    def land(self, _: Future[Response]) -> None:
        self.answered_ns = time.perf_counter_ns()
        self.landings.put(self)

    @property
    def counts(self) -> bool:
        """The loop waits for it."""
        return not (self.may_cancel or self.may_close)

    def __str__(self) -> str:
        n = len(self.part.tokens)
        kind = "raw" if self.part.raw else "sampled"
        return f"session {self.session.session_id}, {n} tokens at {self.start}, {kind}, rows {self.part.rows.name}"


@dataclass(slots=True)
class Pulse:
    """When answers come, and when none did for a while. Every thread's; a beat that gets lost does no harm."""

    last: float = 0.0
    pauses: deque[tuple[float, float]] = field(default_factory=deque)
    """Begin and end of each, in seconds of ``time.monotonic()``, until somebody takes them."""

    def beat(self) -> None:
        now = time.monotonic()
        if self.last and now - self.last >= PAUSE_S:
            self.pauses.append((self.last, now))
        self.last = now

    def take(self) -> list[tuple[float, float]]:
        return [self.pauses.popleft() for _ in range(len(self.pauses))]


_SHORT_OF = {
    Fault.SHORT_DESCRIPTORS: r"ulimit -n|[Dd]escriptor|Too many open files",
    Fault.FULL_SHM: r"/dev/shm|No space left",
    Fault.SHORT_MEMORY: r"ulimit -v|address space|Cannot allocate memory",
    Fault.SHORT_PIDS: r"pids\.max|ulimit -u|new thread|Resource temporarily unavailable",
}
"""What an error says that blames a shortage."""
SELF = "self"


def blame(error: BaseException) -> str | None:
    """What an error says it comes of: a process, by its number, or SELF for a connection of this one that was lost; or a shortage,
    with the second of ``time.monotonic()`` at which it was met."""
    if isinstance(error, SchedulerDied):
        return SELF
    if isinstance(error, EngineDied | EngineTimeout | SessionLost):
        named = re.search(r"\(pid (\d+)\)", str(error))
        return named[1] if named else None
    if isinstance(error, SharedMemoryError | SystemLimit):
        fault = next((f for f, pattern in _SHORT_OF.items() if re.search(pattern, str(error))), None)
        return None if fault is None else f"{fault}@{int(time.monotonic())}"
    return None


@dataclass(slots=True)
class Shared:
    """What the closed loops of one client share."""

    client: Client
    tally: Tally
    check: RowCheck
    held: HeldLeases
    landings: queue.SimpleQueue[Flight | None]
    pulse: Pulse
    peers_fall: bool = False
    to_cancel: deque[Flight] = field(default_factory=deque)
    next_request: int = 1 << 40

    def say_failed(self, error: BaseException, steps: int, where: str) -> None:
        say_failed(self.tally, error, steps, where, peers_fall=self.peers_fall)


def say_failed(tally: Tally, error: BaseException, steps: int, where: str, *, peers_fall: bool) -> None:
    """Count steps that ended as nothing here had asked for. What blames a process or a shortage is the parent's to judge, if there
    may be any."""
    blamed = blame(error) if peers_fall else None
    if blamed is None:
        tally.say_failed(error, steps, where)
    else:
        tally.say_blamed(error, steps, blamed)
