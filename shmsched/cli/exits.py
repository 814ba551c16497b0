"""How a command ends that did not do what was asked: one line on standard error, and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from shmsched.errors import EngineStartError, SchedulerDied, SchedulerUnreachable, ShmschedError, SocketPathError
from shmsched.saying import say

FAILED = 1
UNREACHABLE = 3
"""No daemon is there, or can be: the socket's path may be at fault."""
INTERRUPTED = 130
NOBODY_READS = 141
"""As a shell shows those that SIGPIPE ended (``| head``)."""


class Failed(Exception):
    """Ends the command with ``status``, saying why."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


class NobodyReads(Exception):
    """Standard output is a pipe whose reader has gone."""


@contextmanager
def telling_of_readers_that_left() -> Iterator[None]:
    """click and rich end the process with a status of their own; it shall be that of everybody else."""
    try:
        yield
    except BrokenPipeError as e:
        raise NobodyReads from e
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):
            raise NobodyReads from e
        raise


def say_error(message: object) -> None:
    """One line, whatever the message holds; after it the last words of an engine that did not start."""
    not_started = message if isinstance(message, EngineStartError) else None
    say("shmsched: " + " ".join(str(message if not_started is None else not_started.reason).split()))
    if not_started is not None and not_started.said:
        say(not_started.said)


def show_usage_error(error: click.UsageError) -> None:
    """With the usage that it does not fit."""
    if error.ctx is not None:
        say(error.ctx.get_usage() + "\n")
    say_error(error.format_message())


def status_of(error: ShmschedError) -> int:
    return UNREACHABLE if isinstance(error, SchedulerUnreachable | SchedulerDied | SocketPathError) else FAILED


def is_of_the_output(error: OSError) -> bool:
    """It names no file, and is one of those that writing meets."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EBADF)


def finish_streams() -> None:
    """What cannot be written now would fail again as the process ends, and make that its exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
