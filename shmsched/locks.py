"""Locks and bells that an interrupt leaves in a known state.

An asynchronous exception (Ctrl-C, a signal handler's, ``PyThreadState_SetAsyncExc``) comes between two instructions. What one call
of C does has happened then, or has not. What ``threading`` has of conditions and events is Python: it may be left in the middle,
with its inner lock held for ever.
"""

from __future__ import annotations

import sys
import threading
import time
from _thread import RLock, allocate_lock
from collections.abc import Callable
from types import CodeType


class OwnedLock(RLock):  # type: ignore[misc]
    """A lock that knows which thread has it. Nobody takes it twice: that one can, is for the thread that an interrupt kept from
    giving it back, and that comes again."""

    def give_up(self) -> None:
        """After an interrupt: release it, if this very thread still has it."""
        while self.mine:
            self.release()

    @property
    def mine(self) -> bool:
        """Whether this very thread has it."""
        return bool(self._is_owned())  # type: ignore[attr-defined]

    def can_be_had(self, timeout: float) -> bool:
        """Whether a finalizer may wait for it where it runs: not in the middle of what is done under it, on its very thread."""
        if self.mine:
            return False
        try:
            if not self.acquire(timeout=timeout):
                return False
            self.release()
        except BaseException:
            self.give_up()
            raise
        return True


class Bell:
    """Wakes one thread. A ring that nobody waits for is kept, and two are as one."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            # It was rung already.
            pass

    def wait(self, timeout: float | None) -> bool:
        """Wait for a ring, up to ``timeout`` seconds. False if none came."""
        return self._lock.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))


class Bells:
    """Wakes all who wait for a state, which is there before they are rung for."""

    __slots__ = ("_bells",)

    def __init__(self) -> None:
        self._bells: list[Bell] = []

    def ring(self) -> None:
        for bell in tuple(self._bells):
            bell.ring()

    def wait_until(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Wait for ``ready()``, or until ``deadline`` in seconds of ``time.monotonic()``. False if that came first."""
        bell = Bell()
        try:
            self._bells.append(bell)
            while not ready():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                bell.wait(left)
            return True
        finally:
            # One that an interrupt leaves here is rung for nobody.
            if bell in self._bells:
                self._bells.remove(bell)


def runs(thread: int, code: CodeType) -> bool:
    """Whether the thread of this number is anywhere within the function that has this code."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
