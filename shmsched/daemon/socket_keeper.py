"""Keeps the daemon's socket where its clients look for it, whatever cleans up there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from shmsched.daemon.connections import Connections
from shmsched.daemon.loop import READ, EventLoop, Timer
from shmsched.errors import ShmschedError
from shmsched.wire.listener import Listener

FRESH_S = 60.0
"""How often the files are made new, and looked for even if nobody said that they are gone."""
AGAIN_S = 0.5
"""How soon to try again while they cannot be put back."""

# <sys/inotify.h>: the loss of a name is a change of an inode's attributes while the inode is in use.
_IN_ATTRIB, _IN_MOVE_SELF, _IN_DELETE_SELF = 0x4, 0x800, 0x400


class SocketKeeper:
    """Puts socket and lock back as soon as they are removed, and keeps them fresh."""

    def __init__(
        self, loop: EventLoop, listener: Listener, connections: Connections, log: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._connections = connections
        self._log = log
        self._said = ""
        self._again = Timer(0.0, None)
        self._watch = _Watch.create()
        if self._watch is not None:
            loop.watch(self._watch.fd, READ, lambda _: self._changed())
        loop.every(FRESH_S, self._keep)
        self._keep()

    def close(self) -> None:
        self._again.cancel()
        if self._watch is not None:
            self._loop.unwatch(self._watch.fd)
            os.close(self._watch.fd)

    def _changed(self) -> None:
        assert self._watch is not None
        self._watch.read()
        self._restore()

    def _keep(self) -> None:
        if self._restore():
            self._listener.freshen()

    def _restore(self) -> bool:
        try:
            anew = self._listener.restore()
        except (ShmschedError, OSError) as e:
            if str(e) != self._said:
                self._said = str(e)
                self._log(f"cannot be reached at {self._listener.path} for now: {e}")
            if not self._again.pending:
                self._again = self._loop.call_later(AGAIN_S, self._keep)
            return False
        if anew:
            self._connections.listen_anew()
        if anew or self._said:
            self._said = ""
            self._log(f"{self._listener.path} had been removed or taken; it is there again")
        if self._watch is not None:
            self._watch.look_at(self._listener.files)
        return True


class _Watch:
    """Tells of files that are removed or moved (inotify)."""

    def __init__(self, fd: int, libc: ctypes.CDLL) -> None:
        self.fd = fd
        self._libc = libc

    @classmethod
    def create(cls) -> _Watch | None:
        """None where the system has no more of them: then the files are looked for once a minute."""
        libc = ctypes.CDLL(None)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        return cls(fd, libc) if fd >= 0 else None

    def look_at(self, files: tuple[Path, ...]) -> None:
        """And at their directory; not at what else happens in it. Each is watched once, however often this is called."""
        for file in files:
            self._add(file, _IN_ATTRIB | _IN_MOVE_SELF | _IN_DELETE_SELF)
        self._add(files[0].parent, _IN_MOVE_SELF | _IN_DELETE_SELF)

    def _add(self, path: Path, events: int) -> None:
        self._libc.inotify_add_watch(self.fd, os.fsencode(path), events)

    def read(self) -> None:
        try:
            os.read(self.fd, 1 << 16)
        except BlockingIOError:
            pass
