"""What an asynchronous submission returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

from shmsched.client.async_line import Place, SubmissionLine
from shmsched.client.replies import Reply
from shmsched.not_copied import NotCopied

T = TypeVar("T")


class Submitted(NotCopied, Coroutine[Any, Any, T]):
    """What a call has submitted: on its way, or in line for room, from the call on. ``await`` it for what comes of it; it may
    be made a task too, and awaited more than once. A task that is cancelled as it waits for it cancels it."""

    def __init__(
        self,
        client: SubmissionLine,
        reply: Reply,
        place: Place | None,
        outcome: Callable[[], Coroutine[Any, Any, T]],
    ) -> None:
        self._client = client
        self._reply = reply
        self._place = place
        self._outcome = outcome
        self._driven: Coroutine[Any, Any, T] | None = None

    async def _wait(self) -> T:
        self._client._check_here()
        try:
            if self._place is not None:
                await self._place.taken()
            return await self._outcome()
        except BaseException:
            # Cancelled, or interrupted. Of one that has failed there is nothing left to give up.
            self._client._give_up(self._reply, self._place)
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
                self._client._give_up(self._reply, self._place)
        return driven.throw(kind) if value is None and trace is None else driven.throw(kind, value, trace)

    def close(self) -> None:
        if self._driven is not None:
            self._driven.close()
