"""What one call submits, and how it travels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shmsched.arguments import LONGEST_S, STRANGE, number, shown, whole
from shmsched.client.tokens import as_tokens, packed_tokens
from shmsched.dataplane.layouts import SAMPLING
from shmsched.errors import DeadlineExceeded, Full, InvalidRequest
from shmsched.params import OutputRows, SamplingParams
from shmsched.steps import Tokens
from shmsched.wire.frames import (
    MAX_STOP_TOKENS,
    STEP_DESCRIPTOR,
    WANTED,
    WANTED_AFTER_ROWS,
    WANTED_BEFORE_ROWS,
    StepFlags,
)

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course
    from shmsched.client.replies import Reply
    from shmsched.client.session_core import SessionCore

SAMPLED, MORE = int(StepFlags.SAMPLED), int(StepFlags.MORE)
UNSAMPLED = bytes(SAMPLING.size)
LAST = OutputRows.LAST
NO_ROWS = -1
FARTHEST = 1e300
"""What is more than LONGEST_S ahead is a time of another clock."""


class Submission:
    """What one call submits: checked, and divided into chunks that the engine takes. Once it is sent, its steps on their way.

    ``position`` and ``request_id`` may be left open (None): they are filled in when it is sent, by where the session stands then.
    """

    # A decode, as most are, is as the class has it, but for what must be said of each: 0.3 us to make, where it takes 0.9 to fill
    # slots for all of it.
    position: int | None = None
    request_id: int | None = None
    id: int
    """What its response says: ``request_id``, or one that was free, once it is sent."""
    reply: Reply
    first_request: int
    """The numbers of its first and last step on the wire, once it is sent."""
    last_request: int
    start: int
    """Where it starts, once it is placed."""
    course: Course | None = None
    """The generation that it belongs to."""
    n_steps = 1
    n_tokens = 1
    output_rows = LAST
    n_rows = 1
    raw_rows = 0
    """How many rows of the arena its answer takes."""
    rows_offset = NO_ROWS
    n_results = 1
    """How many sampled tokens its answer has."""
    deadline = 0.0
    """In seconds of ``time.monotonic()``; 0 for none."""
    further = 0
    """How many decodes the scheduler may queue after it, and what ends them."""
    stop_tokens: tuple[int, ...] = ()

    def __init__(
        self,
        session: SessionCore,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float | None,
        course: Course | None = None,
        request_id: int | None = None,
    ) -> None:
        """Raises InvalidRequest for what can never be done."""
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling is {shown(sampling)}; a SamplingParams, or None for raw logits, is wanted")
        self.session = session
        self.sampling = sampling
        self.tokens = packed_tokens(tokens, session.vocab_size)
        """int32, little-endian, 4 bytes each."""
        if position is not None:
            self.position = position
        if course is not None:
            self.course = course
        if request_id is not None:
            self.request_id = request_id
        if deadline is not None:
            self.deadline = checked_deadline(deadline)
        n = len(self.tokens) >> 2
        if n != 1:
            self.n_tokens = n
            self.n_steps = -(-n // session.chunk_size)
        if output_rows is not LAST or sampling is None:
            if output_rows is not LAST:
                self.output_rows = _output_rows(output_rows)
            self.n_rows = n_rows = self.output_rows.count(n)
            self.raw_rows, self.n_results = (n_rows, 0) if sampling is None else (0, n_rows)
        if self.n_steps > 1:
            if self.output_rows is OutputRows.ALL:
                raise InvalidRequest(
                    f"output_rows=ALL with {n} tokens; they must fit one chunk of {session.chunk_size}"
                )
            if request_id is not None:
                raise InvalidRequest(f"request {request_id} has {n} tokens; a step has at most {session.chunk_size}")

    def position_of(self, request: int) -> int:
        """Where the step with this number starts."""
        return self.start + (request - self.first_request) * self.session.chunk_size

    def describe(self) -> bytes:
        """The descriptors of its steps, packed; only the last one asks for output. The session remembers what a plain one wants."""
        session, sampling = self.session, self.sampling
        packed, flags = (UNSAMPLED, 0) if sampling is None else (session.packed(sampling), SAMPLED)
        rows_offset = self.rows_offset if self.raw_rows else 0
        before, last = (self.n_steps - 1) * session.chunk_size, self.last_request
        described = STEP_DESCRIPTOR.pack(
            last, session.session_id, self.n_tokens - before, self.start + before, self.output_rows, flags, packed, rows_offset,
            self.further, len(self.stop_tokens), self.deadline,
        )  # fmt: skip
        if not before:
            if self.output_rows is LAST and not (self.further or self.stop_tokens or self.deadline):
                wanted = described[-WANTED.size :]
                session._usual = sampling, wanted[WANTED_BEFORE_ROWS], wanted[WANTED_AFTER_ROWS]
            return described
        steps = [
            STEP_DESCRIPTOR.pack(
                request, session.session_id, session.chunk_size, self.position_of(request), OutputRows.NONE, flags | MORE,
                packed, rows_offset, 0, 0, self.deadline,
            )
            for request in range(self.first_request, last)
        ]  # fmt: skip
        return b"".join([*steps, described])


class Decode(Submission):
    """The next token of a session, wanted as its last plain step was: nothing about it is to be checked, or said, anew."""

    def __init__(
        self,
        session: SessionCore,
        token: bytes,
        start: int,
        request: int,
        request_id: int,
        reply: Reply,
        rows_offset: int,
    ) -> None:
        """``rows_offset``: of its row of raw logits, or NO_ROWS."""
        self.session = session
        self.tokens = token
        self.start = start
        self.first_request = self.last_request = reply.last_request = request
        self.id = request_id
        self.reply = reply
        if rows_offset != NO_ROWS:
            self.rows_offset, self.raw_rows, self.n_results = rows_offset, 1, 0


def _output_rows(value: object) -> OutputRows:
    """Raises InvalidRequest if ``value`` is none."""
    try:
        return OutputRows(value)  # type: ignore[arg-type]
    except STRANGE:
        # A value that cannot even be compared.
        raise InvalidRequest(f"output_rows is {shown(value)}; OutputRows.NONE, LAST or ALL is wanted") from None


@contextmanager
def waiting_until(deadline: float | None) -> Iterator[float | None]:
    """Gives how many seconds may be waited for a session to begin with; None without a deadline.

    Raises InvalidRequest if it is none, and DeadlineExceeded where it has passed, by then or while a slot was waited for.
    """
    left = None if deadline is None else checked_deadline(deadline) - time.monotonic()
    if left is not None and left <= 0:
        raise DeadlineExceeded(
            f"deadline {deadline!r} was {-left:.3g} s ago as the call was made; nothing was submitted"
        )
    try:
        yield left
    except Full as e:
        if left is None:
            raise
        raise DeadlineExceeded(f"{e}; by then its deadline had passed, and nothing was submitted") from e


def checked_deadline(value: object) -> float:
    """As a frame carries it. Raises InvalidRequest if ``value`` is none."""
    deadline = number("deadline", value, 0.0, FARTHEST, where="(a time of time.monotonic()), or None")
    if not deadline:
        raise InvalidRequest(f"deadline is {shown(value)}; a time of time.monotonic(), or None, is wanted")
    ahead = deadline - time.monotonic()
    if ahead > LONGEST_S:
        raise InvalidRequest(
            f"deadline is {shown(value)}, {ahead:,.0f} s ahead; at most {LONGEST_S:,.0f} s are allowed."
            " It is a time of time.monotonic(), not of time.time()"
        )
    return deadline


def continued(
    session: SessionCore,
    tokens: Tokens,
    sampling: SamplingParams,
    further: int,
    stop_tokens: tuple[int, ...],
    deadline: float | None,
    course: Course | None,
) -> Submission:
    """What a session's ``stream`` submits. Raises InvalidRequest."""
    further = whole("further", further, 0, 2**31 - 1)
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest(f"sampling is {shown(sampling)}; the engine samples what the scheduler goes on with")
    stops = checked_stops(stop_tokens, session.vocab_size)
    if len(stops) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"stop_tokens has {len(stops)} tokens; the scheduler takes at most {MAX_STOP_TOKENS}."
            " Client-driven steps (continuation=False) take any number"
        )
    submission = Submission(session, tokens, None, sampling, LAST, deadline, course)
    submission.further, submission.stop_tokens = further, stops
    return submission


def checked_stops(stop_tokens: object, vocab_size: int) -> tuple[int, ...]:
    """Each token of ``stop_tokens``. Raises InvalidRequest that names what is none."""
    if not isinstance(stop_tokens, Iterable) or isinstance(stop_tokens, str | bytes):
        raise InvalidRequest(
            f"stop_tokens is {shown(stop_tokens)}; a collection of tokens is wanted (None for the model's own, where generating)"
        )
    try:
        tokens = list(stop_tokens)
    except STRANGE as e:
        raise InvalidRequest(f"stop_tokens is {shown(stop_tokens)}, which cannot be iterated over: {e}") from e
    return tuple(as_tokens(tokens, vocab_size, "stop_tokens").tolist()) if tokens else ()
