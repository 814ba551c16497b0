"""What wakes the daemon from outside: signals, and the end of the process that launched it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

from shmsched.daemon.loop import READ, EventLoop

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Calls ``stop`` in the loop's thread for SIGINT and SIGTERM."""

    def __init__(self, loop: EventLoop, stop: Callable[[], None]) -> None:
        # The interpreter's C handler writes to this descriptor, so that a signal wakes the loop however it comes to lie.
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        loop.watch(self._woken.fileno(), READ, self._drain)
        self._stop = stop
        # The handler itself does nothing: Python runs it between any two bytecodes of the loop, whose state may be half-way.
        for number in _STOPPING:
            signal.signal(number, lambda *_: None)

    def _drain(self, _: int) -> None:
        for number in self._woken.recv(4096):
            if number in _STOPPING:
                self._stop()


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
