"""What is known of a generation, while it runs and afterwards; and running its plan, but for what has to be waited for."""

from __future__ import annotations

import concurrent.futures
import inspect
import os
from abc import abstractmethod
from typing import Any

from shmsched.client.core import BLOCK_TIMEOUT_S
from shmsched.client.generation.conclusion import leaving
from shmsched.client.generation.course import FinishReason
from shmsched.client.generation.effects import (
    Await,
    Begin,
    Cancel,
    Continue,
    Effect,
    Halt,
    Handle,
    Left,
    Next,
    Reopen,
    Rest,
    Submit,
)
from shmsched.client.generation.start import Start
from shmsched.client.generation.text_stream import TextStream
from shmsched.client.generation.timings import Clock, Timings
from shmsched.client.submission import continued
from shmsched.errors import ShmschedError
from shmsched.not_copied import NotCopied
from shmsched.saying import counted
from shmsched.wire.frames import Rewinds


def _given_up(error: BaseException) -> bool:
    """Whether it was ended from outside: an interrupt and asyncio's CancelledError are no Exceptions."""
    return not isinstance(error, Exception) or isinstance(error, concurrent.futures.CancelledError | Left)


class Outcome(NotCopied):
    """The tokens of a generation so far, and how it ended."""

    def __init__(self, session: Any, start: Start, deadline: float | None) -> None:
        self._session = session
        self._deadline = deadline
        self._pid = os.getpid()
        self.error: BaseException | None = None
        """Why it failed, if it did; its caller was given it too."""
        self._course, self._plan, self._context = start
        self._model = session.model
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

    def _text_so_far(self) -> TextStream | None:
        """What turns tokens into text, where there is no gate."""
        if self._course.gate is not None:
            return None
        stream = self._text_stream()
        for token in self._course.given:
            stream.push(token)
        return stream

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
        self._plan = leaving(self._course, self._session.rewinds is Rewinds.ANYWHERE)
        return self._resume()

    def _perform(self, effect: Effect) -> Any:
        """Returns what it comes to; or what to await for that, where the caller is a task."""
        if type(effect) is Next:
            return effect.stream.take() or effect.stream.next()
        session, client = self._session, self._session._client
        match effect:
            case Await(step):
                return self._wait_for(step)
            case Submit(tokens, position, sampling, output_rows, other):
                course = self._course if other is None else None
                session = other or session
                return session._client._submit(
                    session, tokens, position, sampling, output_rows, self._deadline, True, BLOCK_TIMEOUT_S, course
                )
            case Continue(tokens, sampling, further, stop_tokens):
                submission = continued(session, tokens, sampling, further, stop_tokens, self._deadline, self._course)
                return client._put_stream(submission, True, BLOCK_TIMEOUT_S)
            case Cancel(handle):
                return handle.cancel()
            case Halt(stream):
                return stream.halt()
            case Begin():
                return client._channel.under_lock(self._begin, effect)
            case Rest():
                return self._rest(effect)
            case Reopen():
                return session.reopen()

    def _begin(self, begin: Begin) -> None:
        """Raises InvalidRequest where another generation goes on, or the session has moved."""
        self._session._client._check_usable()
        self._session.begin(self._course, begin.position, begin.unfed)

    def _rest(self, rest: Rest) -> None:
        session, course, stream = self._session, self._course, self._session._stream
        if session._course is course and stream is not None and not (stream.ended or stream.withdrawn):
            # An interrupt has come before the generation knew of it.
            if session.rewinds is Rewinds.ANYWHERE:
                stream.cancel()
            else:
                stream.halt()
        session._client._channel.under_lock(session.leave, course, rest.position, rest.unfed, rest.held)

    @abstractmethod
    def _wait_for(self, step: Handle) -> Any: ...

    def _end(self, reason: FinishReason) -> None:
        self._clock.note(len(self._course.sampled))
        self._reason = reason
        self._effect = None
        # Where an interrupt has come before the plan could say where the session stands.
        self._session.release(self._course)
