"""What the system allows a process, and what an error says that it has run out of."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from shmsched.errors import SharedMemoryError, SystemLimit

_PASSES = frozenset((errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC))
_NO_THREAD = "can't start new thread"


def is_shortage(error: BaseException | None) -> bool:
    """Whether there may be enough again a moment later: the same attempt can succeed then."""
    while error is not None:
        if isinstance(error, MemoryError | SystemLimit | SharedMemoryError) or is_no_thread(error):
            return True
        if isinstance(error, OSError):
            return error.errno in _PASSES
        error = error.__cause__
    return False


def is_no_thread(error: BaseException) -> bool:
    """Python says so with an error that may mean anything else, too."""
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


def lacking(error: BaseException) -> str:
    """What there was too little of, in words that name the limit and its value, and what to raise."""
    number = error.errno if isinstance(error, OSError) else 0
    if number == errno.EMFILE:
        return (
            f"all {_soft(resource.RLIMIT_NOFILE)} descriptors that process {os.getpid()} may have are in use (Too many open files)."
            " Close some, or raise the limit (`ulimit -n`)"
        )
    if number == errno.ENFILE:
        return "the system's table of open files is full. Close some, or raise fs.file-max"
    if number == errno.EFBIG:
        return (
            f"a file of process {os.getpid()} may have at most {_soft(resource.RLIMIT_FSIZE)} bytes, and shared memory is one."
            " Raise the limit (`ulimit -f`)"
        )
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        most = _soft(resource.RLIMIT_AS)
        if most != "unlimited":
            return (
                f"the address space of process {os.getpid()} may have at most {most} bytes (Cannot allocate memory)."
                " Raise the limit (`ulimit -v`), or ask for less"
            )
        return "the system has no memory left for it (Cannot allocate memory). Free some, or ask for less"
    if number == errno.EAGAIN or is_no_thread(error):
        return (
            f"no further process or thread can be started: at most {_soft(resource.RLIMIT_NPROC)} are allowed to this user"
            f" (`ulimit -u`), and {_pids_max()} to the control group of process {os.getpid()} (pids.max). End some, or raise the limit"
        )
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _soft(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def _pids_max() -> str:
    """The least that any control group above this process allows, where that can be read."""
    least: int | None = None
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "pids" not in controllers.split(","):
                continue
            root = Path("/sys/fs/cgroup") / controllers if controllers else Path("/sys/fs/cgroup")
            group = root / path.lstrip("/")
            while group != root.parent:
                value = _read(group / "pids.max")
                if value.isdecimal():
                    least = int(value) if least is None else min(least, int(value))
                group = group.parent
    except (OSError, ValueError):
        pass
    return "any number" if least is None else f"{least:,}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def no_thread(what: str, error: BaseException) -> SystemLimit:
    """``what`` needs a thread, and none can be started."""
    return SystemLimit(f"{what} needs a thread: {lacking(error)}")
