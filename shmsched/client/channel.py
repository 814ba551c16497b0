"""The client's end of the path: room, submissions on their way, and what came of them.

One lock guards all of it. Futures are settled outside the lock, since their callbacks are anybody's code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from shmsched.client import answers
from shmsched.client.answers import Answered, response_of, settle
from shmsched.client.leases import ClientArena
from shmsched.client.outbox import MOST_TOGETHER, Outbox
from shmsched.client.replies import Reply, TokenStream
from shmsched.client.session_core import SessionCore
from shmsched.client.submission import NO_ROWS, Submission
from shmsched.errors import (
    ErrorCode,
    InvalidRequest,
    ProtocolError,
    SchedulerDied,
    ShmschedError,
    Unsupported,
    error_of,
)
from shmsched.memory.layouts import RECORD, RESULT_DTYPE, STREAMED, ClientLayout, RecordKind
from shmsched.memory.ring import RecordReader, TokenWriter
from shmsched.memory.segment import Segment
from shmsched.steps import Response
from shmsched.wire import frames
from shmsched.wire.link import Link

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
        # What has been read is announced a quarter of the ring at a time: for more room than the rest one could wait for ever.
        self._most_tokens = ring.capacity * 3 // 4
        self._records = RecordReader(view[layout.records_offset :][: RECORD.size * layout.records], RECORD.size)
        size = RESULT_DTYPE.itemsize
        self._results = RecordReader(view[layout.results_offset :][: size * layout.results], size)
        stream = view[layout.stream_offset :][: STREAMED.size * layout.stream]
        self._stream = RecordReader(stream, STREAMED.size)
        self.outbox = Outbox(link, ring, self._records, self._results, self._stream)
        """Everything that goes to the scheduler, but for the hello."""
        self._stream_told = 0
        self._pending: dict[int, Submission] = {}
        """By the number of each step that is on its way, or waits in the outbox."""
        self._outstanding_results = 0
        self._held_rows: dict[int, int] = {}
        self._next_request = 1
        self._ids: set[int] = set()
        self._next_id = 0

    @property
    def outstanding(self) -> int:
        return len(self._pending)

    # --- submitting -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, reply: Reply, later: bool = False) -> None:
        """Send all of it or nothing. The caller holds the lock, and has seen that nothing lacks.

        ``later``: with what follows, or at the next ``flush``.
        """
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
        session, start = submission.session, submission.start
        end = start + submission.n_tokens
        stream = reply if isinstance(reply, TokenStream) else None
        if stream is not None:
            stream.begins(start, end, submission.position_of(last))
        packed, outbox = (submission.describe(), submission.tokens, submission.stop_tokens), self.outbox
        try:
            if first == last:
                self._pending[first] = submission
            else:
                self._pending.update(dict.fromkeys(range(first, last + 1), submission))
            self._ids.add(request_id)
            session.goes_on(first, start, submission.tokens)
            outbox.tokens += submission.n_tokens
            outbox.waiting.append(packed)
        finally:
            # An interrupt comes between calls, and there is none among the following lines: who is in the outbox is counted.
            if outbox.waiting and outbox.waiting[-1] is packed:
                self._next_request = last + 1
                self._outstanding_results += submission.n_results
                session._position = end
                session.unfed = None
                if stream is not None:
                    session._stream = stream
                session._fell_back = False
            else:
                self._forget(submission)
        if not later or len(outbox.waiting) >= MOST_TOGETHER:
            outbox.send_steps()

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
        session, start = submission.session, submission.position
        if self.dead is not None:
            self.check_alive()
        if session.ended is not None or session._stream is not None or session._course is not submission.course:
            session.check_free(submission.course)
        stands_at, n = session._position, submission.n_tokens
        if start is None:
            start = stands_at
        elif not isinstance(start, int | np.integer) or not 0 <= start <= stands_at:
            raise InvalidRequest(
                f"position {start!r} in session {session.session_id}; it goes on at {stands_at}, or below to rewind"
            )
        elif start < stands_at and not session.supports_rewind:
            raise Unsupported(
                f"position {start} rewinds session {session.session_id} from {stands_at};"
                f" model {session.model.name!r} cannot rewind"
            )
        submission.start = start = int(start)
        end = start + n + submission.further
        if end > session.most_tokens:
            raise InvalidRequest(
                f"session {session.session_id} would hold {end} tokens; {session.model.name} takes at most {session.most_tokens}"
            )
        outbox, ring = self.outbox, self.outbox.ring
        room = ring.capacity - (ring.written - ring.read) - outbox.tokens
        if (
            n <= room
            and n <= self._most_tokens
            and len(self._pending) + submission.n_steps <= self._records.capacity
            and self._outstanding_results + submission.n_results <= self._results.capacity
        ):
            return None
        return self._lacking(submission, room)

    def _lacking(self, submission: Submission, room: int) -> str:
        """What there is no room for now, in words. Raises InvalidRequest, with the sizes, where no waiting would make room."""
        n, n_steps, n_results = submission.n_tokens, submission.n_steps, submission.n_results
        if n > self._most_tokens:
            raise InvalidRequest(f"{n} tokens in one submission; the token ring takes at most {self._most_tokens}")
        if n > room:
            return f"{n} tokens do not fit the {room} free cells of the token ring"
        if len(self._pending) + n_steps > self._records.capacity:
            if n_steps > self._records.capacity:
                raise InvalidRequest(
                    f"{n_steps} chunks in one submission; at most {self._records.capacity} are outstanding"
                )
            return f"{len(self._pending)} steps are outstanding, of at most {self._records.capacity}"
        if n_results > self._results.capacity:
            raise InvalidRequest(
                f"{n_results} sampled rows in one step; at most {self._results.capacity} are outstanding"
            )
        return f"{self._outstanding_results} sampled rows are outstanding, of at most {self._results.capacity}"

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
            elif not session.supports_rewind:
                # An engine that cannot rewind keeps the chunks that have run.
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
        settled: list[Answered] = []
        with self.lock:
            try:
                records = self._records.take_until(message.records_written)
                results = self._results.take_until(message.results_written)
                streamed = self._stream.take_until(message.stream_written)
                self.outbox.ring.returned(message.tokens_read)
            except ValueError as e:
                raise ProtocolError(f"completions that cannot be: {e}") from e
            came = answers.tokens_of(streamed, self._pending) if streamed else {}
            at = n_results = 0
            pending, ids = self._pending, self._ids
            for request, n_rows, kind, waited, token, logprob in RECORD.iter_unpack(records):
                submission = pending.pop(request, None)
                first, at = at, at + n_rows if kind == TOKENS else at
                if submission is None:
                    continue
                reply = submission.reply
                if reply.queue_wait is None:
                    reply.queue_wait = waited
                if request != submission.last_request:
                    continue
                n_results += submission.n_results
                ids.discard(submission.id)
                response = None
                if kind != TOKEN:
                    if reply.withdrawn or reply.done():
                        self._free_rows(submission)
                        continue
                    response = (
                        response_of(submission, results, first, n_rows)
                        if kind == TOKENS
                        else self._raw(submission, n_rows)
                    )
                settled.append((submission, token, logprob, response))
            self._outstanding_results -= n_results
            if self.room_came is not None:
                self._tell_of_room()
            if self._stream.read - self._stream_told > self._stream.capacity // 4:
                self._stream_told = self._stream.read
                self._tell_consumed()
        for stream, tokens in came.items():
            stream.streamed(tokens)
        if settled:
            settle(settled)

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
            self._outstanding_results -= submission.n_results
            self._ids.discard(submission.id)
        return submission

    def _free_rows(self, submission: Submission) -> None:
        if submission.rows_offset != NO_ROWS and self.arena is not None:
            self.arena.free(submission.rows_offset)
