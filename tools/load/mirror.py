"""What a session must hold and what echo must answer, and whether it did.

The rolling hash is computed here in another way than in the engine, so that one slip cannot hide in both: the multiplier
is odd, so it has an inverse modulo 2**64, and the recurrence becomes a running sum.
"""

from __future__ import annotations

from array import array
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shmsched.dataplane.session_core import SessionCore
from shmsched.workers.echo import MULTIPLIER, advance, answer

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@lru_cache
def _powers(size: int) -> tuple[U64, U64]:
    """Powers 1 to ``size`` of the multiplier and of its inverse."""
    bases = (MULTIPLIER, pow(MULTIPLIER, -1, 2**64))
    up, down = (np.cumprod(np.full(size, base, np.uint64), dtype=np.uint64) for base in bases)
    return up, down


def hashes_after(h: int, tokens: I32) -> U64:
    """The rolling hash after each of ``tokens``, from ``h``."""
    n = len(tokens)
    up, down = _powers(max(1024, 1 << n.bit_length()))
    sums = np.cumsum(down[:n] * (tokens.astype(np.uint64) + np.uint64(1)), dtype=np.uint64)
    hashes: U64 = up[:n] * (sums + np.array(h, np.uint64))
    return hashes


class Mirror:
    """One session's tokens, the rolling hash after each number of them, and the token that was sampled last and not fed yet."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._tokens = array("i")
        self._hashes = array("Q", [0])
        self.unfed: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def answers(self, position: int, tokens: I32) -> I64:
        """What echo answers after each of ``tokens`` from ``position`` on. Nothing changes."""
        return ((self._after(position, tokens) >> np.uint64(33)) % np.uint64(self._vocab)).astype(np.int64)

    def feed(self, position: int, tokens: I32) -> None:
        hashes = self._after(position, tokens)
        self.rewind(position)
        self._tokens.frombytes(tokens.tobytes())
        self._hashes.frombytes(hashes.tobytes())

    def _after(self, position: int, tokens: I32) -> U64:
        h = self._hashes[position]
        if len(tokens) == 1:
            return np.array([advance(h, tokens.tolist())], np.uint64)
        return hashes_after(h, tokens)

    def rewind(self, length: int) -> None:
        del self._tokens[length:], self._hashes[length + 1 :]
        self.unfed = None

    def upto(self, length: int) -> Mirror:
        """That of a session that begins with the first ``length`` tokens."""
        other = Mirror(self._vocab)
        other._tokens, other._hashes = self._tokens[:length], self._hashes[: length + 1]
        return other

    def continuation(self, position: int, tokens: I32, n: int) -> list[int]:
        """The ``n`` tokens with which echo would greedily go on after ``tokens`` at ``position``."""
        h = int(self._after(position, tokens)[-1]) if len(tokens) else self._hashes[position]
        found: list[int] = []
        for _ in range(n):
            found.append(answer(h, self._vocab))
            h = advance(h, found[-1:])
        return found

    def fault(self, session: SessionCore) -> str | None:
        """What the session says of itself that is not so, in words."""
        if session.position != len(self):
            return f"stands at position {session.position}, not {len(self)}"
        differing = np.flatnonzero(session.history != np.frombuffer(self._tokens, np.int32))
        if len(differing):
            k = int(differing[0])
            return f"has token {session.history[k]} at {k} of its history, not {self._tokens[k]}"
        return None
