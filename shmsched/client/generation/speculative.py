"""Speculative decoding by the caller: many tokens are guessed, and verified in one step."""

from __future__ import annotations

from shmsched.client.generation.course import Course
from shmsched.client.generation.distribution import verify
from shmsched.client.generation.drafting import Draft, Drafter, EngineDraft, checked
from shmsched.client.generation.effects import Plan, Submit
from shmsched.engine.sampling import UnusableLogits
from shmsched.errors import StepFailed
from shmsched.params import OutputRows
from shmsched.steps import Response


def speculating(course: Course, drafter: Drafter | EngineDraft, most: int, vocab_size: int) -> Plan[None]:
    """Feed the last token and a draft of what follows, take what the model agrees with and the token that it gives then.

    A draft that was not drawn is verified against the tokens that the engine samples at its positions: what comes out is what
    would have come out without it, token for token, at any temperature. One that was drawn from a distribution is verified
    by rejection sampling from raw logits: what comes out is distributed as without it.

    most: how many tokens a step may have.
    """
    course.step = yield Submit(course.feed, course.position, course.sampling)
    response = yield from course.answer()
    course.take(course.token_of(response))
    while course.finish_reason is None:
        # The last token that comes is the model's own.
        draft = yield from _draft(course, drafter, min(course.left, most) - 1, vocab_size)
        raw = draft.distributions is not None and course.sampling.temperature > 0.0
        sampling = None if raw else course.sampling
        course.step = yield Submit([*course.feed, *draft.tokens], course.position, sampling, OutputRows.ALL)
        yield from course.giving()
        response = yield from course.answer()
        for token in _agreed(course, draft, response):
            course.take(token)
            if course.finish_reason is not None:
                break
        del response
    yield from course.giving()


def _draft(course: Course, drafter: Drafter | EngineDraft, n: int, vocab_size: int) -> Plan[Draft]:
    if n < 1:
        return Draft([])
    if isinstance(drafter, EngineDraft):
        draft = yield from drafter.drafting(course.context(), n, course.sampling)
        course.draft_error = drafter.error
        return draft
    return checked(drafter.draft(course.context(), n), n, vocab_size)


def _agreed(course: Course, draft: Draft, response: Response) -> list[int]:
    """What the model agrees with, and its own next token."""
    if response.logits is not None:
        assert draft.distributions is not None
        rows = response.logits.data
        try:
            return verify(rows, draft.tokens, draft.distributions, course.sampling, course.last_position)
        except UnusableLogits as e:
            at = f"the step at position {course.position} of session {course.session_id}"
            raise StepFailed(f"{at} failed: {e}") from e
    own: list[int] = response.tokens.tolist()
    n = 0
    while n < len(draft.tokens) and own[n] == draft.tokens[n]:
        n += 1
    return own[: n + 1]
