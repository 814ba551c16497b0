"""One connected client: what it holds, what it asks, what it is told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from shmsched import failpoints
from shmsched.daemon.admission import Rejected, admit, highest_of, not_announced, results_of
from shmsched.daemon.clock import Clock
from shmsched.daemon.config import ClientLimits
from shmsched.daemon.state import Session, SessionState, Step, Wanted
from shmsched.dataplane.layouts import RECORD, RESULT, STREAMED, ClientLayout, RecordKind
from shmsched.dataplane.rings import RecordRing, TokenReader
from shmsched.dataplane.step import StepState
from shmsched.errors import ErrorCode, ProtocolError
from shmsched.memory.segment import Segment
from shmsched.saying import say_trace
from shmsched.wire import frames
from shmsched.wire.peer import Peer

if TYPE_CHECKING:
    from shmsched.daemon.engine_link import EngineLink
    from shmsched.daemon.server import Daemon

TOKEN, TOKENS, LOGITS = int(RecordKind.TOKEN), int(RecordKind.TOKENS), int(RecordKind.LOGITS)

OPEN = SessionState.OPEN
_n_results = attrgetter("wanted.n_results")
MOST_KNOWN = 1024
"""Kinds of decodes that are remembered of a client, for a size of vocabulary: with a seed for each session, as many as these."""
LONGEST_MESSAGE = 1000
"""Characters of what an engine says that each of its steps' clients is told."""


class ClientLink:
    """The scheduler's side of one client. ``number`` is the daemon's own and never used again."""

    def __init__(
        self,
        number: int,
        peer: Peer,
        segment: Segment,
        layout: ClientLayout,
        limits: ClientLimits,
        has_news: Callable[[ClientLink], None],
        clock: Clock,
    ) -> None:
        """``has_news``: called when there is something for ``tell_completions`` to announce."""
        self._has_news = has_news
        self._clock = clock
        self.blame: Callable[[Exception], None] = say_trace
        """Ends the client's connection at the end of this turn, for a fault of ours in what is done for it alone."""
        self.number = number
        self.peer = peer
        self.limits = limits
        self.sessions: dict[int, Session] = {}
        self.arena: Segment | None = None
        self.arenas_given = 0
        self.models_told: set[str] = set()
        self.closed = self.arena_requested = False
        self.outstanding = 0
        self.outstanding_results = 0
        self.option_bytes = 0
        """Of its sessions that are not open yet."""
        self.segment_size = segment.size
        view = memoryview(segment.buffer)
        self._ring = TokenReader(view[: 4 * layout.ring_tokens])
        self._enough_tokens = self._ring.capacity // 4
        """Read since the client was told, so that it is told without anything to read."""
        self._records = RecordRing(view[layout.records_offset :][: RECORD.size * layout.records], RECORD)
        self._results = RecordRing(view[layout.results_offset :][: RESULT.size * layout.results], RESULT)
        self._last_request = 0
        self._known: defaultdict[int, dict[bytes, Wanted]] = defaultdict(dict)
        """What steps of its wanted that had one row, by the size of the vocabulary and by how its frames say it. Rows of logits
        come back to the same few places."""
        self._stream = RecordRing(view[layout.stream_offset :][: STREAMED.size * layout.stream], STREAMED)
        self._stream_read = 0
        self._unstreamed: dict[Step, tuple[int, float, float]] = {}
        """What found no room in the stream: the step that is queued once it has been written, and its token."""
        self._told = frames.Completions(0, 0, 0, 0)
        self._told_at = 0.0
        self._awaited = False  # somebody may wait for an answer of which the client was not told

    # --- what it asks ---------------------------------------------------------------------------------------------------

    def submit(self, message: frames.Submit, daemon: Daemon) -> None:
        """Admit the steps of a frame. Raises ProtocolError where the frame contradicts what the client was told."""
        ring = self._ring
        start = ring.read
        n_tokens = message.tokens_written - start
        self._check_room(message, n_tokens)
        tokens = ring.take(n_tokens)
        failpoints.hit("daemon.tokens.copied")
        now = self._clock.now()
        admitted: dict[EngineLink, list[Step]] = {}
        try:
            n_admitted, n_stop_tokens = self._admit_all(message, tokens, now, admitted, daemon)
        finally:
            for engine, steps in admitted.items():
                self.outstanding += len(steps)
                self.outstanding_results += sum(map(_n_results, steps))
                daemon.take_in(engine, steps, now)
        if n_admitted != n_tokens:
            raise not_announced(message, start)
        if n_stop_tokens != len(message.stop_tokens):
            raise ProtocolError(f"{len(message.stop_tokens)} stop tokens came, which is not what the steps announce")
        if ring.read - self._told.tokens_read >= self._enough_tokens:
            self._has_news(self)
        if message.stream_read != self._stream_read:
            self._consumed_stream(message.stream_read, daemon)

    def _admit_all(
        self, message: frames.Submit, tokens: bytes, now: float, admitted: dict[EngineLink, list[Step]], daemon: Daemon
    ) -> tuple[int, int]:
        """Admit step by step. Returns how many tokens and stop tokens the steps announce.

        Most steps are the next decode of an open session, and want what an earlier one wanted, which was checked then: these
        take 1.3 us each. Every other one takes the full checks, and 6 us.
        """
        sessions, numbers, last = self.sessions, daemon.numbers, self._last_request
        known: dict[bytes, Wanted] = {}
        highest, available = highest_of(tokens), len(tokens)
        engine: EngineLink | None = None
        steps: list[Step] = []
        room = at = stops = 0
        are_tokens = False
        rows = message.steps
        assert isinstance(rows, frames.StepRows)
        for request, session_id, n_tokens, position, wanted in rows.briefly():
            # Only growing numbers: a repeated one could be settled by the answer to the first.
            if request <= last:
                raise ProtocolError(f"step {request} comes after step {last}; numbers only grow")
            last = request
            end = at + 4 * n_tokens
            if end > available:
                raise not_announced(message, message.tokens_written - available // 4)
            session = sessions.get(session_id)
            if session is not None:
                if session.engine is not engine:
                    engine = session.engine
                    room = 0
                    if engine is not None:
                        steps = admitted.setdefault(engine, [])
                        known = self._known[engine.offer.vocab_size]
                        are_tokens = highest < engine.offer.vocab_size
                        room = engine.offer.max_session_tokens if are_tokens else 0
                if (
                    n_tokens == 1
                    and position == session.next_position
                    and position < room
                    and wanted in known
                    and session.state is OPEN
                    and not (session.outstanding and session.generating)
                ):
                    number = next(numbers)
                    step = Step(number, session, 1, request, tokens[at:end], position, known[wanted], now)
                    session.next_position = position + 1
                    session.outstanding[number] = step
                    steps.append(step)
                    at = end
                    continue
            d = frames.StepDescriptor(request, session_id, n_tokens, position, *frames.WANTED.unpack(wanted))
            stop_tokens = message.stop_tokens[stops : stops + d.n_stop_tokens]
            stops += d.n_stop_tokens
            if d.deadline > 0.0:
                d = d._replace(deadline=self._clock.of(d.deadline))
            try:
                step = admit(d, tokens[at:end], are_tokens, stop_tokens, session, self.arena, next(numbers), now)
            except Rejected as rejection:
                if session is not None:
                    session.cut_off = (rejection.code, rejection.message)
                self.tell_failed(rejection.code, rejection.message, [request], rows_held=False)
            else:
                step.session.outstanding[step.number] = step
                steps.append(step)
                if step.deadline:
                    daemon.deadlines.add(step)
                elif step.wanted.n_rows == 1 and step.wanted.generation is None and not d.n_stop_tokens:
                    if len(known) >= MOST_KNOWN:
                        known.clear()
                    known[wanted] = step.wanted
            at = end
        self._last_request = last
        return at // 4, stops

    def consumed(self, message: frames.Consumed, daemon: Daemon) -> None:
        """The client has read: generations that waited for room go on."""
        self._unread(message.records_read, message.results_read)
        self._consumed_stream(message.stream_read, daemon)

    def halt(self, session_id: int, request: int) -> None:
        """The outstanding step of the generation is its last."""
        session = self.sessions.get(session_id)
        step = session.generating if session is not None else None
        if step is not None and step.generation is not None and step.request == request:
            step.generation.further = 0

    def _check_room(self, message: frames.Submit, n_tokens: int) -> None:
        n_steps, capacity = len(message.steps), self._results.capacity
        if not 0 <= n_tokens <= self._ring.capacity:
            raise not_announced(message, self._ring.read)
        unread_records, unread_results = self._unread(message.records_read, message.results_read)
        if self.outstanding + unread_records + n_steps > self._records.capacity:
            raise ProtocolError(f"more than {self._records.capacity} steps are outstanding")
        n_results = self.outstanding_results + unread_results
        # A step has no more results than tokens, or one. Counting what they really are takes long, and is hardly ever needed.
        if n_results + n_steps + n_tokens > capacity and n_results + results_of(message) > capacity:
            raise ProtocolError(f"more than {capacity} sampled tokens are outstanding")

    def _unread(self, records_read: int, results_read: int) -> tuple[int, int]:
        records, results = self._records, self._results
        unread_records, unread_results = records.written - records_read, results.written - results_read
        if not 0 <= unread_records <= records.capacity or not 0 <= unread_results <= results.capacity:
            raise ProtocolError(f"completions read up to {records_read}/{results_read} were never written")
        return unread_records, unread_results

    def _consumed_stream(self, read: int, daemon: Daemon) -> None:
        if not self._stream_read <= read <= self._stream.written:
            raise ProtocolError(
                f"streamed tokens read up to {read}; they are written from {self._stream_read} to {self._stream.written}"
            )
        self._stream_read = read
        while self._unstreamed and self.stream_room:
            step = next(iter(self._unstreamed))
            self._stream.append(step.request, *self._unstreamed.pop(step))
            self._has_news(self)
            step.entered = self._clock.now()
            daemon.queue(step)

    @property
    def stream_room(self) -> int:
        """For how many tokens of generations that go on there is room."""
        return self._stream.capacity - (self._stream.written - self._stream_read)

    def cancel(self, message: frames.Cancel, daemon: Daemon) -> None:
        """Cancel what is outstanding of a session from one of the client's step numbers on."""
        session = self.sessions.get(message.session)
        if session is None:
            return
        first = 2**63
        for number, step in reversed(session.outstanding.items()):
            if step.request < message.request:
                break
            first = number
        if self._runs_past(session, message.position):
            daemon.sessions.end(
                session,
                ErrorCode.SESSION_LOST,
                f"session {session.client_id} is lost: a step was cancelled that its engine has taken already, and the engine"
                f" {session.engine.rewinds.in_words if session.engine else ''}",
            )
            return
        daemon.settling.fail_from(session, first, message.position, ErrorCode.CANCELLED, "cancelled by its client")

    @staticmethod
    def _runs_past(session: Session, position: int) -> bool:
        """The engine has taken, or is taking, tokens from ``position`` on, and cannot give them back."""
        if session.engine is None or session.engine.rewinds.reach(position):
            return False
        queued = (step.position for step in session.outstanding.values() if step.state is StepState.QUEUED)
        return position < next(queued, session.next_position)

    # --- what it is told ------------------------------------------------------------------------------------------------

    def completed_plain(self, records: list[bytes]) -> None:
        """``completed`` for plain steps, whose records are packed."""
        self.outstanding -= len(records)
        self.outstanding_results -= len(records)
        if not self.closed:
            self._awaited = True
            self._records.append_packed(records)
            self._has_news(self)

    def completed(self, step: Step, waited: float, ids: list[int], logprobs: list[float], at: int) -> None:
        """Add the completion record; the next ``tell_completions`` announces it. Room was reserved at admission.

        The step's answers are ``ids`` and ``logprobs`` from ``at`` on.
        """
        self.outstanding -= 1
        if self.closed:
            return
        self._has_news(self)
        n = step.wanted.n_rows
        self._awaited = self._awaited or not step.wanted.more
        if not step.wanted.sampled:
            self._records.append(step.request, n, LOGITS, waited, 0, 0.0)
            return
        self.outstanding_results -= n
        if n == 1:
            self._records.append(step.request, 1, TOKEN, waited, ids[at], logprobs[at])
            return
        if n:
            self._results.append_packed(list(map(RESULT.pack, ids[at : at + n], logprobs[at : at + n])))
        self._records.append(step.request, n, TOKENS, waited, 0, 0.0)

    def stream(self, rows: list[bytes]) -> None:
        """Write tokens of generations that go on, no more than ``stream_room``, as STREAMED packs them."""
        if rows:
            self._stream.append_packed(rows)
            self._has_news(self)

    def hold_back(self, follower: Step, token: int, logprob: float, waited: float) -> None:
        """There is no room for a token of a generation that goes on with ``follower``, which has taken over the room for its last
        answer: it is queued once the client has read.

        So a client that does not read slows its own generations, and what waits here is one token for each.
        """
        self._unstreamed[follower] = (token, logprob, waited)

    def settled_without_answer(self, step: Step) -> None:
        """The room that was reserved for its answer is free again."""
        self.outstanding -= 1
        self.outstanding_results -= step.wanted.n_results
        # One that waited for room in the stream needs it no more. A client that never reads could pile them up.
        self._unstreamed.pop(step, None)

    @property
    def last_told(self) -> frames.Completions:
        """The last announcement."""
        return self._told

    @property
    def has_unannounced(self) -> bool:
        """Something was written for the client that it was not told of."""
        if self.closed:
            return False
        return (self._records.written, self._stream.written) != (self._told.records_written, self._told.stream_written)

    def drop_memory(self) -> None:
        """The client is gone. Whatever still refers to this link must not keep the client's memory mapped."""
        self.arena = None
        self._unstreamed.clear()
        del self._ring, self._records, self._results, self._stream

    def can_hear_later(self, now: float, pause_s: float) -> bool:
        """Whether all that it would be told of is that parts of submissions have run; or a few tokens of generations that go on
        anyway, and it was told something less than ``pause_s`` ago.

        Each time that it is told takes 50 us of it and the daemon: of engines that take less than a step of that it hears
        several at once; and whoever waits for the answers of the same batch is told before.
        """
        if self.closed:
            return False
        streamed = self._stream.written != self._told.stream_written
        return (
            (now - self._told_at < pause_s if streamed else self._records.written != self._told.records_written)
            and not self._awaited
            and self._stream.written - self._told.stream_written <= self._stream.capacity // 4
            and self._ring.read - self._told.tokens_read < self._enough_tokens
        )

    def tell_completions(self) -> None:
        """Announce what was written since the last time, if anything, or that much of the token ring is free."""
        if self.closed:
            return
        written, streamed, read = self._records.written, self._stream.written, self._ring.read
        records, _, stream, tokens = self._told
        if written != records or streamed != stream or read - tokens >= self._enough_tokens:
            for ring in (self._records, self._results, self._stream):
                if ring.waiting:
                    ring.publish()
            failpoints.hit("daemon.completions.written")
            self._told = frames.Completions(written, self._results.written, streamed, read)
            self._told_at = self._clock.now()
            self._awaited = False
            self.peer.send(self._told)
            failpoints.hit("daemon.completions.half_sent", self.peer.flush_half)

    def tell_failed(self, code: ErrorCode, message: str, requests: list[int], rows_held: bool) -> None:
        # A generation's tokens come before the word that it failed, or nobody would know what they are.
        self.tell_completions()
        self.tell(frames.Failed(code, rows_held, message[:LONGEST_MESSAGE], tuple(requests)))

    def tell(self, message: Any, fd: int = -1) -> None:
        """Queue a frame for the client; nothing is said to one that is gone."""
        if not self.closed:
            self.peer.send(message, fd)

    def options_done(self, session: Session) -> None:
        """Its engine has them, or never will."""
        self.option_bytes -= len(session.options)
        session.options = b""

    def end_session(self, session: Session, code: ErrorCode, message: str) -> None:
        """The client is told that a session of its is gone."""
        message = message[:LONGEST_MESSAGE]
        if self.sessions.pop(session.client_id, None) is not None:
            if session.state is SessionState.OPEN:
                self.tell(frames.SessionEnded(session.client_id, code, message))
            else:
                self.tell(frames.SessionRefused(session.client_id, code, message))

    def return_rows(self, step: Step) -> None:
        """No engine writes into the rows of a step that ended without an answer: they are the client's again."""
        if step.raw_rows:
            self.tell(frames.Returned((step.request,)))
