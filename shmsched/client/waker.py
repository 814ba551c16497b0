"""Waking a thread that polls, from anywhere: a finalizer too, for it takes no lock."""

from __future__ import annotations

import os

from shmsched.errors import SystemLimit
from shmsched.limits import lacking


class Waker:
    """To be polled beside other descriptors. Its own is closed with the last reference to it: whoever is about to wake somebody
    has one, and so never writes into what has taken the number since."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        try:
            # One call, from the system call to where it is kept: an interrupt comes before it or after it.
            self._fds.extend(map(os.eventfd, (0,), (os.EFD_NONBLOCK | os.EFD_CLOEXEC,)))
        except OSError as e:
            if e.errno is None:
                # It is a signal handler's.
                raise
            raise SystemLimit(f"a client needs a descriptor: {lacking(e)}") from e

    def fileno(self) -> int:
        return self._fds[0]

    def wake(self) -> None:
        """Have whoever polls look, now or the next time that it polls."""
        os.eventfd_write(self._fds[0], 1)

    def rest(self) -> None:
        """Whoever polls has woken."""
        try:
            os.eventfd_read(self._fds[0])
        except BlockingIOError:
            # Another one has seen it first.
            pass

    def __del__(self) -> None:
        for fd in getattr(self, "_fds", ()):
            os.close(fd)
