"""``python -m shmsched.engine.keeper LEASH SPEC ...``: what the daemon spawns. An engine, and whatever it starts, ends as one.

This process forks the engine's and stays its parent, small: nothing but the standard library comes before. As a subreaper it
is given every orphan of the engine's, however detached. When the engine ends, or the daemon lets go of its end of the socket LEASH
(as it does when it dies), everything below this process is killed; then it ends itself, in the way in which the engine did. Only its
own children are killed, which nobody else can reap: so no number of theirs can have become another process's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from typing import NoReturn

from shmsched.engine.leash import PID

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_MOST_S = 5.0
"""How long what was killed may take to be gone: what the kernel holds on to must not hold the daemon."""
_ROUND_MS = 20
_CLEANERS = b"resource_tracker", b"torch_shm_manager"
"""Of multiprocessing (and of joblib, which has its own) and of torch."""
_CLEANING_S = 1.0
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Whoever signals a whole group or service means the engine, which decides for itself."""


def main() -> int:
    leash = int(sys.argv.pop(1))
    # Ignored, as a parent may have left it, the kernel would reap children by itself and tell nobody how they ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    try:
        engine = os.fork()
    except OSError:
        # The daemon tries again, and says so.
        os._exit(os.EX_TEMPFAIL)
    if engine:
        _keep(engine, leash)
    os.setsid()
    try:
        os.write(leash, PID.pack(os.getpid()))
    except OSError:
        # The daemon is gone already.
        os._exit(0)
    os.close(leash)
    sys.argv += ["--parent", str(keeper)]
    from shmsched.engine.__main__ import main as host

    return host()


def _keep(engine: int, leash: int) -> NoReturn:
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    poll = select.poll()
    poll.register(leash, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while not _has_ended(engine):
        if leash in _wait(poll, woken, None):
            if not _heard(leash):
                break
            os.kill(engine, signal.SIGTERM)
    poll.unregister(leash)
    _end_like(_end_all(engine, poll, woken))


def _heard(leash: int) -> bytes:
    try:
        return os.read(leash, 16)
    except ConnectionResetError:
        # Closed with the engine's number unread.
        return b""


def _wait(poll: select.poll, woken: int, timeout_ms: int | None) -> set[int]:
    ready = {fd for fd, _ in poll.poll(timeout_ms)}
    if woken in ready:
        os.read(woken, 4096)
    return ready


def _has_ended(engine: int) -> bool:
    """Reaps orphans on the way. The engine is not reaped: as long as it is not, its number is its own."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == engine:
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _end_all(engine: int, poll: select.poll, woken: int) -> int:
    """Kill all that is below this process, and reap it. Returns the engine's status."""
    status = signal.SIGKILL.value
    began = time.monotonic()
    # The engine first; then generation by generation, as orphans become children of this process.
    _kill(engine)
    while (now := time.monotonic()) < began + _MOST_S:
        for child in _children():
            if now > began + _CLEANING_S or not _cleans_up(child):
                _kill(child)
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == engine:
                    status = reaped[1]
        except ChildProcessError:
            break
        _wait(poll, woken, _ROUND_MS)
    return status


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _cleans_up(pid: int) -> bool:
    """Whether it is there to remove what the others leave in /dev/shm, and ends by itself once they all have."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)


def _children() -> list[int]:
    mine = str(os.getpid()).encode()
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                # The command's name, in parentheses, may itself hold spaces and parentheses.
                parent = stat.read().rpartition(b")")[2].split()[1]
        except (OSError, IndexError):
            continue
        if parent == mine:
            found.append(int(name))
    return found


def _end_like(status: int) -> NoReturn:
    """Whoever waits for this process learns how the engine ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # One core of it is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    sys.exit(main())
