"""What a call does that has to wait, for whoever waits and however: a generator that yields what it waits for.

It knows no thread and no event loop. A synchronous client drives it by waiting, an asynchronous one by awaiting; what ends the wait
early, an interrupt or a cancelled task, closes it where it stands.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from shmsched.errors import SchedulerUnreachable
from shmsched.wire.link import Link

T = TypeVar("T")


class Until(NamedTuple):
    """Wait for an answer or a reply to be there, for a link to be readable, or (None) for nothing: until ``deadline``, in seconds of
    ``time.monotonic()``, at most. It may end sooner, too."""

    what: Any
    deadline: float | None

    @property
    def left(self) -> float | None:
        return left(self.deadline)


Flow: TypeAlias = Generator[Until, None, T]


def left(deadline: float | None) -> float | None:
    """How many seconds are left until then."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def after(seconds: float | None) -> float | None:
    """The deadline that many seconds from now."""
    return None if seconds is None else time.monotonic() + seconds


def driven(flow: Flow[T], wait: Callable[[Until], object]) -> T:
    """What it comes to, for one whose thread waits."""
    try:
        while True:
            wait(next(flow))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        flow.close()


async def awaited(flow: Flow[T], wait: Callable[[Until], Awaitable[object]]) -> T:
    """The same for a task."""
    try:
        while True:
            await wait(next(flow))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        flow.close()


def wait_for_link(until: Until) -> None:
    """As ``driven`` waits where it is for a link, or for nothing."""
    if isinstance(until.what, Link):
        until.what.wait_readable(until.left)
    else:
        time.sleep(until.left or 0.0)


def hearing(link: Link, hear: Callable[[list[Any]], T | None], seconds: float, closed: str, silent: str) -> Flow[T]:
    """What ``hear`` makes of the frames that arrive, once it makes anything of them. Raises SchedulerUnreachable: ``closed``, or
    ``silent`` for so many seconds."""
    deadline, late = time.monotonic() + seconds, False
    while not late:
        # What has arrived counts, however late we look.
        late = time.monotonic() >= deadline
        yield Until(link, deadline)
        arrived = link.receive_ready()
        if arrived is None:
            raise SchedulerUnreachable(closed)
        heard = hear(arrived)
        if heard is not None:
            return heard
    raise SchedulerUnreachable(f"{silent} within {seconds:g} s")
