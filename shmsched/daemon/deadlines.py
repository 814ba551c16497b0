"""Steps that must be dispatched by a certain time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from shmsched.daemon.loop import EventLoop, Timer
from shmsched.dataplane.session import Step
from shmsched.dataplane.step import StepState

_SLACK = 1024


class Deadlines:
    """Calls ``passed`` with each step that is still queued at its deadline. One timer serves them all."""

    def __init__(self, loop: EventLoop, passed: Callable[[Step], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._heap: list[tuple[float, int, Step]] = []
        self._timer: Timer | None = None
        self._compact_at = _SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, step: Step) -> None:
        """Watch a queued step until its deadline."""
        heappush(self._heap, (step.deadline, step.number, step))
        if len(self._heap) >= self._compact_at:
            self._compact()
        if self._timer is None or step.deadline < self._timer.when:
            self._set_timer()

    def _compact(self) -> None:
        """Forget those that have been dispatched: a far deadline must not keep its step for hours.

        One that its engine deferred was added again each time, and is kept once.
        """
        self._heap = list({entry[1]: entry for entry in self._heap if entry[2].state is StepState.QUEUED}.values())
        heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + _SLACK

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._heap[0][0], self._look) if self._heap else None

    def expire(self, now: float) -> None:
        """Before a batch is formed: its timer may not have had its turn yet, and a late step must not go."""
        while self._heap and self._heap[0][0] <= now:
            step = heappop(self._heap)[2]
            if step.state is StepState.QUEUED:
                try:
                    self._passed(step)
                except Exception as e:
                    step.session.client.blame(e)

    def _look(self) -> None:
        self._timer = None
        self.expire(self._loop.clock.now())
        self._set_timer()
