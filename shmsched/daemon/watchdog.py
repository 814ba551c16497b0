"""Noticing an engine that owes an answer and says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmsched.daemon.loop import Timer

if TYPE_CHECKING:
    from shmsched.daemon.engine_link import EngineLink
    from shmsched.daemon.server import Daemon

WARNING_SHARE = 0.5
"""Of the step time-out: after that much of it a silent engine is named in the log."""


class Watchdog:
    """One timer for all that an engine owes, set again when it fires: one for each batch would pile up."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._timer: Timer | None = None
        self._ended = False
        self._excused_of = 0.0
        self._excused_s = 0.0

    def excuse(self, seconds: float) -> None:
        """We did not run, and the engine, which may have been stopped with us, may be so for that long yet."""
        since = self._engine.silent_since
        if since is not None:
            self._excused_s = seconds + (self._excused_s if since == self._excused_of else 0.0)
            self._excused_of = since

    def limit(self, daemon: Daemon, since: float) -> float:
        """For how long the engine may have been silent ``since`` then."""
        excused = self._excused_s if since == self._excused_of else 0.0
        return daemon.config.step_timeout_s + excused

    def watch(self, daemon: Daemon) -> None:
        """The engine may owe something now."""
        if self._timer is None:
            self._look(daemon)

    def end(self) -> None:
        """The engine is dead. A timer that is still to come would keep it, and its memory mapped, until then."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, daemon: Daemon) -> None:
        self._timer = None
        since = self._engine.silent_since
        if since is None:
            return
        limit, now = self.limit(daemon, since), daemon.loop.clock.now()
        if since + limit <= now:
            daemon.engines.hangs(self._engine)
            return
        due = since + limit * WARNING_SHARE
        if due <= now:
            daemon.engines.is_silent(self._engine, since)
            due = since + limit
        # Looking closer may have shown that it is dead.
        if self._ended:
            return
        self._timer = daemon.loop.call_at(due, lambda: self._look(daemon))
