"""The two ways in which a client waits. A flow yields what is to be done, and is given what came of it, in either way.

So one flow says what a session does, for threads and for asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol, TypeVar

from shmsched import AsyncClient, Client, Response, Session
from shmsched.client.async_replies import AsyncStream
from shmsched.client.async_session import AsyncSession
from shmsched.client.futures import WaitingStream
from shmsched.client.replies import SampledToken
from shmsched.tools.load.drawn import Generation, PlainStep
from shmsched.tools.load.options import MODEL

OPEN_S = 0.5
FORK_S = 2.0
"""Forks of all sessions may wait for each other's slots."""
PATIENCE_S = 20.0
"""What has not come by then is lost."""

T = TypeVar("T")
Flow = Generator[Callable[[], Any], Any, T]


class Hands(Protocol):
    """What a flow may yield, each as a call. Raises what the client does, and TimeoutError after PATIENCE_S."""

    def open(self) -> Any: ...
    def stream(self, session: Any, generation: Generation) -> Any: ...
    def next(self, stream: Any) -> Any: ...
    def ended(self, stream: Any) -> Any: ...
    def submit(self, session: Any, step: PlainStep) -> Any: ...
    def fork(self, session: Any, upto: int | None) -> Any: ...
    def close(self, session: Any) -> Any: ...
    def pause(self, seconds: float) -> Any: ...


class Thread:
    """Waits in the thread that runs the flow."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def run(self, flow: Flow[None]) -> None:
        answer: Any = None
        error: Exception | None = None
        while True:
            try:
                call = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration:
                return
            try:
                answer, error = call(), None
            except Exception as e:
                error = e

    def open(self) -> Session:
        return self._client.open_session(model=MODEL, timeout=OPEN_S)

    def stream(self, session: Session, generation: Generation) -> WaitingStream:
        return session.stream(
            generation.tokens, further=generation.further, stop_tokens=generation.stop_tokens,
            sampling=generation.sampling, deadline=generation.deadline,
        )  # fmt: skip

    def next(self, stream: WaitingStream) -> SampledToken:
        return stream.next(PATIENCE_S)

    def ended(self, stream: WaitingStream) -> bool:
        return stream.wait_until_ended(PATIENCE_S)

    def submit(self, session: Session, step: PlainStep) -> Response:
        return session.submit(step.tokens, position=step.position).result(PATIENCE_S)

    def fork(self, session: Session, upto: int | None) -> Session:
        return session.fork(upto, timeout=FORK_S)

    def close(self, session: Session) -> None:
        session.close()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class Task:
    """Waits in the task that runs the flow."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run(self, flow: Flow[None]) -> None:
        answer: Any = None
        error: Exception | None = None
        while True:
            try:
                call: Callable[[], Awaitable[Any]] = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration:
                return
            try:
                answer, error = await call(), None
            except Exception as e:
                error = e

    async def open(self) -> AsyncSession:
        return await self._client.open_session(model=MODEL, timeout=OPEN_S)

    async def stream(self, session: AsyncSession, generation: Generation) -> AsyncStream:
        return await session.stream(
            generation.tokens, further=generation.further, stop_tokens=generation.stop_tokens,
            sampling=generation.sampling, deadline=generation.deadline,
        )  # fmt: skip

    async def next(self, stream: AsyncStream) -> SampledToken:
        async with asyncio.timeout(PATIENCE_S):
            return await stream.next()

    async def ended(self, stream: AsyncStream) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await stream.wait_until_ended()
        except TimeoutError:
            return False
        return True

    async def submit(self, session: AsyncSession, step: PlainStep) -> Response:
        async with asyncio.timeout(PATIENCE_S):
            return await session.submit(step.tokens, position=step.position)

    async def fork(self, session: AsyncSession, upto: int | None) -> AsyncSession:
        return await session.fork(upto, timeout=FORK_S)

    async def close(self, session: AsyncSession) -> None:
        await session.close()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
