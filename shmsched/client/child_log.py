"""What a private daemon and its engines write on standard error."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections import deque
from typing import IO

_PIPE_BYTES = 1 << 20
"""So much may be written while this process does something else (Python's threads take turns)."""
_KEPT_BYTES = 1 << 18
_MOST_LINES = 60


class ChildLog:
    """Keeps it while they start, for the error that says why they did not; then hands it on to our own standard error."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._kept: deque[bytes] = deque()
        self._n_kept = 0
        self._lock = threading.Lock()
        self._handing_on = False
        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            # More than this user may have: then it is the usual size.
            pass
        self._thread = threading.Thread(target=self._read, name="shmsched-log", daemon=True)
        self._thread.start()

    def hand_on(self) -> None:
        """Write what was kept to standard error, and from now on what comes, as it comes."""
        with self._lock:
            self._handing_on = True
            for data in self._kept:
                _write(data)
            self._kept.clear()

    def last_words(self, timeout: float) -> str:
        """The last lines of those who did not start, once they have ended: it waits at most ``timeout`` seconds for the rest."""
        self._thread.join(timeout)
        with self._lock:
            text = b"".join(self._kept).decode(errors="replace")
        return "\n".join(text.strip("\n").splitlines()[-_MOST_LINES:])

    def join(self, timeout: float) -> None:
        """Wait until all that was written has been read."""
        self._thread.join(timeout)

    def _read(self) -> None:
        with self._pipe as pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                with self._lock:
                    if self._handing_on:
                        _write(data)
                        continue
                    self._kept.append(data)
                    self._n_kept += len(data)
                    while self._n_kept - len(self._kept[0]) >= _KEPT_BYTES:
                        self._n_kept -= len(self._kept.popleft())


def _write(data: bytes) -> None:
    if sys.__stderr__ is None:
        return
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        # Nobody can take it.
        pass
