"""The client's arena: rows of logits are leased from it, and come back when nothing refers to them."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from shmsched.dataplane.dtypes import LOGIT
from shmsched.dataplane.layouts import GUARD, LOGIT_SIZE
from shmsched.errors import Full, InvalidRequest
from shmsched.memory.arena import ArenaAllocator
from shmsched.memory.segment import Segment
from shmsched.saying import counted
from shmsched.steps import LogitsBlock

_TYPE = LOGIT.str
_FIRST = (0,)


class ClientArena:
    """Hands out rows at submission, turns them into leases at completion. The caller holds the client's lock."""

    def __init__(self, segment: Segment) -> None:
        self.size = segment.size
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(segment.buffer, np.uint8)
        self._address = self._bytes.ctypes.data
        self._allocator = ArenaAllocator(segment.size)
        # A finalizer may run anywhere, in the middle of this class too: it only appends here.
        self._ended: deque[int] = deque()
        self._leased: set[int] = set()

    @property
    def leased(self) -> int:
        """How many completed steps' rows something still refers to."""
        return len(self._leased) - len(self._ended)

    def reserve(self, rows: int, vocab_size: int) -> int:
        """Room for ``rows`` rows: its offset in bytes. Raises Full, naming the leases held."""
        offset = self.place(rows, vocab_size)
        self.take(offset, rows, vocab_size)
        return offset

    def place(self, rows: int, vocab_size: int) -> int:
        """Where ``reserve`` would have them."""
        n_bytes = _size(rows, vocab_size)
        if n_bytes > self.size:
            raise InvalidRequest(
                f"{counted(rows, 'row')} of {vocab_size} logits and their guards take {n_bytes:,} bytes; the arena has {self.size:,}."
                " Ask for fewer rows, or make the client with a larger arena_bytes"
            )
        self._collect()
        offset = self._allocator.find(n_bytes)
        if offset is None:
            leased = len(self._leased)
            outstanding = self._allocator.held - leased
            raise Full(
                f"no room for {counted(rows, 'row')} of {vocab_size} logits ({n_bytes:,} bytes) in the arena of {self.size:,} bytes:"
                f" {counted(leased, 'lease is', 'leases are')} held and {counted(outstanding, 'step is', 'steps are')} outstanding."
                " Release logits, keep copies, or make the client with a larger arena_bytes"
            )
        return offset + GUARD

    def take(self, offset: int, rows: int, vocab_size: int) -> None:
        """Reserve what was placed. Once more does nothing."""
        self._allocator.take(offset - GUARD, _size(rows, vocab_size))

    def free(self, offset: int) -> None:
        """Rows of a step that ended without an answer. Once more does nothing."""
        if self._allocator.holds(offset - GUARD):
            self._allocator.free(offset - GUARD)

    def lease(self, offset: int, rows: int, vocab_size: int) -> LogitsBlock:
        """The answer in these rows. They come back when the block and every array made from it are gone."""
        lease = self.lease_to_be(offset, rows, vocab_size)
        block = lease.block()
        lease.begin()
        return block

    def lease_to_be(self, offset: int, rows: int, vocab_size: int) -> Lease:
        """The same, for one who has it begin once what holds it has its place."""
        self._leased.add(offset)
        return Lease(self._bytes, self._address + offset, (rows, vocab_size), offset, self._ended)

    def _collect(self) -> None:
        ended = self._ended
        while ended:
            offset = ended[0]
            self.free(offset)
            self._leased.discard(offset)
            ended.popleft()


def _size(rows: int, vocab_size: int) -> int:
    return rows * vocab_size * LOGIT_SIZE + 2 * GUARD


class Lease:
    """What stands at the base of every array made from a step's logits, so that any slice keeps the rows.

    numpy keeps the object whose ``__array_interface__`` it read as the array's base, however often it is sliced.
    """

    _owed: list[int] | None = None
    """Its offset, from its beginning to its end."""
    _began = False

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

    def block(self) -> LogitsBlock:
        return LogitsBlock.over(np.asarray(self), self.end)

    def begin(self) -> None:
        """From now on its end gives the rows back. Once more does nothing."""
        if not self._began:
            self._owed = [self._offset]
            self._began = True

    def end(self) -> None:
        owed = self._owed
        if owed:
            # One call: an interrupt neither loses nor doubles it.
            self._ended.extend(map(owed.pop, _FIRST))

    def __del__(self) -> None:
        try:
            self.end()
        except BaseException:
            # Python lets an interrupt of a finalizer go no further, and comes here no second time.
            self.end()
            raise
