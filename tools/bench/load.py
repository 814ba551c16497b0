"""What every client does, whatever carries its steps: sessions in closed loop, and every answer checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

from shmsched import SamplingParams, Session
from shmsched.tools.bench.plan import Plan, Round, Tally
from shmsched.workers.echo import MASK, MULTIPLIER, PEAK

ANSWER_S = 30.0
"""How long an answer may take before the contestant counts as broken."""
GREEDY = SamplingParams()


class Answering(Protocol):
    """A future. What it resolves to has ``tokens``, and ``logits.data`` of shape (1, vocab) if raw logits were asked for."""

    def result(self, timeout: float | None = None) -> Any: ...


class Submitting(Protocol):
    """A session, as a client of ours or of a peer gives it."""

    def submit(self, tokens: Sequence[int], *, sampling: SamplingParams | None) -> Answering: ...


class Cursor:
    """A session, and the rolling hash that its engine must have by now."""

    __slots__ = ("future", "hash", "session", "token")

    def __init__(self, session: Submitting) -> None:
        self.session = session
        self.hash = 0
        self.token = 1
        self.future: Answering

    def submit(self, raw: bool) -> None:
        """Submit the next step."""
        self.future = self.session.submit([self.token], sampling=None if raw else GREEDY)
        self.hash = (MULTIPLIER * self.hash + self.token + 1) & MASK

    def take(self, plan: Plan) -> bool:
        """Wait for the answer, which is the next step's token. False if it is not echo's."""
        answer = self.future.result(ANSWER_S)
        expected = (self.hash >> 33) % plan.vocab
        self.token = expected if plan.raw else int(answer.tokens[0])
        return bool(answer.logits.data[0, expected] == PEAK) if plan.raw else self.token == expected


Rounds = Callable[[Round], Tally]
"""Runs a round with one client."""


def rounds(sessions: Sequence[Submitting], plan: Plan) -> Rounds:
    """Rounds over these sessions, which go on from round to round."""
    cursors = [Cursor(session) for session in sessions]
    if plan.clients == plan.sessions == 1:
        return lambda when: round_trips(cursors[0], plan, when)
    return lambda when: closed_loop(cursors, plan, when)


def closed_loop(cursors: list[Cursor], plan: Plan, when: Round) -> Tally:
    """Submit one step of every session; then, until the round ends, take the oldest one's answer and submit its next.

    Every step is answered when this returns.
    """
    raw = plan.raw
    steps = right = taken = 0
    began = 0.0
    for cursor in cursors:
        cursor.submit(raw)
    while (now := time.monotonic()) < when.end or not began:
        if not began and now >= when.start:
            began, steps = now, 0
        for cursor in cursors:
            right += cursor.take(plan)
            cursor.submit(raw)
        steps += len(cursors)
        taken += len(cursors)
    for cursor in cursors:
        right += cursor.take(plan)
    return Tally(steps=steps, seconds=now - began, wrong=taken + len(cursors) - right, p50_us=0.0)


def round_trips(cursor: Cursor, plan: Plan, when: Round) -> Tally:
    """One step after the other, each timed from submit to result."""
    times: list[float] = []
    right = taken = 0
    began = 0.0
    while (now := time.monotonic()) < when.end or not began:
        if not began and now >= when.start:
            began = now
            times.clear()
        cursor.submit(plan.raw)
        right += cursor.take(plan)
        times.append(time.monotonic() - now)
        taken += 1
    return Tally(steps=len(times), seconds=now - began, wrong=taken - right, p50_us=median(times) * 1e6)


FURTHER = 127
"""How many tokens a generation goes on for after its first."""


def streams(sessions: Sequence[Session], plan: Plan) -> Rounds:
    """Rounds of generations that the scheduler drives. Each session's next one begins with the token that ended its last."""
    tokens = [1] * len(sessions)
    hashes = [0] * len(sessions)

    def run(when: Round) -> Tally:
        steps = wrong = 0
        began = 0.0
        while (now := time.monotonic()) < when.end or not began:
            generations = [s.stream([token], further=FURTHER) for s, token in zip(sessions, tokens, strict=True)]
            for _ in range(FURTHER + 1):
                if not began and (now := time.monotonic()) >= when.start:
                    began, steps = now, 0
                for i, generation in enumerate(generations):
                    h = hashes[i] = (MULTIPLIER * hashes[i] + tokens[i] + 1) & MASK
                    token = tokens[i] = generation.next(ANSWER_S).token
                    wrong += token != (h >> 33) % plan.vocab
                steps += len(sessions)
        return Tally(steps=steps, seconds=now - began, wrong=wrong, p50_us=0.0)

    return run
