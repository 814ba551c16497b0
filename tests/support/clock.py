"""A clock that a test sets."""

from __future__ import annotations

import time

from shmsched.daemon.clock import Clock


class StandingClock(Clock):
    """A daemon's clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        super().__init__(lambda: self._at)

    def advance(self, seconds: float) -> None:
        """Let so much time go by, in which the daemon could have run."""
        self.will_wait(seconds)
        self._at += seconds
        self.now()
