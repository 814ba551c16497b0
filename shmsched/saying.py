"""Saying something on standard output or standard error to whoever reads it, and to nobody if they have gone.

A log that nobody reads (``shmsched up 2>&1 | head -1``), a full disk, a closed stream: none of them may change what a process does.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TextIO


def say(line: str, to: TextIO | None = None) -> None:
    """Write a line at once, to standard error unless told otherwise. Raises nothing."""
    stream = to or sys.stderr
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        _write_to_nowhere(stream)
    except (OSError, ValueError):
        # A full disk may have room again; a closed stream stays closed.
        pass


def counted(n: int, one: str, many: str = "") -> str:
    """``1 step``, ``2 steps``; ``many``: the plural that has no ``s`` at its end."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def say_trace(fault: BaseException | None = None) -> None:
    """Write the trace of ``fault``, or of the exception at hand, to standard error. Raises nothing."""
    fault = fault or sys.exception()
    say("".join(traceback.format_exception(fault)).rstrip())


def _write_to_nowhere(stream: TextIO) -> None:
    """What is still buffered would fail again as the process ends, and make that its exit status."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass
