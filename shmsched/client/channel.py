"""What a client does with its port besides submitting, all of it under the port's lock: cancelling, and looking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shmsched import failpoints
from shmsched.client.replies import TokenStream
from shmsched.dataplane.client_port import MOST_TOGETHER, ClientPort
from shmsched.dataplane.layouts import RECORD, RESULT, STREAMED, ClientLayout
from shmsched.dataplane.rings import RecordReader, TokenWriter
from shmsched.dataplane.session_core import SessionCore
from shmsched.dataplane.submission import PendingResult
from shmsched.errors import SchedulerDied
from shmsched.memory.segment import Segment
from shmsched.wire import frames
from shmsched.wire.codec import pack
from shmsched.wire.frames import Rewinds
from shmsched.wire.framing import framed
from shmsched.wire.link import Link, Outgoing, outgoing

T = TypeVar("T")


class Channel(ClientPort):
    """A client's port over its segment. ``Arrivals`` settles what it submits."""

    def __init__(self, link: Link, welcome: frames.Welcome, segment: Segment) -> None:
        layout = ClientLayout(welcome.ring_tokens, welcome.records, welcome.results, welcome.stream)
        view = memoryview(segment.buffer)
        ring = TokenWriter(view[: 4 * layout.ring_tokens])
        records = RecordReader(view[layout.records_offset :][: RECORD.size * layout.records], RECORD.size)
        results = RecordReader(view[layout.results_offset :][: RESULT.size * layout.results], RESULT.size)
        stream = RecordReader(view[layout.stream_offset :][: STREAMED.size * layout.stream], STREAMED.size)
        super().__init__(link, ring, records, results, stream)
        self.max_arena = welcome.max_arena
        self.rings = records, results, stream
        """What the scheduler writes. They are for ``Arrivals`` to read."""
        self._link: Link = link

    @property
    def outstanding(self) -> int:
        return len(self.pending)

    @property
    def full(self) -> bool:
        """No more may wait to be sent together."""
        return len(self.waiting) >= MOST_TOGETHER

    def under_lock(self, do: Callable[..., T], *arguments: Any) -> T:
        """``do`` it under the lock. What is done for every step does the same by itself."""
        try:
            with self.lock:
                self.finish()
                return do(*arguments)
        except BaseException:
            self.interrupted()
            raise

    def decide(self, do: Callable[..., None], *arguments: Any) -> None:
        """The caller holds the lock. ``do`` raises nothing of its own accord."""
        self.decided = do, arguments
        do(*arguments)
        self.decided = None

    def flush(self) -> bool:
        """Send what was left for later. True if nothing is left, as far as this side knows. Raises SchedulerDied."""
        if self.waiting:
            self.under_lock(self.send_steps)
        return self._link.flush()

    def outstanding_of(self, session: SessionCore) -> list[PendingResult]:
        """What the session still waits for, in order of submission."""
        return self.under_lock(
            lambda: list(dict.fromkeys(p.reply for p in self.pending.values() if p.session is session))
        )

    # --- taking back ----------------------------------------------------------------------------------------------------

    def withdraw(self, reply: PendingResult) -> bool:
        """Ask the scheduler to cancel a submission. False if it was answered before."""
        return self.under_lock(self._withdraw, reply)

    def _withdraw(self, reply: PendingResult) -> bool:
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

    def _withdrawn(
        self, session: SessionCore, reply: PendingResult, next_request: int, position: int, frame: Outgoing
    ) -> None:
        session.rewound(next_request, position)
        reply.withdraw()
        try:
            self.send_once(frame)
            failpoints.hit("client.cancel.sent")
        except SchedulerDied:
            # The receiver sees the same, and ends everything.
            pass

    def submitted(self, reply: PendingResult) -> bool:
        """Whether it is on its way."""
        submission = self.pending.get(reply.last_request)
        return submission is not None and submission.reply is reply

    def take_back(self, reply: PendingResult) -> None:
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
                self.send(frames.Halt(last.session.session_id, stream.last_request))
            except SchedulerDied:
                # The receiver sees the same, and fails it.
                pass

    def let_go_on(self, stream: TokenStream) -> None:
        """Whoever held it to cancel it was kept from that, if it is not cancelled now."""
        self.under_lock(stream.go_on)

    def outstanding_replies(self) -> list[PendingResult]:
        """For a forked child, which must not take the lock."""
        return [submission.reply for submission in list(self.pending.values())]


def to_be_sent(message: Any) -> Outgoing:
    """For ``send_once``."""
    return outgoing(framed(pack(message)))
