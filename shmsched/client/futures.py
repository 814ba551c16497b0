"""What a synchronous caller waits on: the future of one submission, the tokens of one generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from concurrent.futures._base import CANCELLED
from typing import TYPE_CHECKING, Any, Protocol

from shmsched.arguments import waiting
from shmsched.client.replies import TokenStream
from shmsched.dataplane.submission import PendingResult
from shmsched.errors import ShmschedError
from shmsched.futures import LightFuture, set_results
from shmsched.locks import Bells
from shmsched.steps import Response, SampledToken

if TYPE_CHECKING:
    from shmsched.client.channel import Channel


class Keeper(Protocol):
    """Who a future of a step turns to."""

    def withdraw(self, reply: PendingResult, /) -> bool:
        """Have the scheduler cancel it. False if it was answered before."""

    def read_until(self, ready: Callable[[], bool], deadline: float | None, /) -> bool:
        """Take in answers until ``ready()``, or until ``deadline`` in seconds of ``time.monotonic()``. False, at once, if
        somebody else does."""

    def wait_for(self, future: LightFuture[Any], deadline: float | None, /) -> bool:
        """Wait until it is settled, taking in answers if nobody else does. False if ``deadline`` came first."""

    def poke(self) -> None:
        """The future was settled by somebody who takes in no answers."""


class StepFuture(LightFuture[Response], PendingResult):
    """A ``concurrent.futures.Future`` whose ``cancel`` reaches the scheduler.

    A queued step leaves its queue; the answer of one that is running already is dropped. Later outstanding steps of the
    session are cancelled with it, and the session goes on from where the cancelled submission started.
    """

    def __init__(self, keeper: Keeper) -> None:
        # LightFuture has nothing to be made.
        PendingResult.__init__(self)
        self._keeper = keeper

    def result(self, timeout: float | None = None) -> Response:
        """The answer, waiting up to ``timeout`` seconds for it. Raises the StepError of a step that failed, CancelledError,
        TimeoutError."""
        if self._result is None and not self.done():
            timeout = self._wait(timeout)
        return super().result(timeout) if self._result is None else self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What ``result`` would raise, or None."""
        if not self.done():
            timeout = self._wait(timeout)
        return super().exception(timeout)

    def _wait(self, timeout: float | None) -> float | None:
        """Returns what is left of the time-out: nothing, or no end."""
        timeout = waiting("timeout", timeout)
        self._keeper.wait_for(self, None if timeout is None else time.monotonic() + timeout)
        return None if timeout is None else 0.0

    def cancel(self) -> bool:
        """True if the future is cancelled now, or was before; False if it had its answer already."""
        if self.done():
            return self.cancelled()
        if not self._keeper.withdraw(self):
            return self.cancelled()
        self.settle_cancelled()
        return self.cancelled()

    def settle_cancelled(self) -> None:
        """Cancelled, and seen to be: ``wait`` and ``as_completed`` return only those that are notified. Idempotent."""
        # Its canceller and the receiver may both come to cancel it, and again after an interrupt; Future takes a second time for a
        # fault. No lock is held here: this runs the callbacks, which may wait for whatever they like.
        if not self.done():
            super().cancel()
        if self._state == CANCELLED:
            self._notify_cancelled()
        self.announce()
        self._keeper.poke()

    def settle(self, response: Response) -> None:
        set_results([(self, response)])

    def settle_failed(self, error: ShmschedError) -> None:
        try:
            self.set_exception(error)
        except InvalidStateError:
            pass

    def fail_in_forked_child(self, error: ShmschedError) -> None:
        """A lock of its own may have been held by a thread that the child does not have: it gets a new one first."""
        self.renew_condition()
        self.settle_failed(error)


class WaitingStream(TokenStream):
    """A token stream whose consumer is a thread that waits."""

    def __init__(self, channel: Channel, keeper: Keeper) -> None:
        super().__init__()
        self._channel = channel
        self._keeper = keeper
        self._followers = Bells()
        """For those who wait while another caller reads the connection."""

    def cancel(self) -> bool:
        """Want no more of it. The session goes on behind the last token that was taken, which is not fed.

        False if its last token has come, or is about to be here: then nothing is undone. An engine that cannot rewind to there has
        taken more by then, and the session is lost: ``halt`` keeps it.
        """
        if not self.ended and self._channel.withdraw(self):
            self.wake()
            self._keeper.poke()
        return self.cancelled

    def halt(self) -> None:
        """Have the step that is queued or runs be the last: for engines that cannot rewind. Its token still comes."""
        self._channel.halt(self)

    def wake(self) -> None:
        self._followers.ring()

    def next(self, timeout: float | None = None) -> SampledToken:
        """The next token, waiting for it. Raises as ``take``, TimeoutError, and Full in a future's callback."""
        deadline = None
        if timeout is not None:
            timeout = waiting("timeout", timeout)
        while True:
            token = self.take()
            if token is not None:
                return token
            if self.held:
                self._channel.let_go_on(self)
                continue
            if timeout is not None and deadline is None:
                deadline = time.monotonic() + timeout
            if not self._wait(lambda: self.ready, deadline):
                raise TimeoutError(f"no token came within {timeout:g} s")

    def wait_until_ended(self, timeout: float | None = None) -> bool:
        """Wait until nothing more will come. False if that took longer than ``timeout`` seconds."""
        timeout = waiting("timeout", timeout)
        return self._wait(lambda: self.ended, None if timeout is None else time.monotonic() + timeout)

    def _wait(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        if not ready() and not self._keeper.read_until(ready, deadline):
            self._followers.wait_until(ready, deadline)
        return ready()

    def fail_in_forked_child(self, error: ShmschedError) -> None:
        self.settle_failed(error)
