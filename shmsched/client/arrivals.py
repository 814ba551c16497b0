"""What ends a client's submissions without an answer, and what ends them all."""

from __future__ import annotations

import time

from shmsched.client.channel import Channel
from shmsched.client.replies import TokenStream
from shmsched.dataplane.answers import Answers, News
from shmsched.dataplane.session_core import SessionCore
from shmsched.dataplane.submission import NO_ROWS, PendingResult, Submission
from shmsched.errors import ErrorCode, SchedulerDied, SessionClosed, ShmschedError, error_of
from shmsched.wire import frames


class Arrivals(Answers):
    """Settles what a channel submits. Each of its frames may be handled again, as in ``Answers``."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, *channel.rings, time.monotonic)
        self._channel = channel

    def tell_consumed(self, n_records: int, n_results: int, n_streamed: int) -> None:
        try:
            self._channel.send(frames.Consumed(n_records, n_results, n_streamed))
        except SchedulerDied:
            # Whoever receives sees the same.
            pass

    def failed(self, message: frames.Failed) -> None:
        """Settle what ended without an answer. A submission carries its first failure."""
        self._channel.under_lock(self._decide_failed, message)
        self.give_out()

    def _decide_failed(self, message: frames.Failed) -> None:
        channel = self._channel
        found = [(r, channel.pending[r]) for r in message.requests if r in channel.pending]
        replies = {submission.reply: submission.session for _, submission in found}
        error: ShmschedError | None = error_of(message.code, message.message)
        if message.code == ErrorCode.CANCELLED:
            error = None
        last = [submission for request, submission in found if request == submission.last_request]
        news = News()
        news.failed = [(reply, self._reason(reply, session, error)) for reply, session in replies.items()]
        news.requests, news.ids = [request for request, _ in found], [submission.id for submission in last]
        taken = channel.results_taken - sum([submission.n_results for submission in last])
        channel.decide(self._failed, found, last, bool(message.rows_held), news, taken)

    @staticmethod
    def _reason(reply: PendingResult, session: SessionCore, error: ShmschedError | None) -> ShmschedError | None:
        if reply.withdrawn or error is None:
            return None
        if isinstance(error, SessionClosed) and session.ended is not None:
            # It was on its way when the session ended; why the session ended says more than that it did.
            return type(session.ended)(str(session.ended))
        return error

    def _failed(
        self,
        found: list[tuple[int, Submission]],
        last: list[Submission],
        rows_held: bool,
        news: News,
        results_taken: int,
    ) -> None:
        channel = self._channel
        for request, submission in found:
            position, reply = submission.position_of(request), submission.reply
            if request == submission.last_request and isinstance(reply, TokenStream):
                position = reply.step_position
            submission.session.step_failed(request, position)
        for submission in last:
            if submission.rows_offset == NO_ROWS:
                continue
            if rows_held:
                channel.held_rows[submission.last_request] = submission.rows_offset
            else:
                channel.free_rows([submission.rows_offset])
        channel.settled(news.requests, news.ids)
        channel.results_taken = results_taken
        self.tell(news)

    def returned(self, message: frames.Returned) -> None:
        """Rows that an engine may have been writing into are free."""
        self._channel.under_lock(self._channel.decide, self._returned, message.requests)

    def _returned(self, requests: tuple[int, ...]) -> None:
        held = self._channel.held_rows
        for request in requests:
            offset = held.get(request)
            if offset is not None:
                self._channel.free_rows([offset])
                held.pop(request, None)

    def end(self, error: ShmschedError) -> None:
        """The connection is over: every reply fails with ``error``, every waiter is woken."""
        self._channel.under_lock(self._decide_end, error)
        self.give_out()

    def _decide_end(self, error: ShmschedError) -> None:
        channel = self._channel
        if channel.dead is None:
            channel.dead = error
        replies = dict.fromkeys(submission.reply for submission in channel.pending.values())
        news = News()
        news.failed = [(reply, error) for reply in replies]
        channel.decide(self._ended, news)

    def _ended(self, news: News) -> None:
        self.tell(news)
        self._channel.pending.clear()
