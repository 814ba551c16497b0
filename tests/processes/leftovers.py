"""What a test started and must not leave: its processes, and names in /dev/shm.

A process is ours if this run's mark is in its environment, or if it descends from us or shares our process group (a
forked child has the environment of its parent's start, without the mark). Parents change when they die; the mark stays.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MARK = "SHMSCHED_TEST_RUN"
DEADLINE_S = 10.0
_PAUSE_MS = 5


class Process(NamedTuple):
    """A process for good: its number may be used again, with another start."""

    pid: int
    started: int


class _Entry(NamedTuple):
    parent: int
    group: int
    command: str
    marked: bool


def mark_this_run() -> None:
    """Put the mark into the environment that everything we start inherits."""
    os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"


def wait_until(condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    """Return once ``condition()`` holds. AssertionError that says what was waited for after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        select.select([], [], [], _PAUSE_MS / 1000)


def our_processes() -> dict[Process, str]:
    """Those that live now, with their command lines. Neither this one, nor those that are over and only not waited for."""
    table = dict(_table())
    ours = {}
    for process, entry in table.items():
        if process.pid != os.getpid() and (
            entry.marked or entry.group == os.getpgrp() or os.getpid() in _ancestors(process.pid, table)
        ):
            ours[process] = entry.command
    for ancestor in _ancestors(os.getpid(), table):
        ours = {p: command for p, command in ours.items() if p.pid != ancestor}
    return ours


def shm_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("shmsched-*")}


@contextmanager
def nothing_left(seconds: float = DEADLINE_S) -> Iterator[None]:
    """After the block, wait until what began in it has ended. What has not is killed, and is an AssertionError."""
    before, names = set(our_processes()), shm_names()
    yield
    deadline = time.monotonic() + seconds
    left = _left(before)
    while left and time.monotonic() < deadline:
        _wait_for_an_end(left, deadline)
        left = _left(before)
    for process in left:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert not left, f"waited {seconds:g} s for processes that the test left: " + "; ".join(
        f"{process.pid} {command}" for process, command in left.items()
    )
    wait_until(
        lambda: not shm_names() - names,
        f"/dev/shm to list nothing of ours; it has {sorted(shm_names() - names)}",
        max(0.1, deadline - time.monotonic()),
    )


def _left(before: set[Process]) -> dict[Process, str]:
    """What lives now and did not before. What belongs to a process of a wider fixture is that fixture's business."""
    table = dict(_table())
    old = {process.pid for process in before if process in table}
    return {
        process: command
        for process, command in our_processes().items()
        if process not in before and not old & set(_ancestors(process.pid, table)) and process.pid not in _helpers()
    }


def _helpers() -> set[int]:
    """What multiprocessing keeps until this process ends."""
    tracker = multiprocessing.resource_tracker._resource_tracker  # type: ignore[attr-defined]
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    return {tracker._pid, server._forkserver_pid} - {None}


def _wait_for_an_end(left: dict[Process, str], deadline: float) -> None:
    try:
        fd = os.pidfd_open(next(iter(left)).pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(fd)


def _ancestors(pid: int, table: dict[Process, _Entry]) -> list[int]:
    parents = {process.pid: entry.parent for process, entry in table.items()}
    found: list[int] = []
    while (pid := parents.get(pid, 0)) > 1 and pid not in found:
        found.append(pid)
    return found


def _table() -> Iterator[tuple[Process, _Entry]]:
    mark = f"{MARK}={os.environ.get(MARK)}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            # The command's name, in parentheses, may itself hold spaces and parentheses.
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            marked = mark in (directory / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            # It ended meanwhile, or belongs to another user.
            continue
        yield (
            Process(int(directory.name), int(fields[19])),
            _Entry(int(fields[1]), int(fields[2]), command, marked),
        )
