"""What an asynchronous submission returns, and a task waits on: the answer to one step, the tokens of one generation."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from shmsched.client.one_loop import InOneLoop
from shmsched.client.replies import TokenStream
from shmsched.dataplane.submission import PendingResult, Submission
from shmsched.errors import ShmschedError, StepCancelled
from shmsched.not_copied import NotCopied
from shmsched.steps import Response, SampledToken

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


class Submitted(NotCopied, PendingResult, Coroutine[Any, Any, T]):
    """What a call has submitted: on its way, or in line for room, from the call on. ``await`` it for what comes of it; it may
    be made a task too, and awaited more than once. A task that is cancelled as it waits for it cancels it."""

    place: Place | None = None
    """Where it has waited for room."""
    _driven: Coroutine[Any, Any, T] | None = None

    def __init__(self, client: InOneLoop) -> None:
        PendingResult.__init__(self)
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


class AsyncReply(Submitted[Response]):
    """One submission's answer, for the task that awaits it. Everything happens on the loop's thread."""

    def __init__(self, client: InOneLoop) -> None:
        PendingResult.__init__(self)
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
