"""A step as the queues see it, and the queued steps of one session, in order."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any

from shmsched.dataplane import marks
from shmsched.not_copied import not_copied


class StepState(Enum):
    """One state at a time. The first two are open; a step leaves them once, for one of the others."""

    QUEUED = "queued"
    IN_FLIGHT = "in flight"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class QueuedStep:
    """What queues and ledger read of a step, and the places where they write. One token is a decode, more a prefill chunk.

    Subclass it. A subclass whose ``__init__`` does not call this one sets ``number``, ``session``, ``n_tokens`` and ``state``,
    and nothing else of what is here.
    """

    __slots__ = ("after", "ahead", "before", "behind", "lane", "n_tokens", "number", "rank", "session", "spot", "state")
    __reduce__ = not_copied

    number: Any
    """Whatever its owner calls it; nothing here reads it."""
    session: Hashable
    n_tokens: int
    state: StepState
    """Nobody but the ledger writes it."""
    rank: int
    """Its place by arrival, unique in its queues; one put back at the front ranks before all others."""
    lane: Lane | None
    """None while it is not queued, and of a decode that is alone where its lane would be."""
    before: QueuedStep | None
    """Its neighbours in the lane,"""
    after: QueuedStep | None
    ahead: QueuedStep | None
    """and those in the line of decodes."""
    behind: QueuedStep | None
    spot: int
    """Where it stands in that line; see ``marks``."""

    def __init__(self, number: Any, session: Hashable, n_tokens: int) -> None:
        self.number = number
        self.session = session
        self.n_tokens = n_tokens
        self.state = StepState.QUEUED
        self.lane = None
        self.spot = marks.NOWHERE


class Lane:
    """A list of steps of one session, in order of rank, linked through the steps themselves.

    So taking one out of the middle is O(1) and leaves nothing behind, and hardly any memory is touched beside the
    steps: with 100,000 of them queued, memory is what a step costs.
    """

    __slots__ = ("head", "last_chunk", "n_chunks", "place", "session", "tail", "vacated")
    __reduce__ = not_copied

    def __init__(self, session: Hashable) -> None:
        self.session = session
        self.head: QueuedStep | None = None
        self.tail: QueuedStep | None = None
        self.n_chunks = 0
        self.place = -1
        """Its session's turn to prefill, or -1 if it has none at the moment. The rotation alone writes it."""
        self.last_chunk = 0
        """The rank of the last of its chunks, queued or not any more."""
        self.vacated = False
        """Whether that one was taken out by itself, and not in a batch. See ``StepQueues.remove``."""

    def append(self, step: QueuedStep) -> None:
        """Add a step at the end."""
        last = self.tail
        step.lane = self
        step.before = last
        step.after = None
        if last is None:
            self.head = step
        else:
            last.after = step
        self.tail = step
        if step.n_tokens > 1:
            self.n_chunks += 1
            self.last_chunk = step.rank
            self.vacated = False

    def prepend(self, step: QueuedStep) -> None:
        """Add a step at the head."""
        first = self.head
        step.lane = self
        step.before = None
        step.after = first
        if first is None:
            self.tail = step
        else:
            first.before = step
        self.head = step
        if step.n_tokens > 1:
            self.n_chunks += 1
            if self.n_chunks == 1:
                self.last_chunk = step.rank
                self.vacated = False

    def unlink(self, step: QueuedStep) -> None:
        """Take out a step of this lane."""
        before = step.before
        after = step.after
        if before is None:
            self.head = after
        else:
            before.after = after
        if after is None:
            self.tail = before
        else:
            after.before = before
        step.lane = None
        step.before = None
        step.after = None
        if step.n_tokens > 1:
            self.n_chunks -= 1

    def offer(self) -> int:
        """The size of the chunk at its head, or what stands for none."""
        head = self.head
        if head is None or self.n_chunks == 0:
            return marks.NOTHING
        return marks.NEVER if head.n_tokens == 1 else head.n_tokens
