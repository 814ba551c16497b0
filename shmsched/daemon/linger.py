"""When to wait a moment before forming a batch.

When a batch ends, the sessions that just got a token come back with the next one a turnaround later. Going at once would
split them over two batches, or let a pure prefill batch slip in front of their decodes. So an engine that is free waits
until every expected session is back, or until a deadline that follows the measured turnaround and never exceeds a small
share of the engine's mean step time. With no session expected it does not wait at all; and a session that is known to
take longer than that share (a reader, a tool call) is not expected.

Where prompts wait, they pay for it, and the share is a smaller one. Sessions that take longer decode in every other batch meanwhile.

Where no prompt could slip in front, waiting saves only what of a step does not grow with its size: two half batches take no longer
than a whole one on an engine that has its work step by step, and the clients of one half can work while the other half runs. So the
share is then of that part alone.
"""

from __future__ import annotations

from collections.abc import Iterable

LEAST_S = 100e-6
"""A wait below this is none: a turn of the loop takes half of it, and no client is back by then. So with an engine that
takes less than a third of a millisecond nothing is noted of who comes back, either, which would take 1.5 us for each step."""
PROMPTS_SHARE = 0.15
"""Of a mean step, where prompts wait. On two cores eight decodes are back after 1.0 to 1.5 ms. Where steps take 8 ms, as in the
bench's ``storm``, that is mostly too long: they go in every other batch, 450 of them a second, and the prompts keep 0.94 of what
they get alone. With 0.2 they go in every batch, 770 a second, and the prompts keep 0.87. Longer steps have room for both."""
_GAIN = 0.125
"""Weight of a new sample in the running means (as TCP smooths round trips, RFC 6298)."""
_SESSION_GAIN = 0.25
_FIT_GAIN = 1 / 32
"""Of what a step costs for each of its tokens, and at all: a fit needs more samples than a mean."""
_LEAST_SPREAD = 0.02
"""Of the mean size; batches more alike than that tell nothing of what their size costs."""
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
        self._longest = 0.0
        self._fit = SizeFit()

    @property
    def expected(self) -> int:
        return len(self._expected)

    @property
    def longest(self) -> float:
        """The most that is waited before the next batch."""
        return self._longest

    def batch_ended(self, now: float, seconds: float, tokens: int, sessions: Iterable[int], prompts_wait: bool) -> None:
        """A batch of so many tokens took ``seconds``; each of ``sessions`` got one, has nothing queued, and may come back.

        ``prompts_wait``: chunks of prompts are queued, and would go without them.
        """
        self.mean_step_s += _GAIN * (seconds - self.mean_step_s) if self.mean_step_s else seconds
        self._since = now
        longest = self._share * self.mean_step_s
        if longest >= LEAST_S:
            self._fit.add(tokens, seconds)
            longest = min(longest, PROMPTS_SHARE * self.mean_step_s if prompts_wait else self._share * self._fit.fixed)
        self._longest = longest
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
        most = _SLOWEST * self._longest
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
        return self._since + (min(turnaround, self._longest) if turnaround else self._longest)

    def gave_up(self) -> None:
        """A batch goes without those still expected; what they really take is learned when they do come back."""
        self._expected.clear()


class SizeFit:
    """What a step takes at all, and for each of its tokens: a line through (tokens, seconds), the latest weighing most."""

    __slots__ = ("_n", "_together", "_tokens", "_tokens_spread", "seconds")

    def __init__(self) -> None:
        self._n = 0
        self._tokens = self.seconds = 0.0
        self._tokens_spread = self._together = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._n += 1
        gain = max(_FIT_GAIN, 1.0 / self._n)
        off, late = tokens - self._tokens, seconds - self.seconds
        self._tokens += gain * off
        self.seconds += gain * late
        self._tokens_spread = (1.0 - gain) * (self._tokens_spread + gain * off * off)
        self._together = (1.0 - gain) * (self._together + gain * off * late)

    @property
    def fixed(self) -> float:
        """Seconds that a step takes however small it is. All of them, as long as sizes have not differed enough to tell."""
        if self._tokens_spread <= (_LEAST_SPREAD * self._tokens) ** 2:
            return self.seconds
        per_token = self._together / self._tokens_spread
        return min(self.seconds, max(0.0, self.seconds - per_token * self._tokens))
