"""Plans for one token after the other: sampled by the engine, with the scheduler's help or without it, or by the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched.arguments import STRANGE, shown
from shmsched.client.generation.course import Course
from shmsched.client.generation.effects import Continue, Next, Plan, Submit
from shmsched.engine.sampling import NO_TOKEN, fault_of, sample
from shmsched.errors import InvalidRequest, StepFailed
from shmsched.saying import counted
from shmsched.steps import Response

LogitsProcessor = Callable[[Sequence[int], npt.NDArray[np.float32]], npt.NDArray[np.floating[Any]]]
"""``processor(tokens, row) -> row``: what the next token is sampled from.

``tokens`` are those sampled so far, without the prompt, and not to be changed. ``row`` is what the engine gave: float32
(vocab,), in shared memory and read-only. What is returned is another array of that shape, or ``row`` itself.
"""


def stepping(course: Course) -> Plan[None]:
    """Each token is a step that the client submits; the next is under way while the caller deals with the last."""
    course.step = yield Submit(course.feed, course.position, course.sampling)
    while True:
        response = yield from course.answer()
        course.take(course.token_of(response))
        if course.finish_reason is None:
            course.step = yield Submit(course.feed, course.position, course.sampling)
        yield from course.giving()
        if course.finish_reason is not None:
            return


def continuing(course: Course) -> Plan[None]:
    """The scheduler queues each decode itself."""
    stops = tuple(course.stop_tokens)
    course.step = yield Continue(course.feed, course.sampling, course.left - 1, stops)
    while course.finish_reason is None:
        sampled = yield Next(course.step)
        course.take(sampled.token)
        yield from course.giving()


def processing(course: Course, processor: LogitsProcessor) -> Plan[None]:
    """The client samples, from what ``processor`` makes of the raw logits, by the rule that the engine's host has."""
    course.reads = lambda course, response: _sample(course, processor, response)
    course.step = yield Submit(course.feed, course.position, None)
    while True:
        response = yield from course.answer()
        course.take(course.token_of(response))
        # Its rows are given back before the next ones are asked for.
        del response
        if course.finish_reason is None:
            course.step = yield Submit(course.feed, course.position, None)
        yield from course.giving()
        if course.finish_reason is not None:
            return


def _sample(course: Course, processor: LogitsProcessor, response: Response) -> int:
    assert response.logits is not None
    row = response.logits.data[0]
    given = processor(course.sampled, row)
    try:
        processed = np.asarray(given)
    except STRANGE:
        processed = np.empty(0)
    if processed.shape != row.shape or processed.dtype.kind != "f":
        what = f"an array of {given.dtype} {given.shape}" if isinstance(given, np.ndarray) else shown(given)
        raise InvalidRequest(f"the logits processor returned {what}; a row of floats of shape {row.shape} is wanted")
    tokens, _ = sample(processed[np.newaxis], [course.sampling], np.array([course.last_position]))
    token = int(tokens[0])
    if token != NO_TOKEN:
        return token
    if fault := fault_of(row):
        raise StepFailed(
            f"the step at position {course.position} of session {course.session_id} failed: row 0 of its logits, for position"
            f" {course.last_position}, has {fault}, and the logits processor left it so"
        )
    raise InvalidRequest(
        f"the logits processor left no token to sample after {counted(len(course.sampled), 'token')}: its"
        f" row has {fault_of(processed)}"
    )
