"""Where every step stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmsched.dataplane.step import QueuedStep, StepState
from shmsched.not_copied import not_copied

QUEUED, IN_FLIGHT = StepState.QUEUED, StepState.IN_FLIGHT
COMPLETED, FAILED, CANCELLED = StepState.COMPLETED, StepState.FAILED, StepState.CANCELLED


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """The ledger at one moment. ``ignored`` counts answers that came too late, twice or for nobody; it is no state."""

    submitted: int = 0
    queued: int = 0
    in_flight: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    ignored: int = 0

    @property
    def balanced(self) -> bool:
        """No step is lost, and none is counted twice."""
        states = (self.queued, self.in_flight, self.completed, self.failed, self.cancelled)
        return min(states) >= 0 and self.submitted == sum(states)


class Ledger:
    """Moves steps from state to state and counts them. Rejected steps never come here.

    The one place that decides whether a step may still be settled: a settling that returns False (or leaves the step
    out of its list) came too late, and its caller must not answer. Not thread-safe; callers hold their own lock.
    """

    __slots__ = ("cancelled", "completed", "failed", "ignored", "in_flight", "queued", "submitted")
    __reduce__ = not_copied

    def __init__(self) -> None:
        self.submitted = 0
        self.queued = 0
        self.in_flight = 0
        self.completed = 0
        self.failed = 0
        self.cancelled = 0
        self.ignored = 0

    def enter(self, step: QueuedStep) -> None:
        """A new step is queued."""
        step.state = QUEUED
        self.submitted += 1
        self.queued += 1

    def enter_many(self, n: int) -> None:
        """So many new steps, made as queued ones."""
        self.submitted += n
        self.queued += n

    def dispatch(self, steps: list[Any]) -> None:
        """A batch of queued steps is handed out."""
        in_flight = IN_FLIGHT
        for step in steps:
            step.state = in_flight
        self.queued -= len(steps)
        self.in_flight += len(steps)

    def requeue(self, step: QueuedStep) -> bool:
        """An in-flight step is queued again. False, and nothing changes, if it is not in flight."""
        if step.state is not IN_FLIGHT:
            return False
        step.state = QUEUED
        self.in_flight -= 1
        self.queued += 1
        return True

    def complete(self, step: QueuedStep) -> bool:
        """An in-flight step is answered. An answer to a queued one is not its own: ignored, and the step still runs."""
        if step.state is not IN_FLIGHT:
            self.ignored += 1
            return False
        step.state = COMPLETED
        self.in_flight -= 1
        self.completed += 1
        return True

    def complete_run(self, steps: list[Any], statuses: bytes, first: int, done: int) -> int:
        """The steps from ``first`` on are answered, up to the first that is not in flight or whose status is not ``done``. Returns
        where that one is."""
        in_flight, completed = IN_FLIGHT, COMPLETED
        end = len(steps)
        for at in range(first, end):
            step = steps[at]
            if step.state is not in_flight or statuses[at] != done:
                end = at
                break
            step.state = completed
        self.in_flight -= end - first
        self.completed += end - first
        return end

    def fail(self, step: QueuedStep) -> bool:
        """An open step fails. The caller takes a queued one out of its queue."""
        if not self._close(step, FAILED):
            return False
        self.failed += 1
        return True

    def cancel(self, step: QueuedStep) -> bool:
        """An open step is cancelled. The caller takes a queued one out of its queue."""
        if not self._close(step, CANCELLED):
            return False
        self.cancelled += 1
        return True

    def ignore(self) -> None:
        """An answer came for a step that nobody knows."""
        self.ignored += 1

    def counts(self) -> LedgerCounts:
        """All counts at this moment."""
        return LedgerCounts(
            self.submitted, self.queued, self.in_flight, self.completed, self.failed, self.cancelled, self.ignored
        )

    def _close(self, step: QueuedStep, outcome: StepState) -> bool:
        if step.state is IN_FLIGHT:
            self.in_flight -= 1
        elif step.state is QUEUED:
            self.queued -= 1
        else:
            self.ignored += 1
            return False
        step.state = outcome
        return True
