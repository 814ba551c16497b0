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

    Sessions may share blocks. Whoever is about to write to one that others have, too, gets a copy of its own first.
    """

    def __init__(self, n_blocks: int, n_layers: int, n_kv_heads: int, head_dim: int) -> None:
        self._pool = np.empty((n_blocks, n_layers, 2, n_kv_heads, BLOCK_TOKENS, head_dim), np.float32)
        self._free = list(range(n_blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self._users = [0] * n_blocks  # the sessions that have each block

    @property
    def n_free(self) -> int:
        return len(self._free)

    def reserve(self, slot: int, start: int, stop: int) -> bool:
        """Give the slot's session, of ``start`` tokens, room to write up to ``stop``. False, and nothing taken, if it cannot."""
        table = self._tables.setdefault(slot, [])
        number, offset = divmod(start, BLOCK_TOKENS)
        shared = offset > 0 and self._users[table[number]] > 1
        n_more = -(-stop // BLOCK_TOKENS) - len(table)
        if n_more + shared > len(self._free):
            return False
        if shared:
            before, mine = table[number], self._take()
            self._pool[mine, ..., :offset, :] = self._pool[before, ..., :offset, :]
            self._release(before)
            table[number] = mine
        table.extend(self._take() for _ in range(n_more))
        return True

    def share(self, parent: int, slot: int, length: int) -> None:
        """Let the session in ``slot`` begin with the blocks of the parent's first ``length`` tokens."""
        table = self._tables.get(parent, [])[: -(-length // BLOCK_TOKENS)]
        for block in table:
            self._users[block] += 1
        self._tables[slot] = table

    def truncate(self, slot: int, length: int) -> None:
        """Take back the blocks that the first ``length`` tokens do not need."""
        table = self._tables.get(slot, [])
        n_kept = -(-length // BLOCK_TOKENS)
        for block in reversed(table[n_kept:]):
            self._release(block)
        del table[n_kept:]

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            self._free.append(block)

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
