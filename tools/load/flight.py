"""A submission on its way, and what the closed loops of one client share."""

from __future__ import annotations

import os
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
    StepFuture,
)
from shmsched.tools.load.answers import I64
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


def blamed_process(error: BaseException) -> int | None:
    """The process whose end or silence is why a step failed, as the error says; for a lost connection this one."""
    if isinstance(error, SchedulerDied):
        return os.getpid()
    if isinstance(error, EngineDied | EngineTimeout | SessionLost):
        named = re.search(r"\(pid (\d+)\)", str(error))
        return int(named[1]) if named else None
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
    """Count steps that ended as nothing here had asked for. What blames a process is the parent's to judge, if any may fall."""
    pid = blamed_process(error) if peers_fall else None
    if pid is None:
        tally.say_failed(error, steps, where)
    else:
        tally.say_blamed(error, steps, pid)
