"""The daemon's clock: it stands still while the daemon does not run.

A laptop sleeps, a machine is snapshot, somebody sends SIGSTOP to everything: whatever waited then has waited for nobody. So what the
daemon measures (step time-outs, deadlines, back-off, lingering) is the time that its loop could have seen go by. It is
``time.monotonic()`` less the pauses, and every reading finds out whether there was one: between two readings the loop waits no
longer than it has said, and works for no longer than ``LONGEST_TURN_S``.

A peer may be continued some time after the daemon. Whoever owes it something is excused for as long as the pause was, ``EXCUSED_S`` at
most, once for each pause.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LONGEST_TURN_S = 0.1
"""Between two readings, beyond what was asked of a wait. What is more is a pause; a machine that is so busy is one, too."""
HEARTBEAT_S = 0.25
_HEARTBEATS = 2
"""The clock is read so often until something is due, and no more often than that: a pause is known to within half of what was
still to be waited. A daemon that has nothing to do sleeps."""
EXCUSED_S = 1.0
_LONG_PAST = 1e-9
SETTLING_S = 0.1
"""After a pause, what was sent before and during it is read; what is read later was sent later."""


def until_next_reading(seconds: float) -> float:
    """How much of a wait goes by before the clock is read."""
    return max(min(HEARTBEAT_S, seconds), seconds / _HEARTBEATS)


class Clock:
    """Seconds, as ``time.monotonic()`` gives them until the first pause. ``read`` stands for that."""

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._last = read()
        self._allowed = LONGEST_TURN_S
        self._paused = 0.0
        self._paused_before = 0.0
        self._resumed = -SETTLING_S
        self.on_pause: Callable[[float], None] = lambda excused: None
        """Called with the seconds that whoever owes something is excused for after a pause."""

    def now(self) -> float:
        """Never goes back, and counts no pause."""
        read = self._read()
        gap = read - self._last
        self._last = read
        if gap > self._allowed:
            self._pause(gap - self._allowed + LONGEST_TURN_S, read)
        self._allowed = LONGEST_TURN_S
        return read - self._paused

    def will_wait(self, seconds: float) -> None:
        """Up to the next reading that long may pass, because nothing happens; ``math.inf`` where nothing is due at all."""
        self._allowed = seconds + LONGEST_TURN_S

    def continued(self) -> None:
        """The process was stopped, and goes on. Where nothing is due, no reading would have told for how long."""
        if self._allowed == math.inf:
            self._allowed = LONGEST_TURN_S
            self.now()

    def of(self, moment: float) -> float:
        """A moment of ``time.monotonic()``, as a peer has named it, in this clock's time.

        A peer that named it before a pause, or in it, could not know of the pause: it is as much later.
        """
        settled = self._last - self._paused - self._resumed >= SETTLING_S
        # Never 0, which is none.
        return max(_LONG_PAST, moment - (self._paused if settled else self._paused_before))

    def _pause(self, seconds: float, read: float) -> None:
        paused = self._paused + seconds
        resumed = read - paused
        if resumed - self._resumed >= SETTLING_S:
            self._paused_before = self._paused
        self._paused, self._resumed = paused, resumed
        self.on_pause(min(seconds, EXCUSED_S))
