"""What is known of a generation, while it runs and afterwards; and running its plan, but for what has to be waited for."""

from __future__ import annotations

import concurrent.futures
import inspect
from typing import Any

from shmsched.client.generation.conclusion import leaving
from shmsched.client.generation.course import Course, FinishReason
from shmsched.client.generation.effects import Effect, Left, Plan, TokenArray
from shmsched.client.generation.text_stream import TextStream
from shmsched.client.generation.timings import Clock, Timings
from shmsched.client.session_core import SessionCore
from shmsched.errors import ShmschedError
from shmsched.not_copied import NotCopied
from shmsched.saying import counted
from shmsched.wire.frames import Rewinds


def _given_up(error: BaseException) -> bool:
    """Whether it was ended from outside: an interrupt and asyncio's CancelledError are no Exceptions."""
    return not isinstance(error, Exception) or isinstance(error, concurrent.futures.CancelledError | Left)


class Outcome(NotCopied):
    """The tokens of a generation so far, and how it ended."""

    def __init__(self, session: SessionCore, course: Course, plan: Plan[None], context: TokenArray) -> None:
        self.error: BaseException | None = None
        """Why it failed, if it did; its caller was given it too."""
        self._course = course
        self._plan = plan
        self._model = session.model
        self._standing = session
        self._context = context
        self._clock = Clock()
        self._reason: FinishReason | None = None
        self._effect: Effect | None = None
        """What the plan waits for."""

    @property
    def tokens(self) -> list[int]:
        """The tokens given so far. A token that stopped it is not among them."""
        return list(self._course.given)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs."""
        return self._reason

    @property
    def draft_error(self) -> ShmschedError | None:
        """Why it went on without the drafts of its ``EngineDraft``, if it did: what it gives does not depend on them."""
        return self._course.draft_error

    @property
    def timings(self) -> Timings:
        return self._clock.timings()

    @property
    def text(self) -> str:
        """What ``increments`` gives of the tokens given so far: up to the stop text if one came, and without what is held back.
        Raises Unsupported if the model has no tokenizer."""
        course = self._course
        if course.gate is not None:
            return course.text
        stream = self._text_stream()
        return "".join(map(stream.push, course.given)) + (stream.finish() if course.text_ended else "")

    def nothing_follows(self) -> None:
        """Say that no later generation goes on with this one's text: all of it is given then, also where ``max_new_tokens`` cuts it
        within a character (as U+FFFD) or at what may be the beginning of a stop text. Before its end."""
        self._course.is_last = True

    @property
    def held_back(self) -> str:
        """The text that it held back as it ended, because it may be the beginning of a stop text: a later generation of the session
        begins with it, where nothing else was fed in between."""
        return self._course.held or ""

    def __repr__(self) -> str:
        state = "running" if self._reason is None else self._reason.value
        return f"<{type(self).__name__} of {self._model.name!r}, {counted(len(self._course.given), 'token')}, {state}>"

    def _text_stream(self) -> TextStream:
        return TextStream(self._model.tokenizer.decode, self._context.tolist(), self._course.goes_on_with)

    def _increment(self, stream: TextStream | None, token: int) -> str:
        """The text that came with ``token``; ``stream`` where there is no gate."""
        if stream is not None:
            return stream.push(token)
        return self._course.pieces[-1].text

    def _last_increment(self, stream: TextStream | None) -> str:
        if not self._course.text_ended:
            return ""
        return self._course.rest_of_text if stream is None else stream.finish()

    # --- running the plan -----------------------------------------------------------------------------------------------

    def _resume(self, result: Any = None, error: BaseException | None = None) -> Effect | None:
        """Tell the plan what its last effect came to. Returns its next one; None if it has ended. Raises why it failed."""
        try:
            effect = self._plan.send(result) if error is None else self._plan.throw(error)
        except StopIteration:
            self._end(self._course.finish_reason or FinishReason.CANCELLED)
            return None
        except Left:
            self._end(self._course.finish_reason or FinishReason.CANCELLED)
            return None
        except BaseException as e:
            self._end(FinishReason.CANCELLED if _given_up(e) else FinishReason.FAILED)
            self.error = e
            raise
        self._clock.note(len(self._course.sampled))
        self._effect = effect
        return effect

    def _leave(self) -> Effect | None:
        """The caller wants no more tokens. Returns what is to be done about it first."""
        if inspect.getgeneratorstate(self._plan) != inspect.GEN_CLOSED:
            return self._resume(error=Left())
        # The collector finalizes what it finds together in any order, and found the plan before us.
        self._plan = leaving(self._course, self._standing.rewinds is Rewinds.ANYWHERE)
        return self._resume()

    def _end(self, reason: FinishReason) -> None:
        self._clock.note(len(self._course.sampled))
        self._reason = reason
        self._effect = None
        # Where an interrupt has come before the plan could say where the session stands.
        self._standing.release(self._course)
