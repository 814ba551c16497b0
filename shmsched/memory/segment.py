"""Pieces of shared memory that no name outlives.

A segment's name exists for the microseconds between creating and unlinking it; what travels is its descriptor. So a
SIGKILL at any later moment leaves nothing in /dev/shm. What a kill within those microseconds leaves carries its maker's
pid and start time, and ``sweep`` removes it.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import re
from pathlib import Path

import posix_ipc

from shmsched import failpoints
from shmsched.errors import SharedMemoryError, SharedMemoryLimit
from shmsched.limits import lacking

_NAME = re.compile(r"shmsched-(\d+)-(\d+)-\d+")
_SHM = Path("/dev/shm")
_counter = itertools.count()
_OF_A_LIMIT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Segment:
    """Shared memory mapped in this process. The mapping lives as long as any view of ``buffer``."""

    __slots__ = ("buffer", "fd", "size")

    def __init__(self, fd: int, size: int, *, mapped: bool = True) -> None:
        """Map ``size`` bytes of ``fd``, and take the descriptor over. ``mapped``: not for one that is only passed on.

        Raises SharedMemoryError, and SharedMemoryLimit where the system allows this process too little.
        """
        self.fd = fd
        self.size = size
        try:
            actual = os.fstat(fd).st_size
            if actual < size:
                raise SharedMemoryError(f"a shared-memory segment has {actual} bytes; its layout needs {size}")
            if mapped:
                self.buffer = mmap.mmap(fd, size)
        except BaseException as e:
            os.close(fd)
            self.fd = -1
            message = f"a shared-memory segment of {size:,} bytes cannot be mapped"
            if isinstance(e, MemoryError) or (isinstance(e, OSError) and e.errno in _OF_A_LIMIT):
                raise SharedMemoryLimit(f"{message}: {lacking(e)}") from e
            if isinstance(e, OSError | ValueError | OverflowError):
                raise SharedMemoryError(f"{message}: {e}") from e
            raise

    @classmethod
    def create(cls, size: int, what: str, *, mapped: bool = True) -> Segment:
        """Make a zeroed segment of ``size`` bytes, its memory reserved now. Raises SharedMemoryError with the sizes."""
        name = f"/shmsched-{os.getpid()}-{start_time(os.getpid())}-{next(_counter)}"
        try:
            shm = posix_ipc.SharedMemory(name, flags=posix_ipc.O_CREX, mode=0o600)
        except (OSError, posix_ipc.Error) as e:
            message = f"{what} needs {size:,} bytes of shared memory, which cannot be made"
            if isinstance(e, OSError) and e.errno is None:
                # posix_ipc says it in words alone.
                e = OSError(errno.ENFILE if "system" in str(e) else errno.EMFILE, str(e))
            if isinstance(e, OSError) and e.errno in _OF_A_LIMIT:
                raise SharedMemoryLimit(f"{message}: {lacking(e)}") from e
            raise SharedMemoryError(f"{message}: {e}") from e
        _unlink(name, shm.fd)
        try:
            os.ftruncate(shm.fd, size)
            # Without this a full /dev/shm would show later, as SIGBUS at the first touch of a page.
            _reserve(shm.fd, size)
        except OSError as e:
            os.close(shm.fd)
            if e.errno == errno.EFBIG:
                raise SharedMemoryLimit(f"{what} needs {size:,} bytes of shared memory: {lacking(e)}") from e
            if e.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise SharedMemoryError(f"{what}: cannot reserve {size:,} bytes of shared memory: {e.strerror}") from e
            space = os.statvfs(_SHM)
            raise SharedMemoryError(
                f"{what} needs {size:,} bytes of shared memory; /dev/shm has {space.f_bavail * space.f_frsize:,} free of "
                f"{space.f_blocks * space.f_frsize:,}. Make /dev/shm larger, or ask for less"
            ) from e
        return cls(shm.fd, size, mapped=mapped)

    def close_descriptor(self) -> None:
        """The mapping stays; only the descriptor goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _unlink(name: str, fd: int) -> None:
    try:
        # Whoever sweeps may not know our pid, being in another PID namespace: the lock says that its maker lives.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        failpoints.hit("daemon.segment.named")
        posix_ipc.unlink_shared_memory(name)
    except (BlockingIOError, posix_ipc.ExistentialError):
        # It was here between the two lines: then it has the lock, and removes the name itself, which we need no more.
        pass


def _reserve(fd: int, size: int) -> None:
    while True:
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except InterruptedError:
            continue


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if there is no such process. With the pid it names a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command's name, in parentheses, may itself hold spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[19])


def sweep() -> list[str]:
    """Remove the names that a kill in the middle of ``create`` left. Returns those removed."""
    removed = []
    for entry in _SHM.glob("shmsched-*"):
        match = _NAME.fullmatch(entry.name)
        if match and start_time(int(match[1])) != int(match[2]) and _remove(entry):
            removed.append(entry.name)
    return removed


def _remove(entry: Path) -> bool:
    """Remove the name unless its maker, of another PID namespace, lives."""
    try:
        fd = os.open(entry, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        # Another daemon was faster, or it is another user's.
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        posix_ipc.unlink_shared_memory("/" + entry.name)
    except (OSError, posix_ipc.Error):
        return False
    finally:
        os.close(fd)
    return True
