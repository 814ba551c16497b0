"""What wakes the daemon from outside: signals, and the end of the process that launched it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

from shmsched.daemon.loop import READ, EventLoop
from shmsched.surroundings import STOPPING, is_ignored, let_go


class Signals:
    """Calls ``stop`` in the loop's thread for SIGINT, SIGTERM and SIGHUP, and for those that came since the process began; and
    ``child_ended`` for SIGCHLD.

    A terminal that closes may say so twice, itself and by its shell: a hang-up is the first request or none, and none at all
    where it was ignored before (nohup).
    """

    def __init__(self, loop: EventLoop, stop: Callable[[], None], child_ended: Callable[[], None]) -> None:
        # The interpreter's C handler writes to this descriptor, so that a signal wakes the loop however it comes to lie.
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        loop.watch(self._woken.fileno(), READ, self._drain)
        self._stop = stop
        self._child_ended = child_ended
        # The handler itself does nothing: Python runs it between any two bytecodes of the loop, whose state may be half-way.
        for number in STOPPING:
            if number != signal.SIGHUP or not is_ignored(number):
                signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._asked = False
        let_go()

    def _drain(self, _: int) -> None:
        for number in self._woken.recv(4096):
            if number in STOPPING and not (number == signal.SIGHUP and self._asked):
                self._asked = True
                self._stop()
            elif number == signal.SIGCHLD:
                self._child_ended()


def end_with(pid: int, loop: EventLoop, end: Callable[[], None]) -> None:
    """Call ``end`` when the process ``pid`` has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        end()
        return

    def ended(_: int) -> None:
        loop.unwatch(pidfd)
        os.close(pidfd)
        end()

    loop.watch(pidfd, READ, ended)
