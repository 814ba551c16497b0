"""The client's end of the path: room, submissions on their way, and what came of them.

One lock guards all of it. Futures are settled outside the lock, since their callbacks are anybody's code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched.client.leases import ClientArena
from shmsched.client.replies import Reply, TokenStream
from shmsched.client.session_core import SessionCore
from shmsched.client.submission import Submission
from shmsched.errors import ErrorCode, InvalidRequest, ProtocolError, SchedulerDied, ShmschedError, error_of
from shmsched.memory.layouts import RECORD, RESULT_DTYPE, STREAMED, ClientLayout, RecordKind
from shmsched.memory.ring import RecordReader, TokenWriter
from shmsched.memory.segment import Segment
from shmsched.steps import Response
from shmsched.wire import frames
from shmsched.wire.client_frames import pack_submit
from shmsched.wire.link import Link

_NO_ROWS = -1
TOKEN, TOKENS = int(RecordKind.TOKEN), int(RecordKind.TOKENS)


class Pending(NamedTuple):
    """A step on its way."""

    reply: Reply
    session: SessionCore
    request_id: int
    position: int
    n_results: int
    rows_offset: int
    is_last: bool


class Channel:
    """Submits steps and settles their replies. Whoever reads the link hands the frames to the methods named after them."""

    def __init__(self, link: Link, welcome: frames.Welcome, segment: Segment) -> None:
        layout = ClientLayout(welcome.ring_tokens, welcome.records, welcome.results, welcome.stream)
        view = memoryview(segment.buffer)
        self.lock = threading.Lock()
        self.room_came: Callable[[], None] = lambda: None
        """Called, with the lock held, when some room may have come back."""
        self.dead: ShmschedError | None = None
        self.arena: ClientArena | None = None
        self.max_arena = welcome.max_arena
        self._link = link
        self._ring = TokenWriter(np.frombuffer(segment.buffer, np.int32, layout.ring_tokens))
        # What has been read is announced a quarter of the ring at a time: for more room than the rest one could wait for ever.
        self._most_tokens = self._ring.capacity * 3 // 4
        self._records = RecordReader(view[layout.records_offset :][: RECORD.size * layout.records], RECORD.size)
        size = RESULT_DTYPE.itemsize
        self._results = RecordReader(view[layout.results_offset :][: size * layout.results], size)
        stream = view[layout.stream_offset :][: STREAMED.size * layout.stream]
        self._stream = RecordReader(stream, STREAMED.size)
        self._stream_told = 0
        self._pending: dict[int, Pending] = {}
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
        """Send all of it or nothing. The caller holds the lock, and has seen that nothing lacks."""
        session, raw_rows, first = submission.session, submission.raw_rows, self._next_request
        n_results = 0 if raw_rows else submission.n_rows
        request_id = submission.request_id
        if request_id is None:
            request_id = self._free_id()
        elif request_id in self._ids:
            raise InvalidRequest(f"request {request_id} is still outstanding; ids may repeat once settled")
        offset = _NO_ROWS
        if raw_rows:
            assert self.arena is not None
            offset = self.arena.reserve(raw_rows, session.vocab_size)
        descriptors = submission.describe(first, offset if raw_rows else 0)
        last = descriptors[-1]
        reply.start, reply.first_request, reply.last_request = submission.start, first, last.request
        if isinstance(reply, TokenStream):
            reply.prompt_end, reply.step_position = submission.start + submission.n_tokens, last.position
        pending = {last.request: Pending(reply, session, request_id, last.position, n_results, offset, True)}
        for d in descriptors[:-1]:
            pending[d.request] = Pending(reply, session, request_id, d.position, 0, _NO_ROWS, False)
        ring, sent = self._ring.written, self._link.frames_sent
        frame = pack_submit(
            ring + submission.n_tokens, self._records.read, self._results.read, self._stream.read, descriptors,
            submission.stop_tokens,
        )  # fmt: skip
        try:
            for chunk in submission.chunks:
                self._ring.write(chunk)
            self._pending.update(pending)
            self._ids.add(request_id)
            self._link.send_packed(frame, later)
        except BaseException:
            # An interrupt, say: a ring that is ahead of what frames have announced would end the connection.
            if self._link.frames_sent == sent:
                self._ring.written = ring
                for request in pending:
                    self._pending.pop(request, None)
                self._ids.discard(request_id)
                if offset != _NO_ROWS and self.arena is not None:
                    self.arena.free(offset)
                raise
            self._account(reply, n_results)
            raise
        self._account(reply, n_results)

    def _account(self, reply: Reply, n_results: int) -> None:
        self._next_request = reply.last_request + 1
        self._outstanding_results += n_results

    def _free_id(self) -> int:
        """A request id that no outstanding step has."""
        self._next_id += 1
        while self._next_id in self._ids:
            self._next_id += 1
        return self._next_id

    def lacking(self, submission: Submission) -> str | None:
        """What there is no room for now, in words. Raises InvalidRequest, with the sizes, where no waiting would make room."""
        n, chunks = submission.n_tokens, len(submission.chunks)
        if n > self._most_tokens:
            raise InvalidRequest(f"{n} tokens in one submission; the token ring takes at most {self._most_tokens}")
        if n > self._ring.room:
            return f"{n} tokens do not fit the {self._ring.room} free cells of the token ring"
        if len(self._pending) + chunks > self._records.capacity:
            if chunks > self._records.capacity:
                raise InvalidRequest(
                    f"{chunks} chunks in one submission; at most {self._records.capacity} are outstanding"
                )
            return f"{len(self._pending)} steps are outstanding, of at most {self._records.capacity}"
        if submission.sampling is not None and self._outstanding_results + submission.n_rows > self._results.capacity:
            if submission.n_rows > self._results.capacity:
                raise InvalidRequest(
                    f"{submission.n_rows} sampled rows in one step; at most {self._results.capacity} are outstanding"
                )
            return f"{self._outstanding_results} sampled rows are outstanding, of at most {self._results.capacity}"
        return None

    def outstanding_of(self, session: SessionCore) -> list[Reply]:
        """What the session still waits for, in order of submission. The caller holds the lock."""
        return list(dict.fromkeys(p.reply for p in self._pending.values() if p.session is session))

    def is_outstanding(self, reply: Reply) -> bool:
        """Whether its last chunk is on its way. The caller holds the lock."""
        pending = self._pending.get(reply.last_request)
        return pending is not None and pending.reply is reply

    def withdraw(self, reply: Reply) -> bool:
        """Ask the scheduler to cancel a submission. False if it was answered before."""
        with self.lock:
            last = self._pending.get(reply.last_request)
            if last is None or self.dead is not None:
                return False
            if reply.withdrawn:
                return True
            first, position = reply.first_request, reply.start
            if isinstance(reply, TokenStream):
                position = reply.resume_at
            elif not last.session.supports_rewind:
                # An engine that cannot rewind keeps the chunks that have run.
                first = next(r for r in range(first, reply.last_request + 1) if r in self._pending)
                position = reply.start if first == reply.first_request else self._pending[first].position
            # What was submitted after it goes with it, also where that had rewound the session further.
            position = last.session.earliest_from(first, position)
            last.session.rewound(self._next_request, position)
            sent = self._link.frames_sent
            try:
                reply.withdrawn = True
                self._link.send(frames.Cancel(last.session.session_id, first, position))
            except SchedulerDied:
                # The receiver sees the same, and fails it.
                reply.withdrawn = False
                return False
            except BaseException:
                # An interrupt: it may be withdrawn again, if the scheduler was not told.
                reply.withdrawn = self._link.frames_sent != sent
                raise
        return True

    def halt(self, stream: TokenStream) -> None:
        """Let the step of a generation that is queued or runs be its last."""
        with self.lock:
            last = self._pending.get(stream.last_request)
            if last is not None and self.dead is None:
                try:
                    self._link.send(frames.Halt(last.session.session_id, stream.last_request))
                except SchedulerDied:
                    # The receiver sees the same, and fails it.
                    pass

    # --- settling -------------------------------------------------------------------------------------------------------

    def completions(self, message: frames.Completions) -> None:
        """Read what was written up to the cursors, and settle with it."""
        settled: list[tuple[Reply, Response]] = []
        with self.lock:
            try:
                records = self._records.take_until(message.records_written)
                results = self._results.take_until(message.results_written)
                streamed = self._stream.take_until(message.stream_written)
                self._ring.returned(message.tokens_read)
            except ValueError as e:
                raise ProtocolError(f"completions that cannot be: {e}") from e
            came = self._advance(streamed) if streamed else []
            at = 0
            for request, n_rows, kind, waited, token, logprob in RECORD.iter_unpack(records):
                first, at = at, at + n_rows if kind == TOKENS else at
                pending = self._take(request)
                if pending is None:
                    continue
                reply = pending.reply
                if reply.queue_wait is None:
                    reply.queue_wait = waited
                if not pending.is_last:
                    continue
                if reply.withdrawn or reply.done():
                    self._free_rows(pending)
                elif kind == TOKEN:
                    # 0.8 us; as a row of ``results`` it would take 3.
                    ids, logprobs = np.array((token,)), np.array((logprob,), np.float32)
                    settled.append((reply, _answer(pending, ids, logprobs)))
                elif kind == TOKENS:
                    settled.append((reply, _sampled(pending, results, first, n_rows)))
                else:
                    settled.append((reply, self._raw(pending, n_rows)))
            self.room_came()
            if self._stream.read - self._stream_told > self._stream.capacity // 4:
                self._stream_told = self._stream.read
                self._tell_consumed()
        for stream, token, logprob in came:
            stream.streamed(token, logprob)
        for reply, response in settled:
            reply.settle(response)

    def _advance(self, streamed: bytes) -> list[tuple[TokenStream, int, float]]:
        """The tokens of generations that go on: each is fed by the scheduler as it comes."""
        came = []
        for request, token, logprob, waited in STREAMED.iter_unpack(streamed):
            pending = self._pending.get(request)
            if pending is None or pending.reply.withdrawn:
                continue
            stream = pending.reply
            assert isinstance(stream, TokenStream)
            stream.step_position = pending.session.position
            if stream.queue_wait is None:
                stream.queue_wait = waited
            pending.session.fed(token)
            came.append((stream, token, logprob))
        return came

    def _raw(self, pending: Pending, n_rows: int) -> Response:
        if not n_rows:
            return Response(pending.request_id, pending.session.session_id, queue_wait=pending.reply.queue_wait)
        assert self.arena is not None
        block = self.arena.lease(pending.rows_offset, n_rows, pending.session.vocab_size)
        session_id, waited = pending.session.session_id, pending.reply.queue_wait
        return Response(pending.request_id, session_id, logits=block, queue_wait=waited)

    def _tell_consumed(self) -> None:
        try:
            self._link.send(frames.Consumed(self._records.read, self._results.read, self._stream.read))
        except SchedulerDied:
            # Whoever receives sees the same.
            pass

    def failed(self, message: frames.Failed) -> None:
        """Settle what ended without an answer. A submission carries its first failure."""
        replies: dict[Reply, SessionCore] = {}
        with self.lock:
            for request in message.requests:
                pending = self._take(request)
                if pending is None:
                    continue
                if not message.rows_held:
                    self._free_rows(pending)
                elif pending.rows_offset != _NO_ROWS:
                    self._held_rows[request] = pending.rows_offset
                reply, position = pending.reply, pending.position
                if isinstance(reply, TokenStream) and pending.is_last:
                    position = reply.step_position
                pending.session.step_failed(request, position)
                replies[reply] = pending.session
            self.room_came()
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
            replies = {pending.reply: None for pending in self._pending.values()}
            self._pending.clear()
            self.room_came()
        for reply in replies:
            reply.settle_failed(error)

    def outstanding_replies(self) -> list[Reply]:
        """For a forked child, which must not take the lock."""
        return [pending.reply for pending in list(self._pending.values())]

    def _take(self, request: int) -> Pending | None:
        pending = self._pending.pop(request, None)
        if pending is not None:
            self._outstanding_results -= pending.n_results
            if pending.is_last:
                self._ids.discard(pending.request_id)
        return pending

    def _free_rows(self, pending: Pending) -> None:
        if pending.rows_offset != _NO_ROWS and self.arena is not None:
            self.arena.free(pending.rows_offset)


def _sampled(pending: Pending, results: bytes, first: int, n_rows: int) -> Response:
    rows = np.frombuffer(results, RESULT_DTYPE, n_rows, first * RESULT_DTYPE.itemsize)
    return _answer(pending, rows["token"].astype(np.int64), np.ascontiguousarray(rows["logprob"]))


def _answer(pending: Pending, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]) -> Response:
    return Response(pending.request_id, pending.session.session_id, tokens, logprobs, None, pending.reply.queue_wait)
