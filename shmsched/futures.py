"""A future that costs little until somebody waits for it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from typing import Any, Generic, NoReturn, TypeVar

from shmsched.arguments import waiting
from shmsched.locks import Bells, OwnedLock

T = TypeVar("T")
V = TypeVar("V")

_SETTLED = (FINISHED, CANCELLED, CANCELLED_AND_NOTIFIED)

_lock = OwnedLock()
"""Guards the futures that have no condition yet. Held for a few instructions, never for a callback."""
_LEFT_LOCKED_S = 1.0
"""Nobody has a future's condition for so long, but one whom an interrupt has kept from giving it back."""


def _renew_lock() -> None:
    """In a forked child: a thread that exists in the parent only may have held the old one."""
    global _lock
    _lock = OwnedLock()


os.register_at_fork(after_in_child=_renew_lock)


def set_results(settled: Iterable[tuple[LightFuture[T], T]]) -> None:
    """``set_result`` for many, in a third of the time: most have no company. Those that are settled stay as they are.

    To be called again with the same where an interrupt has ended it.
    """
    others: list[tuple[LightFuture[T], T]] = []
    followed: list[Bells] = []
    try:
        with _lock:
            _set_lonely(settled, others, followed)
    except BaseException:
        _lock.give_up()
        raise
    for bells in followed:
        bells.ring()
    for future, result in others:
        try:
            future.set_result(result)
        except InvalidStateError:
            future.announce()


def _set_lonely(
    settled: Iterable[tuple[LightFuture[T], T]], others: list[tuple[LightFuture[T], T]], followed: list[Bells]
) -> None:
    """The caller holds the lock. Not where that is taken: what a tracer raises at the end of a loop there, or at the end of a
    branch, belongs to no handler (Python 3.11), and the lock would be kept."""
    for future, result in settled:
        if future._state is PENDING and not future._in_company:
            future._result = result
            future._state = FINISHED
            if future._bells is not None:
                followed.append(future._bells)
        else:
            others.append((future, result))


class _MadeOnDemand(Generic[V]):
    """What ``Future`` keeps for those that wait or are to be called. Once made, the instance's own hides this."""

    def __set_name__(self, owner: type[LightFuture[Any]], name: str) -> None:
        self._name = name

    def __get__(self, future: LightFuture[Any], owner: type[LightFuture[Any]]) -> V:
        future._expect_company()
        made: V = future.__dict__[self._name]
        return made


class LightFuture(Future[T]):
    """A ``concurrent.futures.Future`` that makes its condition and lists when somebody first waits or adds a callback.

    Most steps are settled before anybody asks. Made, settled and read, this one takes 0.6 us then, and ``Future``
    2.2 us, of a step that takes 3 us in the ``Scheduler``.

    Without company it is settled under one lock for all: nobody is to be woken or called. Whoever comes to wait gets
    a condition under that lock, and so finds the future settled, or is found by who settles it and does all that
    ``Future`` does.
    """

    _state: str = PENDING
    _result: T | None = None
    _exception: BaseException | None = None
    _in_company = False
    _bells: Bells | None = None
    """For those that wait in ``result``, once one has."""
    _condition: _MadeOnDemand[threading.Condition] = _MadeOnDemand()
    _waiters: _MadeOnDemand[list[Any]] = _MadeOnDemand()
    _done_callbacks: _MadeOnDemand[list[Callable[[Future[T]], object]]] = _MadeOnDemand()

    def __init__(self) -> None:
        """Not that of ``Future``: the class has what all start with, and the rest is made on demand."""

    # The state is written after what it says is there, and so may be read without a lock.

    def cancelled(self) -> bool:
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED)

    def running(self) -> bool:
        return self._state == RUNNING

    def done(self) -> bool:
        return self._state in _SETTLED

    def result(self, timeout: float | None = None) -> T:
        if self._state == FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                # The error's traceback has this frame.
                del error, self
        return self._result  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state == FINISHED:
            return self._exception
        if not self.done():
            timeout = waiting("timeout", timeout)
            if not self.wait_until_done(None if timeout is None else time.monotonic() + timeout):
                raise TimeoutError
        if self.cancelled():
            raise CancelledError
        return self._exception

    def wait_until_done(self, deadline: float | None) -> bool:
        """Wait until it is settled, or until ``deadline`` in seconds of ``time.monotonic()``. False if that came first."""
        bells = self._bells
        if bells is None:
            bells = self.__dict__.setdefault("_bells", Bells())
        return bells.wait_until(self.done, deadline)

    def set_result(self, result: T) -> None:
        set_it = super().set_result
        self._settle(lambda: set_it(result), result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        set_it = super().set_exception
        self._settle(lambda: set_it(exception), None, exception)

    def cancel(self) -> bool:
        self._reclaim_condition()
        cancelled = super().cancel()
        self._ring()
        return cancelled

    def _notify_cancelled(self) -> None:
        with self._reclaim_condition():
            if self._state == CANCELLED:
                self._state = CANCELLED_AND_NOTIFIED
                for waiter in self._waiters:
                    waiter.add_cancelled(self)

    def announce(self) -> None:
        """It is settled, and perhaps an interrupt has kept that from those who wait for it."""
        self._ring()
        if self._in_company and self.done():
            condition = self._reclaim_condition()
            with condition:
                for waiter in self._waiters:
                    if self not in waiter.finished_futures:
                        waiter.add_result(self)
                condition.notify_all()
            self._invoke_callbacks()

    def _settle(self, as_future_does: Callable[[], None], result: T | None, exception: BaseException | None) -> None:
        try:
            with _lock:
                alone = self._state is PENDING and not self._in_company
                if alone:
                    self._result, self._exception = result, exception
                    self._state = FINISHED
        except BaseException:
            _lock.give_up()
            raise
        if not alone:
            self._reclaim_condition()
            as_future_does()
        self._ring()

    def _ring(self) -> None:
        if self._bells is not None:
            self._bells.ring()

    def _invoke_callbacks(self) -> None:
        # Each once, whatever an interrupt does to the one at hand.
        callbacks = self._done_callbacks
        while callbacks:
            try:
                callbacks.pop(0)(self)
            except Exception:
                logging.getLogger("concurrent.futures").exception("exception calling callback for %r", self)

    def _reclaim_condition(self) -> threading.Condition:
        """The condition, with a lock that can be had: a thread that was interrupted in what ``concurrent.futures`` does with it may
        have kept it."""
        condition = self._condition
        if condition.acquire(timeout=_LEFT_LOCKED_S):
            condition.release()
        else:
            self._condition = condition = threading.Condition()
        return condition

    def renew_condition(self) -> None:
        """In a forked child: a thread that exists in the parent only may have held the old one."""
        self._expect_company()
        self._condition = threading.Condition()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a future cannot be pickled or copied: it is settled here; pass its result on, or make a Client there"
        )

    def _expect_company(self) -> None:
        waiters: list[Any] = []
        callbacks: list[Callable[[Future[T]], object]] = []
        condition = threading.Condition()  # made before the lock is taken: it may set off the garbage collector
        try:
            with _lock:
                if not self._in_company:
                    self._waiters, self._done_callbacks, self._condition = waiters, callbacks, condition
                    self._in_company = True
        except BaseException:
            _lock.give_up()
            raise
