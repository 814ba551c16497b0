"""How a command ends that did not do what was asked: one line on standard error, and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shmsched.errors import SchedulerDied, SchedulerUnreachable

FAILED = 1
UNREACHABLE = 3
INTERRUPTED = 130


class Failed(Exception):
    """Ends the command with ``status``, saying why."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


def say_error(message: object) -> None:
    """One line, whatever the message holds."""
    print("shmsched: " + " ".join(str(message).split()), file=sys.stderr, flush=True)


@contextmanager
def reaching_the_daemon() -> Iterator[None]:
    """For commands that tell apart a daemon that cannot be reached."""
    try:
        yield
    except (SchedulerUnreachable, SchedulerDied) as e:
        raise Failed(str(e), UNREACHABLE) from e
