"""A submission on its way, and what the closed loops of one client share."""

from __future__ import annotations

import queue
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmsched import Client, Response, Session, StepFuture
from shmsched.tools.load.answers import I64
from shmsched.tools.load.rows import HeldLeases, RowCheck
from shmsched.tools.load.tally import Tally
from shmsched.tools.load.turns import Part

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
class Shared:
    """What the closed loops of one client share."""

    client: Client
    tally: Tally
    check: RowCheck
    held: HeldLeases
    landings: queue.SimpleQueue[Flight | None] = field(default_factory=queue.SimpleQueue)
    to_cancel: deque[Flight] = field(default_factory=deque)
    next_request: int = 1 << 40
