"""What is done to processes for a while: they are stopped, or run short of something.

Each begins by what a context manager does and ends with it. What this machine does not let us inject, ``NotInjected`` says.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

MIB = 1 << 20
ADDRESS_SPACE_LEFT = 4 * MIB
"""What a process that runs short of it may still map: a thread's stack and an arena it may not."""
SHM_LEFT = 256 << 10
OWN_SHM = 1 << 30
SHM = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup")
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000  # <linux/sched.h>
_MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x20, 0x4000, 0x40000  # <linux/mount.h>
_libc = ctypes.CDLL(None, use_errno=True)


class NotInjected(Exception):
    """Why a fault cannot be injected here."""


# --- stopped ------------------------------------------------------------------------------------------------------------


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end, if it still lives."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        # It has ended by itself in this moment.
        yield
        return
    try:
        _send(pidfd, signal.SIGSTOP)
        yield
    finally:
        _send(pidfd, signal.SIGCONT)
        os.close(pidfd)


@contextmanager
def all_stopped(pids: list[int]) -> Iterator[None]:
    """As the sleep of a machine: they are stopped one after the other, and go on one after the other, the last stopped first."""
    with ExitStack() as stack:
        for pid in pids:
            stack.enter_context(stopped(pid))
        yield


def _send(pidfd: int, number: int) -> None:
    # It may have been killed meanwhile.
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def descendants(pid: int) -> list[int]:
    """What the process has started, and what that has."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # The thread may have ended.
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


# --- descriptors, address space -----------------------------------------------------------------------------------------


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
            with suppress(ProcessLookupError):
                if resource.prlimit(each, which)[0] == least:
                    resource.prlimit(each, which, (soft, hard))


def no_descriptors(pid: int) -> AbstractContextManager[None]:
    """The process may open no descriptor but those that it closes first."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(fd for fd in range(len(used) + 1) if fd not in used)
    return limited(pid, resource.RLIMIT_NOFILE, lowest_free)


def little_address_space(pid: int) -> AbstractContextManager[None]:
    """The process may map ADDRESS_SPACE_LEFT more than it has now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return limited(pid, resource.RLIMIT_AS, pages * resource.getpagesize() + ADDRESS_SPACE_LEFT)


# --- process numbers ----------------------------------------------------------------------------------------------------


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
            # It may have ended; those that it had started are told one by one.
            with suppress(OSError):
                (self._path / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def exhausted(self) -> Iterator[None]:
        most = self._path / "pids.max"
        most.write_text((self._path / "pids.current").read_text())
        try:
            yield
        finally:
            most.write_text("max")

    def close(self) -> None:
        # Somebody may live in it still, which the run's end says.
        with suppress(OSError):
            self._path.rmdir()


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


# --- room in /dev/shm, namespaces ---------------------------------------------------------------------------------------


def own_shm() -> None:
    """From here on this thread and the processes that it starts have a /dev/shm of their own, to fill without taking anybody else's
    room. Raises NotInjected."""
    try:
        _checked(_libc.unshare(_CLONE_NEWNS))
        _checked(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
        _mount_shm(0, b"mode=1777,size=%d" % OWN_SHM)
    except OSError as e:
        raise NotInjected(
            f"no /dev/shm of our own can be mounted ({e.strerror}), and everybody's is not ours to fill"
        ) from e


@contextmanager
def filled_shm() -> Iterator[None]:
    """/dev/shm, our own, has less than SHM_LEFT left: it is made smaller, which takes neither memory nor time."""
    while True:
        held = os.statvfs(SHM)
        try:
            _mount_shm(_MS_REMOUNT, b"size=%d" % ((held.f_blocks - held.f_bfree) * held.f_frsize + SHM_LEFT))
            break
        except OSError as e:
            # More is in it by now.
            if e.errno != errno.EINVAL:
                raise
    try:
        yield
    finally:
        _mount_shm(_MS_REMOUNT, b"size=%d" % OWN_SHM)


def _mount_shm(flags: int, data: bytes) -> None:
    _checked(_libc.mount(b"tmpfs", bytes(SHM), b"tmpfs", flags, data))


def _checked(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def next_child_in_pid_namespace() -> Iterator[None]:
    """The next process that this thread starts is number 1 of a PID namespace of its own. Raises NotInjected."""
    with open("/proc/self/ns/pid") as before:
        try:
            _checked(_libc.unshare(_CLONE_NEWPID))
        except OSError as e:
            raise NotInjected(f"no PID namespace can be made: {e.strerror}") from e
        try:
            yield
        finally:
            _checked(_libc.setns(before.fileno(), _CLONE_NEWPID))
