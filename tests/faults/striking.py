"""Raises an exception between two instructions of the client, once, at a chosen one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import shmsched

_ROOT = Path(shmsched.__file__).parent
PLACES = tuple(
    str(_ROOT / name)
    for name in ("client/", "dataplane/", "wire/", "memory/", "futures.py", "locks.py", "steps.py", "params.py")
)
"""What a client's call runs through, but for what belongs to Python."""

Place = tuple[str, int, int]
"""A file, a line, and within the line an instruction; -1 for its beginning."""


class Struck(BaseException):
    """As an interrupt is none: nobody expects it."""


class Interrupt(KeyboardInterrupt):
    """What ends an event loop's turn: asyncio passes it on, and keeps all else to itself."""


class Alarm(TimeoutError):
    """What a time limit's handler raises: an OSError, as it happens."""


class Tracer:
    """Follows one call. Raises at ``place`` when that is first reached; notes every place that is reached."""

    def __init__(self, place: Place | None = None, *, instructions: bool, error: type[BaseException] = Struck) -> None:
        self.reached: dict[Place, None] = {}
        self.struck = False
        self._place = place
        self._instructions = instructions
        self._error = error

    @contextmanager
    def following(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if self.struck or not frame.f_code.co_filename.startswith(PLACES):
            return None
        if frame.f_code.co_name == "__del__":
            # What is raised there is printed, and nothing else.
            return None
        frame.f_trace_opcodes = self._instructions
        return self._event

    def _event(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if self.struck or event not in ("line", "opcode"):
            return self._event
        at = frame.f_lasti if event == "opcode" else -1
        place = frame.f_code.co_filename, frame.f_lineno, at
        self.reached.setdefault(place)
        if place == self._place:
            self.struck = True
            sys.settrace(None)
            raise self._error(f"at {place}")
        return self._event
