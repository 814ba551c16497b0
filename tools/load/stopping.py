"""Processes that are stopped for a while, one or all at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


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
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        # It was killed meanwhile.
        pass


def descendants(pid: int) -> list[int]:
    """What the process has started, and what that has."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            # The thread has ended.
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found
