"""What echo must answer, and whether it did.

The rolling hash is computed here in another way than in the engine, so that one slip cannot hide in both: the multiplier
is odd, so it has an inverse modulo 2**64, and the recurrence becomes a running sum.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from shmsched.workers.echo import MASK, MULTIPLIER

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_INVERSE = pow(MULTIPLIER, -1, 2**64)


class _Powers:
    """Powers 1 to n of the multiplier and of its inverse, made longer when needed, by whichever thread needs it."""

    def __init__(self) -> None:
        self._both: tuple[U64, U64] = (np.empty(0, np.uint64), np.empty(0, np.uint64))

    def upto(self, n: int) -> tuple[U64, U64]:
        """Those of the multiplier, and of its inverse."""
        up, down = self._both
        if len(up) < n:
            size = max(1024, 2 * n)
            up = np.cumprod(np.full(size, MULTIPLIER, np.uint64), dtype=np.uint64)
            down = np.cumprod(np.full(size, _INVERSE, np.uint64), dtype=np.uint64)
            # At once: another thread must not see one of them without the other.
            self._both = (up, down)
        return up[:n], down[:n]


_powers = _Powers()


def hashes_after(h: int, tokens: npt.NDArray[np.int32]) -> U64:
    """The rolling hash after each of ``tokens``, from ``h``."""
    up, down = _powers.upto(len(tokens))
    terms = down * (tokens.astype(np.uint64) + np.uint64(1))
    sums: U64 = np.cumsum(terms, dtype=np.uint64) + np.array(h, np.uint64)
    hashes: U64 = up * sums
    return hashes


class Mirror:
    """The rolling hash of one session after each number of its tokens."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._hashes = array("Q", [0])

    @property
    def length(self) -> int:
        return len(self._hashes) - 1

    def foresee(self, position: int, tokens: npt.NDArray[np.int32]) -> U64:
        """The hashes that ``tokens`` from ``position`` on would give. Nothing changes."""
        h = self._hashes[position]
        if len(tokens) == 1:
            return np.array([(MULTIPLIER * h + int(tokens[0]) + 1) & MASK], np.uint64)
        return hashes_after(h, tokens)

    def commit(self, position: int, hashes: U64) -> None:
        self.rewind(position)
        self._hashes.frombytes(hashes.tobytes())

    def rewind(self, length: int) -> None:
        del self._hashes[length + 1 :]

    def upto(self, length: int) -> Mirror:
        """Another one, of a session that begins with the first ``length`` tokens."""
        other = Mirror(self._vocab)
        other._hashes = self._hashes[: length + 1]
        return other

    def answers(self, hashes: U64) -> I64:
        """What echo answers where the rolling hash is each of ``hashes``."""
        return ((hashes >> np.uint64(33)) % np.uint64(self._vocab)).astype(np.int64)

    def continuation(self, position: int, n: int) -> npt.NDArray[np.int32]:
        """What echo would greedily go on with at ``position``, ``n`` tokens."""
        h = self._hashes[position]
        tokens: list[int] = []
        for _ in range(n):
            tokens.append((h >> 33) % self._vocab)
            h = (MULTIPLIER * h + tokens[-1] + 1) & MASK
        return np.array(tokens, np.int32)
