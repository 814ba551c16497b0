"""What an asynchronous submission returns."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from shmsched.client.one_loop import InOneLoop
from shmsched.client.replies import Reply
from shmsched.client.submission import Submission
from shmsched.errors import StepCancelled
from shmsched.not_copied import NotCopied

T = TypeVar("T")


@dataclass(eq=False)
class Place:
    """A submission's place in the line for room."""

    submission: Submission
    reply: Submitted[Any]
    block: bool
    """Whether to wait for room. One that does not waits for the arena only."""
    timeout: float | None
    leave: Callable[[Place], bool]
    """Has it wait no longer. False if it had gone already."""
    future: asyncio.Future[None]
    """Says that it has gone."""
    timer: asyncio.TimerHandle | None = None
    lacking: str = ""

    def gone(self, error: Any = None) -> None:
        """It is submitted, or never will be."""
        if self.timer is not None:
            self.timer.cancel()
        if error is not None:
            self.reply.settle_failed(error)
        if not self.future.done():
            self.future.set_result(None)


class Submitted(NotCopied, Reply, Coroutine[Any, Any, T]):
    """What a call has submitted: on its way, or in line for room, from the call on. ``await`` it for what comes of it; it may
    be made a task too, and awaited more than once. A task that is cancelled as it waits for it cancels it."""

    place: Place | None = None
    """Where it has waited for room."""
    _driven: Coroutine[Any, Any, T] | None = None

    def __init__(self, client: InOneLoop) -> None:
        self._client = client

    @abstractmethod
    async def _outcome(self) -> T: ...

    def cancel(self) -> bool:
        """Want no more of it. False if its answer has come."""
        place = self.place
        if place is not None and place.leave(place):
            place.gone(StepCancelled("whoever submitted it did not wait until there was room"))
            self.withdraw()
            return True
        withdrawn = self._client._channel.withdraw(self)
        if withdrawn:
            self.settle_cancelled()
        return withdrawn

    def _give_up(self) -> None:
        """Whoever waited for it does not any more. Nothing happens elsewhere than in the client's own loop."""
        if asyncio._get_running_loop() is self._client._loop:
            self.cancel()

    async def _wait(self) -> T:
        self._client._check_here()
        try:
            return await self._outcome()
        except BaseException:
            # Cancelled, or interrupted. Of one that has failed there is nothing left to give up.
            self._give_up()
            raise

    def __await__(self) -> Generator[Any, Any, T]:
        return self._wait().__await__()

    def send(self, value: Any, /) -> Any:
        if self._driven is None:
            self._driven = self._wait()
        return self._driven.send(value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None, /) -> Any:
        driven = self._driven
        if driven is None:
            driven = self._driven = self._wait()
            if isinstance(kind, asyncio.CancelledError) or kind is asyncio.CancelledError:
                # A task that is cancelled before its first step: nothing of ``_wait`` will run.
                self._give_up()
        return driven.throw(kind) if value is None and trace is None else driven.throw(kind, value, trace)

    def close(self) -> None:
        if self._driven is not None:
            self._driven.close()
