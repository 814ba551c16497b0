"""Keeping an interrupt from what must not be left half done.

Python runs the handlers of signals between any two instructions of the main thread, and Ctrl-C's raises KeyboardInterrupt there:
between taking a frame from the socket and settling what it answers, say. (trio keeps it from its own internals alike.)
"""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# What `signal` wraps: its enums take 10 us a call, and this is entered for everything that arrives.
_signal: Any = importlib.import_module("_signal")

_SIGNALS = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)))


class Deferred:
    """While it is entered, what handlers in Python have to do waits until it is left. For the main thread; elsewhere it does
    nothing, since no handler runs there.

    A signal that comes a second time meanwhile is handled at once: what it interrupts may hang.
    """

    def __init__(self) -> None:
        self._main_thread = threading.main_thread().ident
        self._handlers: dict[int, object] = {}
        self._came: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.get_ident() != self._main_thread:
            return
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handlers:
            return
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            _signal.signal(number, handler)
        if self._came:
            came, self._came = self._came, {}
            for number, frame in came.items():
                handlers[number](number, frame)  # type: ignore[operator]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came[number] = frame
            return
        handler = self._handlers.get(number)
        if callable(handler):
            handler(number, frame)
