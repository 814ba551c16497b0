"""The client's end of the path: room, submissions on their way, and what came of them.

One lock guards all of it. Futures are settled outside the lock, since their callbacks are anybody's code.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched.client.futures import StepFuture
from shmsched.client.leases import ClientArena
from shmsched.errors import ErrorCode, Full, InvalidRequest, ProtocolError, SchedulerDied, ShmschedError, error_of
from shmsched.memory.layouts import RECORD, RESULT_DTYPE, ClientLayout, Record, RecordKind
from shmsched.memory.ring import RecordReader, TokenWriter
from shmsched.memory.segment import Segment
from shmsched.steps import OutputRows, RequestParams, Response
from shmsched.wire import frames
from shmsched.wire.frames import StepDescriptor, StepFlags
from shmsched.wire.link import Link

if TYPE_CHECKING:
    from shmsched.client.session import Session

_NO_ROWS = -1


class Pending(NamedTuple):
    """A step on its way."""

    future: StepFuture
    session: Session
    request_id: int
    position: int
    n_results: int
    rows_offset: int
    is_last: bool


class Submission(NamedTuple):
    """What one call submits: checked, and split into chunks that the engine takes."""

    session: Session
    request_id: int
    chunks: list[npt.NDArray[np.int32]]
    position: int
    params: RequestParams
    seed: int

    @property
    def n_tokens(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def n_rows(self) -> int:
        return self.params.output_rows.count(len(self.chunks[-1]))


class Channel:
    """Submits steps and settles their futures. Whoever reads the link hands the frames to the methods named after them."""

    def __init__(self, link: Link, welcome: frames.Welcome, segment: Segment) -> None:
        layout = ClientLayout(welcome.ring_tokens, welcome.records, welcome.results)
        view = memoryview(segment.buffer)
        self.lock = threading.Lock()
        self.receiver: threading.Thread | None = None
        self.dead: ShmschedError | None = None
        self.arena: ClientArena | None = None
        self.max_arena = welcome.max_arena
        self._link = link
        self._room = threading.Condition(self.lock)
        self._ring = TokenWriter(np.frombuffer(segment.buffer, np.int32, layout.ring_tokens))
        self._records = RecordReader(view[layout.records_offset :][: RECORD.size * layout.records], RECORD.size)
        size = RESULT_DTYPE.itemsize
        self._results = RecordReader(view[layout.results_offset :][: size * layout.results], size)
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

    def next_request_id(self) -> int:
        """A request id that no outstanding step has. The caller holds the lock."""
        self._next_id += 1
        while self._next_id in self._ids:
            self._next_id += 1
        return self._next_id

    def check_fits(self, submission: Submission) -> None:
        """Refuse what no waiting would make room for. Raises InvalidRequest with the sizes."""
        most = self._ring.capacity * 3 // 4
        if submission.n_tokens > most:
            raise InvalidRequest(f"{submission.n_tokens} tokens in one submission; the token ring takes at most {most}")
        if len(submission.chunks) > self._records.capacity:
            raise InvalidRequest(
                f"{len(submission.chunks)} chunks in one submission; at most {self._records.capacity} are outstanding"
            )
        if submission.params.sampling is not None and submission.n_rows > self._results.capacity:
            raise InvalidRequest(
                f"{submission.n_rows} sampled rows in one step; at most {self._results.capacity} are outstanding"
            )

    def submit(self, submission: Submission) -> StepFuture:
        """Send all of it or nothing. The caller holds the lock, has checked the submission and has seen that nothing lacks."""
        params, session = submission.params, submission.session
        n_rows = submission.n_rows
        raw = params.sampling is None and n_rows > 0
        offset = _NO_ROWS
        if raw:
            assert self.arena is not None
            offset = self.arena.reserve(n_rows, session.vocab_size)
        future = StepFuture(self.withdraw)
        future.start = submission.position
        future.first_request = self._next_request
        future.last_request = self._next_request + len(submission.chunks) - 1
        descriptors = []
        pending = {}
        position = submission.position
        for request, chunk in enumerate(submission.chunks, self._next_request):
            is_last = request == future.last_request
            descriptors.append(_describe(submission, request, len(chunk), position, is_last, max(offset, 0)))
            n_results = n_rows if is_last and not raw else 0
            pending[request] = Pending(
                future, session, submission.request_id, position, n_results, offset if is_last else _NO_ROWS, is_last
            )
            position += len(chunk)
        frame = frames.Submit(
            self._ring.written + submission.n_tokens, self._records.read, self._results.read, descriptors
        )
        ring, sent = self._ring.written, self._link.frames_sent
        try:
            for chunk in submission.chunks:
                self._ring.write(chunk)
            self._pending.update(pending)
            self._ids.add(submission.request_id)
            self._link.send(frame)
        except BaseException:
            # An interrupt, say: a ring that is ahead of what frames have announced would end the connection.
            if self._link.frames_sent == sent:
                self._ring.written = ring
                for request in pending:
                    self._pending.pop(request, None)
                self._ids.discard(submission.request_id)
                if offset != _NO_ROWS and self.arena is not None:
                    self.arena.free(offset)
                raise
            self._account(future, n_rows, raw)
            raise
        self._account(future, n_rows, raw)
        return future

    def _account(self, future: StepFuture, n_rows: int, raw: bool) -> None:
        self._next_request = future.last_request + 1
        self._outstanding_results += 0 if raw else n_rows

    def lacking(self, submission: Submission) -> str | None:
        """What there is no room for now, in words."""
        if submission.n_tokens > self._ring.room:
            return f"{submission.n_tokens} tokens do not fit the {self._ring.room} free cells of the token ring"
        if len(self._pending) + len(submission.chunks) > self._records.capacity:
            return f"{len(self._pending)} steps are outstanding, of at most {self._records.capacity}"
        if submission.params.sampling is None:
            return None
        if self._outstanding_results + submission.n_rows > self._results.capacity:
            return f"{self._outstanding_results} sampled rows are outstanding, of at most {self._results.capacity}"
        return None

    def wait_for_room(self, lacking: str, block: bool, deadline: float | None) -> bool:
        """Give up the lock until some room has come back; whatever the caller knew may have changed then.

        False if the deadline came first. Raises Full where waiting is not wanted, or would be for ever.
        """
        if not block:
            raise Full(f"{lacking}; submit with block=True to wait")
        if threading.current_thread() is self.receiver:
            raise Full(f"{lacking}; a future's callback cannot wait for room, since it is what makes room")
        return self._room.wait(None if deadline is None else deadline - time.monotonic())

    def withdraw(self, future: StepFuture) -> bool:
        """Ask the scheduler to cancel a submission. False if it was answered before."""
        with self.lock:
            last = self._pending.get(future.last_request)
            if last is None or self.dead is not None:
                return False
            future.withdrawn = True
            # An engine that cannot rewind keeps the chunks that have run.
            first = future.first_request
            if not last.session.supports_rewind:
                first = next(r for r in range(first, future.last_request + 1) if r in self._pending)
            position = future.start if first == future.first_request else self._pending[first].position
            # What was submitted after it goes with it, also where that had rewound the session further.
            position = last.session.earliest_from(first, position)
            last.session.rewound(self._next_request, position)
            try:
                self._link.send(frames.Cancel(last.session.session_id, first, position))
            except SchedulerDied:
                # The receiver sees the same, and fails it.
                future.withdrawn = False
                return False
        return True

    # --- settling -------------------------------------------------------------------------------------------------------

    def completions(self, message: frames.Completions) -> None:
        """Read the records up to the cursors and settle their futures."""
        settled: list[tuple[StepFuture, Response]] = []
        with self.lock:
            try:
                records = self._records.take_until(message.records_written)
                results = np.frombuffer(self._results.take_until(message.results_written), RESULT_DTYPE)
                self._ring.returned(message.tokens_read)
            except ValueError as e:
                raise ProtocolError(f"completions that cannot be: {e}") from e
            at = 0
            for record in map(Record._make, RECORD.iter_unpack(records)):
                pending = self._take(record.request)
                if record.kind == RecordKind.TOKENS:
                    rows = results[at : at + record.n_rows]
                    at += record.n_rows
                if pending is None:
                    continue
                if not pending.is_last:
                    continue
                if pending.future.withdrawn or pending.future.done():
                    self._free_rows(pending)
                    continue
                session = pending.session
                if record.kind == RecordKind.LOGITS:
                    if record.n_rows:
                        assert self.arena is not None
                        block = self.arena.lease(pending.rows_offset, record.n_rows, session.vocab_size)
                    else:
                        block = None
                    response = Response(pending.request_id, session.session_id, logits=block)
                else:
                    response = Response(
                        pending.request_id,
                        session.session_id,
                        rows["token"].astype(np.int64),
                        np.ascontiguousarray(rows["logprob"]),
                    )
                settled.append((pending.future, response))
            self._room.notify_all()
        for future, response in settled:
            future.settle(response)

    def failed(self, message: frames.Failed) -> None:
        """Settle the futures of steps that ended without an answer. A submission carries its first failure."""
        futures: dict[StepFuture, Session] = {}
        with self.lock:
            for request in message.requests:
                pending = self._take(request)
                if pending is None:
                    continue
                if not message.rows_held:
                    self._free_rows(pending)
                elif pending.rows_offset != _NO_ROWS:
                    self._held_rows[request] = pending.rows_offset
                pending.session.step_failed(request, pending.position)
                futures[pending.future] = pending.session
            self._room.notify_all()
        for future, session in futures.items():
            if message.code == ErrorCode.CANCELLED or future.withdrawn:
                future.settle_cancelled()
            elif message.code == ErrorCode.SESSION_CLOSED and session.ended is not None:
                # It was on its way when the session ended; why the session ended says more than that it did.
                future.settle_failed(type(session.ended)(str(session.ended)))
            else:
                future.settle_failed(error_of(message.code, message.message))

    def returned(self, message: frames.Returned) -> None:
        """Rows that an engine may have been writing into are free."""
        with self.lock:
            for request in message.requests:
                offset = self._held_rows.pop(request, None)
                if offset is not None and self.arena is not None:
                    self.arena.free(offset)

    def end(self, error: ShmschedError) -> None:
        """The connection is over: every future fails with ``error``, every waiter is woken."""
        with self.lock:
            if self.dead is None:
                self.dead = error
            futures = {pending.future: None for pending in self._pending.values()}
            self._pending.clear()
            self._room.notify_all()
        for future in futures:
            future.settle_failed(error)

    def outstanding_futures(self) -> list[StepFuture]:
        """For a forked child, which must not take the lock."""
        return [pending.future for pending in list(self._pending.values())]

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

    def id_is_outstanding(self, request_id: int) -> bool:
        return request_id in self._ids


def _describe(s: Submission, request: int, n: int, position: int, is_last: bool, rows_offset: int) -> StepDescriptor:
    sampling = s.params.sampling
    rows = s.params.output_rows if is_last else OutputRows.NONE
    flags = (StepFlags.SAMPLED if sampling is not None else 0) | (0 if is_last else StepFlags.MORE)
    if sampling is None:
        return StepDescriptor(request, s.session.session_id, n, position, rows, flags, 0, 0.0, 1.0, 0, rows_offset)
    seed = s.seed if sampling.seed is None else sampling.seed
    return StepDescriptor(
        request, s.session.session_id, n, position, rows, flags,
        sampling.top_k, sampling.temperature, sampling.top_p, seed, rows_offset,
    )  # fmt: skip
