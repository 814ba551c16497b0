"""Checking what callers submit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shmsched.arguments import LONGEST_S, STRANGE, number, shown, whole
from shmsched.dataplane.descriptors import MAX_STOP_TOKENS
from shmsched.dataplane.session_core import GenerationState, SessionCore
from shmsched.dataplane.submission import LAST, Submission
from shmsched.dataplane.tokens import as_tokens
from shmsched.errors import DeadlineExceeded, Full, InvalidRequest
from shmsched.params import OutputRows, SamplingParams
from shmsched.steps import Tokens

FARTHEST = 1e300
"""What is more than LONGEST_S ahead is a time of another clock."""


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


def submitted(
    session: SessionCore,
    tokens: Tokens,
    position: int | None,
    sampling: SamplingParams | None,
    output_rows: OutputRows,
    deadline: float | None,
    course: GenerationState | None = None,
    request_id: int | None = None,
) -> Submission:
    """What a session's ``submit`` submits. Raises InvalidRequest."""
    until = 0.0 if deadline is None else checked_deadline(deadline)
    return Submission(session, tokens, position, sampling, output_rows, until, course, request_id)


def continued(
    session: SessionCore,
    tokens: Tokens,
    sampling: SamplingParams,
    further: int,
    stop_tokens: tuple[int, ...],
    deadline: float | None,
    course: GenerationState | None,
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
    submission = submitted(session, tokens, None, sampling, LAST, deadline, course)
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
