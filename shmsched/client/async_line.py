"""Who waits for room in an asynchronous client: in order of arrival, and none of them driven by the task that waits for it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque

from shmsched.arguments import flag, seconds
from shmsched.client.async_replies import AsyncStream
from shmsched.client.one_loop import InOneLoop
from shmsched.client.replies import Reply
from shmsched.client.submission import Submission
from shmsched.errors import Full, ShmschedError, StepCancelled
from shmsched.memory.segment import Segment

ARENA = "the logits arena is being made"
BEHIND = "other submissions wait for room already"


class Place:
    """A submission's place in the line. Its ``future`` says that it has gone, or why it never will."""

    def __init__(
        self, submission: Submission, reply: Reply, block: bool, timeout: float | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.submission = submission
        self.reply = reply
        self.block = block
        """Whether to wait for room. One that does not waits for the arena only."""
        self.timeout = timeout
        self.timer: asyncio.TimerHandle | None = None
        self.lacking = ""
        self.future: asyncio.Future[None] = loop.create_future()

    def gone(self, error: Exception | None = None) -> None:
        """It is submitted, or never will be."""
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
            return
        self.future.set_exception(error)
        # Nobody need ever ask what became of it.
        self.future.exception()

    async def taken(self) -> None:
        """Wait until it is submitted. Raises why it never will be. A task that is cancelled here may wait again."""
        if not self.future.done():
            await asyncio.wait([self.future])
        self.future.result()


class SubmissionLine(InOneLoop):
    """The submitting half of an asynchronous client. Everything happens on its loop's thread."""

    def __init__(self, arena_bytes: int | None) -> None:
        super().__init__(arena_bytes)
        self._line: deque[Place] = deque()
        """Nobody goes before those in here."""

    @abstractmethod
    def _submitted(self) -> bool:
        """Something waits in the outbox. The caller holds the lock. True."""

    def _put(self, submission: Submission, reply: Reply, block: bool, timeout: float | None) -> Place | None:
        """Submit it now, or have it submitted once there is room and those before it have gone.

        Raises Full where waiting is not wanted, and why it can never be submitted.
        """
        block, timeout = flag("block", block), seconds("block_timeout", timeout)
        try:
            lacking: str | None = BEHIND
            if not self._line:
                lacking = self._try(submission, reply)
                if lacking is None:
                    return None
            if not block and lacking is not ARENA:
                raise Full(f"{lacking}; submit with block=True to wait")
            place = Place(submission, reply, block, timeout, self._own_loop)
            self._line.append(place)
            if lacking is not ARENA:
                self._waits(place, lacking)
            return place
        except BaseException as e:
            self._line = deque(place for place in self._line if place.reply is not reply)
            self._not_submitted(reply, e)
            raise

    def _try(self, submission: Submission, reply: Reply) -> str | None:
        """Submit it if there is room. Returns what is lacking; ``_advance`` is called once that may have changed."""
        channel = self._channel
        try:
            with channel.lock:
                lacking = channel.place(submission)
                if lacking is not None:
                    if self._room_came not in channel.wait_for_room:
                        channel.wait_for_room.append(self._room_came)
                    return lacking
                if submission.raw_rows and channel.arena is None:
                    self._have_arena_made()
                    return ARENA
                channel.submit(submission, reply)
                self._submitted()
                return None
        except BaseException:
            channel.interrupted()
            raise

    def _not_submitted(self, reply: Reply, error: BaseException) -> None:
        """Submitting it has raised. Where that was an interrupt, nobody has the reply: it is taken back."""
        self._channel.interrupted()
        if not isinstance(error, ShmschedError):
            self._channel.take_back(reply)

    def _waits(self, place: Place, lacking: str | None) -> None:
        place.lacking = lacking or ""
        if place.timer is None and place.timeout is not None:
            place.timer = self._own_loop.call_later(place.timeout, self._out_of_time, place)

    def _out_of_time(self, place: Place) -> None:
        if self._leave(place):
            place.gone(Full(f"{place.lacking}, and waiting {place.timeout:g} s did not change that"))

    def _leave(self, place: Place) -> bool:
        """It does not wait any longer. False if it had gone already."""
        if place not in self._line:
            return False
        self._line.remove(place)
        # Whoever stood behind it may need less.
        self._room_came()
        return True

    def _give_up(self, reply: Reply, place: Place | None) -> None:
        """Whoever waited for it does not any more. Nothing happens elsewhere than in the client's own loop."""
        if asyncio._get_running_loop() is not self._loop:
            return
        if place is not None and self._leave(place):
            place.gone(StepCancelled("whoever submitted it did not wait until there was room"))
            return
        if isinstance(reply, AsyncStream):
            reply.cancel()
        else:
            self._channel.withdraw(reply)

    def _room_came(self) -> None:
        """Called with the lock held or without: what is done about it is done later."""
        if self._line and not self._own_loop.is_closed():
            # Twice, since an interrupt may come when the loop has taken it out and it has not begun.
            self._own_loop.call_soon(self._advance)
            self._own_loop.call_soon(self._advance)

    def _advance(self) -> None:
        """Submit whoever can go now, in order."""
        try:
            self._advance_all()
        except BaseException:
            # An interrupt. It is gone on with, and one that has gone meanwhile is not submitted twice.
            self._room_came()
            raise

    def _advance_all(self) -> None:
        while self._line:
            place = self._line[0]
            try:
                lacking = None if self._went(place) else self._try(place.submission, place.reply)
                if lacking is ARENA:
                    return
                if lacking is not None and not place.block:
                    raise Full(f"{lacking}; submit with block=True to wait")
            except ShmschedError as e:
                self._line.popleft()
                place.gone(e)
                continue
            if lacking is not None:
                self._waits(place, lacking)
                return
            place.gone()
            if self._line and self._line[0] is place:
                self._line.popleft()

    def _went(self, place: Place) -> bool:
        """Whether it was submitted, and an interrupt has kept that from being noted."""
        return place.future.done() or place.reply.done() or self._channel.submitted(place.reply)

    def _have_arena_made(self) -> None:
        """If that is not under way. The caller holds the lock."""
        if self._state.arena is None:
            answer: asyncio.Future[Segment] = self._own_loop.create_future()
            # Twice, as in ``_room_came``.
            answer.add_done_callback(self._arena_made)
            answer.add_done_callback(self._arena_made)
            self._ask_for_arena(answer)

    def _arena_made(self, answer: asyncio.Future[Segment]) -> None:
        if self._state.arena is not answer:
            # It was refused, as was said already.
            return
        try:
            self._channel.under_lock(self._arena_came, answer)
        except (ShmschedError, OSError) as e:
            if isinstance(e, OSError) and not isinstance(e, ShmschedError) and e.errno is None:
                # A signal's handler has raised it.
                self._room_came()
                raise
            for place in [place for place in self._line if place.submission.raw_rows]:
                self._line.remove(place)
                place.gone(type(e)(str(e)))
        except BaseException:
            self._room_came()
            raise
        self._advance()
