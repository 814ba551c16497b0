"""Queued steps of one session, in order."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from shmsched.scheduling.rotation import InTurn


class QueuedStep:
    """What the queues read of a step, and the places where they write. One token is a decode, more a prefill chunk.

    Subclass it. ``rank`` is the step's place by arrival, unique in its queues; one put back at the front ranks before
    all others. ``lane`` is None while the step is not queued.
    """

    __slots__ = ("after", "before", "lane", "n_tokens", "number", "rank", "session")

    def __init__(self, number: int, session: Hashable, n_tokens: int) -> None:
        self.number = number
        self.session = session
        self.n_tokens = n_tokens
        self.rank = 0
        self.lane: Any = None

    before: Any  # its neighbours in the lane, while it is queued
    after: Any


S = TypeVar("S", bound=QueuedStep)


class Lane(InTurn, Generic[S]):
    """A list of steps in order of rank, linked through the steps themselves.

    So taking one out of the middle is O(1) and leaves nothing behind, and hardly any memory is touched beside the
    steps: with 100,000 of them queued, memory is what a step costs.
    """

    __slots__ = ("head", "last_chunk", "n_chunks", "session", "tail", "vacated")

    session: Hashable

    def __init__(self) -> None:
        self.place = -1
        self.head: S | None = None
        self.tail: S | None = None
        self.n_chunks = 0
        self.last_chunk = 0
        """The rank of the last of its chunks, queued or not any more."""
        self.vacated = False
        """Whether that one was taken out by itself, and not in a batch. See ``StepQueues.remove``."""

    def append(self, step: S) -> None:
        """Add a step at the end."""
        step.lane = self
        step.before, step.after = self.tail, None
        if self.tail is None:
            self.head = step
        else:
            self.tail.after = step
        self.tail = step
        if step.n_tokens > 1:
            self.n_chunks += 1
            self.last_chunk = step.rank
            self.vacated = False

    def prepend(self, step: S) -> None:
        """Add a step at the head."""
        step.lane = self
        step.before, step.after = None, self.head
        if self.head is None:
            self.tail = step
        else:
            self.head.before = step
        self.head = step
        if step.n_tokens > 1:
            self.n_chunks += 1
            if self.n_chunks == 1:
                self.last_chunk = step.rank
                self.vacated = False

    def unlink(self, step: S) -> None:
        """Take out a step of this lane."""
        before, after = step.before, step.after
        if before is None:
            self.head = after
        else:
            before.after = after
        if after is None:
            self.tail = before
        else:
            after.before = before
        step.lane = step.before = step.after = None
        if step.n_tokens > 1:
            self.n_chunks -= 1
