"""What a session does next: random, and the same for the same seed."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from shmsched import OutputRows
from shmsched.tools.load.answers import Mirror
from shmsched.tools.load.options import Mode

I32 = npt.NDArray[np.int32]

LONGEST_PROMPT = 6000
MOST_RAW_ROWS = 8
RAW_PROMPT = 400


class Kind(Enum):
    DECODE = "decode"
    PREFILL = "prefill"
    RAW = "raw"
    VERIFY = "verify"


_WEIGHTS: dict[Mode, dict[Kind, float]] = {
    Mode.DECODE: {Kind.DECODE: 1},
    Mode.PREFILL: {Kind.PREFILL: 1},
    Mode.RAW: {Kind.RAW: 1},
    Mode.VERIFY: {Kind.VERIFY: 1},
    # In this mode no session makes turns: all of them generate.
    Mode.GENERATE: {Kind.DECODE: 1},
    Mode.MIXED: {Kind.DECODE: 0.6, Kind.PREFILL: 0.15, Kind.RAW: 0.15, Kind.VERIFY: 0.1},
}
_ENDS = {Mode.PREFILL: 0.05}


@dataclass(frozen=True, slots=True)
class Part:
    """One submission. ``rewind``: a fraction of the session's length to go back to first; None goes on where it stands."""

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

    parts: list[Part]
    cancel: int | None
    """Which of them is cancelled."""
    cancel_later: bool
    """Not at once, but when something else has been answered."""
    close: bool
    """The session is closed with all of them outstanding."""


class Choices:
    """One closed loop's choices. They depend on the seed and on what the loop itself did before, not on the others."""

    def __init__(
        self,
        mode: Mode,
        vocab: int,
        max_chunk: int,
        max_session_tokens: int,
        seed: tuple[int, ...],
        cancel: float | None = None,
    ) -> None:
        """``cancel``: the share of submissions that are cancelled; None for one that depends on how many are made at once."""
        self._mode = mode
        self._cancel = cancel
        self._vocab = vocab
        self._max_chunk = max_chunk
        self._longest = min(LONGEST_PROMPT, max_session_tokens // 4)
        self._kinds = list(_WEIGHTS[mode])
        self._weights = list(_WEIGHTS[mode].values())
        self._end = _ENDS.get(mode, 0.01)
        self.random = random.Random(repr(seed))
        self._tokens = np.random.default_rng(seed)

    @property
    def most_tokens(self) -> int:
        """That one turn may add to a session."""
        return self._longest + 32 + 4 * min(RAW_PROMPT, self._longest)

    def session_ends(self) -> bool:
        return self.random.random() < self._end

    def turn(self, mirror: Mirror, position: int) -> Turn:
        """``position``: where the session goes on."""
        chance = self.random.random
        parts = self._parts(self._first_kind() if position == 0 else self._kind(), mirror, position)
        # Cancelling in the middle of a pipeline is where most can go wrong.
        cancels = (0.03 if len(parts) == 1 else 0.15) if self._cancel is None else 1 - (1 - self._cancel) ** len(parts)
        cancel = self.random.randrange(len(parts)) if chance() < cancels else None
        return Turn(parts, cancel, chance() < 0.5, chance() < self._end / 4)

    def _kind(self) -> Kind:
        return self.random.choices(self._kinds, self._weights)[0]

    def _first_kind(self) -> Kind:
        return Kind.PREFILL if self._mode is Mode.MIXED else self._kinds[0]

    def _parts(self, kind: Kind, mirror: Mirror, position: int) -> list[Part]:
        match kind:
            case Kind.DECODE:
                return [self._part(1) for _ in range(self._burst())]
            case Kind.PREFILL:
                return self._prompt()
            case Kind.RAW:
                return [self._raw() for _ in range(self._burst())]
            case Kind.VERIFY:
                return [self._draft(mirror, position)]

    def _burst(self) -> int:
        return self.random.randint(2, 4) if self.random.random() < 0.1 else 1

    def _draw(self, n: int) -> I32:
        if n == 1:
            return np.array([self.random.randrange(self._vocab)], np.int32)
        return self._tokens.integers(0, self._vocab, n, np.int32)

    def _log_uniform(self, least: int, most: int) -> int:
        return int(math.exp(self.random.uniform(math.log(least), math.log(most + 1))))

    def _part(self, n: int, rows: OutputRows = OutputRows.LAST, *, raw: bool = False) -> Part:
        chance = self.random.random
        rewind = chance() if chance() < 0.05 else None
        as_request = n <= self._max_chunk and chance() < 0.05
        return Part(self._draw(n), rows, raw, rewind=rewind, as_request=as_request, block=chance() < 0.9)

    def _prompt(self) -> list[Part]:
        chance = self.random.random
        n = self._log_uniform(2, self._longest)
        cuts = [0, n]
        if chance() < 0.25:
            cuts = sorted({0, n, *(self.random.randrange(1, n) for _ in range(self.random.randint(1, 3)))})
        sizes = [b - a for a, b in itertools.pairwise(cuts)]
        parts = [self._part(size, OutputRows.NONE if chance() < 0.8 else OutputRows.LAST) for size in sizes[:-1]]
        last = sizes[-1]
        rows = OutputRows.LAST
        if chance() < 0.2:
            rows = OutputRows.ALL if last <= self._max_chunk and chance() < 0.8 else OutputRows.NONE
        return [*parts, self._part(last, rows)]

    def _raw(self) -> Part:
        chance = self.random.random
        if chance() < 0.6:
            return self._part(1, raw=True)
        if chance() < 0.3:
            return self._part(self._few(MOST_RAW_ROWS), OutputRows.ALL, raw=True)
        return self._part(
            self._log_uniform(2, min(RAW_PROMPT, self._longest)),
            OutputRows.LAST if chance() < 0.95 else OutputRows.NONE,
            raw=True,
        )

    def _few(self, most: int) -> int:
        most = min(most, self._max_chunk)
        return self.random.randint(min(2, most), most)

    def _draft(self, mirror: Mirror, position: int) -> Part:
        """The token that is due and some guesses at what follows, of which the later are the more likely wrong."""
        chance = self.random.random
        n = self._few(9)
        tokens = mirror.continuation(position, n)
        right = 1
        while right < n and chance() < 0.75:
            right += 1
        tokens[right:] = self._draw(n - right)
        raw = self._mode is Mode.MIXED and chance() < 0.2
        return Part(tokens, OutputRows.ALL, raw=raw, draft=True)
