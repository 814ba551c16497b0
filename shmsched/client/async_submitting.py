"""Submitting as an asynchronous client does: at the call, whoever waits for what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmsched.client.async_line import Place, SubmissionLine
from shmsched.client.async_replies import AsyncReply, AsyncStream
from shmsched.client.replies import Reply
from shmsched.client.session_core import SessionCore
from shmsched.client.submission import LAST, Submission, continued
from shmsched.params import OutputRows, SamplingParams
from shmsched.steps import Tokens

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course


class AsyncSubmitting(SubmissionLine):
    """What sessions and generations of an asynchronous client submit through."""

    def _put_step(
        self,
        session: SessionCore,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> tuple[AsyncReply, Place | None]:
        self._check_here()
        reply = AsyncReply()
        if deadline is None and output_rows is LAST and not self._line:
            self._check_usable()
            try:
                with self._channel.lock:
                    is_on_its_way = (
                        self._channel.submit_decode(session, tokens, position, sampling, course, reply)
                        and self._submitted()
                    )
                if is_on_its_way:
                    return reply, None
            except BaseException as e:
                self._not_submitted(reply, e)
                raise
        submission = Submission(session, tokens, position, sampling, output_rows, deadline, course)
        return reply, self._put(submission, reply, block, timeout)

    async def _begin(
        self,
        session: SessionCore,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> AsyncReply:
        """Put a step on its way, for one who waits for it later."""
        reply, place = self._put_step(
            session, tokens, position, sampling, output_rows, deadline, block, timeout, course
        )
        if place is not None:
            await self._gone(reply, place)
        return reply

    def _put_stream(
        self,
        session: SessionCore,
        tokens: Tokens,
        sampling: SamplingParams,
        further: int,
        stop_tokens: tuple[int, ...],
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> tuple[AsyncStream, Place | None]:
        self._check_here()
        submission = continued(session, tokens, sampling, further, stop_tokens, deadline, course)
        stream = AsyncStream(self._channel, self._check_here)
        return stream, self._put(submission, stream, block, timeout)

    async def _stream(
        self,
        session: SessionCore,
        tokens: Tokens,
        sampling: SamplingParams,
        further: int,
        stop_tokens: tuple[int, ...],
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> AsyncStream:
        """Put a generation on its way, for one who waits for its tokens later."""
        stream, place = self._put_stream(
            session, tokens, sampling, further, stop_tokens, deadline, block, timeout, course
        )
        if place is not None:
            await self._gone(stream, place)
        return stream

    async def _gone(self, reply: Reply, place: Place) -> None:
        try:
            await place.taken()
        except BaseException:
            self._give_up(reply, place)
            raise
