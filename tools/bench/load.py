"""What every client does, whatever carries its steps: sessions in closed loop, and every answer checked."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from queue import SimpleQueue
from statistics import median
from typing import Any, NamedTuple

from shmsched import SamplingParams
from shmsched.tools.bench.crew import Rounds
from shmsched.tools.bench.plan import Gauge, Plan, Round, Tally, Way
from shmsched.workers.echo import MASK, MULTIPLIER, PEAK

ANSWER_S = 30.0
"""How long an answer may take before the contestant counts as broken."""
FURTHER = 127
"""How many tokens a generation goes on for after its first."""
GREEDY = SamplingParams()


class Watch:
    """Counts the steps from a round's start on."""

    def __init__(self, when: Round) -> None:
        self.end = when.end
        self._start = when.start
        self.began = self._now = 0.0
        self.steps = 0

    def goes_on(self) -> bool:
        """Whether to do more. The first look after the round's start begins the count."""
        self._now = now = time.monotonic()
        more = now < self.end or not self.began
        if not self.began and now >= self._start:
            self.began, self.steps = now, 0
        return more

    def tally(self, wrong: int, gauged: float | None = None) -> Tally:
        return Tally(self.steps, self._now - self.began, wrong, gauged)


class Note(NamedTuple):
    """A step's times, and what its engine gave as log-probability."""

    sent: float
    taken: float
    logprob: float


class Cursor:
    """A session, and the rolling hash that its engine must have by now.

    The session is a client's of ours or of a peer: ``submit(tokens, sampling=...)`` gives a future. What that resolves to has
    ``tokens``, and ``logits.data`` of shape (1, vocab) if raw logits were asked for.
    """

    def __init__(self, session: Any, plan: Plan) -> None:
        self.session = session
        self.token = 1
        self.wrong = 0
        self.notes: list[Note] = []
        self.future: Any = None
        self._hash = 0
        self._raw, self._vocab = plan.raw, plan.vocab
        self._sampling = None if plan.raw else GREEDY

    def submit(self) -> None:
        """Submit the next step."""
        self.future = self.session.submit([self.token], sampling=self._sampling)
        self._hash = (MULTIPLIER * self._hash + self.token + 1) & MASK

    def take(self) -> None:
        """Wait for the answer."""
        self.check(self.future.result(ANSWER_S))

    def check(self, answer: Any) -> None:
        """It has the next step's token. Counts it if it is not echo's."""
        expected = (self._hash >> 33) % self._vocab
        if self._raw:
            self.token = expected
            self.wrong += int(answer.logits.data[0, expected] != PEAK)
        else:
            self.token = int(answer.tokens[0])
            self.wrong += self.token != expected

    def stream(self, further: int) -> Any:
        """Have the scheduler go on by itself."""
        return self.session.stream([self.token], further=further)

    def check_streamed(self, token: int) -> None:
        """The next of the stream."""
        self._hash = (MULTIPLIER * self._hash + self.token + 1) & MASK
        self.token = token
        self.wrong += token != (self._hash >> 33) % self._vocab


class NotingCursor(Cursor):
    """Keeps notes of its steps."""

    _sent = 0.0

    def submit(self) -> None:
        self._sent = time.monotonic()
        super().submit()

    def check(self, answer: Any) -> None:
        super().check(answer)
        told = answer.logprobs
        self.notes.append(Note(self._sent, time.monotonic(), 0.0 if told is None else float(told[0])))


def rounds(sessions: Sequence[Any], plan: Plan) -> Rounds:
    """Rounds over these sessions, which go on from round to round."""
    return over(cursors_of(sessions, plan), plan, use_callbacks if plan.way is Way.CALLBACKS else wait_for_results)


@contextmanager
def rounds_in_loop(open_sessions: Callable[[AsyncExitStack], Awaitable[Sequence[Any]]], plan: Plan) -> Iterator[Rounds]:
    """The same over sessions of an event loop, which runs in rounds only."""

    async def opened() -> list[Cursor]:
        return cursors_of(await open_sessions(stack), plan)

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        cursors = runner.run(opened())
        try:
            yield over(cursors, plan, lambda cursors, watch: runner.run(await_tasks(cursors, watch)))
        finally:
            runner.run(stack.aclose())


def cursors_of(sessions: Sequence[Any], plan: Plan) -> list[Cursor]:
    kind = Cursor if plan.gauge is Gauge.NONE else NotingCursor
    return [kind(session, plan) for session in sessions]


def over(cursors: Sequence[Cursor], plan: Plan, drive: Callable[[Sequence[Cursor], Watch], None]) -> Rounds:
    """Rounds in which these are driven so."""

    def run(when: Round) -> Tally:
        watch = Watch(when)
        drive(cursors, watch)
        tally = watch.tally(sum(cursor.wrong for cursor in cursors), _gauge(plan.gauge, cursors, watch.began))
        for cursor in cursors:
            cursor.wrong = 0
            cursor.notes.clear()
        return tally

    return run


def wait_for_results(cursors: Sequence[Cursor], watch: Watch) -> None:
    """Submit one step of every session; then, until the round ends, take the oldest one's answer and submit its next.

    Every step is answered when this returns.
    """
    for cursor in cursors:
        cursor.submit()
    while watch.goes_on():
        for cursor in cursors:
            cursor.take()
            cursor.submit()
        watch.steps += len(cursors)
    for cursor in cursors:
        cursor.take()


def use_callbacks(cursors: Sequence[Cursor], watch: Watch) -> None:
    """Futures' callbacks feed a queue, and this thread submits what comes out of it."""
    answered: SimpleQueue[Cursor] = SimpleQueue()

    def submit(cursor: Cursor) -> None:
        cursor.submit()
        cursor.future.add_done_callback(lambda _: answered.put(cursor))

    for cursor in cursors:
        submit(cursor)
    while watch.goes_on():
        cursor = answered.get(timeout=ANSWER_S)
        cursor.take()
        submit(cursor)
        watch.steps += 1
    for _ in cursors:
        answered.get(timeout=ANSWER_S).take()


async def await_tasks(cursors: Sequence[Cursor], watch: Watch) -> None:
    """Each session has a task that submits and awaits."""

    async def drive(cursor: Cursor) -> None:
        while watch.goes_on():
            cursor.submit()
            cursor.check(await cursor.future)
            watch.steps += 1

    async with asyncio.timeout(watch.end - time.monotonic() + ANSWER_S):
        await asyncio.gather(*map(drive, cursors))


def drive_streams(cursors: Sequence[Cursor], watch: Watch, further: int) -> None:
    """Generations that the scheduler drives. Each session's next one begins with the token that ended its last."""
    streams: list[Any] = []
    left = 0
    while watch.goes_on():
        if not left:
            streams, left = [cursor.stream(further) for cursor in cursors], further + 1
        for cursor, stream in zip(cursors, streams, strict=True):
            sampled = stream.next(ANSWER_S)
            cursor.check_streamed(sampled.token)
            if isinstance(cursor, NotingCursor):
                cursor.notes.append(Note(sampled.arrived, sampled.arrived, sampled.logprob))
        watch.steps += len(cursors)
        left -= 1
    for stream in streams:
        stream.cancel()


def _gauge(gauge: Gauge, cursors: Sequence[Cursor], began: float) -> float | None:
    counted = [[note for note in cursor.notes if note.sent >= began] for cursor in cursors]
    if min(map(len, counted)) < 2:
        return None
    if gauge is Gauge.LATENCY:
        return 1e6 * median(note.taken - note.sent for note in counted[0])
    if gauge is Gauge.BUSY:
        first, last = counted[0][0], counted[0][-1]
        return (last.logprob - first.logprob) / 10.0 / (last.taken - first.taken)
    return 100.0 * together([[int(note.logprob) for note in of_session] for of_session in counted])


def together(batches: Sequence[Sequence[int]]) -> float:
    """The share of batches in which every session had a step, of those from when all had begun until one had ended. Each
    session's batches are given."""
    first, last = max(of_session[0] for of_session in batches), min(of_session[-1] for of_session in batches)
    steps = Counter(batch for of_session in batches for batch in of_session if first <= batch <= last)
    return sum(n == len(batches) for n in steps.values()) / (last - first + 1)
