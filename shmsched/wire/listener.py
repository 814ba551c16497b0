"""The daemon's socket: where it lies, who may have it, and what to do about one that a dead daemon left."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path

from shmsched.errors import DaemonRunning, SocketPathError

MAX_PATH_BYTES = 107
"""``sun_path`` has 108 bytes, the last of them a zero (man 7 unix)."""
BACKLOG = 512


def default_socket() -> Path:
    """``$SHMSCHED_SOCKET``, or ``default.sock`` in a private directory of this user."""
    chosen = os.environ.get("SHMSCHED_SOCKET")
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "shmsched" / "default.sock"
    return Path(tempfile.gettempdir()) / f"shmsched-{os.geteuid()}" / "default.sock"


def check_path_length(path: str) -> None:
    n = len(os.fsencode(path))
    if n > MAX_PATH_BYTES:
        raise SocketPathError(
            f"the socket's path has {n} bytes; a Unix socket takes at most {MAX_PATH_BYTES}: {path}. Choose a shorter one"
        )


class Listener:
    """A listening socket that one daemon at a time can have.

    Who has it is decided by a lock on ``PATH.lock``, which the kernel gives up with its process, so a killed daemon
    never stands in the way of the next.
    """

    def __init__(self, path: Path) -> None:
        check_path_length(str(path))
        self.path = path
        _check_directory(path.parent)
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock = _acquire(self._lock_path, path)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._bind()
        except BaseException:
            self.sock.close()
            self._release()
            raise

    def _bind(self) -> None:
        if self.path.is_socket():
            self.path.unlink()
        elif self.path.exists():
            raise SocketPathError(f"{self.path} exists and is not a socket; remove it or choose another path")
        before = os.umask(0o177)
        try:
            self.sock.bind(str(self.path))
        except OSError as e:
            raise SocketPathError(f"cannot bind {self.path}: {e.strerror}") from e
        finally:
            os.umask(before)
        self.sock.listen(BACKLOG)

    def accept(self) -> socket.socket | None:
        """The next connection, or None if there is none now."""
        try:
            return self.sock.accept()[0]
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None

    def close(self) -> None:
        self.sock.close()
        self.path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def _check_directory(directory: Path) -> None:
    """The directory is ours and nobody else writes to it, or it is sticky, and nobody can put another socket in place."""
    try:
        if not directory.exists():
            # Only the last part: a slip of the pen must not leave a tree of directories.
            directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.stat()
    except OSError as e:
        raise SocketPathError(
            f"the socket's directory {directory} cannot be used: {e.strerror}. Make it, with mode 700, or choose another"
        ) from e
    if not stat.S_ISDIR(info.st_mode):
        raise SocketPathError(f"the socket's directory {directory} is not a directory; choose another")
    # What is sticky is safe from everybody but its owner.
    sticky = bool(info.st_mode & stat.S_ISVTX)
    if info.st_uid != os.geteuid() and not (sticky and info.st_uid == 0):
        raise SocketPathError(
            f"the socket's directory {directory} belongs to user {info.st_uid}, not to {os.geteuid()}; choose one of yours"
        )
    if info.st_mode & 0o022 and not sticky:
        raise SocketPathError(
            f"the socket's directory {directory} can be written by others (mode {stat.S_IMODE(info.st_mode):o}); chmod it to 700"
        )


def _acquire(lock_path: Path, path: Path) -> int:
    while True:
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise SocketPathError(f"cannot open {lock_path}: {e.strerror}") from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise DaemonRunning(
                f"the daemon with pid {holder} has {path}; stop it with `shmsched stop --socket {path}` or choose another path"
            ) from None
        # The holder removes the file as it leaves: a lock on a file that has no name any more excludes nobody.
        try:
            if os.stat(lock_path).st_ino == os.fstat(fd).st_ino:
                os.truncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)
