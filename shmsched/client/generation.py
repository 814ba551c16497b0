"""The closed loop: each token that is sampled is the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shmsched.client.session import Session
from shmsched.steps import GREEDY, SamplingParams, Tokens


def generate_tokens(
    session: Session,
    prompt: Tokens,
    *,
    max_new_tokens: int,
    sampling: SamplingParams = GREEDY,
    stop_tokens: Collection[int] = (),
) -> Iterator[int]:
    """Prefill ``prompt``, then decode one step at a time, giving each token as it is sampled.

    Ends before a stop token, after ``max_new_tokens``, or when the session is full. Raises what ``Session.submit`` raises,
    and what its futures do. The next step is under way while the caller deals with a token, so that dealing with it costs
    the batch nothing; a caller that leaves early has it cancelled.
    """
    n_tokens = min(max_new_tokens, room_for_new_tokens(session, len(prompt)))
    future = session.submit(prompt, sampling=sampling)
    try:
        for n in range(1, n_tokens + 1):
            token = int(future.result().tokens[0])
            if token in stop_tokens:
                return
            if n < n_tokens:
                future = session.submit([token], sampling=sampling)
            yield token
    finally:
        future.cancel()


def room_for_new_tokens(session: Session, n_prompt: int) -> int:
    """How many tokens can be sampled after a prompt; at least one is asked for, so that what cannot fit is an error."""
    # The last sampled token does not enter the session.
    return max(1, session.model.info.max_session_tokens - session.position - n_prompt + 1)
