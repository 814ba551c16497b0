"""The lock that says who has a socket's path: one process at a time, and nobody once that process is dead."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from shmsched.errors import DaemonRunning, SocketPathError, SystemLimit
from shmsched.limits import is_shortage, lacking
from shmsched.wire.socket_path import advice

PASSING_S = 0.25
"""How long somebody may have the lock who only looks whether anybody has it."""
_PAUSE_S = 0.01


def lock_path_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


class SocketLock:
    """A lock on ``PATH.lock``, which the kernel gives up with its process.

    The file may be removed by whoever cleans up: then the lock excludes nobody any more, and ``regain`` makes it anew.
    """

    def __init__(self, path: Path, patience_s: float = PASSING_S) -> None:
        """Raises DaemonRunning if somebody has it for longer than ``patience_s``."""
        self._path = path
        self._file = lock_path_of(path)
        self._fd = self._acquire(time.monotonic() + patience_s)

    @property
    def holds(self) -> bool:
        """Its file is still there: whoever asks for the lock is refused."""
        try:
            return os.path.samestat(os.stat(self._file, follow_symlinks=False), os.fstat(self._fd))
        except OSError:
            return False

    def regain(self) -> None:
        """Have the lock again if its file was removed. Raises DaemonRunning if somebody else has it now."""
        if not self.holds:
            former, self._fd = self._fd, self._acquire(0.0)
            os.close(former)

    def freshen(self) -> None:
        """To whoever removes what is old, it is new."""
        os.utime(self._fd)

    def release(self) -> None:
        if self.holds:
            self._file.unlink(missing_ok=True)
        os.close(self._fd)

    def _acquire(self, deadline: float) -> int:
        while True:
            try:
                fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as e:
                raise self._fault("open", e) from e
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder removes the file as it leaves: a lock on a file that has no name any more excludes nobody.
                if os.path.samestat(os.stat(self._file, follow_symlinks=False), os.fstat(fd)):
                    os.truncate(fd, 0)
                    os.pwrite(fd, str(os.getpid()).encode(), 0)
                    return fd
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    raise refused(self._path, holder_of(self._path)) from None
                time.sleep(_PAUSE_S)
            except FileNotFoundError:
                pass
            except OSError as e:
                os.close(fd)
                raise self._fault("lock", e) from e
            os.close(fd)

    def _fault(self, verb: str, error: OSError) -> SocketPathError | SystemLimit:
        if is_shortage(error) or error.errno == errno.EFBIG:
            return SystemLimit(f"cannot {verb} {self._file}: {lacking(error)}")
        return SocketPathError(
            f"cannot {verb} {self._file}: {error.strerror}. Choose a path elsewhere{advice(self._path)}"
        )


def refused(path: Path, holder: object) -> DaemonRunning:
    return DaemonRunning(
        f"the daemon with pid {holder} has {path}; stop it with `shmsched stop --socket {path}` or choose another path"
    )


def holder_of(path: Path) -> str:
    """Who wrote itself into the lock of the socket at ``path``, as it is called in its own PID namespace."""
    try:
        return lock_path_of(path).read_text(encoding="ascii", errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


def is_held(path: Path) -> bool:
    """Somebody who lives has the lock of the socket at ``path``."""
    try:
        fd = os.open(lock_path_of(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(fd)
    return False
