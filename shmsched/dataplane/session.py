"""What the daemon holds of steps, of their sessions, and of the client and the engine that each of them has.

A port is one side's state as far as a step's way needs it; the daemon's links to clients and engines extend them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from typing import Any

from shmsched.dataplane.layouts import RECORD, RESULT, SAMPLING, STREAMED, ClientLayout
from shmsched.dataplane.queues import StepQueues
from shmsched.dataplane.rings import RecordRing, TokenReader
from shmsched.dataplane.step import QueuedStep, StepState
from shmsched.errors import ErrorCode, ProtocolError
from shmsched.not_copied import not_copied
from shmsched.saying import say_trace

QUEUED = StepState.QUEUED
SPEC = struct.Struct(f"<HH{SAMPLING.size}sQQ")
"""What of a step's entry in a batch slot is the same for every step that wants the same: from ``output_rows`` on."""


class SessionState(Enum):
    WAITING = "waiting"
    """No engine has a free slot yet."""
    OPENING = "opening"
    """It has a slot; the engine has not confirmed it."""
    OPEN = "open"
    ENDED = "ended"


class Generation:
    """Decodes that the scheduler queues by itself, each with the token that the one before it gave."""

    __slots__ = ("further", "stop_tokens")
    __reduce__ = not_copied

    def __init__(self, further: int, stop_tokens: frozenset[int]) -> None:
        self.further = further
        """How many may still follow."""
        self.stop_tokens = stop_tokens


class StepSpec:
    """What is wanted of a step. Steps that want the same share it: nearly all of a client's."""

    __slots__ = ("deadline", "entry", "generation", "more", "output_rows", "rows_offset", "sampled", "wrong")
    __reduce__ = not_copied

    def __init__(
        self,
        entry: bytes,
        output_rows: int,
        sampled: bool,
        rows_offset: int = 0,
        more: bool = False,
        deadline: float = 0.0,
        generation: Generation | None = None,
        wrong: str = "",
    ) -> None:
        self.entry = entry
        """As SPEC packs it: the engine's business."""
        self.output_rows = output_rows
        self.sampled = sampled
        """Tokens answer it, and not the logits themselves."""
        self.rows_offset = rows_offset
        """Where its rows of logits lie in the client's arena."""
        self.more = more
        """It is a part of a submission, and not the last: nobody waits for it."""
        self.deadline = deadline
        """When it must have been dispatched, by the daemon's clock, or 0."""
        self.generation = generation
        """What follows its answer, if anything may."""
        self.wrong = wrong
        """Why no step can want this, or nothing."""


class Step(QueuedStep):
    """A step as the daemon holds it: copied out of the client's memory and validated. ``Session.add`` makes it."""

    __slots__ = ("entered", "n_rows", "position", "request", "spec", "tokens")
    __reduce__ = not_copied

    session: Session
    entered: float
    """When it was queued, by the daemon's clock."""
    n_rows: int
    """How many rows of output it has."""
    position: int
    request: int
    """The client's number for it, only echoed."""
    spec: StepSpec
    tokens: bytes
    """int32, little-endian."""

    @property
    def deadline(self) -> float:
        return self.spec.deadline

    @property
    def generation(self) -> Generation | None:
        return self.spec.generation

    @property
    def n_results(self) -> int:
        """How many sampled tokens answer it."""
        return self.n_rows if self.spec.sampled else 0

    @property
    def raw_rows(self) -> int:
        """How many rows of the client's arena it holds."""
        return 0 if self.spec.sampled else self.n_rows


class Session:
    """One sequence's state in one engine. ``number`` is the daemon's; ``client_id`` is the client's own and only echoed."""

    __slots__ = (
        "client", "client_id", "cut_off", "engine", "model", "next_position", "number", "options", "outstanding", "patient", "slot",
        "state",
    )  # fmt: skip
    __reduce__ = not_copied

    def __init__(self, number: int, client: Any, client_id: int, model: str, options: bytes) -> None:
        self.number = number
        self.client = client  # a ClientPort, of which the daemon knows more
        self.client_id = client_id
        self.model = model
        self.options = options
        self.state = SessionState.WAITING
        self.patient = False
        """While it waits for a slot, it does so until its client gives up, even where no engine is left."""
        self.engine: Any = None  # or an EnginePort, of which the daemon knows more
        self.slot = -1
        self.next_position = 0
        """The end of its last step that counts: where the next one starts, or below it, to rewind."""
        self.cut_off: tuple[ErrorCode, str] | None = None
        """Why its last step that failed or was rejected did: what was submitted behind that one before its client knew fails of the
        same."""
        self.outstanding: dict[int, Step] = {}
        """Its queued and in-flight steps by number, which is their order of submission."""

    @property
    def held(self) -> int:
        """How many of its tokens its engine has taken for good: what is outstanding may change those behind them."""
        return min((step.position for step in self.outstanding.values()), default=self.next_position)

    @property
    def generating(self) -> Step | None:
        """The outstanding step of its generation. Nothing can be submitted behind it: nobody knows where it will end."""
        if not self.outstanding:
            return None
        last = self.outstanding[next(reversed(self.outstanding))]
        return None if last.spec.generation is None else last

    def add(
        self, number: int, request: int, n_tokens: int, n_rows: int, tokens: bytes, position: int, spec: StepSpec, now: float
    ) -> Step:  # fmt: skip
        """Its next step, which is outstanding from here on."""
        step = Step.__new__(Step)
        # All but rank, lane and neighbours, which are written as it is queued.
        step.number = number
        step.session = self
        step.n_tokens = n_tokens
        step.state = QUEUED
        step.entered = now
        step.n_rows = n_rows
        step.position = position
        step.request = request
        step.spec = spec
        step.tokens = tokens
        self.next_position = position + n_tokens
        self.outstanding[number] = step
        return step


class EnginePort:
    """One incarnation of an engine: what it takes, and what is queued for it."""

    __slots__ = ("linger", "max_chunk", "max_session_tokens", "model", "queues", "rewinds", "vocab_size")
    __reduce__ = not_copied

    def __init__(
        self, model: str, vocab_size: int, max_session_tokens: int, max_chunk: int, rewinds: Any, queues: StepQueues, linger: Any
    ) -> None:  # fmt: skip
        self.model = model
        self.vocab_size = vocab_size
        self.max_session_tokens = max_session_tokens
        self.max_chunk = max_chunk
        """Tokens that a step may have."""
        self.rewinds = rewinds
        """To which positions its sessions can go back."""
        self.queues = queues
        self.linger = linger
        """Who is expected back."""


class ClientPort:
    """One client: what it holds, and its segment. ``number`` is the daemon's own and never used again."""

    __slots__ = (
        "answers", "arena", "awaited", "blame", "closed", "last_request", "number", "outstanding", "outstanding_results", "records",
        "results", "ring", "sessions", "specs", "stream", "stream_read", "token_answers", "unstreamed",
    )  # fmt: skip
    __reduce__ = not_copied

    def __init__(self, number: int, view: memoryview, layout: ClientLayout) -> None:
        """``view``: its segment."""
        self.blame: Callable[[Exception], None] = say_trace
        """Ends the client's connection at the end of this turn, for a fault of ours in what is done for it alone."""
        self.number = number
        self.closed = False
        self.sessions: dict[int, Session] = {}
        """By its own numbers."""
        self.specs: dict[bytes, StepSpec] = {}
        """What steps of its wanted, by how its frames say it. Rows of logits come back to the same few places."""
        self.arena: Any = None
        """Its memory for logits, or nothing."""
        self.last_request = 0
        self.outstanding = 0
        self.outstanding_results = 0
        self.ring = TokenReader(view[: 4 * layout.ring_tokens])
        self.records = RecordRing(view[layout.records_offset :][: RECORD.size * layout.records], RECORD)
        self.results = RecordRing(view[layout.results_offset :][: RESULT.size * layout.results], RESULT)
        self.stream = RecordRing(view[layout.stream_offset :][: STREAMED.size * layout.stream], STREAMED)
        self.stream_read = 0
        self.unstreamed: dict[Step, tuple[int, float, float]] = {}
        """What found no room in the stream: the step that is queued once it has been written, and its token."""
        self.answers: list[bytes] = []
        """Records that the next ``answered`` writes, and the tokens of those that have several."""
        self.token_answers: list[bytes] = []
        self.awaited = False
        """Somebody may wait for an answer of which the client was not told."""

    @property
    def stream_room(self) -> int:
        """For how many tokens of generations that go on there is room."""
        return self.stream.capacity - (self.stream.written - self.stream_read)

    def unread(self, records_read: int, results_read: int) -> tuple[int, int]:
        """How many records and results it has not read. Raises ProtocolError if it cannot have read so far."""
        records, results = self.records, self.results
        unread_records, unread_results = records.written - records_read, results.written - results_read
        if not 0 <= unread_records <= records.capacity or not 0 <= unread_results <= results.capacity:
            raise ProtocolError(f"completions read up to {records_read}/{results_read} were never written")
        return unread_records, unread_results

    def answered(self) -> None:
        """Add the records of steps that are completed; the next announcement says so. Room was reserved at admission."""
        answers, self.answers = self.answers, []
        token_answers, self.token_answers = self.token_answers, []
        self.outstanding -= len(answers)
        if not self.closed:
            if token_answers:
                self.results.append_packed(token_answers)
            self.records.append_packed(answers)

    def streamed(self, follower: Step, token: int, logprob: float, waited: float) -> bool:
        """A generation has a token and goes on with ``follower``, which has taken over the room for its last answer.

        False where the stream has no room: the follower is then queued once the client has read. So a client that does not
        read slows its own generations, and what waits here is one token for each.
        """
        stream = self.stream
        if stream.written - self.stream_read < stream.capacity:
            stream.append(follower.request, token, logprob, waited)
            return True
        self.unstreamed[follower] = (token, logprob, waited)
        return False

    def settled_without_answer(self, step: Step) -> None:
        """The room that was reserved for its answer is free again."""
        self.outstanding -= 1
        self.outstanding_results -= step.n_results
        # One that waited for room in the stream needs it no more. A client that never reads could pile them up.
        self.unstreamed.pop(step, None)

    def drop_memory(self) -> None:
        """The client is gone. Whatever still refers to this port must not keep the client's memory mapped."""
        self.arena = None
        self.unstreamed.clear()
        self.ring = self.records = self.results = self.stream = None  # type: ignore[assignment]
