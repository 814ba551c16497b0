"""A session that generates, each token checked as it comes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmsched import AsyncClient, Client, DeadlineExceeded, Full, Model, SessionClosed, StepError
from shmsched.steps import SampledToken
from shmsched.tools.load.choices import Fork, Generation, Generations, Submission
from shmsched.tools.load.mirror import Mirror
from shmsched.tools.load.part import RETRY_S, Parent
from shmsched.tools.load.worker import Spoilt, Worker

FORK_S = 2.0
"""Forks of all sessions may wait for each other's slots."""


@dataclass(slots=True)
class Course:
    """A generation that is under way."""

    drawn: Generation
    stream: Any
    chunks: int
    came: list[int] = field(default_factory=list)
    taken: int = 0
    """How many of them its caller had when it left."""
    at: float = field(default_factory=time.monotonic)
    fault: str = ""
    """What was wrong with the first token that was."""

    @property
    def wanted(self) -> bool:
        """Whether its caller waits for another token."""
        return not self.fault and (self.drawn.leave_after is None or len(self.came) < self.drawn.leave_after)

    @property
    def begun(self) -> int:
        """Steps known to have been submitted, where the last one gave no token: its chunks, and one for each token."""
        return self.chunks + len(self.came)


class Generating(Worker):
    def __init__(
        self, client: Client | AsyncClient, model: Model, parent: Parent, over: threading.Event, index: int,
        seed: tuple[int, ...],
    ) -> None:  # fmt: skip
        super().__init__(client, model, parent, over, index)
        self._draws = Generations(self.vocab, self.max_tokens, seed, parent.plan.cancel)
        self._patience = (self.patience_s,) if isinstance(client, Client) else ()
        """What a stream of a client that waits in threads takes as its time-out."""

    async def use(self, session: Any) -> None:
        mirror = Mirror(self.vocab)
        while not self.over.is_set():
            match self._draws.next(mirror):
                case None:
                    return
                case Generation() as drawn:
                    await self._generate(session, mirror, drawn)
                case Submission() as drawn:
                    await self._step(session, mirror, drawn)
                case Fork() as drawn:
                    await self._fork(session, mirror, drawn)
            self.compare(session, mirror)

    # --- generations ----------------------------------------------------------------------------------------------------

    async def _generate(self, session: Any, mirror: Mirror, drawn: Generation) -> None:
        try:
            stream = await self.call(
                session.stream, drawn.tokens, further=drawn.further, stop_tokens=drawn.stop_tokens,
                sampling=drawn.sampling, deadline=drawn.deadline,
            )  # fmt: skip
        except Full:
            self.tally.full += 1
            await self.pause(RETRY_S)
            return
        course = Course(drawn, stream, -(-len(drawn.tokens) // self.max_chunk))
        self.outstanding = course.chunks
        error = await self._follow(session, course)
        self.outstanding = 0
        self._count(session, course, error)
        self._conclude(session, mirror, course, error)

    async def _follow(self, session: Any, course: Course) -> Exception:
        """Take its tokens until its end, or leave it before. Returns why no more will come."""
        stream = course.stream
        try:
            while course.wanted:
                self._came(course, await self.call(stream.next, *self._patience))
                course.taken += 1
            if course.drawn.closes or course.fault:
                await self.call(session.close)
            else:
                stream.cancel()
            if await self.call(stream.wait_until_ended, *self._patience) is not False:
                while (token := stream.take()) is not None:
                    self._came(course, token)
        except (EOFError, StepError, TimeoutError) as e:
            return e
        return TimeoutError()

    def _came(self, course: Course, token: SampledToken) -> None:
        foreseen, k, now = course.drawn.foreseen, len(course.came), time.monotonic()
        self.parent.answered()
        self.outstanding = 1
        course.came.append(token.token)
        self.tally.rows_checked += 1
        self.tally.took(now - course.at)
        course.at = now
        if k >= len(foreseen):
            course.fault = course.fault or f"token {token.token} came after the last of {len(foreseen)}"
        elif token.token != foreseen[k]:
            course.fault = course.fault or f"token {k} of a generation is {token.token}, not {foreseen[k]}"

    def _count(self, session: Any, course: Course, error: Exception) -> None:
        tally, drawn, came, stream = self.tally, course.drawn, course.came, course.stream
        answered = course.begun - 1 if came else 0
        unanswered = course.begun - answered
        ended = isinstance(error, EOFError)
        tally.generations += 1
        tally.completed += answered
        tally.tokens += len(drawn.tokens) + len(came) - 1 if came else 0
        # One that ended by itself has no step beyond the one that gave its last token.
        tally.sent += answered if ended and not stream.cancelled else course.begun
        if stream.cancelled:
            tally.cancels += 1
            tally.cancelled += unanswered
        elif isinstance(error, SessionClosed) and (drawn.closes or course.fault):
            tally.closed += unanswered
        elif isinstance(error, DeadlineExceeded) and drawn.deadline and drawn.deadline <= time.monotonic():
            tally.expired += unanswered
        elif isinstance(error, TimeoutError):
            tally.say_lost(unanswered, f"session {session.session_id}, token {len(came)} of a generation")
        elif ended:
            tally.cancels_late += drawn.leave_after is not None and not drawn.closes
            tally.stops += drawn.stopped
        else:
            self.failed(error, unanswered, f"session {session.session_id}, a generation")
        if not ended or stream.cancelled:
            tally.unseen += drawn.further + 1 - len(came)

    def _conclude(self, session: Any, mirror: Mirror, course: Course, error: Exception) -> None:
        """Work out what the session must hold now."""
        drawn, came = course.drawn, course.came
        if course.fault:
            self.spoilt(session, course.fault)
        if course.stream.cancelled:
            self._holds(mirror, drawn, came[: course.taken])
        elif isinstance(error, EOFError):
            if len(came) != len(drawn.foreseen):
                self.spoilt(session, f"a generation ended after {len(came)} tokens of {len(drawn.foreseen)}")
            self._holds(mirror, drawn, came)
        elif isinstance(error, DeadlineExceeded) and session.ended is None:
            self._holds(mirror, drawn, came)
            if not came:
                self._holds_chunks(session, mirror, drawn)
        elif not isinstance(error, DeadlineExceeded):
            raise Spoilt
        if drawn.closes or session.ended is not None:
            raise Spoilt

    @staticmethod
    def _holds(mirror: Mirror, drawn: Generation, came: list[int]) -> None:
        """The last token that came is the one that is not fed. If none did, nothing has happened."""
        if came:
            mirror.feed(len(mirror), drawn.tokens)
            mirror.feed(len(mirror), np.array(came[:-1], np.int32))
            mirror.unfed = came[-1]

    def _holds_chunks(self, session: Any, mirror: Mirror, drawn: Generation) -> None:
        """Of a generation that was too late before its first token: the chunks that were in time."""
        n = session.position - len(mirror)
        if n % self.max_chunk or not 0 <= n < len(drawn.tokens):
            self.spoilt(session, f"stands at {session.position} after a generation at {len(mirror)} that was too late")
        if n:
            mirror.feed(len(mirror), drawn.tokens[:n])

    # --- in between -----------------------------------------------------------------------------------------------------

    async def _step(self, session: Any, mirror: Mirror, drawn: Submission) -> None:
        start = len(mirror) if drawn.rewind is None else int(len(mirror) * drawn.rewind)
        try:
            await self.step(session, mirror, drawn.tokens, start)
        except Full:
            self.tally.full += 1

    async def _fork(self, session: Any, mirror: Mirror, drawn: Fork) -> None:
        length = len(mirror) if drawn.upto is None else drawn.upto
        # Where the engine has no slot for it, it is prefilled.
        self.tally.unseen += -(-length // self.max_chunk)
        try:
            child = await self.call(session.fork, drawn.upto, timeout=FORK_S)
        except (Full, TimeoutError):
            self.tally.full += 1
            return
        self.tally.forks += 1
        held = mirror.upto(length)
        try:
            self.compare(child, held)
            await self._generate(child, held, self._draws.generation(held))
            self.compare(child, held)
        except Spoilt:
            # That it is gone says nothing of its parent.
            pass
        finally:
            await self.call(child.close)
