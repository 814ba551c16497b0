"""A session as an asynchronous client holds it."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any

from shmsched.client.async_replies import AsyncReply, AsyncStream
from shmsched.client.client_session import ClientSession
from shmsched.client.generation.async_generation import AsyncGeneration
from shmsched.client.one_loop import InOneLoop
from shmsched.not_copied import NotCopied


class AsyncSession(ClientSession[AsyncReply, AsyncStream, AsyncGeneration, "OpeningSession"]):
    """One sequence's state in one engine. Made by ``AsyncClient.open_session``; use it in an ``async with`` block."""

    _generation = AsyncGeneration
    _guarded = True

    def _guard(self) -> None:
        self._client._check_here()

    async def close(self) -> None:
        """End the session. What is outstanding fails with SessionClosed. Idempotent."""
        if self.ended is None and not self._client._inherited:
            self._client._check_here()
        self._client._close_session(self)

    async def reopen(self, timeout: float | None = None) -> None:
        """After SessionLost: stand for a new, empty session on a living engine, as ``Session.reopen`` does."""
        await self._client._drive(self._client._reopening, self, timeout)

    async def __aenter__(self) -> AsyncSession:
        self._client._check_here()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class OpeningSession(NotCopied, Coroutine[Any, Any, AsyncSession]):
    """A session to come: ``await`` it, make it a task, or enter it with ``async with``, which closes it at the end."""

    def __init__(self, client: InOneLoop, opening: Coroutine[Any, Any, AsyncSession]) -> None:
        self._client = client
        self._opening = opening
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, Any, AsyncSession]:
        self._client._check_here()
        return self._opening.__await__()

    def send(self, value: Any, /) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self
        return self._session

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()
