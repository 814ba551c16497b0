"""Where a daemon's socket lies, and who may have its directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shmsched.errors import SocketPathError

MAX_PATH_BYTES = 107
"""``sun_path`` has 108 bytes, the last of them a zero (man 7 unix)."""


def default_socket() -> Path:
    """``$SHMSCHED_SOCKET``, or ``default.sock`` in a private directory of this user."""
    return _default()[0]


def _default() -> tuple[Path, str]:
    """The default, and the variable that it comes from."""
    if chosen := os.environ.get("SHMSCHED_SOCKET"):
        return Path(chosen), "SHMSCHED_SOCKET"
    directory, variable = next(_private_directories())
    return directory / "default.sock", variable


def _private_directories() -> Iterator[tuple[Path, str]]:
    """Where sockets of this user may lie, the best first, and the variable that says so. Only these are made if missing."""
    mine = f"shmsched-{os.geteuid()}"
    if (runtime := _usable("XDG_RUNTIME_DIR")) is not None:
        yield runtime / "shmsched", "XDG_RUNTIME_DIR"
    if (temporary := _usable("TMPDIR")) is not None:
        yield temporary / mine, "TMPDIR"
    yield Path("/tmp") / mine, "TMPDIR"
    yield Path("/var/tmp") / mine, "TMPDIR"
    # Where segments are made something can be made; with a dot, for those who look for what a segment left there.
    yield Path("/dev/shm") / f".{mine}", "TMPDIR"


def _usable(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value).absolute() if value and os.path.isdir(value) and os.access(value, os.W_OK | os.X_OK) else None


def private_directory(name_bytes: int) -> Path:
    """A private directory that can be written, and that leaves room for a name of so many bytes. Raises SocketPathError."""
    found = [directory for directory, _ in _private_directories()]
    if chosen := os.environ.get("SHMSCHED_SOCKET"):
        found.insert(0, Path(chosen).absolute().parent)
    faults = []
    for directory in found:
        try:
            if (n := len(os.fsencode(directory)) + 1 + name_bytes) > MAX_PATH_BYTES:
                raise SocketPathError(
                    f"{directory}: a socket's path in it would have {n} bytes; {MAX_PATH_BYTES} are allowed"
                )
            check_directory(directory)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise SocketPathError(f"{directory} cannot be written")
        except SocketPathError as e:
            faults.append(str(e))
            continue
        return directory
    raise SocketPathError(
        "no directory is left for a socket. Set XDG_RUNTIME_DIR or TMPDIR to a directory with a short path that can be written: "
        + "; ".join(faults)
    )


def check_path(path: str) -> None:
    """Raises SocketPathError for one that names no file, or is too long for the kernel."""
    if Path(path).name in ("", ".."):
        raise _is_a_directory(path)
    n = len(os.fsencode(path))
    if n > MAX_PATH_BYTES:
        raise SocketPathError(
            f"the socket's path has {n} bytes; a Unix socket takes at most {MAX_PATH_BYTES}: {path}. Choose a shorter one"
            + advice(Path(path))
        )


def check_free(path: Path) -> None:
    """Raises SocketPathError where something else than a socket lies."""
    if os.path.isdir(path):
        raise _is_a_directory(str(path))
    if os.path.lexists(path) and not path.is_socket():
        raise SocketPathError(f"{path} exists and is not a socket; remove it or choose another path{advice(path)}")


def check_can_be(path: Path) -> None:
    """Raises SocketPathError where no daemon can be, nor be started: something else lies there, or there is no directory."""
    check_free(path)
    is_there = os.path.lexists(path.parent)
    if not os.path.isdir(path.parent) and (is_there or not _is_made(path.parent)):
        raise _no_directory(path.parent, path, os.strerror(errno.ENOTDIR if is_there else errno.ENOENT))


def _is_made(directory: Path) -> bool:
    """Whether a daemon makes it. A slip of the pen in a path that somebody chose must not leave directories."""
    return any(directory == private for private, _ in _private_directories())


def _is_a_directory(path: str) -> SocketPathError:
    return SocketPathError(
        f"the socket's path {path!r} names a directory; give it the name of a file in there, as in"
        f" {os.path.join(path, 'shmsched.sock')}{advice(Path(path))}"
    )


def _no_directory(directory: Path, path: Path, why: str | None) -> SocketPathError:
    return SocketPathError(
        f"the socket's directory {directory} cannot be used: {why}. Make it, with mode 700, or choose another{advice(path)}"
    )


def advice(path: Path) -> str:
    """What to set, if nobody chose this path."""
    default, variable = _default()
    if path != default:
        return ""
    if variable == "SHMSCHED_SOCKET":
        return " with SHMSCHED_SOCKET, which says so"
    given = f" (it follows from {variable}={os.environ[variable]})" if os.environ.get(variable) else ""
    return f"{given}: set SHMSCHED_SOCKET to a path, or XDG_RUNTIME_DIR or TMPDIR to a directory of yours"


def check_directory(directory: Path, path: Path | None = None) -> None:
    """The directory is ours and nobody else writes to it, or it is sticky, and nobody can put another socket in place.

    ``path``: the socket that it is for, so that an error can say what chose it.
    """
    try:
        if not directory.exists() and _is_made(directory):
            directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.stat()
    except OSError as e:
        raise _no_directory(directory, path or directory / "default.sock", e.strerror) from e
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
