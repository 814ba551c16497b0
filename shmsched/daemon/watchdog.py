"""Noticing an engine that owes an answer and says nothing."""

from __future__ import annotations

from collections.abc import Callable

from shmsched.daemon.loop import Callback, EventLoop, Timer

WARNING_SHARE = 0.5
"""Of the step time-out: after that much of it a silent engine is named in the log."""


class Watchdog:
    """One timer for all that an engine owes, set again when it fires: one for each batch would pile up."""

    def __init__(self, loop: EventLoop, timeout_s: float, silent_since: Callable[[], float | None]) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._silent_since = silent_since
        self.warn: Callable[[float], None] = lambda since: None
        """Called where the engine has been silent since then, and the time-out is near,"""
        self.bark: Callback = lambda: None
        """and where it is over."""
        self._timer: Timer | None = None
        self._ended = False
        self._excused_of = 0.0
        self._excused_s = 0.0

    def excuse(self, seconds: float) -> None:
        """We did not run, and the engine, which may have been stopped with us, may be so for that long yet."""
        since = self._silent_since()
        if since is not None:
            self._excused_s = seconds + (self._excused_s if since == self._excused_of else 0.0)
            self._excused_of = since

    @property
    def is_over(self) -> bool:
        """The engine has been silent for as long as it may be."""
        since = self._silent_since()
        return since is not None and self._loop.clock.now() >= since + self._limit(since)

    def _limit(self, since: float) -> float:
        return self._timeout_s + (self._excused_s if since == self._excused_of else 0.0)

    def watch(self) -> None:
        """The engine may owe something now."""
        if self._timer is None:
            self._look()

    def end(self) -> None:
        """The engine is dead. A timer that is still to come would keep it, and its memory mapped, until then."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        since = self._silent_since()
        if since is None:
            return
        limit = self._limit(since)
        if self.is_over:
            self.bark()
            return
        due = since + limit * WARNING_SHARE
        if due <= self._loop.clock.now():
            self.warn(since)
            due = since + limit
        # Looking closer may have shown that it is dead.
        if not self._ended:
            self._timer = self._loop.call_at(due, self._look)
