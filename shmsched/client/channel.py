"""The client's end of the path: room, and submissions on their way. One lock guards all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shmsched import failpoints
from shmsched.client.decisions import Decisions
from shmsched.client.leases import ClientArena
from shmsched.client.outbox import Outbox, Packed, to_be_sent
from shmsched.client.replies import Reply, TokenStream
from shmsched.client.room import Room
from shmsched.client.session_core import SessionCore
from shmsched.client.submission import NO_ROWS, Decode, Submission
from shmsched.dataplane.layouts import RECORD, RESULT, STREAMED, ClientLayout
from shmsched.dataplane.rings import RecordReader, TokenWriter
from shmsched.errors import InvalidRequest, SchedulerDied, ShmschedError
from shmsched.memory.segment import Segment
from shmsched.params import SamplingParams
from shmsched.steps import Tokens
from shmsched.wire import frames
from shmsched.wire.frames import ROWS_DESCRIPTOR, Rewinds
from shmsched.wire.link import Link, Outgoing

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course


class Channel(Decisions):
    """Submits steps, and takes them back. ``Arrivals`` settles them."""

    def __init__(self, link: Link, welcome: frames.Welcome, segment: Segment) -> None:
        layout = ClientLayout(welcome.ring_tokens, welcome.records, welcome.results, welcome.stream)
        view = memoryview(segment.buffer)
        super().__init__()
        self.wait_for_room: list[Callable[[], None]] = []
        """Each is called once, with the lock held, when some room may have come back."""
        self.dead: ShmschedError | None = None
        self.arena: ClientArena | None = None
        self.max_arena = welcome.max_arena
        self._link = link
        ring = TokenWriter(view[: 4 * layout.ring_tokens])
        records = RecordReader(view[layout.records_offset :][: RECORD.size * layout.records], RECORD.size)
        size = RESULT.size
        results = RecordReader(view[layout.results_offset :][: size * layout.results], size)
        stream = RecordReader(view[layout.stream_offset :][: STREAMED.size * layout.stream], STREAMED.size)
        self.outbox = Outbox(link, ring, records, results, stream)
        """Everything that goes to the scheduler, but for the hello."""
        self.pending: dict[int, Submission] = {}
        """By the number of each step that is on its way, or waits in the outbox."""
        self.room = Room(self.outbox, self.pending, records, results)
        self.held_rows: dict[int, int] = {}
        """Rows of steps that have ended, which an engine may still write into; by the step's number."""
        self.rings = records, results, stream
        """What the scheduler writes. They are for ``Arrivals`` to read."""
        self._next_request = 1
        self._ids: set[int] = set()
        self._next_id = 0

    def finish(self) -> None:
        super().finish()
        self.outbox.finish()

    @property
    def outstanding(self) -> int:
        return len(self.pending)

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
            or self.decided is not None
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
            rows_offset = self.arena.place(1, session.vocab_size)
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
            submission.rows_offset = self.arena.place(submission.raw_rows, submission.session.vocab_size)
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
        tokens, results = self.outbox.tokens + submission.n_tokens, self.room.results_taken + submission.n_results
        self.decided = self._entered, (submission, packed, stream, tokens, results)
        self._entered(submission, packed, stream, tokens, results)
        self.decided = None

    def _entered(
        self, submission: Submission, packed: Packed, stream: TokenStream | None, tokens: int, results: int
    ) -> None:
        first, last, session, outbox = (
            submission.first_request,
            submission.last_request,
            submission.session,
            self.outbox,
        )
        if submission.raw_rows:
            assert self.arena is not None
            self.arena.take(submission.rows_offset, submission.raw_rows, session.vocab_size)
        if first == last:
            self.pending[first] = submission
        else:
            self.pending.update(dict.fromkeys(range(first, last + 1), submission))
        self._ids.add(submission.id)
        session.goes_on(first, submission.start, submission.tokens)
        outbox.tokens = tokens
        if not outbox.waiting or outbox.waiting[-1] is not packed:
            outbox.waiting.append(packed)
        self._next_request = last + 1
        self.room.results_taken = results
        session._position = submission.start + submission.n_tokens
        session.unfed = None
        if stream is not None:
            session._stream = stream
        session._fell_back = False

    def flush(self) -> bool:
        """Send what was left for later. True if nothing is left, as far as this side knows. Raises SchedulerDied."""
        if self.outbox.waiting:
            self.under_lock(self.outbox.send_steps)
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
        self.finish()
        if self.dead is not None:
            self.check_alive()
        if session.ended is not None or session._stream is not None or session._course is not submission.course:
            session.check_free(submission.course)
        submission.start = session.placed(submission.position, submission.n_tokens + submission.further)
        return self.room.lacking(submission)

    def outstanding_of(self, session: SessionCore) -> list[Reply]:
        """What the session still waits for, in order of submission."""
        return self.under_lock(
            lambda: list(dict.fromkeys(p.reply for p in self.pending.values() if p.session is session))
        )

    # --- taking back ----------------------------------------------------------------------------------------------------

    def withdraw(self, reply: Reply) -> bool:
        """Ask the scheduler to cancel a submission. False if it was answered before."""
        return self.under_lock(self._withdraw, reply)

    def _withdraw(self, reply: Reply) -> bool:
        if reply.withdrawn:
            return True
        submission = self.pending.get(reply.last_request)
        if submission is None or submission.reply is not reply or self.dead is not None:
            return False
        session, first, position = submission.session, submission.first_request, submission.start
        if isinstance(reply, TokenStream):
            reply.hold()
            position = reply.resume_at
        elif not session.rewinds.reach(position):
            # An engine that cannot rewind to there keeps the chunks that have run.
            first = next(r for r in range(first, reply.last_request + 1) if r in self.pending)
            position = submission.position_of(first)
        # What was submitted after it goes with it, also where that had rewound the session further.
        position = session.earliest_from(first, position)
        frame = to_be_sent(frames.Cancel(session.session_id, first, position))
        self.decide(self._withdrawn, session, reply, self._next_request, position, frame)
        return True

    def _withdrawn(self, session: SessionCore, reply: Reply, next_request: int, position: int, frame: Outgoing) -> None:
        session.rewound(next_request, position)
        reply.withdraw()
        try:
            self.outbox.send_once(frame)
            failpoints.hit("client.cancel.sent")
        except SchedulerDied:
            # The receiver sees the same, and ends everything.
            pass

    def submitted(self, reply: Reply) -> bool:
        """Whether it is on its way."""
        submission = self.pending.get(reply.last_request)
        return submission is not None and submission.reply is reply

    def take_back(self, reply: Reply) -> None:
        """An interrupt has kept it from whoever submitted it, if it was submitted at all: nobody waits for it."""
        submission = self.pending.get(reply.last_request)
        if submission is None or submission.reply is not reply:
            return
        rewinds = submission.session.rewinds
        if rewinds is Rewinds.ANYWHERE or (rewinds.reach(submission.start) and not isinstance(reply, TokenStream)):
            self.withdraw(reply)
        elif isinstance(reply, TokenStream):
            self.halt(reply)

    def halt(self, stream: TokenStream) -> None:
        """Let the step of a generation that is queued or runs be its last."""
        self.under_lock(self._halt, stream)

    def _halt(self, stream: TokenStream) -> None:
        last = self.pending.get(stream.last_request)
        if last is not None and self.dead is None:
            try:
                self.outbox.send(frames.Halt(last.session.session_id, stream.last_request))
            except SchedulerDied:
                # The receiver sees the same, and fails it.
                pass

    def let_go_on(self, stream: TokenStream) -> None:
        """Whoever held it to cancel it was kept from that, if it is not cancelled now."""
        self.under_lock(stream.go_on)

    # --- what arrivals do under the lock; each may be done again ---------------------------------------------------------

    def settled(self, requests: list[int], ids: list[int]) -> None:
        """These steps are over, and the submissions that had these ids."""
        self._ids.difference_update(ids)
        pending = self.pending
        for request in requests:
            submission = pending.get(request)
            if (
                submission is not None
                and submission.session._stream is submission.reply
                and request == submission.last_request
            ):
                # The session is free from here on, though the stream itself is told of its end later, outside the lock.
                submission.session._stream = None
            pending.pop(request, None)

    def free_rows(self, offsets: list[int]) -> None:
        for offset in offsets:
            if offset != NO_ROWS and self.arena is not None:
                self.arena.free(offset)

    def tell_of_room(self) -> None:
        for tell in self.wait_for_room:
            tell()
        self.wait_for_room = []

    # ---------------------------------------------------------------------------------------------------------------------

    def outstanding_replies(self) -> list[Reply]:
        """For a forked child, which must not take the lock."""
        return [submission.reply for submission in list(self.pending.values())]
