"""The daemon's socket: who may have it, what to do about one that a dead daemon left, and about one that a cleaner removed."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections import deque
from pathlib import Path

from shmsched.errors import ShmschedError, SocketPathError
from shmsched.wire.credentials import credentials
from shmsched.wire.socket_lock import SocketLock, lock_path_of, refused
from shmsched.wire.socket_path import advice, check_directory, check_free, check_path

BACKLOG = 512


class Listener:
    """A listening socket that one daemon at a time can have.

    Who has it is decided by a lock, which the kernel gives up with its process, so a killed daemon never stands in the way of the
    next. Where the lock's file was removed, whoever still listens at the path has it. Nothing is unlinked but what is dead, and
    one's own.
    """

    def __init__(self, path: Path) -> None:
        check_path(str(path))
        self.path = path
        check_directory(path.parent, path)
        self._at = path.parent.resolve() / path.name
        """Where it is, should a link on the way go; too long to bind to, perhaps."""
        self._lock = SocketLock(self._at)
        self._waiting: deque[socket.socket] = deque()
        """Those that had connected to a socket whose name is gone."""
        try:
            self.sock, self._own = _bound(path)
        except BaseException:
            self._lock.release()
            raise

    def accept(self) -> socket.socket | None:
        """The next connection, or None if there is none now."""
        return self._waiting.popleft() if self._waiting else self._accept()

    def _accept(self) -> socket.socket | None:
        try:
            return self.sock.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None

    @property
    def files(self) -> tuple[Path, Path]:
        """What must stay where it is, for the daemon to be found and to be alone."""
        return self._at, lock_path_of(self._at)

    def restore(self) -> bool:
        """Put back what was removed. True if ``sock`` listens anew, under its old number, and must be watched again.

        Raises ShmschedError while it cannot be: somebody else has the path now, or the directory is gone.
        """
        check_directory(self.path.parent, self.path)
        self._lock.regain()
        if self._is_own():
            return False
        new, own = _bound(self.path)
        try:
            while (connection := self._accept()) is not None:
                self._waiting.append(connection)
        except OSError:
            # No descriptors are left: who waits in there is told by the end of it.
            pass
        os.dup2(new.fileno(), self.sock.fileno(), inheritable=False)
        new.close()
        self._own = own
        return True

    def freshen(self) -> None:
        """To whoever removes what is old, socket, lock and directory are new."""
        try:
            self._lock.freshen()
            if self._is_own():
                os.utime(self._at, follow_symlinks=False)
            directory = self._at.parent.stat()
            if directory.st_uid == os.geteuid() and not directory.st_mode & stat.S_ISVTX:
                os.utime(self._at.parent)
        except OSError:
            # Another file system, another owner: then it ages.
            pass

    def close(self) -> None:
        try:
            # With the lock, nobody puts another socket in place between the look and the unlinking. The socket is closed after
            # both: until then its inode's number is no other's.
            self._lock.regain()
            if self._is_own():
                self._at.unlink(missing_ok=True)
        except (ShmschedError, OSError):
            # Somebody else has the path, or it is gone.
            pass
        for connection in self._waiting:
            connection.close()
        self.sock.close()
        self._lock.release()

    def _is_own(self) -> bool:
        return _identity(self._at) == self._own


Identity = tuple[int, int]


def _identity(path: Path) -> Identity | None:
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _bound(path: Path) -> tuple[socket.socket, Identity | None]:
    """A socket that listens at ``path``, whose lock the caller has. Raises DaemonRunning if another one does."""
    _remove_dead(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
        own = _identity(path)
        sock.listen(BACKLOG)
    except OSError as e:
        sock.close()
        raise SocketPathError(f"cannot bind {path}: {e.strerror}. Choose a path elsewhere{advice(path)}") from e
    finally:
        os.umask(before)
    return sock, own


def _remove_dead(path: Path) -> None:
    """Unlink the socket that a dead daemon left. The caller has the lock. Raises DaemonRunning if the one there is alive."""
    check_free(path)
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except OSError as e:
            if e.errno == errno.EAGAIN:
                raise refused(path, "unknown") from None
        else:
            raise refused(path, credentials(probe)[0] or "unknown")
    path.unlink(missing_ok=True)


def sweep_sockets(directory: Path, pattern: str) -> None:
    """Remove the sockets and locks of that name whose daemons are dead."""
    found = {path.with_name(path.name.removesuffix(".lock")) for path in directory.glob(pattern)}
    for path in found:
        try:
            lock = SocketLock(path, patience_s=0.0)
        except ShmschedError:
            # Somebody has it, or it cannot be looked at.
            continue
        try:
            _remove_dead(path)
        except (ShmschedError, OSError):
            # It lives, and only its lock's file was removed; or it is no socket.
            pass
        finally:
            lock.release()
