"""Of a traceback that ends in an engine's code, what is the engine's own."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from types import TracebackType

from shmsched.saying import say

_OURS = (
    *(str(Path(__file__).with_name(f"{name}.py")) for name in ("__main__", "host", "spec", "files")),
    str(importlib.__file__),
)
_IMPORTING = "<frozen importlib"
_MOST_CHARACTERS = 500
"""Of a message, for whoever waits for an answer; the log has all of it."""
_SHOWN = 3
"""Frames that an error of one line names."""


def in_words(error: BaseException) -> str:
    """Its type and its message, whatever that is: none, endless, or something that raises by itself."""
    try:
        message = str(error)
    except Exception as e:
        message = f"(its message cannot be read: {type(e).__name__})"
    if len(message) > _MOST_CHARACTERS:
        message = f"{message[:_MOST_CHARACTERS]}... and {len(message) - _MOST_CHARACTERS:,} characters more"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def in_one_line(error: BaseException) -> str:
    """The error, and where it came from: the innermost of the engine's frames first."""
    frames = traceback.extract_tb(_own(error))[-_SHOWN:]
    places = [f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in reversed(frames)]
    if places and frames[-1].line:
        places[0] += f": {frames[-1].line}"
    return in_words(error) + (f" (at {', from '.join(places)})" if places else "")


def say_own(what: str, error: BaseException) -> None:
    """Write the traceback to standard error, under a line that says what went wrong, without the frames of the host that called."""
    trace = traceback.format_exception(type(error), error, _own(error))
    say(f"{what}\n{''.join(trace).rstrip()}")


def _own(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((*_OURS, _IMPORTING)):
        trace = trace.tb_next
    return trace
