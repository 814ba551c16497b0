"""When to wait a moment before forming a batch.

When a batch ends, the sessions that just got a token come back with the next one a turnaround later. Going at once would
split them over two batches, or let a pure prefill batch slip in front of their decodes. So an engine that is free waits
until every expected session is back, or until a deadline that follows the measured turnaround and never exceeds a small
share of the engine's mean step time. With no session expected it does not wait at all.
"""

from __future__ import annotations

from collections.abc import Iterable

_GAIN = 0.125
"""Weight of a new sample in the running means (as TCP smooths round trips, RFC 6298)."""
_DEVIATIONS = 4.0


class Linger:
    """The expected sessions of one engine, and how long they are worth waiting for. Times are seconds."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._expected: set[int] = set()
        self._since = 0.0
        self._turnaround = 0.0
        self._deviation = 0.0
        self.mean_step_s = 0.0

    @property
    def expected(self) -> int:
        return len(self._expected)

    def batch_ended(self, now: float, seconds: float, sessions: Iterable[int]) -> None:
        """A batch that took ``seconds`` ended; each of ``sessions`` got a token and may come back."""
        self.mean_step_s = (
            seconds if self.mean_step_s == 0.0 else self.mean_step_s + _GAIN * (seconds - self.mean_step_s)
        )
        self._expected.update(sessions)
        self._since = now

    def came_back(self, session: int, now: float) -> None:
        """A step of ``session`` was submitted."""
        if session in self._expected:
            self._expected.discard(session)
            self._learn(now - self._since)

    def forget(self, session: int) -> None:
        """The session is closed, or lost: nobody waits for it."""
        self._expected.discard(session)

    def deadline(self) -> float:
        """Until when to wait for those still expected; in the past where there is nothing to wait for."""
        if not self._expected:
            return 0.0
        longest = self._share * self.mean_step_s
        turnaround = self._turnaround + _DEVIATIONS * self._deviation
        # Before anything was measured, the share alone bounds the wait.
        return self._since + (min(turnaround, longest) if turnaround else longest)

    def gave_up(self, now: float) -> None:
        """A batch goes without those still expected. They were slower than we waited, which the mean must learn."""
        for _ in self._expected:
            self._learn(now - self._since)
        self._expected.clear()

    def _learn(self, seconds: float) -> None:
        error = seconds - self._turnaround
        self._turnaround += _GAIN * error
        self._deviation += _GAIN * (abs(error) - self._deviation)
