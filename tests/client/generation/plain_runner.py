"""Runs plans without processes, on a plain model of a session, its engine and its scheduler."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched.client.generation.conclusion import concluding
from shmsched.client.generation.course import Course, FinishReason
from shmsched.client.generation.effects import (
    Await,
    Begin,
    Cancel,
    Continue,
    Effect,
    Emit,
    Halt,
    Left,
    Next,
    Plan,
    Reopen,
    Rest,
    Submit,
)
from shmsched.client.generation.stop_text import TextGate
from shmsched.client.replies import TokenStream
from shmsched.engine.sampling import sample
from shmsched.errors import SessionLost
from shmsched.params import GREEDY, OutputRows, SamplingParams
from shmsched.steps import LogitsBlock, Response, SampledToken

VOCAB = 5
MakePlan = Callable[[Course], Plan[None]]


def row_after(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The logits of a small language model that looks at the last two tokens, so that its texts repeat themselves."""
    numbers = random.Random(repr(list(tokens[-2:])))
    return np.array([numbers.gauss(0, 2) for _ in range(VOCAB)], np.float32)


def sampled_after(tokens: Sequence[int], sampling: SamplingParams) -> int:
    ids, _ = sample(row_after(tokens)[np.newaxis], [sampling], np.array([len(tokens) - 1]))
    return int(ids[0])


def reference(prompt: Sequence[int], n: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """What a plain loop samples after the prompt."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(sampled_after(tokens, sampling))
    return tokens[len(prompt) :]


class PlainStep:
    """A step that ran as it was submitted; its answer waits."""

    def __init__(self, start: int, response: Response) -> None:
        self.start = start
        self.response = response
        self.answered = False


class PlainStream(TokenStream):
    def __init__(self, start: int, prompt_end: int, tokens: Sequence[int]) -> None:
        super().__init__()
        self.start, self.prompt_end = start, prompt_end
        self.coming = deque(tokens)
        self.halted = False

    def wake(self) -> None:
        pass


class PlainSession:
    """What a session holds. Its engine runs each step at once, and a stream as far ahead as it may."""

    def __init__(self, can_rewind: bool = True) -> None:
        self.held: list[int] = []
        self.position = 0
        self.unfed: int | None = None
        self.can_rewind = can_rewind
        self.steps = 0
        self.loss: Exception | None = None
        """What the next effect meets."""
        self.lost = False

    def feed(self, tokens: Sequence[int], position: int) -> None:
        assert not self.lost, "something was submitted to a session that is lost"
        assert position <= self.position, f"a gap: {position} in a session of {self.position}"
        assert position == self.position or self.can_rewind, "an engine that cannot rewind was told to"
        self.held[position:] = [int(t) for t in tokens]
        self.position = len(self.held)
        self.steps += 1


class Runner:
    """Runs one plan. ``meet`` is asked before each effect that engines have a part in, and may raise what the effect then comes to."""

    def __init__(
        self, session: PlainSession, course: Course, plan: Plan[None], meet: Callable[[], None] = lambda: None
    ) -> None:
        self.session = session
        self.course = course
        self.plan = concluding(course, plan, lambda: session.can_rewind)
        self.given: list[int] = []
        self.meet = meet

    def run(self, leave_after: int | None = None) -> list[int]:
        """What the plan gives to a caller who leaves after so many tokens. Raises what the plan fails with."""
        try:
            effect = self.plan.send(None)
            while True:
                if isinstance(effect, Emit):
                    self.given.append(effect.token)
                    if len(self.given) == leave_after:
                        self.meet = lambda: None
                        effect = self.plan.throw(Left())
                    else:
                        effect = self.plan.send(None)
                    continue
                try:
                    if isinstance(effect, Submit | Await | Continue | Next | Reopen):
                        self.meet()
                    result = self.perform(effect)
                except Exception as e:
                    effect = self.plan.throw(e)
                else:
                    effect = self.plan.send(result)
        except (StopIteration, Left):
            return self.given

    def perform(self, effect: Effect) -> Any:
        session = self.session
        match effect:
            case Begin(position, unfed):
                assert (position, unfed) == (session.position, session.unfed)
                return None
            case Submit(tokens, position, sampling, rows):
                session.feed(tokens, position)
                return PlainStep(position, self.response(len(tokens), sampling, rows))
            case Await(step):
                step.answered = True
                return step.response
            case Continue(tokens, sampling, further, stop_tokens):
                start = session.position
                session.feed(tokens, start)
                first = sampled_after(session.held, sampling)
                coming = [first]
                while len(coming) <= further and coming[-1] not in stop_tokens:
                    session.feed(coming[-1:], session.position)
                    coming.append(sampled_after(session.held, sampling))
                return PlainStream(start, start + len(tokens), coming)
            case Next(stream):
                if not stream.coming:
                    raise EOFError
                stream.taken += 1
                return SampledToken(stream.coming.popleft(), 0.0, 0.0)
            case Cancel(PlainStream() as stream):
                if session.can_rewind and stream.coming:
                    session.position = min(session.position, stream.resume_at)
                return True
            case Cancel(step):
                # It has run; a scheduler that still had it queued would say True, and so it does every other time.
                assert session.can_rewind, (
                    "to cancel a step that has run loses the session of an engine that cannot rewind"
                )
                if step.answered:
                    return False
                session.position = min(session.position, step.start)
                return True
            case Halt():
                return None
            case Rest(position, unfed):
                if session.can_rewind:
                    session.position = min(session.position, position)
                session.unfed = unfed if position == session.position else None
                return None
            case Reopen():
                session.held, session.position, session.lost = [], 0, False
                return None
        raise AssertionError(f"an effect that is none: {effect}")

    def response(self, n: int, sampling: SamplingParams | None, rows: OutputRows) -> Response:
        held = self.session.held
        ends = range(len(held) - n + 1, len(held) + 1)[n - rows.count(n) :]
        if sampling is None:
            data = np.array([row_after(held[:end]) for end in ends], np.float32).reshape(-1, VOCAB)
            return Response(1, 1, logits=LogitsBlock(data))
        tokens = np.array([sampled_after(held[:end], sampling) for end in ends], np.int64)
        return Response(1, 1, tokens, np.zeros(len(tokens), np.float32))


class Losses:
    """Loses the session before those effects whose numbers are given; it stays lost until it is opened anew."""

    def __init__(self, session: PlainSession, at: set[int]) -> None:
        self.session = session
        self.at = at
        self.n = 0
        self.happened = 0

    def __call__(self) -> None:
        self.n += 1
        if self.n in self.at:
            self.happened += 1
            self.session.lost = True
            raise SessionLost("the engine died")


def course_on(
    session: PlainSession,
    prompt: Sequence[int],
    most: int,
    *,
    sampling: SamplingParams = GREEDY,
    stop_tokens: Sequence[int] = (),
    gate: TextGate | None = None,
) -> Course:
    """A generation of the session as it stands, as ``start`` makes it."""
    unfed = session.unfed
    fed = [*([] if unfed is None else [unfed]), *prompt]
    before = np.array(session.held[: session.position], np.int32)
    return Course(
        np.array(fed, np.int32),
        session.position,
        sampling=sampling,
        most=most,
        stop_tokens=stop_tokens,
        unfed=unfed,
        before=before,
        gate=gate,
    )


__all__ = ["FinishReason", "Losses", "PlainSession", "Runner", "VOCAB", "course_on", "reference", "row_after"]
