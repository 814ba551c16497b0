"""Pieces of shared memory that no name outlives.

A segment's name exists for the microseconds between creating and unlinking it; what travels is its descriptor. So a
SIGKILL at any later moment leaves nothing in /dev/shm. What a kill within those microseconds leaves carries its maker's
pid and start time, and ``sweep`` removes it.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
from pathlib import Path

import posix_ipc

from shmsched.errors import SharedMemoryError

_NAME = re.compile(r"shmsched-(\d+)-(\d+)-\d+")
_SHM = Path("/dev/shm")
_counter = itertools.count()


class Segment:
    """Shared memory mapped in this process. The mapping lives as long as any view of ``buffer``."""

    __slots__ = ("buffer", "fd", "size")

    def __init__(self, fd: int, size: int) -> None:
        """Map ``size`` bytes of ``fd``, and take the descriptor over."""
        self.fd = fd
        self.size = size
        try:
            actual = os.fstat(fd).st_size
            if actual < size:
                raise SharedMemoryError(f"a shared-memory segment has {actual} bytes; its layout needs {size}")
            self.buffer = mmap.mmap(fd, size)
        except BaseException as e:
            os.close(fd)
            self.fd = -1
            if isinstance(e, OSError | ValueError | OverflowError):
                raise SharedMemoryError(f"a shared-memory segment of {size:,} bytes cannot be mapped: {e}") from e
            raise

    @classmethod
    def create(cls, size: int, what: str) -> Segment:
        """Make a zeroed segment of ``size`` bytes, its memory reserved now. Raises SharedMemoryError with the sizes."""
        name = f"/shmsched-{os.getpid()}-{start_time(os.getpid())}-{next(_counter)}"
        try:
            shm = posix_ipc.SharedMemory(name, flags=posix_ipc.O_CREX, mode=0o600)
        except (OSError, posix_ipc.Error) as e:
            raise SharedMemoryError(f"{what}: cannot create shared memory: {e}") from e
        posix_ipc.unlink_shared_memory(name)
        try:
            os.ftruncate(shm.fd, size)
            # Without this a full /dev/shm would show later, as SIGBUS at the first touch of a page.
            _reserve(shm.fd, size)
        except OSError as e:
            os.close(shm.fd)
            if e.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise SharedMemoryError(f"{what}: cannot reserve {size:,} bytes of shared memory: {e.strerror}") from e
            space = os.statvfs(_SHM)
            raise SharedMemoryError(
                f"{what} needs {size:,} bytes of shared memory; /dev/shm has {space.f_bavail * space.f_frsize:,} free of "
                f"{space.f_blocks * space.f_frsize:,}. Make /dev/shm larger, or ask for less"
            ) from e
        return cls(shm.fd, size)

    def close_descriptor(self) -> None:
        """The mapping stays; only the descriptor goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


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
        if match and start_time(int(match[1])) != int(match[2]):
            try:
                posix_ipc.unlink_shared_memory("/" + entry.name)
            except (OSError, posix_ipc.Error):
                # Another daemon was faster, or it is another user's.
                continue
            removed.append(entry.name)
    return removed
