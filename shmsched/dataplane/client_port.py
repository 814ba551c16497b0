"""The client's end of a step's way: credits, and submissions on their way. One lock guards all of it.

What changes more than one thing is made ready first, then *decided* by one store, and then done in a way that may be done again from
the beginning. So an interrupt leaves it not decided, and nothing has happened; or decided, and whoever takes the lock next does it
(again) before anything else. (Compiled, an interrupt comes between two calls of Python code only.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmsched import failpoints
from shmsched.dataplane.descriptors import pack_submit
from shmsched.dataplane.rings import RecordReader, TokenWriter
from shmsched.dataplane.submission import NO_ROWS, PendingResult, Submission
from shmsched.errors import InvalidRequest, SchedulerDied, ShmschedError
from shmsched.locks import OwnedLock
from shmsched.not_copied import not_copied

MOST_TOGETHER = 1024
"""Submissions in one frame: far below what a frame may hold."""


class ClientPort:
    """Submits steps. ``Completions`` takes them back; ``shmsched.client.Channel`` cancels them."""

    __slots__ = (
        "_ids", "_link", "_most_tokens", "_next_id", "_next_request", "_records", "_results", "_ring", "_stream", "arena", "dead",
        "decided", "entering", "held_rows", "leaving", "lock", "pending", "results_taken", "wait_for_room", "waiting",
        "waiting_tokens",
    )  # fmt: skip
    __reduce__ = not_copied

    def __init__(
        self, link: Any, ring: TokenWriter, records: RecordReader, results: RecordReader, stream: RecordReader
    ) -> None:
        """``link``: a ``shmsched.wire.Link``. ``records``, ``results``, ``stream``: what the scheduler writes."""
        self.lock = OwnedLock()
        self.decided: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        """What is to be done, with what. To be looked at whenever the lock is taken, as are"""
        self.entering: Submission | None = None
        """the submission that is on its way from now on,"""
        self.leaving: tuple[list[Any], int, list[Submission], int] | None = None
        """and the steps that go now: their frame, up to where the ring is written then, and what waited, of which those are the first
        so many. A frame that was sent twice, or a ring that is ahead of what frames have announced, would end the connection."""
        self.wait_for_room: list[Callable[[], None]] = []
        """Each is called once, with the lock held, when some credits may have come back."""
        self.dead: ShmschedError | None = None
        self.arena: Any = None
        """A ``shmsched.client.leases.ClientArena``, once there is one."""
        self.waiting: list[Submission] = []
        """Those that were not sent yet: they go with what follows, or by the next ``send_steps``."""
        self.waiting_tokens = 0
        """How many tokens those have."""
        self.pending: dict[int, Submission] = {}
        """By the number of each step that is on its way, or waits to be sent."""
        self.held_rows: dict[int, int] = {}
        """Rows of steps that have ended, which an engine may still write into; by the step's number."""
        self.results_taken = 0
        """How many sampled rows are to come."""
        self._link = link
        self._ring = ring
        self._records = records
        self._results = results
        self._stream = stream
        # What has been read is announced a quarter of the ring at a time: for more than the rest one could wait for ever.
        self._most_tokens = ring.capacity * 3 // 4
        self._next_request = 1
        self._ids: set[int] = set()
        self._next_id = 0

    # --- the lock ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Do what was decided and not done. The caller holds the lock."""
        entering, decided = self.entering, self.decided
        if entering is not None:
            self._entered(entering)
            self.entering = None
        if decided is not None:
            do, arguments = decided
            do(*arguments)
            self.decided = None
        if self.leaving is not None:
            # The scheduler may have it, and speak of it.
            try:
                self._leave()
            except SchedulerDied:
                # Whoever receives sees the same.
                pass

    def interrupted(self) -> None:
        """What was called under the lock has raised: give it back, if it was an interrupt that kept it, and finish what was
        decided."""
        self.lock.give_up()
        if self.entering is not None or self.decided is not None:
            try:
                with self.lock:
                    self.finish()
            finally:
                self.lock.give_up()

    # --- submitting -------------------------------------------------------------------------------------------------------

    def enter(self, submission: Submission, reply: PendingResult) -> str | None:
        """Have all of it on its way, from where its session stands now; it leaves with the next ``send_steps``. Or nothing, and say
        what lacks: credits, or the arena (""). The caller holds the lock.

        Raises InvalidRequest, Unsupported or Full for what cannot be submitted, or why client or session are over.
        """
        session = submission.session
        if self.entering is not None or self.decided is not None or self.leaving is not None:
            self.finish()
        if self.dead is not None:
            self.check_alive()
        if session.ended is not None or session._stream is not None or session._course is not submission.course:
            session.check_free(submission.course)
        submission.start = session.placed(submission.position, submission.n_tokens + submission.further)
        lacking = self._lacking(submission)
        if lacking is not None:
            return lacking
        if submission.raw_rows:
            if self.arena is None:
                return ""
            submission.rows_offset = self.arena.place(submission.raw_rows, session.vocab_size)
        request_id = submission.request_id
        if request_id is None:
            request_id = self._next_id + 1
            while request_id in self._ids:
                request_id += 1
            self._next_id = request_id
        elif request_id in self._ids:
            raise InvalidRequest(f"request {request_id} is still outstanding; ids may repeat once settled")
        submission.id, submission.reply = request_id, reply
        first = submission.first_request = self._next_request
        last = submission.last_request = first + submission.n_steps - 1
        reply.last_request = last
        submission.described = submission.describe()
        submission.tokens_then = self.waiting_tokens + submission.n_tokens
        submission.results_then = self.results_taken + submission.n_results
        if reply.streams:
            start = submission.start
            reply.begins(start, start + submission.n_tokens, submission.position_of(last))
        self.entering = submission
        self._entered(submission)
        self.entering = None
        return None

    def _entered(self, submission: Submission) -> None:
        first, last, session = submission.first_request, submission.last_request, submission.session
        if submission.raw_rows:
            self.arena.take(submission.rows_offset, submission.raw_rows, session.vocab_size)
        pending = self.pending
        for request in range(first, last + 1):
            pending[request] = submission
        self._ids.add(submission.id)
        session.goes_on(first, submission.start, submission.tokens)
        waiting = self.waiting
        if not waiting or waiting[len(waiting) - 1] is not submission:
            waiting.append(submission)
        self.waiting_tokens = submission.tokens_then
        self.results_taken = submission.results_then
        self._next_request = last + 1
        session._position = submission.start + submission.n_tokens
        session.unfed = None
        if submission.reply.streams:
            session._stream = submission.reply
        session._fell_back = False

    def check_alive(self) -> None:
        """Raises why nothing can be submitted any more."""
        if self.dead is not None:
            raise type(self.dead)(str(self.dead))

    def _lacking(self, submission: Submission) -> str | None:
        """What there are no credits for now, in words. Raises InvalidRequest, with the sizes, where no waiting would bring them."""
        n, n_steps, n_results = submission.n_tokens, submission.n_steps, submission.n_results
        ring, records, results = self._ring, self._records, self._results
        # What waits to be sent counts as there.
        cells = ring.capacity - (ring.written - ring.read) - self.waiting_tokens
        outstanding = len(self.pending)
        if n > self._most_tokens:
            raise InvalidRequest(f"{n} tokens in one submission; the token ring takes at most {self._most_tokens}")
        if n > cells:
            return f"{n} tokens do not fit the {cells} free cells of the token ring"
        if outstanding + n_steps > records.capacity:
            if n_steps > records.capacity:
                raise InvalidRequest(f"{n_steps} chunks in one submission; at most {records.capacity} are outstanding")
            return f"{outstanding} steps are outstanding, of at most {records.capacity}"
        if self.results_taken + n_results > results.capacity:
            if n_results > results.capacity:
                raise InvalidRequest(
                    f"{n_results} sampled rows in one step; at most {results.capacity} are outstanding"
                )
            return f"{self.results_taken} sampled rows are outstanding, of at most {results.capacity}"
        return None

    # --- sending ----------------------------------------------------------------------------------------------------------

    def send_steps(self) -> None:
        """Send what waits. The caller holds the lock. Raises SchedulerDied if the connection is gone."""
        if self.leaving is not None:
            self._leave()
        waiting = self.waiting
        if not waiting:
            return
        described: list[bytes] = []
        laid: list[bytes] = []
        stops: list[int] = []
        for submission in waiting:
            described.append(submission.described)
            laid.append(submission.tokens)
            if submission.stop_tokens:
                stops.extend(submission.stop_tokens)
        written = self._ring.put(b"".join(laid))
        steps = b"".join(described)
        frame = pack_submit(written, self._records.read, self._results.read, self._stream.read, steps, stops)
        self.leaving = [frame], written, waiting, len(described)
        self._leave()

    def _leave(self) -> None:
        """May be done again, from anywhere in it."""
        leaving = self.leaving
        assert leaving is not None
        frame, written, waiting, n = leaving
        failpoints.hit("client.submit.written")
        failpoints.hit("client.submit.half_sent", self._link.send_half, frame[0])
        self._link.send_packed(frame[0], frame)
        failpoints.hit("client.submit.sent")
        self._ring.written = written
        if self.waiting is waiting:
            self.waiting = waiting[n:]
        tokens = 0
        for submission in self.waiting:
            tokens += submission.n_tokens
        self.waiting_tokens = tokens
        self.leaving = None

    def send(self, message: Any) -> None:
        """Send another frame, behind the steps that were submitted before it. Raises SchedulerDied."""
        self.send_steps()
        self._link.send(message)

    def send_once(self, frame: list[Any]) -> None:
        """The same of what ``Link.outgoing`` has made, for one who may come again with it."""
        self.send_steps()
        self._link.send_packed(frame[0], frame)

    # --- what completions do under the lock; each may be done again --------------------------------------------------------

    def settled(self, requests: list[int], ids: list[int]) -> None:
        """These steps are over, and the submissions that had these ids."""
        pending, outstanding_ids = self.pending, self._ids
        for number in ids:
            outstanding_ids.discard(number)
        for request in requests:
            submission = pending.get(request)
            if submission is None:
                continue
            if (
                submission.reply.streams
                and request == submission.last_request
                and submission.session._stream is submission.reply
            ):
                # The session is free from here on, though the stream itself is told of its end later, outside the lock.
                submission.session._stream = None
            del pending[request]

    def free_rows(self, offsets: list[int]) -> None:
        for offset in offsets:
            if offset != NO_ROWS and self.arena is not None:
                self.arena.free(offset)

    def tell_of_room(self) -> None:
        for tell in self.wait_for_room:
            tell()
        self.wait_for_room = []
