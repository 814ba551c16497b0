"""One session after the other that generates, each token checked as it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shmsched import (
    ClientClosed,
    DeadlineExceeded,
    Full,
    SchedulerDied,
    SchedulerStopped,
    SessionClosed,
    ShmschedError,
    StepError,
)
from shmsched.tools.load.answers import Mirror
from shmsched.tools.load.counts import Counts
from shmsched.tools.load.drawn import Draws, End, Fork, Generation, PlainStep
from shmsched.tools.load.expected import Expected
from shmsched.tools.load.flight import say_failed
from shmsched.tools.load.hands import PATIENCE_S, Flow, Hands

RETRY_S = 0.005
RETRY_AFTER_FAILURE_S = 0.1


class _Spoilt(Exception):
    """The session cannot be checked any further; what was wrong is counted."""


@dataclass(slots=True)
class _Course:
    """A generation that is under way."""

    drawn: Generation
    stream: Any
    chunks: int
    came: list[int] = field(default_factory=list)
    at: float = field(default_factory=time.monotonic)
    fault: str = ""
    """What was wrong with the first token that was."""

    @property
    def leaves_by_closing(self) -> bool:
        return self.drawn.closes or bool(self.fault)

    @property
    def wanted(self) -> bool:
        """Whether its caller waits for another token."""
        return not self.fault and (self.drawn.leave_after is None or len(self.came) < self.drawn.leave_after)

    @property
    def begun(self) -> int:
        """Steps known to have been submitted, where the last one gave no token: its chunks, and one for each token."""
        return self.chunks + len(self.came)


class Generating:
    """Opens a session, generates in it, closes it, opens the next."""

    def __init__(self, hands: Hands, counts: Counts, draws: Draws, vocab: int, max_chunk: int) -> None:
        self._hands = hands
        self._counts = counts
        self._draws = draws
        self._vocab = vocab
        self._max_chunk = max_chunk
        self.outstanding = 0
        """Steps of which it waits for the answer."""

    def run(self) -> Flow[None]:
        """Until the client's end."""
        counts = self._counts
        while not counts.over.is_set():
            try:
                session = yield self._hands.open
            except Full:
                with counts.held() as tally:
                    tally.full += 1
                yield partial(self._hands.pause, RETRY_S)
            except ShmschedError as e:
                counts.say_failed(e, 1, "opening a session to generate in")
                if isinstance(e, SchedulerDied | SchedulerStopped | ClientClosed):
                    return
                yield partial(self._hands.pause, RETRY_AFTER_FAILURE_S)
            else:
                with counts.held() as tally:
                    tally.sessions_opened += 1
                yield from self._use(session)

    def _use(self, session: Any) -> Flow[None]:
        expected = Expected(Mirror(self._vocab))
        counts = self._counts
        try:
            while not counts.over.is_set():
                drawn = self._draws.next(expected)
                match drawn:
                    case End():
                        break
                    case Generation():
                        yield from self._generate(session, expected, drawn)
                    case PlainStep():
                        yield from self._step(session, expected, drawn)
                    case Fork():
                        yield from self._fork(session, expected, drawn)
                self._check(session, expected)
        except _Spoilt:
            pass
        except ShmschedError as e:
            # Of a session that is gone, why it is gone says more than that it is.
            error = session.ended if isinstance(e, SessionClosed) and session.ended is not None else e
            counts.say_failed(error, 1, f"session {session.session_id}, a call")
            yield partial(self._hands.pause, RETRY_S)
        yield partial(self._hands.close, session)
        with counts.held() as tally:
            tally.sessions_closed += 1

    # --- generations ----------------------------------------------------------------------------------------------------

    def _generate(self, session: Any, expected: Expected, drawn: Generation) -> Flow[None]:
        try:
            stream = yield partial(self._hands.stream, session, drawn)
        except Full:
            with self._counts.held() as tally:
                tally.full += 1
            yield partial(self._hands.pause, RETRY_S)
            return
        course = _Course(drawn, stream, -(-len(drawn.tokens) // self._max_chunk))
        self.outstanding = course.chunks
        error: Exception | None = None
        try:
            while course.wanted:
                token = yield partial(self._hands.next, stream)
                self._came(course, token.token)
        except (EOFError, StepError, TimeoutError) as e:
            error = e
        taken = len(course.came)
        if error is None:
            if course.leaves_by_closing:
                yield partial(self._hands.close, session)
            else:
                stream.cancel()
            in_time = yield partial(self._hands.ended, stream)
            error = self._rest(course) if in_time else TimeoutError()
        self.outstanding = 0
        self._conclude(session, expected, course, taken, error)

    def _came(self, course: _Course, token: int) -> None:
        now, counts = time.monotonic(), self._counts
        counts.pulse.beat()
        foreseen, k = course.drawn.foreseen, len(course.came)
        course.came.append(token)
        self.outstanding = 1
        with counts.held() as tally:
            tally.rows_checked += 1
            tally.latency.add((now - course.at) * 1e6)
        course.at = now
        if course.fault:
            return
        if k >= len(foreseen):
            course.fault = f"token {token} came after the last of {len(foreseen)}"
        elif token != foreseen[k]:
            course.fault = f"token {k} of a generation is {token}, not {foreseen[k]}"

    def _rest(self, course: _Course) -> Exception:
        """Check what had come and was not taken. Returns why no more will."""
        try:
            while (token := course.stream.take()) is not None:
                self._came(course, token.token)
        except (EOFError, StepError) as e:
            return e
        return TimeoutError()

    def _conclude(self, session: Any, expected: Expected, course: _Course, taken: int, error: Exception | None) -> None:
        """Count the steps, and work out what the session must hold now."""
        drawn, came, stream = course.drawn, course.came, course.stream
        answered = course.begun - 1 if came else 0
        with self._counts.held() as tally:
            tally.generations += 1
            tally.completed += answered
            tally.tokens += len(drawn.tokens) + len(came) - 1 if came else 0
            # One that ended by itself has no step beyond the one that gave its last token.
            tally.sent += answered if isinstance(error, EOFError) and not stream.cancelled else course.begun
            unanswered = course.begun - answered
            if stream.cancelled:
                tally.cancels += 1
                tally.cancelled += unanswered
            elif isinstance(error, SessionClosed) and course.leaves_by_closing:
                tally.closed += unanswered
            elif isinstance(error, DeadlineExceeded) and drawn.deadline and drawn.deadline <= time.monotonic():
                tally.expired += unanswered
            elif isinstance(error, TimeoutError):
                tally.lost += unanswered
                tally.examples.insert(0, f"lost: session {session.session_id}, token {len(came)} of a generation")
            elif isinstance(error, EOFError):
                tally.cancels_late += drawn.leave_after is not None and not drawn.closes
                tally.stops += drawn.stopped
            else:
                assert error is not None
                say_failed(
                    tally, error, unanswered, f"session {session.session_id}, a generation",
                    peers_fall=self._counts.peers_fall,
                )  # fmt: skip
            if not isinstance(error, EOFError) or stream.cancelled:
                tally.unseen += drawn.further + 1 - len(came)
        if course.fault:
            self._wrong(session, course.fault)
        if stream.cancelled:
            self._holds(expected, drawn, came[:taken])
        elif isinstance(error, EOFError):
            if len(came) != len(drawn.foreseen):
                self._wrong(session, f"a generation ended after {len(came)} tokens of {len(drawn.foreseen)}")
            self._holds(expected, drawn, came)
        elif isinstance(error, DeadlineExceeded) and session.ended is None:
            self._holds_what_ran(session, expected, course)
        if drawn.closes or (isinstance(error, StepError) and not isinstance(error, DeadlineExceeded)):
            raise _Spoilt
        if isinstance(error, TimeoutError):
            raise _Spoilt

    @staticmethod
    def _holds(expected: Expected, drawn: Generation, came: list[int]) -> None:
        """The last token that came is the one that is not fed. If none did, nothing has happened."""
        if came:
            expected.feed(drawn.tokens)
            expected.feed(np.array(came[:-1], np.int32))
            expected.unfed = came[-1]

    def _holds_what_ran(self, session: Any, expected: Expected, course: _Course) -> None:
        """Of a generation that was too late: the chunks that were in time, or the tokens that came."""
        if course.came:
            self._holds(expected, course.drawn, course.came)
            return
        n = session.position - len(expected)
        if n % self._max_chunk or not 0 <= n < len(course.drawn.tokens):
            self._wrong(
                session, f"stands at {session.position} after a generation at {len(expected)} that was too late"
            )
        if n:
            expected.feed(course.drawn.tokens[:n])
            expected.unfed = None

    # --- in between -----------------------------------------------------------------------------------------------------

    def _step(self, session: Any, expected: Expected, drawn: PlainStep) -> Flow[None]:
        position = len(expected) if drawn.position is None else drawn.position
        (wanted,) = expected.foresee(drawn.tokens, 1, position)
        self.outstanding = 1
        try:
            response = yield partial(self._hands.submit, session, drawn)
        except Full:
            with self._counts.held() as tally:
                tally.full += 1
            return
        except StepError as e:
            self._counts.say_failed(e, 1, f"session {session.session_id}, a step between generations")
            raise _Spoilt from None
        except TimeoutError:
            self._lost(session, f"a step at {position}, for {PATIENCE_S:g} s")
        finally:
            self.outstanding = 0
        self._counts.pulse.beat()
        with self._counts.held() as tally:
            tally.sent += 1
            tally.completed += 1
            tally.tokens += len(drawn.tokens)
            tally.rows_checked += 1
            tally.rewinds += position < len(expected)
        if response.tokens.tolist() != [wanted]:
            self._wrong(session, f"a step at {position} answered {response.tokens.tolist()}, not [{wanted}]")
        expected.rewind(position)
        expected.feed(drawn.tokens)
        expected.unfed = wanted

    def _fork(self, session: Any, expected: Expected, drawn: Fork) -> Flow[None]:
        length = len(expected) if drawn.upto is None else drawn.upto
        try:
            child = yield partial(self._hands.fork, session, drawn.upto)
        except (Full, TimeoutError):
            with self._counts.held() as tally:
                tally.full += 1
                tally.unseen += -(-length // self._max_chunk)
            return
        with self._counts.held() as tally:
            tally.forks += 1
            # Where the engine has no slot for it, it is prefilled.
            tally.unseen += -(-length // self._max_chunk)
        held = expected.upto(length)
        try:
            self._check(child, held)
            yield from self._generate(child, held, self._draws.generation(held))
            self._check(child, held)
        except _Spoilt:
            # That it is gone says nothing of its parent.
            pass
        finally:
            yield partial(self._hands.close, child)

    # --- verdicts -------------------------------------------------------------------------------------------------------

    def _check(self, session: Any, expected: Expected) -> None:
        if session.ended is None and (fault := expected.fault(session)) is not None:
            self._wrong(session, fault)

    def _wrong(self, session: Any, what: str) -> None:
        with self._counts.held() as tally:
            tally.say_wrong(f"session {session.session_id}: {what}")
        raise _Spoilt

    def _lost(self, session: Any, what: str) -> None:
        with self._counts.held() as tally:
            tally.sent += 1
            tally.lost += 1
            tally.examples.insert(0, f"lost: session {session.session_id}, {what}")
        raise _Spoilt
