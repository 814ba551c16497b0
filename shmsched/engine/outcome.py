"""What became of the steps of a batch."""

from __future__ import annotations

import struct
from itertools import accumulate

from shmsched.dataplane.layouts import StepEntry, StepStatus
from shmsched.engine.batch_slot import Results
from shmsched.engine.plan import Row


class BatchOutcome:
    """What became of each step of a batch, until all of it is known."""

    def __init__(self, entries: list[StepEntry]) -> None:
        self.statuses = [0] * len(entries)
        self.messages: dict[int, str] = {}
        self.stopped: dict[int, Row] = {}
        counts = [e.n_rows if e.sampled else 0 for e in entries]
        self._first = list(accumulate(counts, initial=0))
        self._ids = [-1] * self._first[-1]
        self._logprobs = [0.0] * self._first[-1]

    def done(self, row: Row) -> None:
        for i in row.steps:
            self.statuses[i] = StepStatus.DONE

    def defer(self, row: Row) -> None:
        self.stopped[row.slot] = row
        for i in row.steps:
            self.statuses[i] = StepStatus.DEFERRED

    def fail(self, row: Row, message: str) -> None:
        self.stopped[row.slot] = row
        for i in row.steps:
            self.fail_step(i, message)

    def fail_step(self, i: int, message: str, status: StepStatus = StepStatus.FAILED) -> None:
        self.statuses[i] = status
        self.messages[i] = message

    def like(self, row: Row, before: Row) -> None:
        """``row`` meets the fate of an earlier row of its session."""
        for i in row.steps:
            self.statuses[i] = self.statuses[before.steps[0]]
            if before.steps[0] in self.messages:
                self.messages[i] = self.messages[before.steps[0]]

    def set_token(self, i: int, r: int, token: int, logprob: float) -> None:
        self._ids[self._first[i] + r] = token
        self._logprobs[self._first[i] + r] = logprob

    def results(self) -> Results:
        n = len(self._ids)
        return Results(
            bytes(self.statuses),
            struct.pack(f"<{n}i", *self._ids),
            struct.pack(f"<{n}f", *self._logprobs),
            tuple(self.messages[i] for i in sorted(self.messages)),
        )
