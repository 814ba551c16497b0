"""What has come of a client's submissions, from the daemon's frames to those who wait.

A frame may be handled again, from the beginning, where an interrupt came while it was: what it says is decided at once, under the
lock, and done as often as it takes. Futures are settled outside the lock, since their callbacks are anybody's code.
"""

from __future__ import annotations

import time
from collections import deque

from shmsched import failpoints
from shmsched.client import answers
from shmsched.client.answers import Answered, Streamed, response_of, settle
from shmsched.client.channel import Channel
from shmsched.client.leases import Lease
from shmsched.client.replies import Reply, TokenStream
from shmsched.client.session_core import SessionCore
from shmsched.client.submission import NO_ROWS, Submission
from shmsched.dataplane.layouts import RECORD, RecordKind
from shmsched.errors import ErrorCode, ProtocolError, SchedulerDied, SessionClosed, ShmschedError, error_of
from shmsched.steps import Response
from shmsched.wire import frames

TOKEN, TOKENS = int(RecordKind.TOKEN), int(RecordKind.TOKENS)


class _News:
    """What a frame says: decided at once, and then to be given out."""

    __slots__ = ("answered", "failed", "freed", "ids", "raw", "requests", "results", "streamed")

    def __init__(self) -> None:
        self.answered: list[Answered] = []
        self.failed: list[tuple[Reply, ShmschedError | None]] = []
        """With None, those that were cancelled."""
        self.streamed: list[Streamed] = []
        self.raw: list[_RawAnswer] = []
        self.freed: list[int] = []
        """Rows that nobody wants any more."""
        self.requests: list[int] = []
        """The steps that are over."""
        self.ids: list[int] = []
        """Of the submissions whose last steps those are."""
        self.results = 0
        """How many sampled rows were taken by those."""


class _RawAnswer:
    """Rows of logits that came: the lease on them begins once the response that holds it has its place."""

    __slots__ = ("at", "lease", "n_rows", "submission")

    def __init__(self, submission: Submission, n_rows: int, at: int) -> None:
        """``at``: the answer's place among those that came."""
        self.submission = submission
        self.n_rows = n_rows
        self.at = at
        self.lease: Lease | None = None


class Arrivals:
    """Reads the client's segment, and settles."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._records, self._results, self._stream = channel.rings
        self._stream_told = 0
        self._stream_quarter = self._stream.capacity // 4
        self._news: deque[_News] = deque()
        """Decided and not given out yet."""

    def completions(self, message: frames.Completions) -> None:
        """Read what was written up to the cursors, and settle with it."""
        channel, stream = self._channel, self._stream
        failpoints.hit("client.completions.received")
        try:
            with channel.lock:
                if channel.decided is not None or channel.outbox.leaving is not None:
                    channel.finish()
                read, given = self._records, self._results
                n_records, n_results, n_streamed = (
                    message.records_written,
                    message.results_written,
                    message.stream_written,
                )
                try:
                    records = read.rows_until(n_records)
                    results = given.rows_until(n_results) if n_results != given.read else b""
                    streamed = stream.rows_until(n_streamed) if n_streamed != stream.read else b""
                    channel.outbox.ring.returned(message.tokens_read)
                except ValueError as e:
                    raise ProtocolError(f"completions that cannot be: {e}") from e
                news = _News()
                if streamed:
                    news.streamed = answers.tokens_of(streamed, channel.pending)
                    failpoints.hit("client.stream.read")
                if records:
                    self._hear(news, records, results)
                taken = channel.room.results_taken - news.results
                channel.decided = self._completed, (message, news, taken)
                self._completed(message, news, taken)
                channel.decided = None
                if stream.read - self._stream_told > self._stream_quarter:
                    self._tell_consumed()
                    self._stream_told = stream.read
        except BaseException:
            channel.interrupted()
            raise
        self.give_out()

    def _hear(self, said: _News, records: bytes, results: bytes) -> None:
        """What the records are about, and the response of each submission whose last step this was. Nothing is changed yet."""
        pending, now = self._channel.pending, time.monotonic()
        answered, requests, ids = said.answered, said.requests, said.ids
        at = n_results = 0
        for (request, n_rows, kind, waited, _, _), tokens, logprobs in zip(
            RECORD.iter_unpack(records), *answers.columns(records), strict=True
        ):
            submission = pending.get(request)
            if kind == TOKENS:
                at += n_rows
            if submission is None:
                continue
            requests.append(request)
            reply = submission.reply
            if reply.queue_wait is None:
                reply.queue_wait = waited
            if request != submission.last_request:
                continue
            ids.append(submission.id)
            n_results += submission.n_results
            if reply.withdrawn:
                said.freed.append(submission.rows_offset)
                continue
            reply.arrived = now
            if kind == TOKEN:
                session_id = submission.session.session_id
                response = Response(submission.id, session_id, tokens, logprobs, None, reply.queue_wait)
            elif kind == TOKENS:
                response = response_of(submission, results, at - n_rows, n_rows)
            elif reply.done():
                said.freed.append(submission.rows_offset)
                continue
            else:
                response = Response(submission.id, submission.session.session_id, queue_wait=reply.queue_wait)
                if n_rows:
                    said.raw.append(_RawAnswer(submission, n_rows, len(answered)))
            answered.append((reply, response))
        said.results = n_results

    def _completed(self, message: frames.Completions, news: _News, results_taken: int) -> None:
        channel = self._channel
        if news.streamed:
            for streamed in news.streamed:
                streamed.put()
        if news.raw:
            for raw in news.raw:
                self._lease(raw, news.answered)
            failpoints.hit("client.logits.leased")
        if news.freed:
            channel.free_rows(news.freed)
        channel.settled(news.requests, news.ids)
        channel.room.results_taken = results_taken
        self._records.read, self._results.read = message.records_written, message.results_written
        self._stream.read = message.stream_written
        self._tell(news)

    def _lease(self, raw: _RawAnswer, answered: list[Answered]) -> None:
        submission, arena = raw.submission, self._channel.arena
        assert arena is not None
        if raw.lease is None:
            raw.lease = arena.lease_to_be(submission.rows_offset, raw.n_rows, submission.session.vocab_size)
        reply, response = answered[raw.at]
        if response.logits is None:
            logits = raw.lease.block()
            answered[raw.at] = (
                reply,
                Response(response.request_id, response.session_id, logits=logits, queue_wait=response.queue_wait),
            )
        raw.lease.begin()

    def _tell_consumed(self) -> None:
        try:
            self._channel.outbox.send(frames.Consumed(self._records.read, self._results.read, self._stream.read))
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
        news = _News()
        news.failed = [(reply, self._reason(reply, session, error)) for reply, session in replies.items()]
        news.requests, news.ids = [request for request, _ in found], [submission.id for submission in last]
        taken = channel.room.results_taken - sum([submission.n_results for submission in last])
        channel.decide(self._failed, found, last, bool(message.rows_held), news, taken)

    @staticmethod
    def _reason(reply: Reply, session: SessionCore, error: ShmschedError | None) -> ShmschedError | None:
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
        news: _News,
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
        channel.room.results_taken = results_taken
        self._tell(news)

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
        news = _News()
        news.failed = [(reply, error) for reply in replies]
        channel.decide(self._ended, news)

    def _ended(self, news: _News) -> None:
        self._tell(news)
        self._channel.pending.clear()

    def _tell(self, news: _News) -> None:
        waiting = self._news
        if not waiting or waiting[-1] is not news:
            waiting.append(news)
        if self._channel.wait_for_room:
            self._channel.tell_of_room()

    def give_out(self) -> None:
        """Settle what was decided, outside the lock."""
        waiting = self._news
        while waiting:
            try:
                news = waiting[0]
            except IndexError:
                return
            for streamed in news.streamed:
                streamed.stream.wake()
            if news.answered:
                settle(news.answered)
            for reply, error in news.failed:
                if error is None:
                    reply.settle_cancelled()
                else:
                    reply.settle_failed(error)
            try:
                waiting.remove(news)
            except ValueError:
                # Another thread, which ends the client, has given it out as well.
                pass
