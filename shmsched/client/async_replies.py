"""What a task waits on: the answer to one submission, the tokens of one generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shmsched.client.channel import Channel
from shmsched.client.replies import Reply, SampledToken, TokenStream
from shmsched.errors import ShmschedError, StepCancelled
from shmsched.steps import Response


class AsyncReply(Reply):
    """One submission's answer, for the task that awaits it. Everything happens on the loop's thread."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        return self._answer.done() and not self._answer.cancelled()

    async def wait(self) -> Response:
        """The answer. Raises the StepError of a step that failed; StepCancelled among them.

        A task that is cancelled here may wait for it again.
        """
        try:
            return await self._answer
        finally:
            self._renew()

    def _renew(self) -> None:
        """Cancelling a task cancels what it waits for: the answer is still to come, and needs another place."""
        if self._answer.cancelled():
            self._answer = self._answer.get_loop().create_future()

    async def wait_until_done(self) -> None:
        """The same for one who wants to know only that it is over."""
        while not self.done():
            self._renew()
            await asyncio.wait([self._answer])

    def settle(self, response: Response) -> None:
        self._renew()
        if not self._answer.done():
            self._answer.set_result(response)

    def settle_failed(self, error: ShmschedError) -> None:
        self._renew()
        if not self._answer.done():
            self._answer.set_exception(error)
            # Whoever submitted it may have been cancelled meanwhile: nobody retrieves it then, which is no fault.
            self._answer.exception()

    def settle_cancelled(self) -> None:
        # A task that nobody cancelled must not see a CancelledError. One that was is not waiting any more.
        self.settle_failed(StepCancelled("an earlier step of the session was cancelled, and this one with it"))


class AsyncStream(TokenStream):
    """A token stream whose consumer is a task."""

    def __init__(self, channel: Channel, check_here: Callable[[], None]) -> None:
        """``check_here`` raises elsewhere than in the client's own loop."""
        super().__init__()
        self._channel = channel
        self._check_here = check_here
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def itself(self) -> AsyncStream:
        """What awaiting its submission gives."""
        return self

    async def next(self) -> SampledToken:
        """The next token. Raises as ``take``. One task at a time."""
        self._check_here()
        while (token := self.take()) is None:
            if self.held:
                self._channel.let_go_on(self)
            else:
                await self._wait()
        return token

    async def wait_until_ended(self) -> None:
        """Wait until nothing more will come."""
        self._check_here()
        while not self.ended:
            await self._wait()

    def cancel(self) -> bool:
        """Want no more of it, as ``WaitingStream.cancel``."""
        self._check_here()
        if not self.ended and self._channel.withdraw(self):
            self.wake()
        return self.cancelled

    def halt(self) -> None:
        """Have the step that is queued or runs be the last: for engines that cannot rewind. Its token still comes."""
        self._check_here()
        self._channel.halt(self)

    async def _wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("two tasks wait for the tokens of one generation; let one of them read it")
        try:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        finally:
            self._waiter = None
