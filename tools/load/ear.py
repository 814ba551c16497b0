"""Reads what other processes print, line by line, as long as anybody may print."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shmsched.saying import say
from shmsched.tools.load.said import Said

READ_SIZE = 1 << 16
LONGEST_LINE = 4096


class Ear:
    """A thread that reads pipes. It never lets one of them fill up: a daemon that cannot print would wait."""

    def __init__(self) -> None:
        self.said = Said()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._data: dict[int, bytes] = {}
        self._who: dict[int, str] = {}
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._listen, name="ear", daemon=True)
        self._thread.start()

    @contextmanager
    def pipe(self, who: str) -> Iterator[int]:
        """A descriptor for a process to print to; it must have a copy of it by the end of the block."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with self._lock:
            self._who[reading], self._data[reading] = who, b""
            self._selector.register(reading, selectors.EVENT_READ)
        os.write(self._wake, b"\0")
        try:
            yield writing
        finally:
            os.close(writing)

    def close(self, seconds: float) -> Said:
        """Hear them out, as far as they end within ``seconds``."""
        self._deadline = time.monotonic() + seconds
        os.write(self._wake, b"\0")
        self._thread.join()
        for fd in list(self._who):
            self._end(fd)
        self._selector.close()
        for fd in (self._wake_read, self._wake):
            os.close(fd)
        return self.said

    def _listen(self) -> None:
        while True:
            deadline = self._deadline
            if deadline is not None and (not self._who or time.monotonic() >= deadline):
                return
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(left):
                data = os.read(key.fd, READ_SIZE)
                if key.fd != self._wake_read:
                    self._take(key.fd, data)

    def _take(self, fd: int, data: bytes) -> None:
        if not data:
            self._end(fd)
            return
        *lines, rest = (self._data[fd] + data).split(b"\n")
        self._data[fd] = rest[:LONGEST_LINE]
        for line in lines:
            self._hear(fd, line)

    def _end(self, fd: int) -> None:
        with self._lock:
            self._selector.unregister(fd)
            rest = self._data.pop(fd)
        if rest:
            self._hear(fd, rest)
        del self._who[fd]
        os.close(fd)

    def _hear(self, fd: int, data: bytes) -> None:
        line = data.decode(errors="replace")
        self.said.hear(self._who[fd], line)
        # As if nobody had listened: whoever watches the run reads it as it comes.
        say(line, sys.__stderr__)
