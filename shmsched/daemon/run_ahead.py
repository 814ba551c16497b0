"""When an engine is given what comes after its batch."""

from __future__ import annotations

from shmsched.daemon.loop import Callback, EventLoop, Timer

LONG_STEP_S = 0.002
"""An engine that takes less is given it at once, for there is no time to spare; and has run it too before a scheduler that yields has
seen to the batch before."""


class RunAhead:
    """Late in a long batch: who comes before is in the very next one, and who comes after waits for one batch more."""

    def __init__(self, share: float) -> None:
        """``share``: of a step, that must be over."""
        self._share = share
        self._last_s = 0.0
        self._timer: Timer | None = None

    def batch_ended(self, seconds: float) -> None:
        self._last_s = seconds

    def is_due(self, began: float, mean_step_s: float, now: float, loop: EventLoop, look: Callback) -> bool:
        """Whether the time has come in a batch that ``began`` then. If not, ``look`` is called when it has."""
        # The shorter of the two: after a prompt the mean is too long.
        step_s = min(self._last_s, mean_step_s)
        due = began + self._share * step_s
        if now >= due or step_s <= LONG_STEP_S:
            return True
        if self._timer is None or due < self._timer.when:
            self.end()

            def fire() -> None:
                self._timer = None
                look()

            self._timer = loop.call_at(due, fire)
        return False

    def end(self) -> None:
        """Look at nothing. What is still to come would keep a dead engine, and its memory mapped, until then."""
        if self._timer is not None:
            self._timer.cancel()
