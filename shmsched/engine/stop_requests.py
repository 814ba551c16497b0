"""Signals that ask an engine's process to end."""

from __future__ import annotations

import signal

from shmsched.surroundings import STOPPING, is_ignored, let_go
from shmsched.wire.link import Link

_LOOK_AGAIN_S = 60.0
"""A signal in the microsecond between the last look and the wait is seen after it: no wait is longer."""
_NOW_S = 1e-6


class StopRequested(BaseException):
    """Raised in the middle of what cannot wait for its end: a start, or anything once somebody asks again."""


class StopRequests:
    """The first request, once the engine serves, lets it finish the batch in hand."""

    def __init__(self) -> None:
        self.number = 0
        """The signal that came, 0 before."""
        self._link: Link | None = None

    def heed(self, *, ignored: tuple[int, ...] = ()) -> None:
        """Take signals from here on, and those that were held back. A hang-up that was ignored stays so (nohup)."""
        for number in STOPPING:
            if number in ignored:
                signal.signal(number, signal.SIG_IGN)
            elif number != signal.SIGHUP or not is_ignored(number):
                signal.signal(number, lambda number, _: self._came(number))
        let_go()

    def serving(self, link: Link) -> None:
        """The engine has started; between batches it receives from ``link``."""
        link.receive_for(_LOOK_AGAIN_S)
        self._link = link

    def _came(self, number: int) -> None:
        again, self.number = self.number, number
        if again or self._link is None:
            raise StopRequested
        # The wait that this interrupts is taken up again afterwards, and is over then.
        self._link.receive_for(_NOW_S)
