"""What a session does next: random, and the same for the same seed and for what came before."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import dataclass

import numpy as np

from shmsched import OutputRows, SamplingParams
from shmsched.tools.load.mirror import I32, Mirror
from shmsched.tools.load.options import Mode
from shmsched.wire.frames import MAX_STOP_TOKENS

_MIXED = {Mode.DECODE: 0.6, Mode.PREFILL: 0.15, Mode.RAW: 0.15, Mode.VERIFY: 0.1}
RAW_PROMPT = 400


class Drawn:
    """What both kinds of choices are drawn from. ``cancel``: the share that is cancelled; None for a habit of their own."""

    def __init__(self, vocab: int, seed: tuple[int, ...], cancel: float | None) -> None:
        self._vocab = vocab
        self._cancel = cancel
        self.random = random.Random(repr(seed))
        self._rng = np.random.default_rng(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def tokens(self, n: int) -> I32:
        if n == 1:
            return np.array([self.random.randrange(self._vocab)], np.int32)
        return self._rng.integers(0, self._vocab, n, np.int32)

    def log_uniform(self, least: int, most: int) -> int:
        return int(math.exp(self.random.uniform(math.log(least), math.log(most + 1))))


@dataclass(frozen=True, slots=True)
class Submission:
    """``rewind``: a fraction of the session's length to go back to first; None goes on where it stands."""

    tokens: I32
    rows: OutputRows = OutputRows.LAST
    raw: bool = False
    draft: bool = False
    rewind: float | None = None
    as_request: bool = False
    """Through ``Client.submit``, with a position and an id of one's own."""
    block: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """Submissions that are made at once, and what happens to them."""

    parts: list[Submission]
    cancel: int | None
    """Which of them is cancelled."""
    cancel_later: bool
    """Not at once, but when something else may have been answered."""
    close: bool
    """The session is closed with all of them outstanding."""


class Turns(Drawn):
    """The choices of one session that submits, waits, and submits again."""

    def __init__(
        self,
        mode: Mode,
        vocab: int,
        max_chunk: int,
        max_tokens: int,
        seed: tuple[int, ...],
        cancel: float | None = None,
    ) -> None:
        super().__init__(vocab, seed, cancel)
        self._weights = _MIXED if mode is Mode.MIXED else {mode: 1.0}
        self._first = Mode.PREFILL if mode is Mode.MIXED else mode
        self._max_chunk = max_chunk
        self._longest = min(6000, max_tokens // 4)
        self._ends = 0.05 if mode is Mode.PREFILL else 0.01
        self.most_tokens = self._longest + 32 + 4 * min(RAW_PROMPT, self._longest)
        """That one turn may add to a session."""

    def session_ends(self) -> bool:
        return self.chance(self._ends)

    def turn(self, mirror: Mirror, position: int) -> Turn:
        """``position``: where the session goes on."""
        kind = self._first if position == 0 else self.random.choices(*zip(*self._weights.items(), strict=True))[0]
        match kind:
            case Mode.PREFILL:
                parts = self._prompt()
            case Mode.VERIFY:
                parts = [self._draft(mirror, position)]
            case _:
                burst = self.random.randint(2, 4) if self.chance(0.1) else 1
                parts = [self._raw() if kind is Mode.RAW else self._part(1) for _ in range(burst)]
        # Cancelling in the middle of a pipeline is where most can go wrong.
        cancels = (0.03 if len(parts) == 1 else 0.15) if self._cancel is None else 1 - (1 - self._cancel) ** len(parts)
        cancel = self.random.randrange(len(parts)) if self.chance(cancels) else None
        return Turn(parts, cancel, self.chance(0.5), self.chance(self._ends / 4))

    def _part(self, n: int, rows: OutputRows = OutputRows.LAST, *, raw: bool = False) -> Submission:
        rewind = self.random.random() if self.chance(0.05) else None
        as_request = n <= self._max_chunk and self.chance(0.05)
        return Submission(self.tokens(n), rows, raw, False, rewind, as_request, block=self.chance(0.9))

    def _prompt(self) -> list[Submission]:
        n = self.log_uniform(2, self._longest)
        cuts = {0, n}
        if self.chance(0.25):
            cuts |= {self.random.randrange(1, n) for _ in range(self.random.randint(1, 3))}
        *sizes, last = (b - a for a, b in itertools.pairwise(sorted(cuts)))
        parts = [self._part(size, OutputRows.NONE if self.chance(0.8) else OutputRows.LAST) for size in sizes]
        rows = OutputRows.LAST
        if self.chance(0.2):
            rows = OutputRows.ALL if last <= self._max_chunk and self.chance(0.8) else OutputRows.NONE
        return [*parts, self._part(last, rows)]

    def _raw(self) -> Submission:
        if self.chance(0.6):
            return self._part(1, raw=True)
        if self.chance(0.3):
            return self._part(self._few(8), OutputRows.ALL, raw=True)
        n = self.log_uniform(2, min(RAW_PROMPT, self._longest))
        return self._part(n, OutputRows.LAST if self.chance(0.95) else OutputRows.NONE, raw=True)

    def _few(self, most: int) -> int:
        most = min(most, self._max_chunk)
        return self.random.randint(min(2, most), most)

    def _draft(self, mirror: Mirror, position: int) -> Submission:
        """The token that is due and some guesses at what follows, of which the later are the more likely wrong."""
        n = self._few(9)
        tokens = np.array(mirror.continuation(position, self.tokens(0), n), np.int32)
        right = 1
        while right < n and self.chance(0.75):
            right += 1
        tokens[right:] = self.tokens(n - right)
        raw = len(self._weights) > 1 and self.chance(0.2)
        return Submission(tokens, OutputRows.ALL, raw=raw, draft=True)


@dataclass(frozen=True, slots=True)
class Generation:
    """What is asked for, what must come, and when its caller wants no more of it."""

    tokens: I32
    further: int
    stop_tokens: tuple[int, ...]
    sampling: SamplingParams
    foreseen: list[int]
    leave_after: int | None
    """Tokens after which its caller leaves; None to see its end."""
    closes: bool
    """Its caller leaves by closing the session, not by cancelling."""
    deadline: float | None

    @property
    def stopped(self) -> bool:
        """A stop token ends it."""
        return self.foreseen[-1] in self.stop_tokens


@dataclass(frozen=True, slots=True)
class Fork:
    """A session that begins with the first ``upto`` tokens (None: all), generates once, and is closed."""

    upto: int | None


class Generations(Drawn):
    """The choices of one session that generates."""

    def __init__(self, vocab: int, max_tokens: int, seed: tuple[int, ...], cancel: float | None = None) -> None:
        super().__init__(vocab, seed, 0.12 if cancel is None else cancel)
        self._max_tokens = max_tokens
        self._longest = min(600, max_tokens // 8)
        self._most_further = min(160, max_tokens // 8)

    def next(self, mirror: Mirror) -> Generation | Submission | Fork | None:
        """None: the session is closed."""
        length = len(mirror)
        if length + 2 * (self._longest + self._most_further) > self._max_tokens or self.chance(0.04):
            return None
        if length and self.chance(0.08):
            rewind = self.random.random() if self.chance(0.6) else None
            return Submission(self.tokens(self.random.randint(1, 8)), rewind=rewind)
        if length and self.chance(0.07):
            return Fork(self.random.randint(0, length) if self.chance(0.7) else None)
        return self.generation(mirror)

    def generation(self, mirror: Mirror) -> Generation:
        tokens = self.tokens(self.log_uniform(1, self._longest))
        if mirror.unfed is not None and self.chance(0.9):
            # As a caller does who lets it go on, with something new behind it or not.
            tokens = np.concatenate([[mirror.unfed], tokens[: 0 if self.chance(0.5) else None]]).astype(np.int32)
        further = self.log_uniform(1, self._most_further) - 1
        foreseen = mirror.continuation(len(mirror), tokens, further + 1)
        stops = self._stops(foreseen) if self.chance(0.5) else ()
        hit = next((i for i, token in enumerate(foreseen) if token in stops), further)
        foreseen = foreseen[: hit + 1]
        closes = self.chance(0.02)
        leaves = closes or self.chance(self._cancel or 0.0)
        return Generation(
            tokens=tokens,
            further=further,
            stop_tokens=stops,
            sampling=SamplingParams(temperature=0.7, seed=7) if self.chance(0.5) else SamplingParams(),
            foreseen=foreseen,
            leave_after=self.random.randrange(len(foreseen)) if leaves else None,
            closes=closes,
            deadline=time.monotonic() + self.random.uniform(0.001, 0.1) if self.chance(0.04) else None,
        )

    def _stops(self, foreseen: list[int]) -> tuple[int, ...]:
        """Most of them are never sampled, one may well be."""
        stops = self.tokens(self.random.randint(1, MAX_STOP_TOKENS)).tolist()
        if self.chance(0.6):
            stops[self.random.randrange(len(stops))] = self.random.choice(foreseen)
        return tuple(stops)
