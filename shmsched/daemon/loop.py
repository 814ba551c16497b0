"""The daemon's event loop: one thread, readiness and timers. Nothing in it blocks."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable

from shmsched.daemon.clock import Clock, until_next_reading
from shmsched.saying import say_trace

READ = select.EPOLLIN | select.EPOLLRDHUP
WRITE = select.EPOLLOUT
Callback = Callable[[], None]

_FINE_S = 0.02
_LONGEST_S = 3600.0
"""No single wait is longer: epoll counts milliseconds in 32 bits."""
_SLACK = 1024
"""Timers that may be kept though cancelled."""


class Timer:
    """A call to come. Cancelling one that has fired does nothing."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callback | None) -> None:
        self.when = when
        self.callback = callback
        """None once it has fired or was cancelled."""

    def cancel(self) -> None:
        self.callback = None

    @property
    def pending(self) -> bool:
        """Neither fired nor cancelled."""
        return self.callback is not None

    def fire(self) -> None:
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()


class EventLoop:
    """Calls back for descriptors that are ready, timers that are due, and work that other threads post.

    ``after_turn`` runs once after each round of callbacks, so that what they caused (batches, frames) is done once for all
    of them and not for each.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._compact_at = _SLACK
        self._order = itertools.count()
        self._posted: deque[Callback] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._running = True
        self._chore: Callback = lambda: None
        self._chore_every = self._chore_due = math.inf
        self.after_turn: Callback = lambda: None
        self.watch(self._wake_fd, READ, self._woken)

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call ``callback(events)`` while ``fd`` is ready."""
        self._epoll.register(fd, events)
        self._callbacks[fd] = callback

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        del self._callbacks[fd]
        self._epoll.unregister(fd)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        """Call ``callback`` after so many seconds in which this process runs."""
        return self.call_at(self.clock.now() + seconds, callback)

    def call_at(self, when: float, callback: Callback) -> Timer:
        """Call ``callback`` at ``when``, in seconds of ``clock``."""
        timer = Timer(when, callback)
        if len(self._timers) >= self._compact_at:
            # Those that were cancelled, and would have been far.
            self._timers[:] = [entry for entry in self._timers if entry[2].pending]
            heapq.heapify(self._timers)
            self._compact_at = 2 * len(self._timers) + _SLACK
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def every(self, seconds: float, chore: Callback) -> None:
        """Call ``chore`` every so many seconds of ``time.monotonic()``, from now on.

        For what may as well be late: nothing but timers has the clock read while the loop waits, so an idle loop sleeps in between.
        """
        self._chore, self._chore_every = chore, seconds
        self._chore_due = time.monotonic() + seconds

    def post(self, callback: Callback) -> None:
        """Have the loop's thread call ``callback`` soon. May be called from any thread."""
        self._posted.append(callback)
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Turn until ``stop``."""
        while self._running:
            self.turn()

    def turn(self) -> None:
        """Wait until something is ready or due, and make one round of callbacks."""
        callbacks = self._callbacks
        for fd, events in self._wait():
            # One callback may unwatch what a later one of the same round was for.
            if fd in callbacks:
                try:
                    callbacks[fd](events)
                except Exception:
                    say_trace()
        timers = self._timers
        if timers:
            now = self.clock.now()
            while timers and timers[0][0] <= now:
                with contained():
                    heapq.heappop(timers)[2].fire()
        if time.monotonic() >= self._chore_due:
            self._chore_due = time.monotonic() + self._chore_every
            with contained():
                self._chore()
        with contained():
            self.after_turn()

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wake_fd)

    def _wait(self) -> list[tuple[int, int]]:
        timers, clock = self._timers, self.clock
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
        now = clock.now()
        timeout = timers[0][0] - now if timers else math.inf
        while timeout >= _FINE_S:
            # The clock is read meanwhile, so that it knows when the process did not run.
            wait = min(until_next_reading(timeout), _LONGEST_S, max(0.0, self._chore_due - time.monotonic()))
            clock.will_wait(wait if timers else math.inf)
            ready = self._epoll.poll(wait)
            now = clock.now()
            if ready or time.monotonic() >= self._chore_due:
                return ready
            if timers:
                timeout = timers[0][0] - now
        if timeout > 0.0:
            # epoll rounds its time-out up to whole milliseconds; select on the epoll descriptor keeps the microseconds.
            # A busy loop seldom has to wait: it asks first.
            ready = self._epoll.poll(0.0)
            if ready:
                return ready
            clock.will_wait(timeout)
            select.select([self._epoll], [], [], timeout)
        return self._epoll.poll(0.0)

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        while self._posted:
            with contained():
                self._posted.popleft()()


class contained:
    """A fault of ours that is found within is said, and ends neither the loop nor what follows for others."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> bool:
        if isinstance(fault, Exception):
            say_trace()
            return True
        return False
