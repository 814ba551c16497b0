"""Keys and values of many sessions in blocks of one pool."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

BLOCK_TOKENS = 256


class Segment(NamedTuple):
    """Consecutive tokens of a session in one block: ``offset`` to ``offset + length`` within ``block``."""

    block: int
    offset: int
    length: int


class KvBlocks:
    """A pool of ``n_blocks`` blocks, each with room for ``BLOCK_TOKENS`` tokens in every layer.

    ``keys(layer)`` and ``values(layer)`` are (n_blocks, n_kv_heads, BLOCK_TOKENS, head_dim). The pool is reserved at
    once and takes memory as blocks are first written; those used before are used again first.
    """

    def __init__(self, n_blocks: int, n_layers: int, n_kv_heads: int, head_dim: int) -> None:
        self._pool = np.empty((n_blocks, n_layers, 2, n_kv_heads, BLOCK_TOKENS, head_dim), np.float32)
        self._free = list(range(n_blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}

    @property
    def n_free(self) -> int:
        return len(self._free)

    def reserve(self, slot: int, length: int) -> bool:
        """Give the slot's session room for ``length`` tokens in all. False, and nothing taken, if it cannot."""
        table = self._tables.setdefault(slot, [])
        n_more = -(-length // BLOCK_TOKENS) - len(table)
        if n_more > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(n_more))
        return True

    def truncate(self, slot: int, length: int) -> None:
        """Take back the blocks that the first ``length`` tokens do not need."""
        table = self._tables.get(slot, [])
        n_kept = -(-length // BLOCK_TOKENS)
        self._free.extend(reversed(table[n_kept:]))
        del table[n_kept:]

    def keys(self, layer: int) -> Floats:
        return self._pool[:, layer, 0]

    def values(self, layer: int) -> Floats:
        return self._pool[:, layer, 1]

    def places(self, slot: int, start: int, length: int) -> tuple[Ints, Ints]:
        """The block and the offset within it of each token from ``start`` on."""
        positions = np.arange(start, start + length)
        return np.asarray(self._tables[slot])[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS

    def segments(self, slot: int, start: int, stop: int) -> list[Segment]:
        """Where the tokens from ``start`` to ``stop`` lie, in order."""
        found = []
        while start < stop:
            number, offset = divmod(start, BLOCK_TOKENS)
            length = min(BLOCK_TOKENS - offset, stop - start)
            found.append(Segment(self._tables[slot][number], offset, length))
            start += length
        return found
