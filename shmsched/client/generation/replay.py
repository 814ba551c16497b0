"""Going on where an engine was lost: a new session, fed what the old one held."""

from __future__ import annotations

from collections.abc import Callable

from shmsched.client.generation.course import Course
from shmsched.client.generation.effects import Await, Plan, Reopen, Submit
from shmsched.errors import EngineDied, EngineError, EngineTimeout, SessionLost
from shmsched.params import OutputRows

LOST = (SessionLost, EngineDied, EngineTimeout, EngineError)
"""What ends a session and leaves its client able to open another one."""
MOST_IN_A_ROW = 3
"""Replays without a new token: what it generates from may itself be what engines die of."""


def replaying(course: Course, plan: Callable[[Course], Plan[None]]) -> Plan[None]:
    """Run ``plan``, as often as engines are lost. A token depends on its logits, seed and position, so the text goes on as
    it would have."""
    in_a_row = 0
    while True:
        sampled = len(course.sampled)
        try:
            if in_a_row:
                # What had come before may still be on its way to the caller.
                yield from course.giving()
                yield Reopen()
                course.step = None
                if course.position:
                    # What follows is to find it there, and not to stand in line with it.
                    yield Await((yield Submit(course.fed(), 0, None, OutputRows.NONE)))
            yield from plan(course)
        except LOST:
            in_a_row = 1 if len(course.sampled) > sampled else in_a_row + 1
            if in_a_row > MOST_IN_A_ROW:
                raise
        else:
            return
