"""Which clients are told of what was written for them, and when."""

from __future__ import annotations

from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.loop import EventLoop, Timer

PAUSE_S = 2e-3
"""A client that gets nothing but tokens of generations which go on, or parts of prompts, is told of them no more often: with an engine
that costs nothing it gets an eighth more tokens than with 1 ms, and no more still with 4."""


class Telling:
    """Announces completions to clients: at the end of the turn, or a moment later what nobody waits for."""

    def __init__(self, loop: EventLoop, touched: set[ClientLink]) -> None:
        """``touched``: those that have something to hear of at the end of this turn."""
        self.touched = touched
        self._later: set[ClientLink] = set()
        """Those that are told at the next ``_tell_later``."""
        self._loop = loop
        self._timer: Timer | None = None

    def gone(self, link: ClientLink) -> None:
        """The client has left."""
        self.touched.discard(link)
        self._later.discard(link)

    def tell_touched(self) -> None:
        """At the end of a turn. What goes wrong with one client costs the others nothing."""
        now, touched = self._loop.clock.now(), self.touched
        while touched:
            link = touched.pop()
            try:
                if link.can_hear_later(now, PAUSE_S):
                    self._later.add(link)
                else:
                    self._later.discard(link)
                    link.tell_completions()
            except Exception as e:
                link.blame(e)
        if self._later and self._timer is None:
            self._timer = self._loop.call_at(now + PAUSE_S, self._tell_later)

    def _tell_later(self) -> None:
        self._timer = None
        links, self._later = self._later, set()
        for link in links:
            try:
                link.tell_completions()
            except Exception as e:
                link.blame(e)
