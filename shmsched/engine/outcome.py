"""What became of the steps of a batch."""

from __future__ import annotations

from itertools import accumulate, compress

from shmsched.engine.batch_slot import BatchSlot
from shmsched.engine.batch_view import BatchView
from shmsched.engine.plan import Row
from shmsched.memory.layouts import StepEntry, StepStatus

DONE = int(StepStatus.DONE)


class BatchOutcome:
    """What became of each step of a batch, until it is written to the slot in one go."""

    def __init__(self, entries: list[StepEntry]) -> None:
        self.statuses = [0] * len(entries)
        self.messages: dict[int, str] = {}
        self.stopped: dict[int, Row] = {}
        counts = [e.n_rows if e.sampled else 0 for e in entries]
        self._first = list(accumulate(counts, initial=0))
        self._ids = [-1] * self._first[-1]
        self._logprobs = [0.0] * self._first[-1]

    def done_all(self, entries: list[StepEntry], view: BatchView) -> bool:
        """Every step of a batch of ``all_decodes`` was answered. False, and nothing changes, if a token is none."""
        ids, logprobs = view.token_ids.tolist(), view.logprobs.tolist()
        if len(self._ids) < len(entries):
            sampled = [entry.sampled for entry in entries]
            ids, logprobs = list(compress(ids, sampled)), list(compress(logprobs, sampled))
        if ids and not (min(ids) >= 0 and max(ids) < view.vocab_size):
            return False
        self.statuses = [DONE] * len(entries)
        self._ids, self._logprobs = ids, logprobs
        return True

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

    def fail_step(self, i: int, message: str) -> None:
        self.statuses[i] = StepStatus.FAILED
        self.messages[i] = message

    def like(self, row: Row, before: Row) -> None:
        """``row`` meets the fate of an earlier row of its session."""
        for i in row.steps:
            self.statuses[i] = self.statuses[before.steps[0]]
            if self.statuses[i] == StepStatus.FAILED:
                self.messages[i] = self.messages[before.steps[0]]

    def set_token(self, i: int, r: int, token: int, logprob: float) -> None:
        self._ids[self._first[i] + r] = token
        self._logprobs[self._first[i] + r] = logprob

    def write(self, slot: BatchSlot) -> None:
        slot.statuses[: len(self.statuses)] = self.statuses
        slot.ids[: len(self._ids)] = self._ids
        slot.logprobs[: len(self._logprobs)] = self._logprobs
