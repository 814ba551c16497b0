"""When to wait a moment before forming a batch.

When a batch ends, the sessions that just got a token come back with the next one a turnaround later. Going at once would
split them over two batches, or let a pure prefill batch slip in front of their decodes. So an engine that is free waits
until every expected session is back, or until a deadline that follows the measured turnaround and never exceeds a small
share of the engine's mean step time. With no session expected it does not wait at all; and a session that is known to
take longer than that share (a reader, a tool call) is not expected.
"""

from __future__ import annotations

from collections.abc import Iterable

LEAST_S = 100e-6
"""A wait below this is none: a turn of the loop takes half of it, and no client is back by then. So with an engine that
takes less than half a millisecond nothing is noted of who comes back, either, which would take 1.5 us for each step."""
_GAIN = 0.125
"""Weight of a new sample in the running means (as TCP smooths round trips, RFC 6298)."""
_SESSION_GAIN = 0.25
_DEVIATIONS = 4.0
_SLOWEST = 8.0
"""A session's sample counts as at most so many waits, so that one pause does not rule it out for long."""


class Linger:
    """The expected sessions of one engine, and how long they are worth waiting for. Times are seconds."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._expected: set[int] = set()
        self._answered: dict[int, float] = {}
        """When each session that has not come back got its token."""
        self._usual: dict[int, float] = {}
        """Each session's own mean turnaround."""
        self._since = 0.0
        self._turnaround = 0.0
        self._deviation = 0.0
        self.mean_step_s = 0.0

    @property
    def expected(self) -> int:
        return len(self._expected)

    @property
    def longest(self) -> float:
        """The most that is ever waited."""
        return self._share * self.mean_step_s

    def batch_ended(self, now: float, seconds: float, sessions: Iterable[int]) -> None:
        """A batch that took ``seconds`` ended; each of ``sessions`` got a token, has nothing queued, and may come back."""
        self.mean_step_s += _GAIN * (seconds - self.mean_step_s) if self.mean_step_s else seconds
        self._since = now
        longest = self.longest
        if longest < LEAST_S:
            self._answered.clear()
            self._expected.clear()
            return
        usual = self._usual
        for session in sessions:
            self._answered[session] = now
            if usual.get(session, 0.0) <= longest:
                self._expected.add(session)

    @property
    def minds(self) -> bool:
        """Whether it matters at all who comes back."""
        return bool(self._answered)

    def came_back(self, sessions: Iterable[int], now: float) -> None:
        """A step of each of ``sessions`` was submitted."""
        answers, usual, expected = self._answered, self._usual, self._expected
        most = _SLOWEST * self.longest
        for session in sessions:
            answered = answers.pop(session, None)
            if answered is None:
                continue
            seconds = now - answered
            mean = usual.get(session, 0.0)
            usual[session] = mean + _SESSION_GAIN * ((min(most, seconds)) - mean)
            if session in expected:
                expected.remove(session)
                error = seconds - self._turnaround
                self._turnaround += _GAIN * error
                self._deviation += _GAIN * ((error if error > 0.0 else -error) - self._deviation)

    def forget(self, session: int) -> None:
        """The session is closed, or lost: nobody waits for it."""
        self._expected.discard(session)
        self._answered.pop(session, None)
        self._usual.pop(session, None)

    def deadline(self) -> float:
        """Until when to wait for those still expected; in the past where there is nothing to wait for."""
        if not self._expected:
            return 0.0
        turnaround = self._turnaround + _DEVIATIONS * self._deviation
        # Before anything was measured, the share alone bounds the wait.
        return self._since + (min(turnaround, self.longest) if turnaround else self.longest)

    def gave_up(self) -> None:
        """A batch goes without those still expected; what they really take is learned when they do come back."""
        self._expected.clear()
