"""What a task waits on: the answer to one submission, the tokens of one generation."""

from __future__ import annotations

import asyncio

from shmsched.client.async_submitted import Submitted
from shmsched.client.one_loop import InOneLoop
from shmsched.client.replies import SampledToken, TokenStream
from shmsched.errors import ShmschedError, StepCancelled
from shmsched.steps import Response


class AsyncReply(Submitted[Response]):
    """One submission's answer, for the task that awaits it. Everything happens on the loop's thread."""

    def __init__(self, client: InOneLoop) -> None:
        self._client = client
        self._answer: asyncio.Future[Response] = client._own_loop.create_future()

    def done(self) -> bool:
        return self._answer.done() and not self._answer.cancelled()

    async def _outcome(self) -> Response:
        """The answer. Raises the StepError of a step that failed; StepCancelled among them.

        A task that is cancelled here may wait for it again.
        """
        try:
            return await self._answer
        finally:
            self._renew()

    def result(self) -> Response:
        """The same of one that is done."""
        return self._answer.result()

    def pending(self) -> asyncio.Future[Response]:
        """What it is settled through, unless a task that waits for it is cancelled."""
        self._renew()
        return self._answer

    def _renew(self) -> None:
        """Cancelling a task cancels what it waits for: the answer is still to come, and needs another place."""
        if self._answer.cancelled():
            self._answer = self._answer.get_loop().create_future()

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


class AsyncStream(Submitted["AsyncStream"], TokenStream):
    """A token stream whose consumer is a task."""

    def __init__(self, client: InOneLoop) -> None:
        Submitted.__init__(self, client)
        TokenStream.__init__(self)
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _outcome(self) -> AsyncStream:
        """Itself, once it is submitted."""
        if self.place is not None:
            await asyncio.wait([self.place.future])
            if self.error is not None and not self.came:
                self.take()
        return self

    async def next(self) -> SampledToken:
        """The next token. Raises as ``take``. One task at a time."""
        self._client._check_here()
        while (token := self.take()) is None:
            if self.held:
                self._client._channel.let_go_on(self)
            else:
                await self._wait_on()
        return token

    async def wait_until_ended(self) -> None:
        """Wait until nothing more will come."""
        self._client._check_here()
        while not self.ended:
            await self._wait_on()

    def cancel(self) -> bool:
        """Want no more of it, as ``WaitingStream.cancel``."""
        self._client._check_here()
        if not self.ended and super().cancel():
            self.wake()
        return self.cancelled

    def halt(self) -> None:
        """Have the step that is queued or runs be the last: for engines that cannot rewind. Its token still comes."""
        self._client._check_here()
        if self.place is not None and not self.place.future.done():
            self.cancel()
        self._client._channel.halt(self)

    async def _wait_on(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("two tasks wait for the tokens of one generation; let one of them read it")
        try:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        finally:
            self._waiter = None
