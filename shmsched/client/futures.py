"""The future of one submission."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from shmsched.errors import ShmschedError
from shmsched.steps import Response


class StepFuture(Future[Response]):
    """A ``concurrent.futures.Future`` whose ``cancel`` reaches the scheduler.

    A queued step leaves its queue; the answer of one that is running already is dropped. Later outstanding steps of the
    session are cancelled with it, and the session goes on from where the cancelled submission started.
    """

    def __init__(self, withdraw: Callable[[StepFuture], bool]) -> None:
        super().__init__()
        self._withdraw = withdraw
        # Its canceller and the receiver may both come to cancel it; Future takes a second time for a fault.
        self._settling = threading.Lock()
        self._cancelling = False
        self.first_request = self.last_request = 0
        """The numbers of its first and last chunk on the wire."""
        self.start = 0
        """The position of its first token."""
        self.withdrawn = False
        """Its cancelling is under way: an answer that still comes does not count. Guarded by the client's lock."""

    def cancel(self) -> bool:
        """True if the future is cancelled now, or was before; False if it had its answer already."""
        if self.done():
            return self.cancelled()
        if not self._withdraw(self):
            return self.cancelled()
        self.settle_cancelled()
        return self.cancelled()

    def settle_cancelled(self) -> None:
        """Cancelled, and seen to be: ``wait`` and ``as_completed`` return only those that are notified. Idempotent."""
        with self._settling:
            first, self._cancelling = not self._cancelling, True
        # Outside the lock: this runs the callbacks, which may wait for whatever they like.
        if first and not self.done() and super().cancel():
            self.set_running_or_notify_cancel()

    def settle(self, response: Response) -> None:
        try:
            self.set_result(response)
        except InvalidStateError:
            pass

    def settle_failed(self, error: ShmschedError) -> None:
        try:
            self.set_exception(error)
        except InvalidStateError:
            pass

    def fail_in_forked_child(self, error: ShmschedError) -> None:
        """The lock may have been held by a thread that the child does not have: it gets a new one first."""
        self._condition = threading.Condition()
        self.settle_failed(error)
