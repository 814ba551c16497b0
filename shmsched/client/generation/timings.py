"""How long a generation's tokens took to come."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shmsched.dataplane.submission import PendingResult


@dataclass(frozen=True, slots=True)
class Timings:
    """In seconds; None where there were not tokens enough. Tokens that one verified step gave came at once."""

    queue_wait: float | None
    """For how long its first step was queued before an engine got it."""
    time_to_first_token: float | None
    """From the call of ``generate``."""
    inter_token_mean: float | None
    inter_token_max: float | None


class Clock:
    """Notes when tokens came."""

    def __init__(self) -> None:
        self.now = self._began = time.monotonic()
        """When what the plan is told next has come."""
        self.queue_wait: float | None = None
        """Of the first step, once it is known."""
        self._first: float | None = None
        self._last = 0.0
        self._longest = 0.0
        self._n = 0

    def hear(self, handle: PendingResult, arrived: float) -> None:
        """Something came to ``handle`` at ``arrived``."""
        self.now = arrived
        if self.queue_wait is None:
            self.queue_wait = handle.queue_wait

    def note(self, n_sampled: int) -> None:
        """The plan has ``n_sampled`` tokens, having been told what had come by ``now``."""
        if n_sampled <= self._n:
            return
        if self._first is None:
            self._first = self.now
        else:
            self._longest = max(self._longest, self.now - self._last)
        self._n, self._last = n_sampled, self.now

    def timings(self) -> Timings:
        if self._first is None:
            return Timings(self.queue_wait, None, None, None)
        to_first = self._first - self._began
        if self._n == 1:
            return Timings(self.queue_wait, to_first, None, None)
        return Timings(self.queue_wait, to_first, (self._last - self._first) / (self._n - 1), self._longest)
