"""The client's end of the path: room, submissions on their way, and what came of them.

One lock guards all of it. Futures are settled outside the lock, since their callbacks are anybody's code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmsched.client import answers
from shmsched.client.answers import Answered, response_of, settle
from shmsched.client.leases import ClientArena
from shmsched.client.outbox import Outbox, Packed
from shmsched.client.replies import Reply, TokenStream
from shmsched.client.room import Room
from shmsched.client.session_core import SessionCore
from shmsched.client.submission import NO_ROWS, Decode, Submission
from shmsched.errors import (
    ErrorCode,
    InvalidRequest,
    ProtocolError,
    SchedulerDied,
    ShmschedError,
    error_of,
)
from shmsched.memory.layouts import RECORD, RESULT, STREAMED, ClientLayout, RecordKind
from shmsched.memory.ring import RecordReader, TokenWriter
from shmsched.memory.segment import Segment
from shmsched.params import SamplingParams
from shmsched.steps import Response, Tokens
from shmsched.wire import frames
from shmsched.wire.frames import ROWS_DESCRIPTOR
from shmsched.wire.link import Link

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course

TOKEN, TOKENS = int(RecordKind.TOKEN), int(RecordKind.TOKENS)


class Channel:
    """Submits steps and settles their replies. Whoever reads the link hands the frames to the methods named after them."""

    def __init__(self, link: Link, welcome: frames.Welcome, segment: Segment) -> None:
        layout = ClientLayout(welcome.ring_tokens, welcome.records, welcome.results, welcome.stream)
        view = memoryview(segment.buffer)
        self.lock = threading.Lock()
        self.room_came: Callable[[], None] | None = None
        """Called once, with the lock held, when some room may have come back."""
        self.dead: ShmschedError | None = None
        self.arena: ClientArena | None = None
        self.max_arena = welcome.max_arena
        self._link = link
        ring = TokenWriter(view[: 4 * layout.ring_tokens])
        self._records = RecordReader(view[layout.records_offset :][: RECORD.size * layout.records], RECORD.size)
        size = RESULT.size
        self._results = RecordReader(view[layout.results_offset :][: size * layout.results], size)
        stream = view[layout.stream_offset :][: STREAMED.size * layout.stream]
        self._stream = RecordReader(stream, STREAMED.size)
        self.outbox = Outbox(link, ring, self._records, self._results, self._stream)
        """Everything that goes to the scheduler, but for the hello."""
        self._stream_told = 0
        self._pending: dict[int, Submission] = {}
        """By the number of each step that is on its way, or waits in the outbox."""
        self.room = Room(self.outbox, self._pending, self._records, self._results)
        self._held_rows: dict[int, int] = {}
        self._next_request = 1
        self._ids: set[int] = set()
        self._next_id = 0

    @property
    def outstanding(self) -> int:
        return len(self._pending)

    # --- submitting -----------------------------------------------------------------------------------------------------

    def submit_decode(
        self,
        session: SessionCore,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        course: Course | None,
        reply: Reply,
    ) -> bool:
        """``place`` and ``submit`` for what most steps are: a session's next token, wanted as its last plain step was. In 440
        bytecodes, what calls it included, instead of 625.

        False, and nothing has happened, where it is anything else, or something lacks. The caller holds the lock.
        """
        usual = session._usual
        if usual is None or usual[0] is not sampling or type(tokens) is not list or len(tokens) != 1:
            return False
        token, start, request_id = tokens[0], session._position, self._next_id + 1
        if (
            type(token) is not int
            or not 0 <= token < session.vocab_size
            or not (position is None or (type(position) is int and position == start))
            or self.dead is not None
            or session.ended is not None
            or session._stream is not None
            or session._course is not course
            or start >= session.most_tokens
            or request_id in self._ids
            or not self.room.takes_a_decode
        ):
            return False
        rows_offset = NO_ROWS
        if sampling is None:
            assert self.arena is not None
            rows_offset = self.arena.reserve(1, session.vocab_size)
        self._next_id = request_id
        fed, request = token.to_bytes(4, "little"), self._next_request
        described = ROWS_DESCRIPTOR.pack(
            request, session.session_id, 1, start, usual[1], 0 if sampling is not None else rows_offset, usual[2]
        )
        self._enter(Decode(session, fed, start, request, request_id, reply, rows_offset), (described, fed, ()))
        return True

    def submit(self, submission: Submission, reply: Reply) -> None:
        """Put all of it into the outbox, or nothing. The caller holds the lock, and has seen that nothing lacks."""
        request_id = submission.request_id
        if request_id is None:
            request_id = self._next_id + 1
            while request_id in self._ids:
                request_id += 1
            self._next_id = request_id
        elif request_id in self._ids:
            raise InvalidRequest(f"request {request_id} is still outstanding; ids may repeat once settled")
        if submission.raw_rows:
            assert self.arena is not None
            submission.rows_offset = self.arena.reserve(submission.raw_rows, submission.session.vocab_size)
        first = submission.first_request = self._next_request
        last = submission.last_request = reply.last_request = first + submission.n_steps - 1
        submission.id, submission.reply = request_id, reply
        stream = reply if isinstance(reply, TokenStream) else None
        if stream is not None:
            start = submission.start
            stream.begins(start, start + submission.n_tokens, submission.position_of(last))
        self._enter(submission, (submission.describe(), submission.tokens, submission.stop_tokens), stream)

    def _enter(self, submission: Submission, packed: Packed, stream: TokenStream | None = None) -> None:
        """It is on its way from here on, and leaves with the outbox."""
        first, last, session, outbox = (
            submission.first_request,
            submission.last_request,
            submission.session,
            self.outbox,
        )
        try:
            if first == last:
                self._pending[first] = submission
            else:
                self._pending.update(dict.fromkeys(range(first, last + 1), submission))
            self._ids.add(submission.id)
            session.goes_on(first, submission.start, submission.tokens)
            outbox.tokens += submission.n_tokens
            outbox.waiting.append(packed)
        finally:
            # An interrupt comes between calls, and there is none among the following lines: who is in the outbox is counted.
            if outbox.waiting and outbox.waiting[-1] is packed:
                self._next_request = last + 1
                self.room.results_taken += submission.n_results
                session._position = submission.start + submission.n_tokens
                session.unfed = None
                if stream is not None:
                    session._stream = stream
                session._fell_back = False
            else:
                self._forget(submission)

    def _forget(self, submission: Submission) -> None:
        """An interrupt has kept it from being sent."""
        for request in range(submission.first_request, submission.last_request + 1):
            self._pending.pop(request, None)
        self._ids.discard(submission.id)
        self._free_rows(submission)

    def flush(self) -> bool:
        """Send what was left for later. True if nothing is left, as far as this side knows. Raises SchedulerDied."""
        if self.outbox.waiting:
            with self.lock:
                self.outbox.send_steps()
        return self._link.flush()

    def check_alive(self) -> None:
        """Raises why nothing can be submitted any more."""
        if self.dead is not None:
            raise type(self.dead)(str(self.dead))

    def place(self, submission: Submission) -> str | None:
        """Let it start where the session stands now, refuse what can never run as it stands, and say what there is no room for.

        The caller holds the lock. Raises InvalidRequest, Unsupported, or why client or session are over.
        """
        session = submission.session
        if self.dead is not None:
            self.check_alive()
        if session.ended is not None or session._stream is not None or session._course is not submission.course:
            session.check_free(submission.course)
        submission.start = session.placed(submission.position, submission.n_tokens + submission.further)
        return self.room.lacking(submission)

    def outstanding_of(self, session: SessionCore) -> list[Reply]:
        """What the session still waits for, in order of submission. The caller holds the lock."""
        return list(dict.fromkeys(p.reply for p in self._pending.values() if p.session is session))

    def withdraw(self, reply: Reply) -> bool:
        """Ask the scheduler to cancel a submission. False if it was answered before."""
        with self.lock:
            submission = self._pending.get(reply.last_request)
            if submission is None or self.dead is not None:
                return False
            if reply.withdrawn:
                return True
            session, first, position = submission.session, submission.first_request, submission.start
            if isinstance(reply, TokenStream):
                position = reply.resume_at
            elif not session.rewinds.reach(position):
                # An engine that cannot rewind to there keeps the chunks that have run.
                first = next(r for r in range(first, reply.last_request + 1) if r in self._pending)
                position = submission.position_of(first)
            # What was submitted after it goes with it, also where that had rewound the session further.
            position = session.earliest_from(first, position)
            session.rewound(self._next_request, position)
            try:
                self.outbox.send_steps()
                sent, reply.withdrawn = self._link.frames_sent, True
                self._link.send(frames.Cancel(session.session_id, first, position))
            except SchedulerDied:
                # The receiver sees the same, and fails it.
                reply.withdrawn = False
                return False
            except BaseException:
                # An interrupt: it may be withdrawn again, if the scheduler was not told.
                reply.withdrawn = reply.withdrawn and self._link.frames_sent != sent
                raise
        return True

    def halt(self, stream: TokenStream) -> None:
        """Let the step of a generation that is queued or runs be its last."""
        with self.lock:
            last = self._pending.get(stream.last_request)
            if last is not None and self.dead is None:
                try:
                    self.outbox.send(frames.Halt(last.session.session_id, stream.last_request))
                except SchedulerDied:
                    # The receiver sees the same, and fails it.
                    pass

    # --- settling -------------------------------------------------------------------------------------------------------

    def completions(self, message: frames.Completions) -> None:
        """Read what was written up to the cursors, and settle with it."""
        answered: list[Answered] = []
        with self.lock:
            try:
                records = self._records.take_until(message.records_written)
                results = self._results.take_until(message.results_written)
                streamed = self._stream.take_until(message.stream_written)
                self.outbox.ring.returned(message.tokens_read)
            except ValueError as e:
                raise ProtocolError(f"completions that cannot be: {e}") from e
            came = answers.tokens_of(streamed, self._pending) if streamed else {}
            if records:
                answered = self._answered(records, results)
            if self.room_came is not None:
                self._tell_of_room()
            if self._stream.read - self._stream_told > self._stream.capacity // 4:
                self._stream_told = self._stream.read
                self._tell_consumed()
        for stream, tokens in came.items():
            stream.streamed(tokens)
        settle(answered)

    def _answered(self, records: bytes, results: bytes) -> list[Answered]:
        """Take what the records are about from what is on its way, and make the response of each whose last step this was."""
        pending, ids, now, answered = self._pending, self._ids, time.monotonic(), []
        at = n_results = 0
        for (request, n_rows, kind, waited, _, _), tokens, logprobs in zip(
            RECORD.iter_unpack(records), *answers.columns(records), strict=True
        ):
            submission = pending.pop(request, None)
            if kind == TOKENS:
                at += n_rows
            if submission is None:
                continue
            reply = submission.reply
            if reply.queue_wait is None:
                reply.queue_wait = waited
            if request != submission.last_request:
                continue
            n_results += submission.n_results
            ids.discard(submission.id)
            if reply.withdrawn:
                self._free_rows(submission)
                continue
            reply.arrived = now
            if kind == TOKEN:
                session_id = submission.session.session_id
                response = Response(submission.id, session_id, tokens, logprobs, None, reply.queue_wait)
            elif kind == TOKENS:
                response = response_of(submission, results, at - n_rows, n_rows)
            elif not reply.done():
                response = self._raw(submission, n_rows)
            else:
                self._free_rows(submission)
                continue
            answered.append((reply, response))
        self.room.results_taken -= n_results
        return answered

    def _tell_of_room(self) -> None:
        room_came, self.room_came = self.room_came, None
        if room_came is not None:
            room_came()

    def _raw(self, submission: Submission, n_rows: int) -> Response:
        session, waited, block = submission.session, submission.reply.queue_wait, None
        if n_rows:
            assert self.arena is not None
            block = self.arena.lease(submission.rows_offset, n_rows, session.vocab_size)
        return Response(submission.id, session.session_id, logits=block, queue_wait=waited)

    def _tell_consumed(self) -> None:
        try:
            self.outbox.send(frames.Consumed(self._records.read, self._results.read, self._stream.read))
        except SchedulerDied:
            # Whoever receives sees the same.
            pass

    def failed(self, message: frames.Failed) -> None:
        """Settle what ended without an answer. A submission carries its first failure."""
        replies: dict[Reply, SessionCore] = {}
        with self.lock:
            for request in message.requests:
                submission = self._take(request)
                if submission is None:
                    continue
                session, reply, position = submission.session, submission.reply, submission.position_of(request)
                if request == submission.last_request:
                    if not message.rows_held:
                        self._free_rows(submission)
                    elif submission.rows_offset != NO_ROWS:
                        self._held_rows[request] = submission.rows_offset
                    if isinstance(reply, TokenStream):
                        position = reply.step_position
                session.step_failed(request, position)
                replies[reply] = session
            if self.room_came is not None:
                self._tell_of_room()
        for reply, session in replies.items():
            if message.code == ErrorCode.CANCELLED or reply.withdrawn:
                reply.settle_cancelled()
            elif message.code == ErrorCode.SESSION_CLOSED and session.ended is not None:
                # It was on its way when the session ended; why the session ended says more than that it did.
                reply.settle_failed(type(session.ended)(str(session.ended)))
            else:
                reply.settle_failed(error_of(message.code, message.message))

    def returned(self, message: frames.Returned) -> None:
        """Rows that an engine may have been writing into are free."""
        with self.lock:
            for request in message.requests:
                offset = self._held_rows.pop(request, None)
                if offset is not None and self.arena is not None:
                    self.arena.free(offset)

    def end(self, error: ShmschedError) -> None:
        """The connection is over: every reply fails with ``error``, every waiter is woken."""
        with self.lock:
            if self.dead is None:
                self.dead = error
            replies = {submission.reply: None for submission in self._pending.values()}
            self._pending.clear()
            if self.room_came is not None:
                self._tell_of_room()
        for reply in replies:
            reply.settle_failed(error)

    def outstanding_replies(self) -> list[Reply]:
        """For a forked child, which must not take the lock."""
        return [submission.reply for submission in list(self._pending.values())]

    def _take(self, request: int) -> Submission | None:
        submission = self._pending.pop(request, None)
        if submission is not None and request == submission.last_request:
            self.room.results_taken -= submission.n_results
            self._ids.discard(submission.id)
        return submission

    def _free_rows(self, submission: Submission) -> None:
        if submission.rows_offset != NO_ROWS and self.arena is not None:
            self.arena.free(submission.rows_offset)
