"""What a process of ours makes of what it inherits, before anything else: its standard streams, and how signals lie.

Whoever starts a process may have closed its standard streams, set them to a full disk or a pipe that nobody reads, ignored
or blocked any signal. None of that is to decide what a daemon, an engine or a command does.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from typing import TextIO, cast

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Requests to stop: Ctrl-C, a service manager's, a terminal that closes."""
UTF_8 = {"PYTHONUTF8": "1"}
"""For a Python that is started where the locale may not be UTF-8."""
_AT_ONCE = 4096
"""What a pipe takes without waiting once it is writable (PIPE_BUF)."""


def settle_in(*, hold: bool = False) -> None:
    """Call it first. With ``hold``, requests to stop wait until ``let_go``; as process 1 too, where they would be lost."""
    # SIGCHLD that the parent ignored would take our children's exit statuses from us.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, STOPPING if hold else ())
    _open_standard_descriptors()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            fd = ("stdin", "stdout", "stderr").index(name)
            stream = open(fd, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
        elif isinstance(stream, io.TextIOWrapper):
            # Whatever the locale; what a terminal was said not to show (PYTHONIOENCODING) is shown as a replacement.
            encoding = stream.encoding if os.environ.get("PYTHONIOENCODING") else "utf-8"
            stream.reconfigure(encoding=encoding, errors="replace")


def let_go() -> None:
    """Requests to stop that ``settle_in`` held back arrive now, and later ones at once."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


def speak_to_nobody_in_particular(patience_s: float) -> None:
    """From here on what this process prints is a log: no reader, none that reads, or a full disk costs lines and nothing else.

    ``patience_s``: how long a reader that has fallen behind is waited for.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, _log(fd, patience_s))


def _log(fd: int, patience_s: float) -> TextIO:
    raw = cast("io.RawIOBase", _Log(fd, patience_s))
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _Log(io.FileIO):
    """Writes what can be written, and drops the rest. Raises nothing."""

    def __init__(self, fd: int, patience_s: float) -> None:
        super().__init__(fd, "w", closefd=False)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._patience_ms = 1000 * patience_s
        self._behind = False
        """Its reader was waited for in vain; until it reads again, nobody waits for it."""

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _AT_ONCE):
                piece = view[start : start + _AT_ONCE]
                while piece:
                    self._behind = not self._poll.poll(0 if self._behind else self._patience_ms)
                    if self._behind:
                        return len(view)
                    piece = piece[os.write(self.fileno(), piece) :]
        except OSError:
            # A broken pipe, a full disk: the next line may find it otherwise.
            pass
        return len(view)


def _open_standard_descriptors() -> None:
    """What is opened next must never become number 0, 1 or 2: children and libraries print there."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if fd > 2:
            os.close(fd)
            return
        os.set_inheritable(fd, True)
