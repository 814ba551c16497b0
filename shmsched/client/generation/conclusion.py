"""How every plan ends: nothing of it outstanding, and the session at a known position."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

from shmsched.client.generation.course import Course
from shmsched.client.generation.effects import Begin, Cancel, Halt, Next, Plan, Rest
from shmsched.client.replies import TokenStream
from shmsched.errors import ShmschedError


def concluding(course: Course, plan: Plan[None], can_rewind: Callable[[], bool]) -> Plan[None]:
    """Run ``plan``. Afterwards the session holds the prompt and all that was sampled but for the last token.

    Where the caller leaves or something fails, what the caller was not given is undone, and the session stands as if it had
    not been sampled. An engine that cannot rewind to anywhere keeps what has run; what came of it then counts as given.

    can_rewind: whether the engine can that the session is in by then.
    """
    yield Begin(course.position, course.unfed)
    try:
        yield from plan
    except GeneratorExit:
        raise
    except BaseException:
        yield from leaving(course, can_rewind())
        raise
    yield from _surely(lambda: _resting(course))


def leaving(course: Course, can_rewind: bool) -> Plan[None]:
    """The caller has what it was given, and nothing more comes."""
    yield from _surely(lambda: _leaving(course, can_rewind))


def _surely(plan: Callable[[], Plan[None]]) -> Plan[None]:
    """Once more, where an interrupt or a second cancelling came in the middle of it."""
    try:
        yield from plan()
    except GeneratorExit:
        raise
    except BaseException:
        yield from plan()
        raise


def _resting(course: Course) -> Plan[None]:
    yield from _withdrawing(course)
    yield Rest(course.position, course.unfed, course.held)


def _leaving(course: Course, can_rewind: bool) -> Plan[None]:
    if can_rewind:
        yield from _withdrawing(course)
        course.undo()
    else:
        yield from _keeping(course)
        course.keep()
    yield Rest(course.position, course.unfed, course.held)


def _withdrawing(course: Course) -> Plan[None]:
    if course.step is not None:
        yield Cancel(course.step)


def _keeping(course: Course) -> Plan[None]:
    """Take what cannot be undone. A step that runs is waited for: to cancel it would lose the session."""
    try:
        if isinstance(course.step, TokenStream):
            yield Halt(course.step)
            while True:
                course.take((yield Next(course.step)).token)
        elif course.step is not None:
            response = yield from course.answer()
            course.take(course.token_of(response))
    except (ShmschedError, EOFError, CancelledError):
        # A stream has ended, or a step failed: there is no more to take. Anything else is an interrupt's.
        return
