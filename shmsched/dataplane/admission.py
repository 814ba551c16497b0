"""Which steps of a client enter: everything is checked before it counts as submitted."""

from __future__ import annotations

import math
from typing import Any

from shmsched import failpoints
from shmsched.dataplane.core import Core
from shmsched.dataplane.descriptors import MAX_STOP_TOKENS, WANTED, StepFlags
from shmsched.dataplane.layouts import CACHE_LINE, GUARD, LOGIT_SIZE, SAMPLING
from shmsched.dataplane.session import SPEC, ClientPort, EnginePort, Generation, Session, SessionState, StepSpec
from shmsched.errors import ErrorCode, InvalidRequest, ProtocolError
from shmsched.not_copied import not_copied
from shmsched.params import OutputRows, SamplingParams

OPEN = SessionState.OPEN
# Plain numbers: a member of an enum takes several times as long to fetch and to compare.
SAMPLED, MORE = int(StepFlags.SAMPLED), int(StepFlags.MORE)
LAST_ROW, ALL_ROWS = int(OutputRows.LAST), int(OutputRows.ALL)
GREEDY = SAMPLING.pack(0, 0.0, 1.0, 0)[: SAMPLING.size - 8]
"""What any seed may follow."""
MOST_SPECS = 1024
"""That are remembered of a client: with a seed for each session, as many as these."""


class Rejected(Exception):
    """The step enters no queue and no count; its client is told why."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Admission:
    """Takes the steps out of what clients send."""

    __slots__ = ("core",)
    __reduce__ = not_copied

    def __init__(self, core: Core) -> None:
        self.core = core

    def admit(self, client: ClientPort, frame: Any) -> None:
        """Admit the steps of a Submit. Raises ProtocolError where it contradicts what the client was told."""
        core, ring = self.core, client.ring
        start = ring.read
        most = frame.tokens_written - start
        self._check_room(client, frame, most)
        tokens: bytes = ring.take(most)
        failpoints.hit("daemon.tokens.copied")
        now = core.clock.now()
        highest, numbers, specs = _highest_of(tokens), core.numbers, client.specs
        sessions = client.sessions
        engine: EnginePort | None = None
        steps: list[Any] = []
        at = stops = n_results = 0
        available = len(tokens)
        try:
            for request, session_id, n_tokens, position, wanted in frame.steps.briefly():
                # Only growing numbers: a repeated one could be settled by the answer to the first.
                if request <= client.last_request:
                    raise ProtocolError(f"step {request} comes after step {client.last_request}; numbers only grow")
                client.last_request = request
                begin = at
                at += 4 * n_tokens
                if at > available:
                    raise _not_announced(frame, start)
                spec = specs.get(wanted)
                if spec is None:
                    n_stops = WANTED.unpack(wanted)[5]
                    spec = self._read_spec(client, wanted, frame.stop_tokens[stops : stops + n_stops])
                    stops += n_stops
                session: Any = sessions.get(session_id)
                taken = tokens[begin:at]
                try:
                    self._check(client, session_id, session, n_tokens, position, spec, taken, highest)
                except Rejected as rejection:
                    if session is not None:
                        session.cut_off = (rejection.code, rejection.message)
                    client.tell_failed(rejection.code, rejection.message, [request], rows_held=False)  # type: ignore[attr-defined]
                    continue
                if session.engine is not engine:
                    self._enter(client, engine, steps, n_results, now)
                    engine, steps, n_results = session.engine, [], 0
                n_rows = n_tokens if spec.output_rows == ALL_ROWS else spec.output_rows
                if spec.sampled:
                    n_results += n_rows
                step = session.add(next(numbers), request, n_tokens, n_rows, taken, position, spec, now)
                steps.append(step)
                if spec.deadline != 0.0:
                    core.watch(step)
        finally:
            self._enter(client, engine, steps, n_results, now)
        if at != available:
            raise _not_announced(frame, start)
        if stops != len(frame.stop_tokens):
            raise ProtocolError(f"{len(frame.stop_tokens)} stop tokens came, which is not what the steps announce")

    def _enter(
        self, client: ClientPort, engine: EnginePort | None, steps: list[Any], n_results: int, now: float
    ) -> None:
        """New steps of the engine's sessions count as submitted, and may go into a batch, from here on."""
        if engine is not None:
            client.outstanding += len(steps)
            client.outstanding_results += n_results
            self.core.ledger.enter_many(len(steps))
            self.core.queue(engine, steps, now)
            failpoints.hit("daemon.steps.queued")

    def _check(
        self,
        client: ClientPort,
        session_id: int,
        session: Session | None,
        n_tokens: int,
        position: int,
        spec: StepSpec,
        tokens: bytes,
        highest: int,
    ) -> None:
        """Whether the step may enter. Raises Rejected. ``highest``: no token of the frame is higher."""
        if session is None or session.state is not OPEN:
            raise Rejected(ErrorCode.SESSION_CLOSED, f"session {session_id} is not open")
        engine = session.engine
        if n_tokens < 1 or n_tokens > engine.max_chunk:
            raise _invalid(f"a step of {n_tokens} tokens; at least 1 and at most {engine.max_chunk} are allowed")
        generation = spec.generation
        end = position + n_tokens
        if generation is not None:
            end += generation.further
        if end > engine.max_session_tokens:
            raise _invalid(
                f"positions up to {end} in session {session_id}; {engine.model} holds at most {engine.max_session_tokens} tokens"
            )
        if position != session.next_position:
            _check_position(session, position)
        if highest >= engine.vocab_size:
            _check_vocabulary(tokens, engine.vocab_size)
        if spec.wrong:
            raise _invalid(spec.wrong)
        if not spec.sampled and spec.output_rows:
            _check_rows(client, engine, n_tokens if spec.output_rows == ALL_ROWS else 1, spec.rows_offset)
        if session.outstanding and session.generating is not None:
            raise _invalid(
                f"session {session_id} is generating; it can be halted or cancelled, and nothing can follow it"
            )

    def _read_spec(self, client: ClientPort, wanted: bytes, stop_tokens: tuple[int, ...]) -> StepSpec:
        """What a frame says in these bytes. It is remembered, unless it is of one step alone."""
        output_rows, flags, sampling, rows_offset, further, n_stops, deadline = WANTED.unpack(wanted)
        sampled, more = bool(flags & SAMPLED), bool(flags & MORE)
        wrong, generation = "", None
        if output_rows > ALL_ROWS:
            wrong = f"output rows {output_rows} are neither NONE, LAST nor ALL"
        elif sampled and not sampling.startswith(GREEDY):
            wrong = _what_is_wrong_with(sampling)
        if further:
            generation = Generation(further, frozenset(stop_tokens))
            if not sampled or more or output_rows != LAST_ROW:
                wrong = (
                    wrong
                    or "only the last chunk of a submission, sampled and with its last row, can be followed by decodes"
                )
            elif n_stops > MAX_STOP_TOKENS:
                wrong = wrong or f"{n_stops} stop tokens; at most {MAX_STOP_TOKENS} are allowed"
        if not math.isfinite(deadline):
            wrong = wrong or f"a deadline of {deadline}"
        elif deadline > 0.0:
            deadline = self.core.clock.of(deadline)
        entry = SPEC.pack(output_rows, sampled, sampling, client.number, 0 if sampled else rows_offset)
        spec = StepSpec(entry, output_rows, sampled, rows_offset, more, deadline, generation, wrong)
        if not further and not n_stops and not deadline:
            if len(client.specs) >= MOST_SPECS:
                client.specs.clear()
            client.specs[wanted] = spec
        return spec

    def _check_room(self, client: ClientPort, frame: Any, n_tokens: int) -> None:
        """Whether the tokens can be in the ring, and the answers have a place. Raises ProtocolError."""
        n_steps, capacity = len(frame.steps), client.results.capacity
        if not 0 <= n_tokens <= client.ring.capacity:
            raise _not_announced(frame, client.ring.read)
        unread_records, unread_results = client.unread(frame.records_read, frame.results_read)
        if client.outstanding + unread_records + n_steps > client.records.capacity:
            raise ProtocolError(f"more than {client.records.capacity} steps are outstanding")
        n_results = client.outstanding_results + unread_results
        # A step has no more results than tokens, or one. Counting what they really are takes long, and is hardly ever needed.
        if n_results + n_steps + n_tokens > capacity and n_results + _results_of(frame) > capacity:
            raise ProtocolError(f"more than {capacity} sampled tokens are outstanding")


def _invalid(message: str) -> Rejected:
    return Rejected(ErrorCode.INVALID_REQUEST, message)


def _check_position(session: Session, position: int) -> None:
    if position > session.next_position:
        if session.cut_off is not None:
            raise Rejected(*session.cut_off)
        raise _invalid(
            f"position {position} leaves a gap in session {session.client_id}, which goes on at {session.next_position}"
            " (an earlier step of it may have failed)"
        )
    if not session.engine.rewinds.reach(position):
        what = f"position {position} rewinds session {session.client_id} from {session.next_position}"
        raise Rejected(ErrorCode.UNSUPPORTED, f"{what}; its engine {session.engine.rewinds.in_words}")


def _check_vocabulary(tokens: bytes, vocab_size: int) -> None:
    values = memoryview(tokens).cast("i")
    worst, least = max(values), min(values)
    if least < 0 or worst >= vocab_size:
        raise _invalid(f"token {least if least < 0 else worst} is outside the vocabulary of {vocab_size}")


def _check_rows(client: ClientPort, engine: EnginePort, n_rows: int, offset: int) -> None:
    size = 0 if client.arena is None else client.arena.size
    end = offset + n_rows * engine.vocab_size * LOGIT_SIZE
    if offset % CACHE_LINE or offset < GUARD or end + GUARD > size:
        raise _invalid(
            f"{n_rows} rows of logits at offset {offset}, with {GUARD} bytes on either side, do not lie in the arena of {size} bytes"
        )


def _what_is_wrong_with(sampling: bytes) -> str:
    top_k, temperature, top_p, seed = SAMPLING.unpack(sampling)
    try:
        SamplingParams(temperature, top_p, top_k, seed)
    except InvalidRequest as e:
        return str(e)
    return ""


def _highest_of(tokens: bytes) -> int:
    """The highest of the tokens; a negative one is higher than any other."""
    if len(tokens) == 4:
        return int.from_bytes(tokens, "little")
    return max(memoryview(tokens).cast("I"), default=0)


def _results_of(frame: Any) -> int:
    sampled = [d for d in frame.steps if d.flags & SAMPLED]
    return sum([d.n_tokens if d.output_rows > 1 else d.output_rows for d in sampled])


def _not_announced(frame: Any, read: int) -> ProtocolError:
    n_tokens = sum([d.n_tokens for d in frame.steps])
    return ProtocolError(
        f"the token ring is written up to {frame.tokens_written}, but {n_tokens} tokens are announced from {read}"
    )
