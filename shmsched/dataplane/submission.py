"""What one call submits, how it travels, and through what it is answered."""

from __future__ import annotations

from typing import Any

from shmsched.arguments import STRANGE, shown
from shmsched.dataplane.descriptors import STEP_DESCRIPTOR, StepFlags
from shmsched.dataplane.layouts import SAMPLING
from shmsched.dataplane.session_core import GenerationState, SessionCore
from shmsched.dataplane.tokens import packed_tokens
from shmsched.errors import InvalidRequest
from shmsched.not_copied import not_copied
from shmsched.params import OutputRows, SamplingParams
from shmsched.steps import Response, Tokens

SAMPLED, MORE = int(StepFlags.SAMPLED), int(StepFlags.MORE)
UNSAMPLED = bytes(SAMPLING.size)
LAST, ALL, NONE = OutputRows.LAST, OutputRows.ALL, OutputRows.NONE
NO_ROWS = -1


class PendingResult:
    """One submission's answer to come. The attributes are the client port's, guarded by its lock."""

    __slots__ = ("arrived", "last_request", "queue_wait", "streams", "withdrawn")
    __reduce__ = not_copied

    streams: bool
    """It is a token stream, and ``begins`` has to know of its submission."""

    last_request: int
    """The number of its last chunk on the wire."""
    withdrawn: bool
    """Its cancelling is under way: an answer that still comes does not count."""
    queue_wait: float | None
    """For how many seconds its first chunk was queued, once that is known."""
    arrived: float
    """When its answer came, in seconds of ``time.monotonic()``. Said before it is settled."""

    def __init__(self) -> None:
        self.streams = False
        self.last_request = 0
        self.withdrawn = False
        self.queue_wait = None
        self.arrived = 0.0

    def withdraw(self) -> None:
        """It is being cancelled, as is decided. Under the port's lock; once more does nothing."""
        self.withdrawn = True

    def begins(self, start: int, prompt_end: int, step_position: int) -> None:
        """It is submitted; its first outstanding step is that of the prompt's last chunk."""

    def done(self) -> bool:
        """Whether it is settled."""
        raise NotImplementedError

    def settle(self, response: Response) -> None:
        """The answer came. Like all three, it does nothing where another one came first, and may be called again."""
        raise NotImplementedError

    def settle_failed(self, error: Any) -> None:
        raise NotImplementedError

    def settle_cancelled(self) -> None:
        raise NotImplementedError


class Submission:
    """What one call submits: checked, and divided into chunks that the engine takes. Once it is sent, its steps on their way.

    ``position`` and ``request_id`` may be left open (None): they are filled in when it is sent, by where the session stands then.
    """

    __slots__ = (
        "course", "deadline", "described", "first_request", "further", "id", "last_request", "n_results", "n_rows", "n_steps",
        "n_tokens", "output_rows",
        "position", "raw_rows", "reply", "request_id", "results_then", "rows_offset", "sampling", "session", "start",
        "stop_tokens", "tokens", "tokens_then",
    )  # fmt: skip
    __reduce__ = not_copied

    reply: PendingResult
    id: int
    """What its response says: ``request_id``, or one that was free, once it is sent."""
    first_request: int
    """The numbers of its first and last step on the wire, once it is sent."""
    last_request: int
    start: int
    """Where it starts, once it is placed."""
    described: bytes
    """The descriptors of its steps, once it is sent."""
    tokens_then: int
    """How many tokens wait to be sent, and how many sampled rows are to come, with it. So it can be entered again."""
    results_then: int

    def __init__(
        self,
        session: SessionCore,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float,
        course: GenerationState | None,
        request_id: int | None,
    ) -> None:
        """``deadline``: in seconds of ``time.monotonic()``, checked; 0 for none. Raises InvalidRequest for what can never be done."""
        self.session = session
        self.position = position
        self.sampling = sampling
        self.output_rows = output_rows
        self.deadline = deadline
        self.course = course
        """The generation that it belongs to."""
        self.request_id = request_id
        self.rows_offset = NO_ROWS
        self.further = 0
        """How many decodes the scheduler may queue after it, and what ends them."""
        self.stop_tokens: tuple[int, ...] = ()
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling is {shown(sampling)}; a SamplingParams, or None for raw logits, is wanted")
        if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < session.vocab_size:
            # A decode: 0.2 us, and not the 4 that looking at an array takes.
            self.tokens = tokens[0].to_bytes(4, "little")
        else:
            self.tokens = packed_tokens(tokens, session.vocab_size)
        """int32, little-endian, 4 bytes each."""
        n = self.n_tokens = len(self.tokens) >> 2
        n_rows = self.n_steps = 1
        if n > 1:
            self.n_steps = (n + session.chunk_size - 1) // session.chunk_size
        if output_rows is not LAST:
            rows = self.output_rows = _output_rows(output_rows)
            n_rows = rows.count(n)
        self.n_rows = n_rows
        self.raw_rows = n_rows if sampling is None else 0
        """How many rows of the arena its answer takes, or else"""
        self.n_results = n_rows - self.raw_rows
        """how many sampled tokens it has."""
        if self.n_steps > 1:
            if self.output_rows is ALL:
                raise InvalidRequest(
                    f"output_rows=ALL with {n} tokens; they must fit one chunk of {session.chunk_size}"
                )
            if request_id is not None:
                raise InvalidRequest(f"request {request_id} has {n} tokens; a step has at most {session.chunk_size}")

    def position_of(self, request: int) -> int:
        """Where the step with this number starts."""
        chunk_size: int = self.session.chunk_size
        return self.start + (request - self.first_request) * chunk_size

    def describe(self) -> bytes:
        """The descriptors of its steps, packed; only the last one asks for output."""
        session, sampling = self.session, self.sampling
        packed, flags = UNSAMPLED, 0
        if sampling is not None:
            packed, flags = session.packed(sampling), SAMPLED
        rows_offset = self.rows_offset if self.raw_rows else 0
        before, last = (self.n_steps - 1) * session.chunk_size, self.last_request
        described = STEP_DESCRIPTOR.pack(
            last, session.session_id, self.n_tokens - before, self.start + before, self.output_rows, flags, packed, rows_offset,
            self.further, len(self.stop_tokens), self.deadline,
        )  # fmt: skip
        if not before:
            return described
        steps = [
            STEP_DESCRIPTOR.pack(
                request, session.session_id, session.chunk_size, self.position_of(request), NONE, flags | MORE,
                packed, rows_offset, 0, 0, self.deadline,
            )
            for request in range(self.first_request, last)
        ]  # fmt: skip
        steps.append(described)
        return b"".join(steps)


def _output_rows(value: object) -> OutputRows:
    """Raises InvalidRequest if ``value`` is none."""
    try:
        return OutputRows(value)  # type: ignore[arg-type]
    except STRANGE:
        # A value that cannot even be compared.
        raise InvalidRequest(f"output_rows is {shown(value)}; OutputRows.NONE, LAST or ALL is wanted") from None
