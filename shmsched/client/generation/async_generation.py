"""A generation whose caller is a task."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from types import CoroutineType
from typing import Any

from shmsched.client.async_replies import AsyncReply
from shmsched.client.collected import is_ours
from shmsched.client.generation.course import FinishReason
from shmsched.client.generation.effects import Cancel, Effect, Emit, Halt, Next, Rest
from shmsched.client.generation.outcome import Outcome
from shmsched.steps import Response


class AsyncGeneration(Outcome):
    """The tokens of a generation, as they come. Made by ``AsyncSession.generate``; for one task at a time.

    It begins with the first token asked for. Iterate over it with ``async for``. It is cancelled within one step when a loop over
    it is left, by ``aclose()``, at the end of an ``async with`` block, and with the task that waits for it. All else is as for
    :class:`Generation`.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    async def __anext__(self) -> int:
        self._session._client._check_here()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            effect = self._resume()
        else:
            effect = self._resume() if isinstance(self._effect, Emit) else self._effect
        while effect is not None:
            if isinstance(effect, Emit):
                return effect.token
            effect = await self._advance(effect)
        raise StopAsyncIteration

    def __aiter__(self) -> AsyncIterator[int]:
        return _Loop(self)

    async def increments(self) -> AsyncIterator[str]:
        """The text as it comes, at character boundaries, up to the stop text. Raises Unsupported without a tokenizer."""
        self._session._client._check_here()
        stream = self._text_so_far()
        try:
            while True:
                try:
                    token = await self.__anext__()
                except StopAsyncIteration:
                    break
                if text := self._increment(stream, token):
                    yield text
            if text := self._last_increment(stream):
                yield text
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel what has not come yet. Idempotent."""
        if self._reason is not None or self._pid != os.getpid():
            return
        self._session._client._check_here()
        if self._loop is None:
            self._plan.close()
            self._end(FinishReason.CANCELLED)
            return
        effect = self._leave()
        while effect is not None:
            effect = await self._advance(effect)

    async def __aenter__(self) -> AsyncGeneration:
        self._session._client._check_here()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        loop = self._loop
        if loop is None or self._reason is not None or not is_ours(self._pid):
            return
        if asyncio._get_running_loop() is loop and not self._session._client._channel.lock.mine:
            self._loop_left()
            return
        try:
            # The collector may run this anywhere; what it takes to cancel happens on the loop.
            loop.call_soon_threadsafe(lambda: loop.create_task(self.aclose()))
        except RuntimeError:
            # The loop is closed, and everything with it.
            pass

    def _loop_left(self) -> None:
        """Leave at once, as far as that takes no waiting: who leaves a loop may go on with the session right after it."""
        if self._reason is not None or self._loop is None or asyncio._get_running_loop() is not self._loop:
            return
        effect = self._leave()
        while isinstance(effect, Cancel | Halt | Rest):
            effect = self._resume(self._perform(effect))
        if effect is not None:
            self._effect = effect
            self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        effect = self._effect
        while effect is not None:
            effect = await self._advance(effect)

    async def _advance(self, effect: Effect) -> Effect | None:
        try:
            result = self._perform(effect)
            if type(result) is CoroutineType:
                result = await result
        except BaseException as e:
            return self._resume(error=e)
        if type(effect) is Next:
            self._clock.hear(effect.stream, result.arrived)
        return self._resume(result)

    async def _wait_for(self, step: AsyncReply) -> Response:
        response = await step._outcome()
        self._clock.hear(step, step.arrived)
        return response


class _Loop:
    """A loop over a generation: to leave it is to let go of this, which an asynchronous generator learns a turn later."""

    def __init__(self, generation: AsyncGeneration) -> None:
        self._generation = generation

    def __aiter__(self) -> _Loop:
        return self

    def __anext__(self) -> Coroutine[Any, Any, int]:
        return self._generation.__anext__()

    def __del__(self) -> None:
        self._generation._loop_left()
