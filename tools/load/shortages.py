"""Shortages of a second or two: of descriptors, of address space, of process numbers, of room in /dev/shm.

Each begins by what a context manager does and ends with it. What this machine does not let us inject, ``NotInjected`` says.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from shmsched.tools.load.stopping import descendants

MIB = 1 << 20
ADDRESS_SPACE_LEFT = 4 * MIB
"""What a process that runs short of it may still map: a thread's stack and an arena it may not."""
SHM_LEFT = 256 << 10
OWN_SHM = 1 << 30
"""The size of a /dev/shm of our own."""
SHM = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup")
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000  # <linux/sched.h>
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000  # <linux/mount.h>


class NotInjected(Exception):
    """Why a fault cannot be injected here."""


@contextmanager
def limited(pid: int, which: int, most: int) -> Iterator[None]:
    """The process has ``most`` of a resource, or what it had if that was less. Raises ProcessLookupError if it is gone."""
    soft, hard = resource.prlimit(pid, which)
    least = most if soft == resource.RLIM_INFINITY else min(soft, most)
    resource.prlimit(pid, which, (least, hard))
    try:
        yield
    finally:
        # What it started meanwhile inherited its limit, and would keep it for ever.
        for each in (pid, *descendants(pid)):
            try:
                if resource.prlimit(each, which)[0] == least:
                    resource.prlimit(each, which, (soft, hard))
            except ProcessLookupError:
                # It has ended meanwhile.
                continue


def no_descriptors(pid: int) -> AbstractContextManager[None]:
    """The process may open no descriptor but those that it closes first."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(fd for fd in range(len(used) + 1) if fd not in used)
    return limited(pid, resource.RLIMIT_NOFILE, lowest_free)


def little_address_space(pid: int) -> AbstractContextManager[None]:
    """The process may map ADDRESS_SPACE_LEFT more than it has now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return limited(pid, resource.RLIMIT_AS, pages * resource.getpagesize() + ADDRESS_SPACE_LEFT)


class PidsCgroup:
    """A cgroup of ours whose processes can be denied any new one. It is removed with ``close``, once they have ended."""

    def __init__(self, pids: set[int]) -> None:
        """Put the processes in. Raises NotInjected."""
        try:
            self._path = _pids_cgroup() / f"shmsched-stress-{os.getpid()}"
            self._path.mkdir()
        except OSError as e:
            raise NotInjected(f"no cgroup can be made under {_CGROUPS} to limit process numbers: {e.strerror}") from e
        if not (self._path / "pids.max").exists():
            self.close()
            raise NotInjected(f"the cgroups under {_CGROUPS} do not limit process numbers (no pids.max)")
        for pid in pids:
            try:
                (self._path / "cgroup.procs").write_text(str(pid))
            except OSError:
                # It has ended; those that it had started are told one by one.
                continue

    @contextmanager
    def exhausted(self) -> Iterator[None]:
        most = self._path / "pids.max"
        most.write_text((self._path / "pids.current").read_text())
        try:
            yield
        finally:
            most.write_text("max")

    def close(self) -> None:
        try:
            self._path.rmdir()
        except OSError:
            # Somebody lives in it still, which the run's end says.
            pass


def _pids_cgroup() -> Path:
    """The one that this process is in, of the kind that limits process numbers."""
    unified = _CGROUPS
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "pids" in controllers.split(","):
            return _CGROUPS / "pids" / path.lstrip("/")
        if not controllers:
            unified = _CGROUPS / path.lstrip("/")
    return unified


@contextmanager
def filled_shm() -> Iterator[None]:
    """/dev/shm has less than SHM_LEFT left. What fills it has no name, so nothing of it outlives this process."""
    fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        filled, piece = 0, OWN_SHM
        while piece >= SHM_LEFT:
            try:
                os.posix_fallocate(fd, filled, piece)
                filled += piece
            except OSError:
                # Too much, or somebody was faster.
                piece //= 2
        yield
    finally:
        os.close(fd)


def own_shm() -> None:
    """From here on this process and those that it starts have a /dev/shm of their own, small enough to fill without taking the
    machine's memory or anybody else's room. Raises NotInjected."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNS) != 0
        or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0
        or libc.mount(b"tmpfs", bytes(SHM), b"tmpfs", 0, b"mode=1777,size=%d" % OWN_SHM) != 0
    ):
        raise NotInjected(
            f"no /dev/shm of our own can be mounted ({os.strerror(ctypes.get_errno())}), and everybody's is not ours to fill"
        )


@contextmanager
def next_child_in_pid_namespace() -> Iterator[None]:
    """The next process that this thread starts is number 1 of a PID namespace of its own. Raises NotInjected."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWPID) != 0:
            raise NotInjected(f"no PID namespace can be made: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            if libc.setns(before, _CLONE_NEWPID) != 0:
                raise OSError(ctypes.get_errno(), "cannot return to our own PID namespace")
    finally:
        os.close(before)
