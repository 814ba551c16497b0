"""Who waits for room in an asynchronous client: in order of arrival, and none of them driven by the task that waits for it."""

from __future__ import annotations

import asyncio
from collections import deque

from shmsched.arguments import flag, seconds
from shmsched.client.async_replies import AsyncReply, AsyncStream, Place, Submitted
from shmsched.client.one_loop import InOneLoop
from shmsched.client.submitting import ARENA, Submitting
from shmsched.dataplane.submission import PendingResult, Submission
from shmsched.errors import Full, ShmschedError
from shmsched.memory.segment import Segment

BEHIND = "other submissions wait for room already"


class SubmissionLine(InOneLoop, Submitting[AsyncReply, AsyncStream]):
    """The submitting half of an asynchronous client. Everything happens on its loop's thread."""

    _line: deque[Place]
    """Nobody goes before those in here."""

    def _new_step(self) -> AsyncReply:
        return AsyncReply(self)

    def _new_stream(self) -> AsyncStream:
        return AsyncStream(self)

    def _send(self, submission: Submission, reply: PendingResult, block: bool, timeout: float | None) -> None:
        block, timeout = flag("block", block), seconds("block_timeout", timeout)
        lacking = BEHIND if self._line else self._try(submission, reply, self._room_came)
        if lacking is None:
            return
        if not block and lacking is not ARENA:
            raise Full(f"{lacking}; submit with block=True to wait")
        assert isinstance(reply, Submitted)
        reply.place = place = Place(submission, reply, block, timeout, self._leave, self._own_loop.create_future())
        self._line.append(place)
        self._waits(place, lacking)

    def _not_submitted(self, reply: PendingResult, error: BaseException) -> None:
        self._line = deque(place for place in self._line if place.reply is not reply)
        super()._not_submitted(reply, error)

    def _waits(self, place: Place, lacking: str) -> None:
        if lacking is ARENA:
            self._have_arena_made()
            return
        place.lacking = lacking
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
                lacking = None if self._went(place) else self._try(place.submission, place.reply, self._room_came)
                if lacking is not None:
                    if not place.block and lacking is not ARENA:
                        raise Full(f"{lacking}; submit with block=True to wait")
                    self._waits(place, lacking)
                    return
            except ShmschedError as e:
                self._line.popleft()
                place.gone(e)
                continue
            place.gone()
            if self._line and self._line[0] is place:
                self._line.popleft()

    def _went(self, place: Place) -> bool:
        """Whether it was submitted, and an interrupt has kept that from being noted."""
        return place.future.done() or place.reply.done() or self._channel.submitted(place.reply)

    def _have_arena_made(self) -> None:
        """If that is not under way."""
        if self._state.arena is None:
            answer: asyncio.Future[Segment] = self._own_loop.create_future()
            # Twice, as in ``_room_came``.
            answer.add_done_callback(self._arena_made)
            answer.add_done_callback(self._arena_made)
            self._channel.under_lock(self._ask_for_arena, answer)

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
