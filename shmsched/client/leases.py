"""The client's arena: rows of logits are leased from it, and come back when nothing refers to them."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from shmsched.errors import Full, InvalidRequest
from shmsched.memory.arena import ArenaAllocator
from shmsched.memory.dtypes import LOGIT
from shmsched.memory.layouts import GUARD, LOGIT_SIZE
from shmsched.memory.segment import Segment
from shmsched.steps import LogitsBlock

_TYPE = LOGIT.str


class ClientArena:
    """Hands out rows at submission, turns them into leases at completion. The caller holds the client's lock."""

    def __init__(self, segment: Segment) -> None:
        self.size = segment.size
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(segment.buffer, np.uint8)
        self._address = self._bytes.ctypes.data
        self._allocator = ArenaAllocator(segment.size)
        # A finalizer may run anywhere, in the middle of this class too: it only appends here.
        self._ended: deque[int] = deque()
        self._leased = 0

    @property
    def leased(self) -> int:
        """How many completed steps' rows something still refers to."""
        return self._leased - len(self._ended)

    def reserve(self, rows: int, vocab_size: int) -> int:
        """Room for ``rows`` rows: its offset in bytes. Raises Full, naming the leases held."""
        n_bytes = rows * vocab_size * LOGIT_SIZE + 2 * GUARD
        if n_bytes > self.size:
            raise InvalidRequest(
                f"{rows} rows of {vocab_size} logits and their guards take {n_bytes:,} bytes; the arena has {self.size:,}."
                " Ask for fewer rows, or make the client with a larger arena_bytes"
            )
        self._collect()
        offset = self._allocator.allocate(n_bytes)
        if offset is None:
            raise Full(
                f"no room for {rows} rows of {vocab_size} logits ({n_bytes:,} bytes) in the arena of {self.size:,} bytes:"
                f" {self._leased} leases are held and {self._allocator.held - self._leased} steps are outstanding."
                " Release logits, keep copies, or make the client with a larger arena_bytes"
            )
        return offset + GUARD

    def free(self, offset: int) -> None:
        """Rows of a step that ended without an answer."""
        self._allocator.free(offset - GUARD)

    def lease(self, offset: int, rows: int, vocab_size: int) -> LogitsBlock:
        """The answer in these rows. They come back when the block and every array made from it are gone."""
        self._leased += 1
        exporter = _Lease(self._bytes, self._address + offset, (rows, vocab_size), offset, self._ended)
        return LogitsBlock.over(np.asarray(exporter), exporter.end)

    def _collect(self) -> None:
        while self._ended:
            self._allocator.free(self._ended.popleft() - GUARD)
            self._leased -= 1


class _Lease:
    """What stands at the base of every array made from a step's logits, so that any slice keeps the rows.

    numpy keeps the object whose ``__array_interface__`` it read as the array's base, however often it is sliced.
    """

    _ended: deque[int] | None = None

    def __init__(
        self, arena: npt.NDArray[np.uint8], address: int, shape: tuple[int, int], offset: int, ended: deque[int]
    ) -> None:
        self._arena = arena
        self._offset = offset
        self._ended = ended
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": _TYPE,
            "data": (address, True),
        }

    def end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.append(self._offset)

    def __del__(self) -> None:
        self.end()
