"""Signals that ask an engine's process to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from shmsched.surroundings import STOPPING, is_ignored, let_go
from shmsched.wire.link import Link

_LOOK_AGAIN_S = 60.0
"""A signal in the microsecond between the last look and the wait is seen after it: no wait is longer."""
_NOW_S = 1e-6


class StopRequested(BaseException):
    """Raised in the middle of what cannot wait for its end: a start, or anything once somebody asks again."""


INTERRUPTS = (KeyboardInterrupt, StopRequested)
LEAVING = (*INTERRUPTS, SystemExit)
"""What ends the process, wherever in an engine's code it is raised. Whatever else is raised is a fault of what the engine did just
then, though it may not be an Exception: a cancelled task, a panic of a library in Rust."""


class StopRequests:
    """The first request, once the engine serves, lets it finish the batch in hand."""

    def __init__(self) -> None:
        self.number = 0
        """The signal that came, 0 before."""
        self._link: Link | None = None

    def heed(self, *, ignored: tuple[int, ...] = ()) -> None:
        """Take signals from here on, and those that were held back. A hang-up that was ignored stays so (nohup). What the engine
        forks is not asked: it ends by them as by any other."""
        _Forks({number: signal.getsignal(number) for number in STOPPING}).register()
        for number in STOPPING:
            if number in ignored:
                # Not SIG_IGN, which every program that the engine starts would inherit.
                signal.signal(number, lambda *_: None)
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


class _Forks(threading.local):
    """Gives a forked child the handlers that were there before ours. A request that comes in between waits until they are."""

    def __init__(self, handlers: Mapping[signal.Signals, Any]) -> None:
        self._handlers = handlers
        self._mask: set[int] = set()

    def register(self) -> None:
        os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._restore)

    def _hold(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._let_go()
