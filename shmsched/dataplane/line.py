"""The decodes that may go, by arrival."""

from __future__ import annotations

from heapq import heappop, heappush

from shmsched.dataplane import marks
from shmsched.dataplane.step import QueuedStep
from shmsched.not_copied import not_copied


class Line:
    """Steps in order of rank, the first of which are taken for a batch.

    They are linked through the steps themselves; whoever arrives is the last. A step that may go later than others which arrived after
    it is late: its rank waits in a heap, and it stands between its neighbours once it is about to go. That is O(log n), where to look
    for its neighbours at once would be O(n).
    """

    __slots__ = ("first", "heap", "last", "late", "n")
    __reduce__ = not_copied

    def __init__(self) -> None:
        self.first: QueuedStep | None = None
        self.last: QueuedStep | None = None
        self.late: dict[int, QueuedStep] = {}  # by rank
        self.heap: list[int] = []  # their ranks, and stale ones, which are swept out in bulk
        self.n = 0

    def append(self, step: QueuedStep) -> None:
        """Add a step that ranks behind all others."""
        last = self.last
        step.spot = marks.IN_LINE
        step.ahead = last
        step.behind = None
        if last is None:
            self.first = step
        else:
            last.behind = step
        self.last = step
        self.n += 1

    def add(self, step: QueuedStep) -> None:
        """Add a step of any rank."""
        first = self.first
        last = self.last
        if first is None or last is None or step.rank > last.rank:
            self.append(step)
            return
        self.n += 1
        if step.rank < first.rank:
            self._insert(step, first)
        else:
            step.spot = marks.LATE
            self.late[step.rank] = step
            heappush(self.heap, step.rank)

    def remove(self, step: QueuedStep) -> None:
        """Take a step out. Nothing happens if it is not in the line."""
        spot = step.spot
        if spot == marks.NOWHERE:
            return
        if spot == marks.LATE:
            del self.late[step.rank]
            if len(self.heap) > 2 * len(self.late) + 64:
                self.heap = sorted(self.late)
        else:
            ahead = step.ahead
            behind = step.behind
            if ahead is None:
                self.first = behind
            else:
                ahead.behind = behind
            if behind is None:
                self.last = ahead
            else:
                behind.ahead = ahead
            step.ahead = None
            step.behind = None
        step.spot = marks.NOWHERE
        self.n -= 1

    def head(self, most: int) -> list[QueuedStep]:
        """The first steps, that many at most. None of them leaves."""
        steps: list[QueuedStep] = []
        heap = self.heap
        step = self.first
        while len(steps) < most:
            if heap:
                late = self._first_late()
                if late is not None and (step is None or late.rank < step.rank):
                    del self.late[heappop(heap)]
                    self._insert(late, step)
                    step = late
            if step is None:
                break
            steps.append(step)
            step = step.behind
        return steps

    def cut(self, steps: list[QueuedStep]) -> None:
        """Take out what ``head`` has just given."""
        if not steps:
            return
        rest = steps[len(steps) - 1].behind
        nowhere = marks.NOWHERE
        for step in steps:
            step.ahead = None
            step.behind = None
            step.spot = nowhere
        self.first = rest
        if rest is None:
            self.last = None
        else:
            rest.ahead = None
        self.n -= len(steps)

    def _insert(self, step: QueuedStep, behind: QueuedStep | None) -> None:
        """Link a step in front of this one, or behind all."""
        ahead = self.last if behind is None else behind.ahead
        step.spot = marks.IN_LINE
        step.ahead = ahead
        step.behind = behind
        if ahead is None:
            self.first = step
        else:
            ahead.behind = step
        if behind is None:
            self.last = step
        else:
            behind.ahead = step

    def _first_late(self) -> QueuedStep | None:
        heap = self.heap
        while heap:
            step = self.late.get(heap[0])
            if step is not None:
                return step
            heappop(heap)
        return None
