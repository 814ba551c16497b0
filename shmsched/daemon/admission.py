"""Whether a step may enter: everything is checked before it counts as submitted."""

from __future__ import annotations

import math

from shmsched.daemon.batch_slot import WANTED
from shmsched.daemon.state import Generation, Session, SessionState, Step, Wanted
from shmsched.dataplane.layouts import CACHE_LINE, GUARD, LOGIT_SIZE, SAMPLING
from shmsched.errors import ErrorCode, InvalidRequest, ProtocolError
from shmsched.memory.segment import Segment
from shmsched.params import OutputRows, SamplingParams
from shmsched.wire import frames
from shmsched.wire.frames import MAX_STOP_TOKENS, StepDescriptor, StepFlags

# Plain numbers: a member of an enum takes several times as long to fetch and to compare.
SAMPLED, MORE = int(StepFlags.SAMPLED), int(StepFlags.MORE)
ALL_ROWS = int(OutputRows.ALL)
GREEDY = SAMPLING.pack(0, 0.0, 1.0, 0)[:-8]
"""What any seed may follow."""


class Rejected(Exception):
    """The step enters no queue and no count; its client is told why."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def admit(
    d: StepDescriptor,
    tokens: bytes,
    are_tokens: bool,
    stop_tokens: tuple[int, ...],
    session: Session | None,
    arena: Segment | None,
    number: int,
    now: float,
) -> Step:
    """The step that the descriptor, its copied tokens and its stop tokens make, entered ``now``. Raises Rejected.

    ``are_tokens``: all of them are known to be in the vocabulary.
    """
    if session is None or session.state is not SessionState.OPEN or session.engine is None:
        raise Rejected(ErrorCode.SESSION_CLOSED, f"session {d.session} is not open")
    engine = session.engine
    offer = engine.offer
    n_tokens, position, output_rows = d.n_tokens, d.position, d.output_rows
    if not 1 <= n_tokens <= engine.limits.max_prefill_chunk_size:
        raise _invalid(
            f"a step of {n_tokens} tokens; at least 1 and at most {engine.limits.max_prefill_chunk_size} are allowed"
        )
    end = position + n_tokens
    if end + d.further > offer.max_session_tokens:
        raise _invalid(
            f"positions up to {end + d.further} in session {d.session}; {offer.model} holds at most {offer.max_session_tokens} tokens"
        )
    if position > session.next_position:
        if session.cut_off is not None:
            raise Rejected(*session.cut_off)
        raise _invalid(
            f"position {position} leaves a gap in session {d.session}, which goes on at {session.next_position}"
            " (an earlier step of it may have failed)"
        )
    if position < session.next_position and not engine.rewinds.reach(position):
        raise Rejected(
            ErrorCode.UNSUPPORTED,
            f"position {position} rewinds session {d.session} from {session.next_position}; its engine"
            f" {engine.rewinds.in_words}",
        )
    if not are_tokens:
        _check_vocabulary(tokens, offer.vocab_size)
    if output_rows > ALL_ROWS:
        raise _invalid(f"output rows {output_rows} are neither NONE, LAST nor ALL")
    n_rows = n_tokens if output_rows == ALL_ROWS else output_rows
    sampled = bool(d.flags & SAMPLED)
    if sampled:
        if not d.sampling.startswith(GREEDY):
            _check_sampling(d.sampling)
    elif n_rows:
        size = 0 if arena is None else arena.size
        end_of_rows = d.rows_offset + n_rows * offer.vocab_size * LOGIT_SIZE
        if d.rows_offset % CACHE_LINE or d.rows_offset < GUARD or end_of_rows + GUARD > size:
            raise _invalid(
                f"{n_rows} rows of logits at offset {d.rows_offset}, with {GUARD} bytes on either side, do not lie in the arena"
                f" of {size} bytes"
            )
    generation = _generation(d, stop_tokens) if d.further else None
    if session.outstanding and session.generating is not None:
        raise _invalid(f"session {d.session} is generating; it can be halted or cancelled, and nothing can follow it")
    if d.deadline and not math.isfinite(d.deadline):
        raise _invalid(f"a deadline of {d.deadline}")
    session.next_position = end
    entry = WANTED.pack(output_rows, sampled, d.sampling, session.client.number, 0 if sampled else d.rows_offset)
    plain = sampled and n_rows == 1 and generation is None
    more = bool(d.flags & MORE)
    wanted = Wanted(entry, n_rows, n_rows if sampled else 0, sampled, plain, d.deadline, generation, more)
    return Step(number, session, n_tokens, d.request, tokens, position, wanted, now)


def _generation(d: StepDescriptor, stop_tokens: tuple[int, ...]) -> Generation:
    if not d.flags & StepFlags.SAMPLED or d.flags & StepFlags.MORE or d.output_rows != OutputRows.LAST:
        raise _invalid("only the last chunk of a submission, sampled and with its last row, can be followed by decodes")
    if len(stop_tokens) > MAX_STOP_TOKENS:
        raise _invalid(f"{len(stop_tokens)} stop tokens; at most {MAX_STOP_TOKENS} are allowed")
    return Generation(d.further, frozenset(stop_tokens))


def _invalid(message: str) -> Rejected:
    return Rejected(ErrorCode.INVALID_REQUEST, message)


def _check_vocabulary(tokens: bytes, vocab_size: int) -> None:
    values = memoryview(tokens).cast("i")
    worst, least = max(values), min(values)
    if least < 0 or worst >= vocab_size:
        raise _invalid(f"token {least if least < 0 else worst} is outside the vocabulary of {vocab_size}")


def _check_sampling(sampling: bytes) -> None:
    top_k, temperature, top_p, seed = SAMPLING.unpack(sampling)
    try:
        SamplingParams(temperature, top_p, top_k, seed)
    except InvalidRequest as e:
        raise _invalid(str(e)) from None


def highest_of(tokens: bytes) -> int:
    """The highest of the tokens; a negative one is higher than any other."""
    if len(tokens) == 4:
        return int.from_bytes(tokens, "little")
    return max(memoryview(tokens).cast("I"), default=0)


def results_of(message: frames.Submit) -> int:
    sampled = [d for d in message.steps if d.flags & SAMPLED]
    return sum([d.n_tokens if d.output_rows > 1 else d.output_rows for d in sampled])


def not_announced(message: frames.Submit, read: int) -> ProtocolError:
    n_tokens = sum([d.n_tokens for d in message.steps])
    return ProtocolError(
        f"the token ring is written up to {message.tokens_written}, but {n_tokens} tokens are announced from {read}"
    )
