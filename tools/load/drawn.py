"""What a session that generates does next: random, and the same for the same seed."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

import numpy as np

from shmsched import SamplingParams
from shmsched.tools.load.expected import Expected
from shmsched.tools.load.turns import I32
from shmsched.wire.frames import MAX_STOP_TOKENS

LONGEST_PROMPT = 600
MOST_FURTHER = 160
CANCELLED = 0.12
CLOSED = 0.02
EXPIRING = 0.04
UNFED_FIRST = 0.9
WITH_STOPS = 0.5
ENDS = 0.04


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation: what is asked for, what must come, and when its caller wants no more of it."""

    tokens: I32
    further: int
    stop_tokens: tuple[int, ...]
    sampling: SamplingParams
    foreseen: list[int]
    stopped: bool
    """A stop token ends it."""
    leave_after: int | None
    """Tokens after which its caller leaves; None to see its end."""
    closes: bool
    """Its caller leaves by closing the session, not by cancelling."""
    deadline: float | None


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A step in between, which rewinds the session or does not."""

    tokens: I32
    position: int | None


@dataclass(frozen=True, slots=True)
class Fork:
    """A session that begins with the first ``upto`` tokens (None: all), generates once, and is closed."""

    upto: int | None


@dataclass(frozen=True, slots=True)
class End:
    """The session is closed."""


class Draws:
    """The choices of one session after the other. They depend on the seed and on what came before, not on the others."""

    def __init__(self, vocab: int, max_session_tokens: int, seed: tuple[int, ...], cancel: float | None) -> None:
        self._vocab = vocab
        self._max_session_tokens = max_session_tokens
        self._longest = min(LONGEST_PROMPT, max_session_tokens // 8)
        self._most_further = min(MOST_FURTHER, max_session_tokens // 8)
        self._cancel = CANCELLED if cancel is None else cancel
        self._random = random.Random(repr(seed))
        self._tokens = np.random.default_rng(seed)

    def next(self, expected: Expected) -> Generation | PlainStep | Fork | End:
        chance = self._random.random
        if len(expected) + 2 * (self._longest + self._most_further) > self._max_session_tokens or chance() < ENDS:
            return End()
        if len(expected) and chance() < 0.08:
            rewinds = chance() < 0.6
            position = self._random.randrange(len(expected)) if rewinds else None
            return PlainStep(self._draw(self._random.randint(1, 8)), position)
        if len(expected) and chance() < 0.07:
            return Fork(self._random.randint(0, len(expected)) if chance() < 0.7 else None)
        return self.generation(expected)

    def generation(self, expected: Expected) -> Generation:
        chance = self._random.random
        tokens = self._draw(self._log_uniform(1, self._longest))
        if expected.unfed is not None and chance() < UNFED_FIRST:
            # As a caller does who lets it go on, with something new behind it or not.
            tokens = np.concatenate([[expected.unfed], tokens[: 0 if chance() < 0.5 else None]]).astype(np.int32)
        further = self._log_uniform(1, self._most_further) - 1
        foreseen = expected.foresee(tokens, further + 1)
        stops = self._stops(foreseen) if chance() < WITH_STOPS else ()
        hit = next((i for i, token in enumerate(foreseen) if token in stops), None)
        foreseen = foreseen[: None if hit is None else hit + 1]
        closes = chance() < CLOSED
        leaves = closes or chance() < self._cancel
        return Generation(
            tokens=tokens,
            further=further,
            stop_tokens=stops,
            sampling=SamplingParams(temperature=0.7, seed=7) if chance() < 0.5 else SamplingParams(),
            foreseen=foreseen,
            stopped=hit is not None,
            leave_after=self._random.randrange(len(foreseen)) if leaves else None,
            closes=closes,
            deadline=time.monotonic() + self._random.uniform(0.001, 0.1) if chance() < EXPIRING else None,
        )

    def _stops(self, foreseen: list[int]) -> tuple[int, ...]:
        """Most of them are never sampled, one may well be."""
        stops = self._draw(self._random.randint(1, MAX_STOP_TOKENS)).tolist()
        if self._random.random() < 0.6:
            stops[self._random.randrange(len(stops))] = self._random.choice(foreseen)
        return tuple(stops)

    def _draw(self, n: int) -> I32:
        return self._tokens.integers(0, self._vocab, n, np.int32)

    def _log_uniform(self, least: int, most: int) -> int:
        return int(math.exp(self._random.uniform(math.log(least), math.log(most + 1))))
